"""Ways: how one direction of one parameter travels.

A way is a :class:`~qsdp.Quantizer`, one of the wrappers here, or None for full precision. A new
system of this kind adds a wrapper here and what it remembers to :mod:`qsdp.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from qsdp.levels import LevelSchedule
from qsdp.quantizer import Quantizer, format_name
from qsdp.wire import Segment, WireLayout, wire_layout

Direction = Literal["weights", "gradients", "inside_node", "replicas"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(frozen=True)
class Learned:
    """A quantizer whose levels are learned for every parameter (QSDP section 5).

    Attributes:
        quantizer: with ``rounding="nearest"`` and without levels; the grid is uniform until the
            first tables are learned.
        schedule: when levels are learned, and how.

    Raises:
        TypeError, ValueError: a part of the wrong type, or one that does not fit.
    """

    quantizer: Quantizer
    schedule: LevelSchedule = LevelSchedule()

    def __post_init__(self) -> None:
        require_kind("Learned", "quantizer", self.quantizer, (Quantizer,))
        require_kind("Learned", "schedule", self.schedule, (LevelSchedule,))
        fixed = self.quantizer.levels is not None or self.quantizer.scaling == "mean"
        if self.quantizer.rounding != "nearest" or fixed:
            raise ValueError(
                'Learned(quantizer=...) must have rounding="nearest" and levels=None, and a '
                f'grid between extremes, not scaling="mean", got {self.quantizer}'
            )
        if self.quantizer.coded or self.quantizer.scaling == "l2":
            raise ValueError(
                'Learned(quantizer=...) must have coding="fixed" and scaling="minmax" or '
                f'"symmetric", got {self.quantizer}'
            )


@dataclass(frozen=True)
class Differences:
    """Weights travel as differences to what every rank keeps of them (SDP4Bit).

    Errors do not add up over steps, and the gather in backward moves nothing between nodes. The
    price is memory: every rank keeps the weights in the format of ``kept``, about a byte a
    parameter with 8 bits; of the whole model, or where collectives take two levels of one
    ``ranks_per_node``-th of it, which ranks of a node then tell each other in both gathers.

    Attributes:
        quantizer: of the differences.
        kept: the quantizer in which ranks keep the weights, which are those that they compute with,
            with ``rounding="nearest"``; or None for the dtype that FSDP gathers.
        offload: keep them in the host's memory, from where they are copied to the accelerator for
            each gather. One parameter's wish holds for all that are gathered with it. On CPUs it
            changes nothing.

    Raises:
        TypeError, ValueError: a part of the wrong type, or one that does not fit.
    """

    quantizer: Quantizer
    kept: Quantizer | None = field(default_factory=lambda: Quantizer(8, rounding="nearest"))
    offload: bool = False

    def __post_init__(self) -> None:
        require_kind("Differences", "quantizer", self.quantizer, (Quantizer,))
        if self.quantizer.scaling == "l2":
            raise ValueError(
                "Differences(quantizer=...) has scaling='l2', whose error grows with the block, so "
                "that what is kept would stay far from the weights: set scaling='symmetric'"
            )
        if not isinstance(self.offload, bool):
            raise TypeError(f"Differences(offload=...) must be True or False, got {self.offload!r}")
        require_kind("Differences", "kept", self.kept, (Quantizer, None))
        if self.kept is not None and self.kept.rounding != "nearest":
            raise ValueError(
                f"Differences(kept=...) must have rounding='nearest', got {self.kept.rounding!r}"
            )
        if self.kept is not None and self.kept.coded:
            raise ValueError(
                "Differences(kept=...) stays where it is and must have coding='fixed', got "
                f"{self.kept.coding!r}: set the coding of Differences(quantizer=...)"
            )


@dataclass(frozen=True)
class Feedback:
    """Error feedback: what quantization lost of one gradient is added to the next.

    Where collectives take two levels, of each hop that is quantized: inside a node of the whole
    gradient, between nodes of this rank's sums. In an all-reduce, of what a rank contributes and of
    the sums that it forwards.

    Attributes:
        quantizer: of the gradients, or :class:`Learned`.
        decay: what is added is ``decay`` times what was lost, from 0 (nothing) to 1.
        memory: how a rank keeps what was lost, a quantizer with ``rounding="nearest"``, such as
            ``Quantizer(8, 256, "nearest", scaling="symmetric")`` for about a byte an element; None
            for a float32.

    Raises:
        TypeError, ValueError: a part of the wrong type, or one that does not fit.
    """

    quantizer: Quantizer | Learned
    decay: float = 1.0
    memory: Quantizer | None = None

    def __post_init__(self) -> None:
        require_kind("Feedback", "quantizer", self.quantizer, (Quantizer, Learned))
        require_kind("Feedback", "memory", self.memory, (Quantizer, None))
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float):
            raise TypeError(f"Feedback(decay=...) must be a number, got {self.decay!r}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"Feedback(decay=...) must be from 0 to 1, got {self.decay!r}")
        if self.memory is not None and self.memory.rounding != "nearest":
            raise ValueError(
                f"Feedback(memory=...) must have rounding='nearest', got {self.memory.rounding!r}"
            )
        if self.memory is not None and self.memory.coded:
            raise ValueError(
                f"Feedback(memory=...) has coding={self.memory.coding!r}, and what is kept has "
                'fixed sizes: set coding="fixed" there'
            )


@dataclass(frozen=True)
class Warmup:
    """Gradients travel in another way at first: the clock of 1-bit methods.

    Counted in backwards that reduce, for each unit. Until then nothing is fed back; parameters
    that travel in full precision do so from the start.

    Attributes:
        steps: how many.
        gradients: a quantizer for them, or None for full precision.

    Raises:
        TypeError, ValueError: a part of the wrong type, or out of range.
    """

    steps: int
    gradients: Quantizer | None = None

    def __post_init__(self) -> None:
        require_kind("Warmup", "gradients", self.gradients, (Quantizer, None))
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise ValueError(
                f"Warmup(steps=...) must be an integer of at least 1, got {self.steps!r}"
            )


Way = Quantizer | Learned | Differences | Feedback | None

# What each direction may be.
ALLOWED: dict[str, tuple[type | None, ...]] = {
    "weights": (Quantizer, Learned, Differences, None),
    "gradients": (Quantizer, Learned, Feedback, None),
    "inside_node": (Quantizer, None),
    "replicas": (Quantizer, Feedback, None),
}


@dataclass(frozen=True)
class Ways:
    """How some parameters travel, in :attr:`QSDPConfig.exceptions`.

    With ``gradients`` None they travel in full precision inside nodes and between replicas too.
    """

    weights: Quantizer | Learned | Differences | None
    gradients: Quantizer | Learned | Feedback | None

    def __post_init__(self) -> None:
        for name in ("weights", "gradients"):
            require_kind("Ways", name, getattr(self, name), ALLOWED[name])


def row_layout(
    sizes: Sequence[int],
    ways: Sequence[Way],
    direction: Direction,
    dtype: torch.dtype,
    verify: bool,
    tables: Sequence[tuple[float, ...] | None] | None = None,
) -> WireLayout:
    """Layout of one rank's row of parameters that travel in these ways, in one direction.

    Args:
        sizes: values of each parameter in the row.
        ways: of each, in this direction.
        direction: gradients keep their zeros, weights do not need to.
        dtype: of the values.
        verify: with a checksum.
        tables: learned levels of each; None where there are none yet.
    """
    segments = []
    for size, way, table in zip(sizes, ways, tables or [None] * len(sizes), strict=True):
        quantizer = quantizer_of(way)
        if quantizer is not None and table is not None:
            quantizer = replace(quantizer, levels=table)
        segments.append(Segment(size, quantizer))
    # The sender of differences says of its row whether it will travel whole, too.
    mark = any(isinstance(way, Differences) for way in ways)
    return wire_layout(tuple(segments), dtype, verify, mark, direction != "weights")


def kept_layout(
    sizes: Sequence[int], ways: Sequence[Way], dtype: torch.dtype, verify: bool
) -> WireLayout:
    """Layout of a row of weights as ranks keep it, where parameters travel as differences.

    What does not is kept as it is gathered. Arguments are those of :func:`row_layout`.
    """
    segments = [
        Segment(size, way.kept if isinstance(way, Differences) else None)
        for size, way in zip(sizes, ways, strict=True)
    ]
    return wire_layout(tuple(segments), dtype, verify, mark=True)


def quantizer_of(way: Way) -> Quantizer | None:
    """The quantizer inside a way; None for full precision."""
    while not isinstance(way, Quantizer | None):
        way = way.quantizer
    return way


def unlearned(way: Way) -> Quantizer | Feedback | None:
    """A way of gradients if it is one for replicas too; None where levels are learned."""
    if isinstance(way, Quantizer) or (
        isinstance(way, Feedback) and isinstance(way.quantizer, Quantizer)
    ):
        return way
    return None


def way_name(way: Way) -> str:
    """A way in a few words: ``4 bits nearest, differences``."""
    quantizer = quantizer_of(way)
    if quantizer is None:
        return "full precision"
    words = f"{quantizer.bits} bits {format_name(quantizer)}"
    return words if isinstance(way, Quantizer) else f"{words}, {type(way).__name__.lower()}"


def schedule_of(way: Way) -> LevelSchedule | None:
    """When the levels of a way are learned; None where they are not."""
    if isinstance(way, Feedback):
        way = way.quantizer
    return way.schedule if isinstance(way, Learned) else None


def way_to_json(way: Way) -> dict[str, Any] | None:
    if isinstance(way, Learned):
        return {"learned": asdict(way.quantizer), "schedule": asdict(way.schedule)}
    if isinstance(way, Differences):
        kept = {"kept": way.kept and asdict(way.kept), "offload": way.offload}
        return {"differences": asdict(way.quantizer), **kept}
    if isinstance(way, Feedback):
        more = {"decay": way.decay, "memory": way.memory and asdict(way.memory)}
        return {"feedback": way_to_json(way.quantizer), **more}
    return None if way is None else asdict(way)


def way_from_json(value: Any, name: str) -> Any:
    """A way; whether its kind is allowed for ``name``, the constructors say."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping of Quantizer's fields or null, got {value!r}")
    kind = next((k for k in ("learned", "differences", "feedback") if k in value), None)
    if kind is None:
        return Quantizer.from_json(value, name)
    others = {
        "learned": ["schedule"],
        "differences": ["kept", "offload"],
        "feedback": ["decay", "memory"],
    }[kind]
    for key in value:
        if key not in (kind, *others):
            allowed = " and ".join(map(repr, others))
            raise ValueError(f"unknown field {key!r} of {name}: beside {kind!r} goes {allowed}")
    if kind == "feedback":
        more = {key: value[key] for key in others if key in value}
        if more.get("memory") is not None:
            more["memory"] = Quantizer.from_json(more["memory"], f"{name}.memory")
        return Feedback(way_from_json(value[kind], f"{name}.{kind}"), **more)
    inner = Quantizer.from_json(value[kind], f"{name}.{kind}")
    if kind == "learned":
        return Learned(inner, LevelSchedule(**value.get("schedule") or {}))
    more = {key: value[key] for key in others if key in value}
    if more.get("kept") is not None:
        more["kept"] = Quantizer.from_json(more["kept"], f"{name}.kept")
    return Differences(inner, **more)


def ways_from_json(value: Any, name: str) -> Ways:
    """An exception's ways from a mapping of both directions."""
    if sorted(value) != ["gradients", "weights"]:
        raise ValueError(f"{name} must have the fields weights and gradients, got {sorted(value)}")
    return Ways(**{key: way_from_json(way, f"{name}.{key}") for key, way in value.items()})


def warmup_from_json(value: Any) -> Warmup:
    """A warm-up from a mapping of its fields."""
    if not isinstance(value, Mapping) or not {"steps"} <= {*value} <= {"steps", "gradients"}:
        raise ValueError(f"warmup must have the fields steps and gradients, got {value!r}")
    return Warmup(value["steps"], way_from_json(value.get("gradients"), "warmup.gradients"))


def require_kind(owner: str, name: str, value: object, allowed: tuple[type | None, ...]) -> None:
    kinds = [kind for kind in allowed if kind is not None]
    if isinstance(value, tuple(kinds)) or (value is None and None in allowed):
        return
    words = [f"qsdp.{kind.__name__}" for kind in kinds] + ["None"] * (None in allowed)
    text = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    raise TypeError(f"{owner}({name}=...) must be a {text}, got {value!r}")
