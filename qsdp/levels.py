"""Learned levels: tables that replace the uniform grid between a block's extremes (QSDP section 5).

Both learners see values normalised by their block, as the quantizer sees them, and give the same
table on all ranks of a group. :class:`LevelLearner` keeps the tables and their clock. Nothing here
knows of FSDP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from qsdp.kernels.transform import hadamard
from qsdp.quantizer import Quantizer

Method = Literal["kmeans", "gradient"]

BINS = 1024
BINS_A_LEVEL = 16  # for exact k-means: its time grows with the square of the bins
MAX_EXACT_BITS = 6
LLOYD_ITERATIONS = 100
MAX_SAMPLE = 1 << 20  # values of one parameter that one rank looks at
MIN_GAP = 2.0**-15  # between neighbouring levels: two positions on the kernels' grid

GRADIENT_RATE = 0.01
GRADIENT_BATCH = 1024


@dataclass(frozen=True)
class LevelSchedule:
    """When and how levels are learned.

    Attributes:
        first_step: reduce-scatters of a module before its first tables; the grid is uniform until
            then. With one synchronised backward a step these are optimizer steps.
        every: reduce-scatters between two tables.
        method: ``kmeans``, the best table for a histogram of all ranks' values (exact, by dynamic
            programming), or ``gradient``, the paper's online steps, averaged over the ranks.

    Raises:
        ValueError: a field out of range.
    """

    first_step: int = 10
    every: int = 500
    method: Method = "kmeans"

    def __post_init__(self) -> None:
        for name, least in (("first_step", 0), ("every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"LevelSchedule({name}=...) must be an integer of at least {least}, "
                    f"got {value!r}"
                )
        if self.method not in get_args(Method):
            raise ValueError(
                f"LevelSchedule(method=...) must be one of {', '.join(get_args(Method))}, "
                f"got {self.method!r}"
            )

    def due(self, step: int, last: int | None) -> bool:
        """Whether to learn at ``step``, after tables of step ``last`` (None: none yet)."""
        return step >= self.first_step if last is None else step >= last + self.every


class Learnable(NamedTuple):
    """A parameter whose levels are learned, in one direction.

    Attributes:
        direction: ``weights`` or ``gradients``.
        name: of the parameter.
        quantizer: of its values.
        schedule: when to learn.
    """

    direction: str
    name: str
    quantizer: Quantizer
    schedule: LevelSchedule


@dataclass
class LevelLearner:
    """The tables of what communicates together, learned when the schedule says so.

    Attributes:
        reductions: reduce-scatters so far: the clock.
        tables: levels by direction and name.
        learned_at: the clock at the last table, by direction and name.
    """

    reductions: int = 0
    tables: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    learned_at: dict[tuple[str, str], int] = field(default_factory=dict)

    def learn_if_due(
        self,
        candidates: list[tuple[Learnable, torch.Tensor]],
        group: dist.ProcessGroup,
    ) -> bool:
        """Learn from what is about to be encoded; a collective call if something is due.

        Args:
            candidates: parameters and this rank's values of each, (num_rows, numel).
            group: the ranks that share the tables; all come to the same answer.

        Returns:
            Whether there are new tables.
        """
        due = [
            (item, rows)
            for item, rows in candidates
            if item.schedule.due(self.reductions, self.learned_at.get(item[:2]))
        ]
        for method in get_args(Method):
            chosen = [(item, rows) for item, rows in due if item.schedule.method == method]
            if not chosen:
                continue
            items = [item for item, _ in chosen]
            rows = [values for _, values in chosen]
            found = learn_levels(rows, [item.quantizer for item in items], method, group)
            for item, table in zip(items, found, strict=True):
                self.tables[item[:2]] = table
                self.learned_at[item[:2]] = self.reductions
        return bool(due)


def learn_levels(
    rows: list[torch.Tensor],
    quantizers: list[Quantizer],
    method: Method,
    group: dist.ProcessGroup | None,
) -> list[tuple[float, ...]]:
    """One table for each parameter, equal on all ranks of ``group``; a collective call.

    Args:
        rows: for each parameter (num_rows, numel), this rank's values.
        quantizers: of each parameter; their own levels do not count.
        group: whose values count; None is the default group.

    Returns:
        ``2**bits`` increasing numbers from 0 to 1 for each parameter.
    """
    learn = _learn_kmeans if method == "kmeans" else _learn_gradient
    return learn(rows, quantizers, group)


def uniform_levels(bits: int) -> torch.Tensor:
    """The grid that levels replace: (2^bits,) float64."""
    return torch.linspace(0, 1, 1 << bits, dtype=torch.float64)


def best_levels(histogram: torch.Tensor, bits: int) -> torch.Tensor:
    """The levels of least squared error for a histogram over [0, 1]: k-means.

    Exact up to 6 bits: in one dimension clusters are intervals, so dynamic programming over their
    ends finds the optimum. Above, Lloyd's iteration from the uniform grid: there is little to gain.

    Args:
        histogram: (BINS,) weights.
        bits: of a code.

    Returns:
        (2^bits,) float64 on the CPU, not decreasing; uniform for an empty histogram.
    """
    weight = histogram.double().cpu()
    if weight.sum() <= 0:
        return uniform_levels(bits)
    centre = (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS
    bins = min(BINS, BINS_A_LEVEL << bits)
    moments = [
        (weight / weight.sum() * centre**power).unflatten(0, (bins, -1)).sum(1)
        for power in (0, 1, 2)
    ]
    zero = torch.zeros(1, dtype=torch.float64)
    sums = [torch.cat((zero, moment.cumsum(0))) for moment in moments]
    ends = (
        _optimal_ends(sums, 1 << bits) if bits <= MAX_EXACT_BITS else _lloyd_ends(sums, 1 << bits)
    )
    mass, first = sums[0][ends].diff(), sums[1][ends].diff()
    # An empty cluster keeps its place.
    return torch.where(mass > 0, first / mass.clamp(min=1e-300), ends[:-1] / bins)


def _optimal_ends(sums: list[torch.Tensor], num_levels: int) -> torch.Tensor:
    """(num_levels + 1,) indices: cluster j is bins ``ends[j]`` to ``ends[j + 1] - 1``.

    ``sums`` are the running sums of the bins' mass, first and second moment, from zero.
    """
    mass, first, second = (total[None, :] - total[:, None] for total in sums)
    bins = len(sums[0]) - 1
    place = torch.arange(bins + 1)
    # cost[i, j]: squared error of bins i to j - 1 with one level, their mean.
    cost = (second - first**2 / mass.clamp(min=1e-300)).clamp(min=0)
    cost = torch.where(place[:, None] <= place[None, :], cost, torch.inf).T.contiguous()
    best, starts = cost[:, 0], []
    for _ in range(num_levels - 1):
        best, start = (best[None, :] + cost).min(dim=1)
        starts.append(start)
    ends = [bins]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    return torch.tensor([0, *reversed(ends)])


def _lloyd_ends(sums: list[torch.Tensor], num_levels: int) -> torch.Tensor:
    """The same by alternating means and midpoints."""
    bins = len(sums[0]) - 1
    levels = torch.linspace(0, 1, num_levels, dtype=torch.float64)
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    for _ in range(LLOYD_ITERATIONS):
        inner = torch.searchsorted(edges, (levels[1:] + levels[:-1]) / 2)
        ends = torch.cat((torch.tensor([0]), inner, torch.tensor([bins])))
        mass, first = sums[0][ends].diff(), sums[1][ends].diff()
        levels = torch.where(mass > 0, first / mass.clamp(min=1e-300), levels)
    return ends


def spread_out(levels: torch.Tensor) -> tuple[float, ...]:
    """Sorted, within [0, 1], and at least MIN_GAP apart: what the kernels take."""
    values: list[float] = levels.double().clamp(0, 1).sort().values.tolist()
    for i in range(1, len(values)):
        values[i] = max(values[i], values[i - 1] + MIN_GAP)
    top = 1.0
    for i in reversed(range(len(values))):
        values[i] = min(values[i], top)
        top = values[i] - MIN_GAP
    return tuple(values)


def _learn_kmeans(
    rows: list[torch.Tensor], quantizers: list[Quantizer], group: dist.ProcessGroup | None
) -> list[tuple[float, ...]]:
    """Ranks sum their histograms, then share the work: each makes the tables of some parameters.

    What every rank computed for itself could differ in the last bit between machines.
    """
    histograms = torch.stack(
        [_histogram(part, q) for part, q in zip(rows, quantizers, strict=True)]
    )
    dist.all_reduce(histograms, group=group)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    sizes = [1 << quantizer.bits for quantizer in quantizers]
    tables = torch.zeros(sum(sizes), dtype=torch.float64)
    for index, table in enumerate(tables.split(sizes)):
        if index % num_ranks == rank:
            table.copy_(best_levels(histograms[index], quantizers[index].bits))
    shared = tables.to(histograms.device)
    dist.all_reduce(shared, group=group)
    return [spread_out(table) for table in shared.cpu().split(sizes)]


def _learn_gradient(
    rows: list[torch.Tensor], quantizers: list[Quantizer], group: dist.ProcessGroup | None
) -> list[tuple[float, ...]]:
    tables = []
    for part, quantizer in zip(rows, quantizers, strict=True):
        values, _ = _normalised(part, quantizer)
        tables.append(_online_steps(values.flatten(), quantizer.bits).to(part.device))
    total = torch.cat(tables)
    dist.all_reduce(total, group=group)
    total /= dist.get_world_size(group)
    sizes = [len(table) for table in tables]
    return [spread_out(table.cpu()) for table in total.split(sizes)]


def _online_steps(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The paper's update, ``level -= rate * (level - value)`` at the nearest level, in batches.

    A batch moves a level as ``n`` steps towards the mean of its ``n`` values would.
    """
    levels = uniform_levels(bits)
    values = values.double().cpu()
    # A permutation that is the same everywhere and touches no generator.
    stride = 7919 if values.numel() % 7919 else 7907
    order = torch.arange(values.numel()) * stride % max(values.numel(), 1)
    for batch in values[order].split(GRADIENT_BATCH):
        nearest = torch.bucketize(batch, (levels[1:] + levels[:-1]) / 2)
        count = torch.bincount(nearest, minlength=len(levels)).double()
        mean = torch.bincount(nearest, batch, minlength=len(levels)) / count.clamp(min=1)
        kept = (1 - GRADIENT_RATE) ** count
        levels = torch.where(count > 0, mean + kept * (levels - mean), levels)
        levels = levels.sort().values
    return levels


