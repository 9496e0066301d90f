"""Clusters and what a collective costs on them. Rates are in Gbit/s, everywhere in the planner.

A transfer takes a latency for each hop and its bytes over the bandwidth; ring collectives (NCCL's
all-gather and reduce-scatter) keep all links busy at once, two-level ones use the links inside the
node and between nodes one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from qsdp.plan.measured import Measured
from qsdp.plan.sizes import Rows

SUM_BYTES = 4  # of a value that one level of a reduce-scatter hands to the other


class CodedValues(NamedTuple):
    """What a gather costs the codec, in times that a value is encoded or decoded.

    Attributes:
        own: for each value of a rank's own row.
        every: for each value of every row.
    """

    own: int
    every: int


VALUES = CodedValues(own=1, every=1)
# Differences are taken before they are encoded, and are added, kept and, in backward, read again.
# On one core 4M float32 values, kept at 8 bits, took 5 times as long before they were sent as
# encoding them, and 9 times as long afterwards as decoding them. Kept as they are, bfloat16 values
# took 4 and 8 times as long, and float32 ones 5 and 21, which the planner does not tell apart.
DIFFERENCES = CodedValues(own=5, every=9)


@dataclass(frozen=True)
class Gloo:
    """What torch's gloo collectives cost beyond bytes over bandwidth; None of it holds for NCCL.

    Attributes:
        stock_gbps: that stock collectives move on an unlimited link.
        stock_slowdown: how many times bytes over bandwidth they take on a limited one.
        swap_gbps: that qsdp's swaps of rows move on an unlimited link.
    """

    stock_gbps: float = float("inf")
    stock_slowdown: float = 1.0
    swap_gbps: float = float("inf")


@dataclass(frozen=True)
class Cluster:
    """Nodes, links and rates.

    Attributes:
        bandwidth_gbps: Gbit/s of a node's link to the others, each direction, shared by its ranks.
        latency_us: between nodes, one way.
        intra_gbps: Gbit/s of a rank's link inside its node, each direction.
        intra_latency_us: inside a node, one way.
        tflops: that a rank achieves in forward and backward.
        codec_gbps: Gbit/s of values that a rank encodes or decodes, counted as they lie in memory:
            32 bits each in float32.
        overlap: whether collectives run beside the computation, as on GPUs.
        gloo: facts about gloo, None for NCCL.
        measured: seconds that count in place of what rates and latencies give; bytes stay.
    """

    name: str
    nodes: int
    ranks_per_node: int
    bandwidth_gbps: float
    latency_us: float
    intra_gbps: float
    intra_latency_us: float
    tflops: float
    codec_gbps: float
    overlap: bool = True
    gloo: Gloo | None = None
    measured: Measured | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node


class Collective(NamedTuple):
    """One rank's part of a collective: bytes that leave its node (with the node's other ranks'),
    and seconds."""

    between_nodes: int
    network_s: float
    codec_s: float


NOTHING = Collective(0, 0.0, 0.0)


def seconds_at(num_bytes: float, gbps: float) -> float:
    """Seconds that ``num_bytes`` take at a rate in Gbit/s."""
    return num_bytes * 8e-9 / gbps


def gbps_of(num_bytes: float, seconds: float) -> float:
    """The rate in Gbit/s of bytes that took ``seconds``."""
    return num_bytes * 8e-9 / seconds


def gather_cost(rows: Rows, cluster: Cluster) -> Collective:
    """The all-gather of a unit's weights."""
    cost, found = _gather_cost(rows, cluster), cluster.measured
    if found is None or cost is NOTHING:
        return cost
    if not rows.own_gather:
        return cost._replace(network_s=found.stock_gather.seconds(rows.plain_weights))
    coding = found.coding
    codec = rows.numel * (coding.own_weights + cluster.num_ranks * coding.every_weights)
    network = found.gather.seconds(rows.weights)
    if rows.two_level and rows.kept:
        network = found.reduce.seconds(rows.weights) + _inside_seconds(rows.kept, cluster)
    return cost._replace(network_s=network, codec_s=codec)


def gather_again_cost(rows: Rows, cluster: Cluster) -> Collective:
    """The same in backward: of differences everybody has the sum, of two levels in its node."""
    if not rows.kept:
        return gather_cost(rows, cluster)
    if not rows.two_level:
        return NOTHING
    return Collective(0, _inside_seconds(rows.kept, cluster), 0.0)


def reduce_cost(rows: Rows, cluster: Cluster) -> Collective:
    """The reduce-scatter of a unit's gradients."""
    cost, found = _reduce_cost(rows, cluster), cluster.measured
    if found is None or cost is NOTHING:
        return cost
    if not rows.own_reduce:
        return cost._replace(network_s=found.stock_reduce.seconds(rows.plain_gradients))
    network, codec = found.reduce.seconds(rows.gradients), 0.0
    coded = rows.reduced * cluster.num_ranks
    if rows.two_level and found.inside is not None:
        network += found.inside.seconds(rows.inside_node)
        codec = coded * (found.plain.encode_gradients + found.plain.decode_gradients)
        coded = rows.reduced * cluster.nodes
    codec += coded * (found.coding.encode_gradients + found.coding.decode_gradients)
    return cost._replace(network_s=network, codec_s=codec)


