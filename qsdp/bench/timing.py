"""Interleaved timing: every candidate meets the same disturbances, and the median drops them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

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
    timer = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(0).shuffle
    spent = dict.fromkeys(candidates, 0.0)
    for _ in range(WARM_UPS):
        for name in order:
            if spent[name] < budget / 2:
                spent[name] += timer(candidates[name])
    for round_ in range(repetitions):
        shuffle(order)
        for name in order:
            if round_ < MIN_REPETITIONS or sum(seconds[name]) < budget:
                seconds[name].append(timer(candidates[name]))
    return {name: statistics.median(times) for name, times in seconds.items()}


def _cpu_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    kept = run()
    elapsed = time.perf_counter() - start
    del kept  # after the clock: giving memory back is not what is measured
    return elapsed


def _cuda_seconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
