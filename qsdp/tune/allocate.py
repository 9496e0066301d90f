"""Bit widths under a budget: a knapsack whose items are one more bit for one parameter.

Or for one block: `research/widths` chooses those of blocks with the same functions.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

WIDTHS = tuple(range(2, 9))
Width = TypeVar("Width", bound=float)


class Item(NamedTuple, Generic[Width]):
    """One parameter in one direction.

    Attributes:
        name: of the parameter.
        numel: its elements; a bit for each of them is what widening costs.
        harm: by width, what quantizing to it does; falling, and in one unit for all items. Widths
            are bits a value, from 0 on, whole or with what scales take.
    """

    name: str
    numel: int
    harm: Mapping[Width, float]


def within_budget(items: Sequence[Item[Width]], bits: float) -> dict[str, Width]:
    """Widths of least total harm that take at most ``bits`` a value on average.

    Steps along each item's lower convex hull, largest gain a bit first: optimal for every budget
    that a step ends on, and within one step of it in between. What is left is filled with steps
    that still fit.

    Raises:
        ValueError: a budget below the smallest widths.
    """
    least = average_bits(items, {item.name: min(item.harm) for item in items})
    if bits < least - 1e-12:
        raise ValueError(f"--bits must be at least {least:g}, got {bits:g}")
    left = (bits - least) * sum(item.numel for item in items)

    def fits(cost: float, gain: float) -> bool:
        nonlocal left
        if cost > left * (1 + 1e-12):
            return False
        left -= cost
        return True

    return _widen(items, fits)


def within_harm(items: Sequence[Item[Width]], harm: float) -> dict[str, Width]:
    """Widths of few bits whose total harm is at most ``harm``; the widest if none is."""
    total = sum(item.harm[min(item.harm)] for item in items)

    def needed(cost: float, gain: float) -> bool:
        nonlocal total
        if total <= harm:
            return False
        total -= gain
        return True

    return _widen(items, needed)


def total_harm(items: Sequence[Item[Width]], widths: Mapping[str, Width]) -> float:
    return sum(item.harm[widths[item.name]] for item in items)


def average_bits(items: Sequence[Item[Width]], widths: Mapping[str, Width]) -> float:
    return sum(item.numel * widths[item.name] for item in items) / sum(i.numel for i in items)


def _hull(item: Item[Width]) -> list[Width]:
    """Widths on the lower convex hull of (width, harm), from narrow to wide."""
    hull: list[Width] = []
    for width in sorted(item.harm):
        while len(hull) >= 2 and _slope(item, hull[-2], hull[-1]) >= _slope(item, hull[-1], width):
            hull.pop()
        hull.append(width)
    # A wider code that is no better is no step.
    while len(hull) >= 2 and item.harm[hull[-1]] >= item.harm[hull[-2]]:
        hull.pop()
    return hull


def _slope(item: Item[Width], a: Width, b: Width) -> float:
    return (item.harm[b] - item.harm[a]) / (b - a)


def _widen(items: Sequence[Item[Width]], take: Callable[[float, float], bool]) -> dict[str, Width]:
    """Steps along all hulls, largest gain a bit first, as long as ``take(bits, gain)`` takes them.

    An item whose step is not taken stays where it is.
    """
    widths = {item.name: min(item.harm) for item in items}
    hulls = [_hull(item) for item in items]
    # (minus gain a bit, item, place of the new width on its hull)
    heap: list[tuple[float, int, int]] = []

    def offer(index: int, place: int) -> None:
        if place < len(hulls[index]):
            old, new = hulls[index][place - 1 : place + 1]
            heapq.heappush(
                heap, (_slope(items[index], old, new) / items[index].numel, index, place)
            )

    for index in range(len(items)):
        offer(index, 1)
    while heap:
        _, index, place = heapq.heappop(heap)
        item, old, new = items[index], *hulls[index][place - 1 : place + 1]
        if take(item.numel * (new - old), item.harm[old] - item.harm[new]):
            widths[item.name] = new
            offer(index, place + 1)
    return widths
