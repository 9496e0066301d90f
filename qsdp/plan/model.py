"""The step-time model: bytes and seconds of every collective, and a step with or without overlap.

Bytes are exact. A transfer takes a latency for each hop and its bytes over the bandwidth; ring
collectives (NCCL's all-gather and reduce-scatter) keep all links busy at once, two-level ones use
the links inside the node and between nodes one after the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from qsdp.plan.sizes import Model, Parameter, row_bytes, shard_numel

STOCK_NAMES = {"stock-fp32": (32, 32), "stock-bf16": (16, 16)}
CONFIG_HELP = (
    "stock-fp32, stock-bf16, stock-w{16|32}g{16|32} (FSDP2 as it is), w{2..8}g{2..8} (two-level "
    "where nodes have several ranks), w{2..8}g{2..8}-flat"
)


# What a gather costs, in values encoded and decoded: of its own row, and of every row. Differences
# are taken first, and added, kept and read again in backward; on one core that took 3.8 ms where
# encoding 4M values took 0.8, and 10.6 where decoding them took 1.1.
_PASSES = {False: (1, 1), True: (5, 9)}


@dataclass(frozen=True)
class Config:
    """What crosses the network: ``stock``, or qsdp's ``flat`` or ``two-level`` collectives.

    Attributes:
        weight_block, gradient_block: values that share a scale and an offset.
        weight_meta, gradient_meta: bytes of these.
        differences: weights travel as differences, once a micro-batch.
        intra_gradient_bits: of gradients inside the node; None for their own precision.
    """

    name: str
    weight_bits: int
    gradient_bits: int
    collectives: str
    weight_block: int = 1024
    gradient_block: int = 1024
    weight_meta: int = 8
    gradient_meta: int = 8
    differences: bool = False
    intra_gradient_bits: int | None = None


@dataclass(frozen=True)
class Gloo:
    """What torch's gloo collectives cost beyond bytes over bandwidth; None of it holds for NCCL.

    Attributes:
        gather_passes: all-gather, in units of bytes / bandwidth.
        reduce_passes: the same of the reduce-scatter, which is an all-reduce: twice the bytes.
        stock_gbps: bytes that stock collectives move on an unlimited link.
        swap_gbps: the same of qsdp's swaps of rows.
    """

    gather_passes: float = 1.0
    reduce_passes: float = 1.0
    stock_gbps: float = float("inf")
    swap_gbps: float = float("inf")


@dataclass(frozen=True)
class Cluster:
    """Nodes, links and rates.

    Attributes:
        bandwidth_gbps: of a node's link to the others, each direction, shared by its ranks.
        intra_gbps: of a rank's link inside its node, each direction.
        tflops: that a rank achieves in forward and backward.
        codec_gbps: bytes of float32 values that a rank encodes or decodes a second.
        overlap: whether collectives run beside the computation, as on GPUs.
        gloo: facts about gloo, None for NCCL.
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

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Work:
    """What a rank does in a step.

    Attributes:
        tokens: of one micro-batch on one rank.
        micro_batches: forwards of a step.
        gathers: of the weights in a micro-batch: 2 with ``reshard_after_forward``, else 1.
        sync_every: reduce gradients after each micro-batch rather than after the last.
        recompute: whether the forward runs twice (activation checkpointing).
        compute_s: seconds of computation in a micro-batch where they were measured.
    """

    tokens: float
    micro_batches: int = 1
    gathers: int = 2
    sync_every: bool = False
    recompute: bool = False
    compute_s: float | None = None


class Collective(NamedTuple):
    """One rank's part of a collective: bytes that leave its node (with the node's other ranks'),
    and seconds."""

    between_nodes: int
    network_s: float
    codec_s: float


class Prediction(NamedTuple):
    """A step, its parts as if they ran one after another, and what limits it."""

    step_s: float
    compute_s: float
    network_s: float
    codec_s: float
    between_nodes: int
    """Bytes that leave each node in a step."""
    limit: str


def parse_config(name: str) -> Config:
    """Raises ValueError on a name that is none."""
    if name in STOCK_NAMES:
        return Config(name, *STOCK_NAMES[name], "stock")
    match = re.fullmatch(r"(stock-)?w(\d+)g(\d+)(-flat)?", name)
    if match:
        stock, flat = match[1], match[4]
        bits = (int(match[2]), int(match[3]))
        if stock and not flat and all(b in (16, 32) for b in bits):
            return Config(name, *bits, "stock")
        if not stock and all(2 <= b <= 8 for b in bits):
            return _preset(name, *bits, "flat" if flat else "two-level")
    raise ValueError(f"unknown config {name!r}: there are {CONFIG_HELP}")


def _preset(name: str, weight_bits: int, gradient_bits: int, collectives: str) -> Config:
    """What `QSDPConfig.preset` makes of these bits."""
    config = Config(name, weight_bits, gradient_bits, collectives, differences=weight_bits <= 4)
    if gradient_bits <= 4:
        config = replace(config, gradient_block=128, gradient_meta=4)
    return config