def _gather_cost(rows: Rows, cluster: Cluster) -> Collective:
    ranks, nodes, per_node = cluster.num_ranks, cluster.nodes, cluster.ranks_per_node
    if ranks == 1 or not rows.numel:
        return NOTHING
    if not rows.own_gather:
        return _stock(rows.plain_weights, cluster, sweeps=1)
    coded = DIFFERENCES if rows.kept else VALUES
    codec = seconds_at(rows.plain_weights * (coded.own + ranks * coded.every), cluster.codec_gbps)
    if not rows.two_level:
        if cluster.gloo is None:
            return _ring(rows.weights, cluster)._replace(codec_s=codec)
        # Rows go point to point: each of a node's ranks sends to each outside.
        egress = per_node * (ranks - per_node) * rows.weights
        return Collective(egress, _swap(egress, cluster), codec)
    egress = per_node * (nodes - 1) * rows.weights
    seconds = _swap(egress, cluster) + max(nodes - 2, 0) * cluster.latency_us * 1e-6
    # Of differences a node's ranks tell each other what they add up to.
    return Collective(egress, seconds + _inside(rows.kept or rows.weights, cluster), codec)


def _reduce_cost(rows: Rows, cluster: Cluster) -> Collective:
    ranks, nodes, per_node = cluster.num_ranks, cluster.nodes, cluster.ranks_per_node
    if ranks == 1 or not rows.reduced:
        return NOTHING
    if not rows.own_reduce:
        # gloo has no reduce-scatter: torch does an all-reduce, twice the bytes.
        return _stock(rows.plain_gradients, cluster, sweeps=1 if cluster.gloo is None else 2)
    coded = 2 * ranks * rows.plain_gradients
    if rows.two_level:
        egress = per_node * (nodes - 1) * rows.gradients
        seconds = _inside(rows.inside_node, cluster) + _swap(egress, cluster)
        coded += 2 * nodes * rows.reduced * SUM_BYTES
    else:
        egress = per_node * (ranks - per_node) * rows.gradients
        inside = seconds_at((per_node - 1) * rows.gradients, cluster.intra_gbps)
        seconds = max(_swap(egress, cluster), inside + cluster.intra_latency_us * 1e-6)
        # Every further message costs the sender about what one costs inside a node.
        seconds += (ranks - nodes) * cluster.intra_latency_us * 1e-6 * (nodes > 1)
    return Collective(egress, seconds, seconds_at(coded, cluster.codec_gbps))


def _stock(piece: int, cluster: Cluster, *, sweeps: int) -> Collective:
    """FSDP2's own collective, which goes round the ring ``sweeps`` times."""
    gloo = cluster.gloo
    if gloo is None:
        return _ring(piece, cluster)
    moved = sweeps * (cluster.num_ranks - 1) * piece
    between = moved if cluster.nodes > 1 else 0
    seconds = gloo.stock_slowdown * seconds_at(between, cluster.bandwidth_gbps)
    seconds += (cluster.num_ranks - 1) * cluster.latency_us * 1e-6
    return Collective(between, seconds + seconds_at(moved, gloo.stock_gbps), 0.0)


def _ring(piece: int, cluster: Cluster) -> Collective:
    """Every rank passes on ``num_ranks - 1`` pieces; each node's link carries them once."""
    ranks = cluster.num_ranks
    crossings = cluster.nodes if cluster.nodes > 1 else 0
    moved = (ranks - 1) * piece
    between = moved if crossings else 0
    latency = crossings * cluster.latency_us + (ranks - crossings) * cluster.intra_latency_us
    inside = seconds_at(moved, cluster.intra_gbps) if cluster.ranks_per_node > 1 else 0.0
    seconds = max(seconds_at(between, cluster.bandwidth_gbps), inside) + latency * 1e-6
    return Collective(between, seconds, 0.0)


def _swap(egress: int, cluster: Cluster) -> float:
    """Seconds in which every node sends ``egress`` bytes to the others, in both directions."""
    seconds = seconds_at(egress, cluster.bandwidth_gbps)
    seconds += cluster.latency_us * 1e-6 * (cluster.nodes > 1)
    return seconds + (seconds_at(egress, cluster.gloo.swap_gbps) if cluster.gloo else 0.0)


def _inside_seconds(row: int, cluster: Cluster) -> float:
    """The hop inside a node, as it was measured or by rates."""
    found = cluster.measured
    if found is not None and found.inside is not None:
        return found.inside.seconds(row)
    return _inside(row, cluster)


def _inside(row: int, cluster: Cluster) -> float:
    """Seconds in which a rank of a node sends the node's others a row for each node."""
    others = cluster.ranks_per_node - 1
    seconds = seconds_at(others * cluster.nodes * row, cluster.intra_gbps)
    return seconds + others * cluster.intra_latency_us * 1e-6
