"""When replicas synchronise: constant intervals, and the rule of QSR with any power."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple


class Round(NamedTuple):
    """Steps between two synchronisations of the whole model.

    Attributes:
        number: 0, 1, ...
        first: steps that were taken before it.
        interval: steps that it has.
    """

    number: int
    first: int
    interval: int

    @property
    def end(self) -> int:
        """Steps that have been taken once it is over."""
        return self.first + self.interval


@dataclass(frozen=True)
class SyncSchedule:
    """How many steps replicas take between two synchronisations (QSR, arXiv 2310.14423).

    A round is as many steps as :meth:`interval` gives for its first one. Warm-up aside it grows as
    the learning rate falls: ``(alpha / lr) ** power``, never below ``base``.

    Attributes:
        base: steps of a round at least; of every round where ``alpha`` is 0.
        alpha: in the units of the learning rate; 0 keeps the interval constant.
        power: 2 is the quadratic rule; 1 and 3 are the paper's comparisons.
        warmup_steps: rounds that begin before it take ``warmup_interval``: a warm-up's tiny
            learning rates would make them huge.
        warmup_interval: None is ``base``.
        longest: no round is longer; None is no limit but the end of training.

    Raises:
        TypeError, ValueError: a field of the wrong type or out of range.
    """

    base: int = 1
    alpha: float = 0.0
    power: float = 2.0
    warmup_steps: int = 0
    warmup_interval: int | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        least = {"base": 1, "warmup_steps": 0, "warmup_interval": 1, "longest": self.base}
        for name, low in least.items():
            value, optional = getattr(self, name), name in ("warmup_interval", "longest")
            good = isinstance(value, int) and not isinstance(value, bool) and value >= low
            if not good and not (optional and value is None):
                what = "base" if name == "longest" else low
                raise ValueError(
                    f"SyncSchedule({name}=...) must be an integer of at least {what}"
                    f"{', or None' * optional}, got {value!r}"
                )
        for name in ("alpha", "power"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < math.inf:
                raise ValueError(
                    f"SyncSchedule({name}=...) must be a finite number of at least 0, got {value!r}"
                )

    def interval(self, step: int, lr: float, total_steps: int | None = None) -> int:
        """Steps of the round that begins with step ``step`` (0, 1, ...).

        Args:
            lr: learning rate of that step.
            total_steps: of the training; the last round ends with it. None if it has no end.

        Raises:
            ValueError: a round without an end: ``lr`` is 0, and neither ``longest`` nor
                ``total_steps`` says how long it may be.
        """
        steps = self._wanted(step, lr)
        limits = [limit for limit in (self.longest, _left(step, total_steps)) if limit is not None]
        if steps == math.inf and not limits:
            raise ValueError(
                f"the learning rate is {lr} at step {step}, so that this round would not end: give "
                "SyncSchedule(longest=...) or total_steps"
            )
        return max(1, int(min(steps, *limits))) if limits else int(steps)

    def _wanted(self, step: int, lr: float) -> float:
        if step < self.warmup_steps or self.alpha == 0:
            warming = step < self.warmup_steps and self.warmup_interval is not None
            return float(self.warmup_interval if warming and self.warmup_interval else self.base)
        try:
            return float(max(int((self.alpha / lr) ** self.power), self.base))
        except (ZeroDivisionError, OverflowError):
            return math.inf

    def rounds(self, total_steps: int, lr: Callable[[int], float]) -> Iterator[tuple[int, int]]:
        """``(first step, steps)`` of every round of a training.

        Args:
            lr: the learning rate of step 0, 1, ...
        """
        step = 0
        while step < total_steps:
            steps = self.interval(step, lr(step), total_steps)
            yield step, steps
            step += steps

    def to_json(self) -> dict[str, float | int | None]:
        """The fields, for a comparison between ranks."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _left(step: int, total_steps: int | None) -> int | None:
    return None if total_steps is None else total_steps - step