def predict(model: Model, cluster: Cluster, work: Work, config: Config) -> Prediction:
    """One optimizer step."""
    if cluster.ranks_per_node == 1 or cluster.nodes == 1:
        config = replace(config, collectives=config.collectives.replace("two-level", "flat"))
    if config.differences:
        work = replace(work, gathers=1)  # what was decoded is still there in backward
    compute = _compute_seconds(model, cluster, work)
    gathers = [gather_cost(unit, cluster, config) for unit in model.units]
    reduces = [reduce_cost(unit, cluster, config) for unit in model.units]
    syncs = work.micro_batches if work.sync_every else 1
    quiet = work.micro_batches - syncs
    step = syncs * _micro_batch(compute, gathers, reduces, work, cluster.overlap)
    if quiet:
        nothing = [Collective(0, 0.0, 0.0)] * len(reduces)
        step += quiet * _micro_batch(compute, gathers, nothing, work, cluster.overlap)
    # The root stays gathered between forward and backward.
    times = [work.micro_batches * (1 if i == 0 else work.gathers) for i in range(len(gathers))]
    parts = [*zip(gathers, times, strict=True), *((reduce, syncs) for reduce in reduces)]
    network = sum(c.network_s * n for c, n in parts)
    codec = sum(c.codec_s * n for c, n in parts)
    total_compute = work.micro_batches * sum(compute)
    return Prediction(
        step,
        total_compute,
        network,
        codec,
        sum(c.between_nodes * n for c, n in parts),
        max(("compute", total_compute), ("network", network), ("codec", codec), key=_second)[0],
    )


