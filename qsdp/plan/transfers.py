"""How long collectives take in a group of ranks, by the bytes of a row, within a time budget.

FSDP2's own collectives, and qsdp's exchange of rows as training does it: the same routes, hops and
point-to-point transfers. Every function here is a collective call, and its result is equal on all
ranks of the group: what the slowest of them took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from qsdp.exchange import Route, Transfers, gather_in_hops, route, rows_of_all, run, swap_rows
from qsdp.param_group import DefaultAllGather, DefaultReduceScatter
from qsdp.plan.coding import seconds_of
from qsdp.plan.measured import Curve
from qsdp.stats import CommMeter

SMALLEST, GROWTH = 1 << 13, 8
MOST_BYTES = 1 << 26  # of the rows of all ranks together
REPEATS = 5

Prepare = Callable[[int], Callable[[], object]]
Slowest = Callable[[Sequence[float]], list[float]]


class Times(NamedTuple):
    """Seconds by the bytes of one rank's row.

    Attributes:
        stock_gather, stock_reduce: FSDP2's own collectives, by the bytes of the values.
        gather, reduce: qsdp's in one hop.
        gather_in_hops, between, inside: qsdp's in two, None where there are no nodes of several
            ranks; the hops of a reduction one by one.
    """

    stock_gather: Curve
    stock_reduce: Curve
    gather: Curve
    reduce: Curve
    gather_in_hops: Curve | None
    between: Curve | None
    inside: Curve | None


def measure_times(
    group: dist.ProcessGroup,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    ranks_per_node: int,
    largest: int,
    budget_s: float,
) -> Times:
    """Measure every kind of transfer in ``group``, of two ranks or more.

    Args:
        dtypes: of weights and of gradients, for FSDP2's own collectives.
        ranks_per_node: 1 leaves out what takes two hops.
        largest: bytes of the largest row of values that training sends; nothing above is tried.
        budget_s: about as many seconds are spent, in equal parts; but of every kind two sizes are
            measured, however long that takes.
    """
    flat = route(group, device)
    kinds: list[Prepare] = [
        lambda size: _stock_gather(flat, size, dtypes[0], device),
        lambda size: _stock_reduce(flat, size, dtypes[1], device),
        lambda size: _gather(flat, size, device),
        lambda size: _swap(flat, range(flat.size), (flat.size, size), device),
    ]
    hops = route(group, device, ranks_per_node)
    if hops.two_level:
        kinds += [
            lambda size: _gather(hops, size, device),
            lambda size: _swap(hops, hops.counterparts, (hops.num_nodes, size), device),
            lambda size: _swap(
                hops, hops.neighbours, (hops.ranks_per_node, hops.num_nodes, size), device
            ),
        ]
    largest = min(largest, MOST_BYTES // flat.size) // 128 * 128
    curves: list[Curve | None] = [
        measure_curve(
            prepare,
            largest,
            budget_s / len(kinds),
            seconds=lambda run: seconds_of(run, device),
            slowest=lambda values: slowest(values, group, device),
        )
        for prepare in kinds
    ]
    return Times(*curves, *([None] * (len(Times._fields) - len(curves))))  # type: ignore[arg-type]


def measure_curve(
    prepare: Prepare,
    largest: int,
    budget_s: float,
    *,
    seconds: Callable[[Callable[[], object]], float],
    slowest: Slowest,
    now: Callable[[], float] = time.perf_counter,
) -> Curve:
    """Seconds at sizes that grow until the budget would not do for the next.

    Two sizes at least, however long they take. The fastest of a few runs counts, as far as there is
    time for several.

    Args:
        prepare: makes a transfer of rows of as many bytes; the ranks run it together.
        largest: size of a row.
        seconds: that a transfer takes on this rank.
        slowest: the elementwise maximum over all ranks, equal on all of them.
    """
    began, points, size = now(), list[tuple[int, float]](), SMALLEST
    prepare(size)()  # warm-up: connections, memory
    while True:
        transfer = prepare(size)
        best, spent = slowest((seconds(transfer), now() - began))
        # As many more as half of what is left has time for: the other half is for larger rows.
        more = min(REPEATS - 1, int((budget_s - spent) / 2 / max(best, 1e-9)))
        if more > 0:
            again = min(seconds(transfer) for _ in range(more))
            again, spent = slowest((again, now() - began))
            best = min(best, again)
        points.append((size, best))
        following = min(size * GROWTH, largest) if len(points) > 1 else size * GROWTH
        if len(points) > 1 and (following <= size or spent + following / size * best > budget_s):
            return Curve(_rising(points))
        size = following


def _rising(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """What took longer than a larger size was disturbed: it takes no longer than that."""
    best = [min(seconds for _, seconds in points[place:]) for place in range(len(points))]
    return tuple((size, seconds) for (size, _), seconds in zip(points, best, strict=True))


def slowest(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The maximum of each value over the ranks of ``group``; a collective call."""
    # Backends of accelerators are not sure to take float64, and all ranks get the same float32.
    shared = torch.tensor(values, dtype=torch.float32, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    found: list[float] = shared.tolist()
    return found


def _stock_gather(
    way: Route, size: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    row = torch.ones(max(1, size // dtype.itemsize), dtype=dtype, device=device)
    rows, gather = row.repeat(way.size), DefaultAllGather()
    return lambda: gather(rows, row, way.group)


def _stock_reduce(
    way: Route, size: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    row = torch.zeros(max(1, size // dtype.itemsize), dtype=dtype, device=device)
    rows, reduce = row.repeat(way.size), DefaultReduceScatter()
    return lambda: reduce(row, rows, way.group, dist.ReduceOp.SUM)


def _gather(way: Route, size: int, device: torch.device) -> Callable[[], object]:
    wire = torch.ones(way.size * size, dtype=torch.uint8, device=device)
    rows, meter = rows_of_all(wire, size, way), CommMeter()
    return lambda: run(gather_in_hops(rows, way, meter, 0), False, meter, device, ())


def _swap(
    way: Route, peers: range, shape: tuple[int, ...], device: torch.device
) -> Callable[[], object]:
    out, into = (torch.ones(shape, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: _wait(swap_rows(into, out, peers, way))


def _wait(transfers: Transfers) -> None:
    for work in transfers:
        work.wait()