def _histogram(rows: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """(BINS,) float64: how much squared error a level near each place would save.

    A block's values count with the square of its range, because that scales their error.
    """
    values, ranges = _normalised(rows, quantizer)
    place = (values * BINS).long().clamp_(max=BINS - 1)
    weight = (ranges.double() ** 2)[:, None].expand_as(values)
    return torch.bincount(place.flatten(), weight.flatten(), minlength=BINS)


def _normalised(rows: torch.Tensor, quantizer: Quantizer) -> tuple[torch.Tensor, torch.Tensor]:
    """(num_blocks, block) values from 0 to 1, and (num_blocks,) ranges, of a sample of blocks.

    Blocks that are constant or not finite are left out; so is a short last block if there is
    another.
    """
    rows = rows.float()
    if quantizer.transform is not None:
        rows = hadamard(rows)
    size = min(quantizer.block_size, rows.shape[1])
    if not size:
        return rows.new_empty(0, 1), rows.new_empty(0)
    blocks = rows[:, : rows.shape[1] // size * size].reshape(-1, size)
    blocks = blocks[:: max(1, -(-blocks.numel() // MAX_SAMPLE))]
    lo, hi = blocks.amin(1), blocks.amax(1)
    if quantizer.symmetric:
        hi = torch.maximum(lo.abs(), hi.abs())
        lo = -hi
    ranges = hi - lo
    usable = (ranges > 0) & ranges.isfinite()
    blocks, lo, ranges = blocks[usable], lo[usable], ranges[usable]
    return ((blocks - lo[:, None]) / ranges[:, None]).clamp_(0, 1), ranges
