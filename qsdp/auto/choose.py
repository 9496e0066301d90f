"""The ways that keep the loss, what each is predicted to take, and which of them wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from qsdp.auto.decision import STOCK, Link
from qsdp.auto.parts import Part
from qsdp.config import QSDPConfig
from qsdp.plan.cluster import Cluster, Gloo, gbps_of
from qsdp.plan.coding import measure_coding
from qsdp.plan.measured import Coding, Measured
from qsdp.plan.model import Work, predict
from qsdp.plan.transfers import Times, measure_times
from qsdp.plan.variant import UNQUANTIZED, Variant
from qsdp.ways import Ways

# From full precision to few bits. Presets that end within the noise of several seeds
# (docs/quality.md); w3g3 had two seeds, which is too little to choose it unasked.
PRESETS = ("w8g8", "w4g4")
LEVELS = {STOCK: QSDPConfig(None, None), "unquantized": UNQUANTIZED} | {
    name: QSDPConfig.preset(name) for name in PRESETS
}
# What a way with fewer bits must take off the communication of the best with more.
GAIN = 0.05
CODING_S, TRANSFERS_S = 0.3, 1.3  # seconds to measure in, together below two

Exceptions = tuple[tuple[str, Ways], ...]


class Candidate(NamedTuple):
    """A way to communicate.

    Attributes:
        name: of the level, with ``-flat`` where two levels were possible.
        level: among :data:`LEVELS`.
        config: what to apply.
        two_level: whether collectives take two levels, where there are nodes of several ranks.
    """

    name: str
    level: str
    config: QSDPConfig
    two_level: bool


def candidates(
    parts: Sequence[Part], exceptions: Exceptions, ranks_per_node: int | None
) -> list[Candidate]:
    """All ways for a model, those with more bits first.

    Args:
        exceptions: that every way but stock is to have.
        ranks_per_node: asked for, and so without an alternative; None for the launcher's.
    """
    sizes = {part.ranks_per_node for part in parts if part.has_hops}
    # Written down, so that the configuration means the same elsewhere; groups with different nodes
    # can only go by the launcher.
    hops = sizes.copy().pop() if len(sizes) == 1 else None
    found = [Candidate(STOCK, STOCK, LEVELS[STOCK], False)]
    for level, plain in list(LEVELS.items())[1:]:
        config = replace(plain, exceptions=(*exceptions, *plain.exceptions))
        if not sizes or ranks_per_node is not None:
            asked = replace(config, ranks_per_node=ranks_per_node)
            found.append(Candidate(level, level, asked, bool(sizes)))
            continue
        found += [
            Candidate(level, level, replace(config, ranks_per_node=hops), True),
            Candidate(f"{level}-flat", level, replace(config, ranks_per_node=1), False),
        ]
    return found


def predict_ways(
    parts: Sequence[Part],
    ways: Sequence[Candidate],
    work: Work,
    exact: Iterable[str],
) -> tuple[dict[str, float], Link]:
    """Measure, and predict the seconds in which a step communicates in each way, on this rank.

    A collective call of the ranks of every part. What other ranks predict may differ.

    Args:
        parts: those of two ranks or more.
        exact: patterns of parameters that the model wants in full precision.
    """
    plain = tuple((pattern, Ways(None, None)) for pattern in exact)
    codings: dict[tuple[str, tuple[torch.dtype, torch.dtype]], Coding] = {}
    totals, links = dict.fromkeys((way.name for way in ways), 0.0), []
    needed = {(level, part.dtypes): part for part in parts for level in list(LEVELS)[1:]}
    for (level, dtypes), part in needed.items():
        codings[level, dtypes] = measure_coding(
            LEVELS[level], *dtypes, part.device, CODING_S / len(needed)
        )
    for part in parts:
        times = measure_times(
            part.group, part.device, part.dtypes, part.ranks_per_node, part.largest_row,
            TRANSFERS_S / len(parts),
        )  # fmt: skip
        links.append(link_of(part, times))
        for way in ways:
            coding = codings.get((way.level, part.dtypes), Coding(0.0, 0.0, 0.0, 0.0))
            measured = _measured(times, way, coding, codings["unquantized", part.dtypes])
            totals[way.name] += _seconds(part, way, measured, work, plain)
    return totals, min(links)


def choose(ways: Sequence[Candidate], predicted: Mapping[str, float]) -> Candidate:
    """The shortest; fewer bits only where they take :data:`GAIN` off what more bits take."""
    chosen = ways[0]
    for level in LEVELS:
        of_level = [way for way in ways if way.level == level]
        best = min(of_level, key=lambda way: predicted[way.name], default=chosen)
        if predicted[best.name] <= (1 - GAIN) * predicted[chosen.name]:
            chosen = best
    return chosen


def link_of(part: Part, times: Times) -> Link:
    """What a node's link carried in each direction, or a rank's where one node holds all."""
    curve = times.between or times.reduce
    others = part.nodes - 1 if times.between else part.size - 1
    egress = others * (part.ranks_per_node if times.between else 1)
    rate = 1e3 * gbps_of(egress, curve.seconds_per_byte)
    return Link(rate, curve.latency_s * 1e3, part.nodes > 1)


def _measured(times: Times, way: Candidate, coding: Coding, plain: Coding) -> Measured:
    hops = way.two_level and times.gather_in_hops is not None
    return Measured(
        times.stock_gather,
        times.stock_reduce,
        times.gather_in_hops if hops and times.gather_in_hops else times.gather,
        times.between if hops and times.between else times.reduce,
        times.inside if hops else None,
        coding,
        plain,
    )


def _seconds(
    part: Part, way: Candidate, measured: Measured, work: Work, exact: Exceptions
) -> float:
    """Predicted communication of a step in one part, as if nothing of it were hidden."""
    config = replace(way.config, exceptions=(*way.config.exceptions, *exact), ranks_per_node=None)
    variant = Variant(
        way.name,
        None if way.name == STOCK else part.config_here(config),
        *part.dtypes,
        two_level=way.two_level,
    )
    # Rates that count for nothing: seconds are as measured.
    rates = dict.fromkeys(("bandwidth_gbps", "intra_gbps", "tflops", "codec_gbps"), 1.0)
    cluster = Cluster(
        "measured", part.nodes, part.ranks_per_node, latency_us=0.0, intra_latency_us=0.0,
        overlap=False, gloo=Gloo(), measured=measured, **rates,
    )  # fmt: skip
    found = predict(part.model, cluster, work, variant)
    return found.network_s + found.codec_s
