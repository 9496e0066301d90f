"""Quantizer: the format of a block, as an immutable value. The only place that lists its fields.

Kernels, wire layout, checks and benchmarks take a :class:`Quantizer` as it is; to add a field or a
rounding, begin here (docs/design.md, "Add a rounding in an afternoon").
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Rounding = Literal["nearest", "stochastic", "shift", "dither"]
Scaling = Literal["minmax", "symmetric", "l2", "mean"]
ScaleDtype = Literal["float32", "bfloat16"]
Transform = Literal["hadamard"]
Coding = Literal["fixed", "elias", "rice"]

# What each field may be. The order of roundings is that of the numbers in the native kernels.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "rounding": get_args(Rounding),
    "scaling": get_args(Scaling),
    "scale_dtype": get_args(ScaleDtype),
    "transform": (None, *get_args(Transform)),
}
# How packed codes travel, in the order of the native numbers. No kernel that quantizes looks at it.
CODINGS: tuple[str, ...] = get_args(Coding)
MIN_BITS, MAX_BITS = 1, 8
MIN_BLOCK, MAX_BLOCK, BLOCK_MULTIPLE = 32, 65536, 32


@dataclass(frozen=True)
class Quantizer:
    """Blockwise quantizer (QSDP sections 3 and 4 in practical form).

    Every ``block_size`` consecutive values share a scale and an offset and become codes of ``bits``
    bits. A block with a NaN or an infinity decodes to NaN; a constant block decodes exactly where
    scaling is min-max and scales are float32.

    Attributes:
        bits: of a code, 1 to 8.
        block_size: values that share a scale, a multiple of 32 from 32 to 65536.
        rounding: ``nearest`` (error at most half a step), ``stochastic`` (unbiased, error under one
            step), ``shift`` (random shift, one draw a block: unbiased, at most half a step) or
            ``dither`` (the same with one draw a value, which the decoder repeats).
        levels: 2^bits increasing numbers from 0 to 1 that replace the uniform grid between a
            block's extremes, with ``nearest``.
        scaling: ``minmax``, from the block's lowest value to its highest, or ``symmetric``: no
            offset is sent, zero decodes to zero, and there is one step less; with ``stochastic``
            this is QSGD with max-norm scaling. ``l2`` is the same with the block's 2-norm in place
            of its largest magnitude, as QSGD has it: few codes are not zero, which ``coding`` uses.
            ``mean`` is for one bit: of every value its sign travels, and of a block its mean
            magnitude, so that values decode to plus or minus that.
        scale_dtype: of scales and offsets on the wire. ``bfloat16`` halves them and makes steps up
            to 1/64 wider: for small blocks.
        transform: ``hadamard`` rotates every 32 values, which spreads outliers.
        coding: of codes while they travel, without loss: ``fixed`` widths, ``elias`` omega numbers
            as in QSGD, or ``rice`` numbers, which are shorter. For grids around zero, without
            levels. Rows then have sizes of their own, never above ``fixed`` by more than 2 bytes a
            block; values, sums and feedback are those of ``fixed``, bit for bit.

    Raises:
        ValueError: a field out of range, or fields that exclude each other.
    """

    bits: int = 8
    block_size: int = 1024
    rounding: Rounding = "shift"
    levels: tuple[float, ...] | None = None
    scaling: Scaling = "minmax"
    scale_dtype: ScaleDtype = "float32"
    transform: Transform | None = None
    coding: Coding = "fixed"

    def __post_init__(self) -> None:
        if not _is_int(self.bits) or not MIN_BITS <= self.bits <= MAX_BITS:
            raise ValueError(
                f"Quantizer(bits=...) must be an integer from {MIN_BITS} to {MAX_BITS}, "
                f"got {self.bits!r}"
            )
        if (
            not _is_int(self.block_size)
            or not MIN_BLOCK <= self.block_size <= MAX_BLOCK
            or self.block_size % BLOCK_MULTIPLE
        ):
            raise ValueError(
                f"Quantizer(block_size=...) must be a multiple of {BLOCK_MULTIPLE} from "
                f"{MIN_BLOCK} to {MAX_BLOCK}, got {self.block_size!r}"
            )
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"Quantizer({name}=...) must be one of {', '.join(map(str, allowed))}, "
                    f"got {getattr(self, name)!r}"
                )
        if self.rounding == "shift" and (self.scaling, self.scale_dtype) != ("minmax", "float32"):
            raise ValueError(
                'Quantizer(rounding="shift") moves the offset, which scaling="symmetric" does not '
                'send and scale_dtype="bfloat16" cannot hold: take rounding="dither"'
            )
        _check_one_bit(self)
        if self.levels is not None and self.scaling == "l2":
            raise ValueError(
                'Quantizer(scaling="l2") is for the uniform grid: set levels=None, or '
                'scaling="symmetric"'
            )
        if self.levels is not None:
            object.__setattr__(self, "levels", _checked_levels(self))
        self._check_coding()

    def _check_coding(self) -> None:
        if self.coding not in CODINGS:
            raise ValueError(
                f"Quantizer(coding=...) must be one of {', '.join(CODINGS)}, got {self.coding!r}"
            )
        on_zero = self.scaling in ("symmetric", "l2")
        if self.coded and (not on_zero or self.levels is not None):
            raise ValueError(
                f"Quantizer(coding={self.coding!r}) is for grids around zero, and this one has "
                f"scaling={self.scaling!r}{' and levels' if self.levels else ''}: set "
                'scaling="symmetric" and levels=None, or coding="fixed"'
            )

    @property
    def coded(self) -> bool:
        """Whether codes travel in numbers of variable length."""
        return self.coding != "fixed"

    @property
    def steps(self) -> int:
        """Steps between the lowest and the highest point of a block's grid; 1 with levels."""
        if self.levels is not None:
            return 1
        return (1 << self.bits) - (2 if self.scaling in ("symmetric", "l2") else 1)

    @property
    def symmetric(self) -> bool:
        """Whether a block's grid is centred on zero, so that no offset is sent."""
        return self.scaling != "minmax"

    @property
    def keeps_zeros(self) -> bool:
        """Whether zeros need no map to arrive as zeros.

        32 zeros of a block decode to zeros, whatever else is in the block; with mean scaling a
        block of zeros does, and a map would cost more than it is worth beside one bit.
        """
        return self.symmetric and self.rounding in ("nearest", "stochastic") and not self.levels

    @classmethod
    def from_json(cls, value: object, name: str) -> Quantizer:
        """A quantizer from a mapping of its fields; absent ones take their defaults.

        Args:
            value: JSON values by field.
            name: of what is read, for errors.

        Raises:
            TypeError, ValueError: no mapping, an unknown field, or one out of range.
        """
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a mapping of Quantizer's fields, got {value!r}")
        known = {f.name for f in fields(cls)}
        for key in value:
            if key not in known:
                raise ValueError(
                    f"unknown field {key!r} of {name}: a Quantizer has {sorted(known)}"
                )
        values: dict[str, Any] = dict(value)
        if isinstance(values.get("levels"), list):
            values["levels"] = tuple(values["levels"])
        return cls(**values)