def gather_cost(unit: tuple[Parameter, ...], cluster: Cluster, config: Config) -> Collective:
    """The all-gather of a unit's weights."""
    ranks, nodes, per_node = cluster.num_ranks, cluster.nodes, cluster.ranks_per_node
    shard = shard_numel(unit, ranks)
    if ranks == 1 or not shard:
        return Collective(0, 0.0, 0.0)
    if config.collectives == "stock":
        return _ring(shard * config.weight_bits // 8, cluster, stock=True, gather=True)
    size = {"block_size": config.weight_block, "itemsize": 4, "meta_bytes": config.weight_meta}
    row = row_bytes(unit, ranks, config.weight_bits, **size)
    own, every = _PASSES[config.differences]
    codec = _codec_seconds(shard * (own + ranks * every), cluster)
    if config.collectives == "flat":
        return _ring(row, cluster, stock=False, gather=True)._replace(codec_s=codec)
    egress = per_node * (nodes - 1) * row
    seconds = _transfer(egress, cluster.bandwidth_gbps, nodes - 1, cluster.latency_us)
    inside = (per_node - 1) * nodes * row
    seconds += _transfer(inside, cluster.intra_gbps, per_node - 1, cluster.intra_latency_us)
    return Collective(egress, seconds, codec)


def reduce_cost(unit: tuple[Parameter, ...], cluster: Cluster, config: Config) -> Collective:
    """The reduce-scatter of a unit's gradients."""
    ranks, nodes, per_node = cluster.num_ranks, cluster.nodes, cluster.ranks_per_node
    shard = shard_numel(unit, ranks)
    if ranks == 1 or not shard:
        return Collective(0, 0.0, 0.0)
    if config.collectives == "stock":
        return _ring(shard * config.gradient_bits // 8, cluster, stock=True, gather=False)
    size = {
        "block_size": config.gradient_block,
        "itemsize": 4,
        "meta_bytes": config.gradient_meta,
    }
    row = row_bytes(unit, ranks, config.gradient_bits, **size)
    if config.collectives == "flat":
        egress = per_node * (ranks - per_node) * row
        seconds = max(
            _swap(egress, cluster, nodes - 1),
            _transfer((per_node - 1) * row, cluster.intra_gbps, 1, cluster.intra_latency_us),
        )
        # Every further message costs the sender about what one costs inside a node.
        seconds += (ranks - nodes) * cluster.intra_latency_us * 1e-6 * (nodes > 1)
        return Collective(egress, seconds, _codec_seconds(2 * shard * ranks, cluster))
    bits = config.intra_gradient_bits
    intra_row = 4 * shard if bits is None else row_bytes(unit, ranks, bits, **size)
    inside = (per_node - 1) * nodes * intra_row
    egress = per_node * (nodes - 1) * row
    seconds = _transfer(inside, cluster.intra_gbps, per_node - 1, cluster.intra_latency_us)
    seconds += _swap(egress, cluster, nodes - 1)
    return Collective(egress, seconds, _codec_seconds(2 * shard * (ranks + nodes), cluster))


def _ring(piece: int, cluster: Cluster, *, stock: bool, gather: bool) -> Collective:
    """Every rank passes on ``num_ranks - 1`` pieces; each node's link carries them once."""
    ranks, nodes = cluster.num_ranks, cluster.nodes
    moved = (ranks - 1) * piece
    between = moved if nodes > 1 else 0
    gloo = cluster.gloo
    if gloo is not None and not stock:
        # Rows go point to point: each of a node's ranks sends to each outside.
        between = cluster.ranks_per_node * (ranks - cluster.ranks_per_node) * piece
        return Collective(between, _swap(between, cluster, nodes - 1), 0.0)
    if gloo is not None:
        passes = gloo.gather_passes if gather else gloo.reduce_passes
        moved, between = (moved, between) if gather else (2 * moved, 2 * between)
        seconds = passes * between * 8e-9 / cluster.bandwidth_gbps
        seconds += (ranks - 1) * cluster.latency_us * 1e-6
        return Collective(between, seconds + moved * 8e-9 / gloo.stock_gbps, 0.0)
    crossings = nodes if nodes > 1 else 0
    latency = crossings * cluster.latency_us + (ranks - crossings) * cluster.intra_latency_us
    inside = moved * 8e-9 / cluster.intra_gbps if cluster.ranks_per_node > 1 else 0.0
    seconds = max(between * 8e-9 / cluster.bandwidth_gbps, inside) + latency * 1e-6
    return Collective(between, seconds, 0.0)


def _swap(egress: int, cluster: Cluster, hops: int) -> float:
    """Seconds in which every node sends ``egress`` bytes to the others, in both directions."""
    seconds = _transfer(egress, cluster.bandwidth_gbps, min(hops, 1), cluster.latency_us)
    return seconds + (egress * 8e-9 / cluster.gloo.swap_gbps if cluster.gloo else 0.0)


def _transfer(num_bytes: int, gbps: float, hops: int, latency_us: float) -> float:
    return num_bytes * 8e-9 / gbps + hops * latency_us * 1e-6


def _codec_seconds(values: float, cluster: Cluster) -> float:
    return values * 4e-9 / cluster.codec_gbps


def _compute_seconds(model: Model, cluster: Cluster, work: Work) -> list[float]:
    """Seconds of forward and backward of each unit, for one micro-batch."""
    if work.compute_s is not None:
        share = work.compute_s / sum(model.flops)
    else:
        factor = 4 / 3 if work.recompute else 1.0
        share = factor * work.tokens / (cluster.tflops * 1e12)
    return [flops * share for flops in model.flops]


def _micro_batch(
    compute: list[float],
    gathers: list[Collective],
    reduces: list[Collective],
    work: Work,
    overlap: bool,
) -> float:
    """Seconds of one forward and backward.

    With overlap, as FSDP2 does it on GPUs: the gather of the next unit runs while a unit computes,
    and so does the reduction of the one before; transfers take the network in the order in which
    they are issued, encoding and decoding take their stream.
    """
    if not overlap:
        again = sum(g.network_s + g.codec_s for g in gathers[1:]) * (work.gathers - 1)
        once = sum(c.network_s + c.codec_s for c in (*gathers, *reduces))
        return sum(compute) + once + again
    clock = _Clock()
    forward = 1 / 3 if not work.recompute else 1 / 4
    for seconds, gather in zip(compute, gathers, strict=True):
        clock.gather(gather)
        clock.compute(seconds * forward)
    last = len(compute) - 1
    if work.gathers > 1 and last > 0:
        clock.gather(gathers[last])
    for index in range(last, -1, -1):
        clock.compute(compute[index] * (1 - forward))
        if work.gathers > 1 and index > 1:  # the root, unit 0, stays gathered
            clock.gather(gathers[index - 1])
        clock.reduce(reduces[index])
    return clock.end()


class _Clock:
    """When the computation, the two communication streams and the network are free."""

    def __init__(self) -> None:
        self._compute = self._gather = self._reduce = self._network = 0.0
        self._compute_start = self._ready = 0.0

    def gather(self, cost: Collective) -> None:
        """Issued when the unit before began to compute: one unit is gathered ahead."""
        start = max(self._gather, self._compute_start)
        sent = max(start, self._network) + cost.network_s
        self._network = sent if cost.network_s else self._network
        self._gather = self._ready = sent + cost.codec_s

    def compute(self, seconds: float) -> None:
        self._compute_start = max(self._compute, self._ready)
        self._compute = self._compute_start + seconds

    def reduce(self, cost: Collective) -> None:
        """Issued when its unit has computed, after the gather that was issued meanwhile."""
        start = max(self._reduce, self._compute)
        sent = max(start, self._network) + cost.network_s
        self._network = sent if cost.network_s else self._network
        self._reduce = sent + cost.codec_s

    def end(self) -> float:
        return max(self._compute, self._reduce)


def _second(pair: tuple[str, float]) -> float:
    return pair[1]
