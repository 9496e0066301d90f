"""What a synchronisation does: SyncConfig and the outer step. Checked on construction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from qsdp.config import EXACT, QSDPConfig
from qsdp.local.schedule import SyncSchedule
from qsdp.quantizer import Quantizer
from qsdp.ways import Feedback, Learned, quantizer_of, require_kind, way_to_json


@dataclass(frozen=True)
class OuterStep:
    """DiLoCo's outer optimizer (arXiv 2311.08105): SGD with Nesterov momentum on a round's moves.

    With ``D`` the mean of what the replicas moved by since their anchor and ``m`` the momentum,
    zero at first: ``m = momentum * m + D``, and the anchor moves by ``lr * (D + momentum * m)``.

    Attributes:
        lr: the outer learning rate, above 0.
        momentum: from 0 to below 1. Unless 0 it costs a float32 a parameter of this rank's shard.

    Raises:
        ValueError: a field out of range.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        ranges = (
            ("lr", 0 < _number(self.lr) < math.inf, "a finite number above 0"),
            ("momentum", 0 <= _number(self.momentum) < 1, "at least 0 and below 1"),
        )
        for name, good, allowed in ranges:
            if not good:
                raise ValueError(
                    f"OuterStep({name}=...) must be {allowed}, got {getattr(self, name)!r}"
                )


def _number(value: object) -> float:
    """Itself if it is a number, and one that is in no range if it is not."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


@dataclass(frozen=True)
class SyncConfig:
    """How replicas synchronise; equal on all ranks.

    Attributes:
        schedule: when.
        differences: the way of what replicas moved by since the anchor: a Quantizer, or
            :class:`qsdp.Feedback` around one, which adds at both ends what quantization lost. None
            sends full precision. Vectors, parameters under ``min_numel`` elements and those that
            ``exact`` or :data:`qsdp.config.EXACT` names always travel in full precision.
        outer: None moves the anchor to the average.
        fragments: into how many parts the model is divided, in the order of its parameters. The
            parts are synchronised one after another, evenly over a round (Streaming DiLoCo, arXiv
            2501.18512), so that the largest message is that of a part. Every part once a round.
        overlap_steps: a part's average is taken up so many steps after it was sent, and travels
            meanwhile; 0 waits for it. What a replica did meanwhile is kept.
        exact: glob patterns of parameters that travel in full precision; each must match one.
        min_numel: see ``differences``; counted unsharded.
        buffers: whether floating-point buffers (statistics of batch norm) are averaged, in full
            precision, whenever the last part of a round is synchronised.
        seed: of the random rounding, 64 bits.
        verify: send a checksum with every row, and raise where a damaged one arrives.

    Raises:
        TypeError, ValueError: a field of the wrong type or out of range.
    """

    schedule: SyncSchedule = field(default_factory=SyncSchedule)
    differences: Quantizer | Feedback | None = None
    outer: OuterStep | None = None
    fragments: int = 1
    overlap_steps: int = 0
    exact: tuple[str, ...] = ()
    min_numel: int = 1024
    buffers: bool = True
    seed: int = 0
    verify: bool = False

    def __post_init__(self) -> None:
        require_kind("SyncConfig", "schedule", self.schedule, (SyncSchedule,))
        require_kind("SyncConfig", "differences", self.differences, (Quantizer, Feedback, None))
        require_kind("SyncConfig", "outer", self.outer, (OuterStep, None))
        if isinstance(self.differences, Feedback) and isinstance(
            self.differences.quantizer, Learned
        ):
            raise TypeError(
                "SyncConfig(differences=...) does not learn levels: give it a Quantizer or "
                f"Feedback(Quantizer), got {self.differences!r}"
            )
        if isinstance(self.differences, Feedback) and self.differences.memory is not None:
            raise ValueError(
                "SyncConfig(differences=Feedback(memory=...)) must be None: what a synchronisation "
                f"lost is kept in float32, got {self.differences.memory}"
            )
        for name, low, end in (
            ("fragments", 1, 2**31),
            ("overlap_steps", 0, 2**31),
            ("min_numel", 0, 2**63),
            ("seed", 0, 2**64),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < end:
                raise ValueError(
                    f"SyncConfig({name}=...) must be an integer from {low} to {end - 1}, "
                    f"got {value!r}"
                )
        for name in ("buffers", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"SyncConfig({name}=...) must be True or False, got {getattr(self, name)!r}"
                )
        exact = self.exact
        if isinstance(exact, str) or not all(isinstance(pattern, str) for pattern in exact):
            raise TypeError(f"SyncConfig(exact=...) must be a tuple of patterns, got {exact!r}")
        object.__setattr__(self, "exact", tuple(exact))
        self._check_overlap()

    def _check_overlap(self) -> None:
        """A part must have arrived before it is sent again, and must travel while steps go on."""
        quantizer = quantizer_of(self.differences)
        if self.overlap_steps and quantizer is not None and quantizer.coded:
            raise ValueError(
                f"SyncConfig(overlap_steps=...) hides no rows of coding={quantizer.coding!r}, "
                'whose sizes travel first: set coding="fixed", or overlap_steps=0'
            )
        shortest = self.schedule.base
        if self.schedule.warmup_steps and self.schedule.warmup_interval is not None:
            shortest = min(shortest, self.schedule.warmup_interval)
        if self.overlap_steps >= shortest and self.overlap_steps:
            raise ValueError(
                f"SyncConfig(overlap_steps=...) must be below the shortest round, {shortest} steps "
                f"of schedule, got {self.overlap_steps}"
            )

    @property
    def needs_anchor(self) -> bool:
        """Whether a rank keeps the weights that replicas last had in common, in float32."""
        return self.differences is not None or self.outer is not None

    def quantizer_of(self, names: Iterable[str], shape: Sequence[int]) -> Quantizer | None:
        """How a parameter's differences travel; None for full precision.

        Args:
            names: of the parameter; tied ones have several.
            shape: unsharded.
        """
        names = tuple(names)
        rule = QSDPConfig(weights=None, gradients=None, min_numel=self.min_numel)
        if rule.is_vector(shape):
            return None
        for pattern in (*EXACT, *self.exact):
            if any(fnmatchcase(n, pattern) or fnmatchcase(f".{n}", pattern) for n in names):
                return None
        return quantizer_of(self.differences)

    def require_matches(self, names: Iterable[str]) -> None:
        """Raises ValueError where a pattern of ``exact`` matches none of ``names``."""
        names = tuple(names)
        for pattern in self.exact:
            if not any(fnmatchcase(n, pattern) or fnmatchcase(f".{n}", pattern) for n in names):
                raise ValueError(
                    f"SyncConfig(exact=...): {pattern!r} matches no parameter; the model has "
                    f"{len(names)}, such as {', '.join(names[:3])}"
                )

    def to_json(self) -> dict[str, Any]:
        """JSON values, for a comparison between ranks and for logs."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {
            "schedule": self.schedule.to_json(),
            "differences": way_to_json(self.differences),
            "outer": None if self.outer is None else asdict(self.outer),
            "exact": list(self.exact),
        }
