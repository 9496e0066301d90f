"""The step-time model: a step is computation, codec and transfers, with or without overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from qsdp.config import QSDPConfig
from qsdp.plan.cluster import (
    NOTHING,
    Cluster,
    Collective,
    gather_again_cost,
    gather_cost,
    reduce_cost,
)
from qsdp.plan.sizes import Model, unit_rows
from qsdp.plan.variant import Variant


@dataclass(frozen=True)
class Work:
    """What a rank does in a step.

    Attributes:
        tokens: of one micro-batch on one rank.
        micro_batches: forwards of a step.
        reshard: FSDP2's ``reshard_after_forward``: weights are gathered again in backward.
        sync_every: reduce gradients after each micro-batch rather than after the last.
        recompute: whether the forward runs twice (activation checkpointing).
        compute_s: seconds of computation in a micro-batch where they were measured.
    """

    tokens: float
    micro_batches: int = 1
    reshard: bool = True
    sync_every: bool = False
    recompute: bool = False
    compute_s: float | None = None


class Prediction(NamedTuple):
    """A step, and its parts as if they ran one after another.

    Attributes:
        between_nodes: bytes that leave each node in a step.
        wire_bits: of a weight and its gradient together on the wire, scales and padding included.
        limit: the largest part.
    """

    step_s: float
    compute_s: float
    network_s: float
    codec_s: float
    between_nodes: int
    wire_bits: float
    limit: str


class _Unit(NamedTuple):
    """A unit's share of a micro-batch; ``again`` is its gather in backward."""

    compute_s: float
    gather: Collective
    again: Collective
    reduce: Collective


def predict(model: Model, cluster: Cluster, work: Work, variant: Variant) -> Prediction:
    """One optimizer step.

    Raises:
        ValueError: a configuration that :func:`qsdp.apply_qsdp` would refuse on this cluster.
    """
    config = variant.config_on(cluster.nodes, cluster.ranks_per_node)
    _check(config, model, variant.name)
    dtypes = variant.weight_dtype, variant.gradient_dtype
    rows = [unit_rows(unit, cluster.num_ranks, config, *dtypes) for unit in model.units]
    units = []
    for index, (row, seconds) in enumerate(
        zip(rows, _compute_seconds(model, cluster, work), strict=True)
    ):
        gather = gather_cost(row, cluster)
        # The root stays gathered until backward.
        stays = index == 0 or not work.reshard
        again = NOTHING if stays else gather_again_cost(row, cluster)
        units.append(_Unit(seconds, gather, again, reduce_cost(row, cluster)))
    quiet = [unit._replace(reduce=NOTHING) for unit in units]
    syncs = work.micro_batches if work.sync_every else 1
    times = ((units, syncs), (quiet, work.micro_batches - syncs))
    step_s = sum(n * _micro_batch(kind, work.recompute, cluster.overlap) for kind, n in times if n)
    parts = [(c, n) for kind, n in times for unit in kind for c in unit[1:]]
    compute_s = work.micro_batches * sum(unit.compute_s for unit in units)
    network_s, codec_s = (
        sum(n * c.network_s for c, n in parts),
        sum(n * c.codec_s for c, n in parts),
    )
    return Prediction(
        step_s,
        compute_s,
        network_s,
        codec_s,
        sum(n * c.between_nodes for c, n in parts),
        8 * sum(row.weights + row.gradients for row in rows) / sum(row.numel for row in rows),
        max((compute_s, "compute"), (network_s, "network"), (codec_s, "codec"))[1],
    )


def _check(config: QSDPConfig, model: Model, name: str) -> None:
    try:
        config.require_matches(model.names)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if config.replicas is not None:
        raise ValueError(
            f"{name} quantizes between replicas, and the planner knows FSDP over all ranks only: "
            "leave replicas out"
        )


def _compute_seconds(model: Model, cluster: Cluster, work: Work) -> list[float]:
    """Seconds of forward and backward of each unit, for one micro-batch."""
    if work.compute_s is not None:
        share = work.compute_s / sum(model.flops)
    else:
        factor = 4 / 3 if work.recompute else 1.0
        share = factor * work.tokens / (cluster.tflops * 1e12)
    return [flops * share for flops in model.flops]


def _micro_batch(units: list[_Unit], recompute: bool, overlap: bool) -> float:
    """Seconds of one forward and backward.

    With overlap, as FSDP2 does it on GPUs: the gather of the next unit runs while a unit computes,
    and so does the reduction of the one before; transfers take the network in the order in which
    they are issued, encoding and decoding take their stream.
    """
    if not overlap:
        costs = sum(c.network_s + c.codec_s for unit in units for c in unit[1:])
        return costs + sum(unit.compute_s for unit in units)
    clock = _Clock()
    forward = 1 / 4 if recompute else 1 / 3
    for unit in units:
        clock.gather(unit.gather)
        clock.compute(unit.compute_s * forward)
    following = [*reversed(units[:-1]), None]
    clock.gather(units[-1].again)
    for unit, ahead in zip(reversed(units), following, strict=True):
        clock.compute(unit.compute_s * (1 - forward))
        if ahead is not None:
            clock.gather(ahead.again)
        clock.reduce(unit.reduce)
    return clock.end()


class _Clock:
    """When the computation, the two communication streams and the network are free."""

    def __init__(self) -> None:
        self._compute = self._gather = self._reduce = self._network = 0.0
        self._compute_start = 0.0

    def gather(self, cost: Collective) -> None:
        """Issued when the unit before began to compute: one unit is gathered ahead."""
        if cost is not NOTHING:
            self._gather = self._send(max(self._gather, self._compute_start), cost)

    def compute(self, seconds: float) -> None:
        """What was gathered last."""
        self._compute_start = max(self._compute, self._gather)
        self._compute = self._compute_start + seconds

    def reduce(self, cost: Collective) -> None:
        """Issued when its unit has computed, after the gather that was issued meanwhile."""
        if cost is not NOTHING:
            self._reduce = self._send(max(self._reduce, self._compute), cost)

    def _send(self, start: float, cost: Collective) -> float:
        self._network = max(start, self._network) + cost.network_s
        return self._network + cost.codec_s

    def end(self) -> float:
        """When all is done."""
        return max(self._compute, self._reduce)