def every_format(bits: int = 4, block_size: int = 1024) -> list[Quantizer]:
    """All quantizers that differ in more than numbers: what tests and benchmarks go through.

    Levels are the table of :func:`uneven_levels`; formats for one bit have one. Plain formats come
    first.
    """
    found = []
    combinations = itertools.product(*(range(len(allowed)) for allowed in CHOICES.values()), (0, 1))
    # By how far a combination is from the default choices, which come first.
    for *places, with_levels in sorted(combinations, key=lambda c: (sum(map(bool, c[1:])), c)):
        chosen: dict[str, Any] = {
            name: allowed[place]
            for (name, allowed), place in zip(CHOICES.items(), places, strict=True)
        }
        levels = uneven_levels(bits) if with_levels else None
        width = 1 if chosen["scaling"] == "mean" else bits
        try:
            found.append(Quantizer(width, block_size, levels=levels, **chosen))
        except ValueError:
            continue  # fields that exclude each other
    return found


def uneven_levels(bits: int) -> tuple[float, ...]:
    """A table of levels that is not uniform, for tests and benchmarks."""
    top = (1 << bits) - 1
    return tuple((j / top) ** 1.5 for j in range(1 << bits))


def format_name(quantizer: Quantizer) -> str:
    """What makes a format, in words: ``nearest levels bfloat16 hadamard``, without its numbers."""
    words = [quantizer.rounding, "levels" if quantizer.levels else None]
    words += [
        None if getattr(quantizer, name) == allowed[0] else getattr(quantizer, name)
        for name, allowed in CHOICES.items()
        if name != "rounding"
    ]
    words.append(quantizer.coding if quantizer.coded else None)
    return " ".join(word for word in words if word)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_one_bit(quantizer: Quantizer) -> None:
    one_bit, scaling = quantizer.bits == 1, quantizer.scaling
    if one_bit and scaling in ("symmetric", "l2"):
        raise ValueError(
            f'Quantizer(scaling="{scaling}") needs 2 bits or more, for zero and a step to each '
            'side, got bits=1: take scaling="mean" or "minmax"'
        )
    if scaling == "mean" and not (
        one_bit and quantizer.rounding == "nearest" and quantizer.levels is None
    ):
        raise ValueError(
            'Quantizer(scaling="mean") sends signs: it needs bits=1, rounding="nearest" and '
            f"levels=None, got bits={quantizer.bits}, rounding={quantizer.rounding!r}"
        )


def _checked_levels(quantizer: Quantizer) -> tuple[float, ...]:
    assert quantizer.levels is not None
    if quantizer.rounding != "nearest":
        raise ValueError(
            'Quantizer(levels=...) rounds to the nearest level: set rounding="nearest", '
            f"got rounding={quantizer.rounding!r}"
        )
    if isinstance(quantizer.levels, str):
        raise ValueError(
            f"Quantizer(levels=...) must be numbers, got {quantizer.levels!r}; to learn them, "
            "wrap the quantizer: qsdp.Learned(Quantizer(...))"
        )
    levels = tuple(float(level) for level in quantizer.levels)
    increasing = all(a < b for a, b in itertools.pairwise(levels))
    if len(levels) != 1 << quantizer.bits or not increasing or levels[0] < 0 or levels[-1] > 1:
        raise ValueError(
            f"Quantizer(levels=...) must be {1 << quantizer.bits} increasing numbers from 0 to 1 "
            f"at bits={quantizer.bits}, got {len(levels)} numbers: {levels[:4]}..."
        )
    return levels
