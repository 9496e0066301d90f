"""Interleaved timing: every candidate meets the same disturbances, and the median drops them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping

import torch

from qsdp.plan.coding import seconds_of

MIN_REPETITIONS = 3
# A peer that allocates 64 MiB a call faults pages in until the heap has found its final shape.
WARM_UPS = 10


def median_seconds(
    candidates: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    repetitions: int,
    budget: float = 1.0,
) -> dict[str, float]:
    """Median seconds of each candidate over rounds in which every one runs once.

    The order is another one in every round, because what ran before leaves the caches in its own
    state. A candidate that has used up ``budget`` seconds runs no more, but three times at least.
    Up to half as much goes into warming up before.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(0).shuffle
    spent = dict.fromkeys(candidates, 0.0)
    for _ in range(WARM_UPS):
        for name in order:
            if spent[name] < budget / 2:
                spent[name] += seconds_of(candidates[name], device)
    for round_ in range(repetitions):
        shuffle(order)
        for name in order:
            if round_ < MIN_REPETITIONS or sum(seconds[name]) < budget:
                seconds[name].append(seconds_of(candidates[name], device))
    return {name: statistics.median(times) for name, times in seconds.items()}
