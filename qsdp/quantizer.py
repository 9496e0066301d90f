"""Quantizer: how the values of one direction become wire bytes, as an immutable value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from qsdp.kernels import VALUE_DTYPES, backend_for
from qsdp.wire import Segment, WireLayout, wire_layout

Rounding = Literal["nearest", "stochastic", "shift", "dither"]
Scaling = Literal["minmax", "symmetric", "norm"]
ScaleDtype = Literal["float32", "bfloat16"]
Transform = Literal["hadamard"]

MIN_BITS, MAX_BITS = 2, 8
MIN_BLOCK, MAX_BLOCK, BLOCK_MULTIPLE = 32, 65536, 32


@dataclass(frozen=True)
class Quantizer:
    """Blockwise quantizer (QSDP sections 3 and 4 in practical form).

    Every ``block_size`` consecutive values share a scale and an offset and become codes of ``bits``
    bits. A block with a NaN or an infinity decodes to NaN; a constant block decodes exactly where
    scaling is min-max and scales are float32.

    Attributes:
        bits: of a code, 2 to 8.
        block_size: values that share a scale, a multiple of 32 from 32 to 65536.
        rounding: ``nearest`` (error at most half a step), ``stochastic`` (unbiased, error under one
            step), ``shift`` (random shift, one draw a block: unbiased, at most half a step) or
            ``dither`` (the same with one draw a value, which the decoder repeats).
        levels: 2^bits increasing numbers from 0 to 1 that replace the uniform grid between a
            block's extremes, with ``nearest``. ``"learned"`` stands for tables that
            :func:`qsdp.apply_qsdp` learns for every parameter; until then, and in
            :meth:`encode`, it is the uniform grid.
        scaling: ``minmax``, from the block's lowest value to its highest, or ``symmetric``: no
            offset is sent, zero decodes to zero, and there is one step less; with ``stochastic``
            this is QSGD with max-norm scaling. ``norm`` is QSGD's own scaling by the 2-norm, for
            comparison: most codes of a large block are zero, and no native kernel has it.
        scale_dtype: of scales and offsets on the wire. ``bfloat16`` halves them and makes steps up
            to 1/64 wider: for small blocks.
        transform: ``hadamard`` rotates every 32 values, which spreads outliers.

    Raises:
        ValueError: a field out of range, or fields that exclude each other.
    """

    bits: int = 8
    block_size: int = 1024
    rounding: Rounding = "shift"
    levels: tuple[float, ...] | Literal["learned"] | None = None
    scaling: Scaling = "minmax"
    scale_dtype: ScaleDtype = "float32"
    transform: Transform | None = None

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
        for name, allowed in (
            ("rounding", get_args(Rounding)),
            ("scaling", get_args(Scaling)),
            ("scale_dtype", get_args(ScaleDtype)),
            ("transform", (None, *get_args(Transform))),
        ):
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
        if self.levels is not None:
            object.__setattr__(self, "levels", _checked_levels(self))

    @property
    def learns(self) -> bool:
        """Whether levels are to be learned."""
        return self.levels == "learned"

    def segment(self, numel: int, learned: tuple[float, ...] | None = None) -> Segment:
        """A wire segment of ``numel`` values; ``learned`` levels if the quantizer learns."""
        return Segment(
            numel,
            self.bits,
            self.block_size,
            self.rounding,
            learned if isinstance(self.levels, str) else self.levels,
            self.scaling,
            self.scale_dtype,
            self.transform,
        )

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> WireLayout:
        """The wire layout of one row that is one segment of ``numel`` values."""
        return wire_layout((self.segment(numel),), dtype)

    def wire_bytes(self, numel: int) -> int:
        """Bytes on the wire for ``numel`` values of one tensor, padding included."""
        return self.layout(numel).row_bytes

    def encode(self, values: torch.Tensor, *, key: int = 0) -> torch.Tensor:
        """Quantize and pack a tensor of any shape.

        Args:
            values: float32, bfloat16 or float16; flattened in row-major order. Not modified.
            key: 64-bit number. Random draws depend on it and on each block's values alone; no
                generator is touched.

        Returns:
            (wire_bytes(values.numel()),) uint8 on the same device.

        Raises:
            TypeError: values of another dtype.
        """
        if values.dtype not in VALUE_DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in VALUE_DTYPES)
            raise TypeError(f"Quantizer.encode takes {names}, got {values.dtype}")
        layout = self.layout(values.numel(), values.dtype)
        wire = torch.empty(1, layout.row_bytes, dtype=torch.uint8, device=values.device)
        rows = values.detach().reshape(1, -1).contiguous()
        backend_for(values.device).encode(rows, layout, wire, key=key & (2**64 - 1))
        return wire[0]

    def decode(
        self, wire: torch.Tensor, numel: int, *, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Unpack and dequantize what :meth:`encode` gave for ``numel`` values.

        Args:
            wire: (wire_bytes(numel),) uint8.
            dtype: of the result; values are computed in float32 and rounded once.

        Returns:
            (numel,) of ``dtype``.

        Raises:
            TypeError: ``wire`` is not uint8, or ``dtype`` is not float32, bfloat16 or float16.
            ValueError: ``wire`` has not the length of ``numel`` encoded values.
        """
        if wire.dtype != torch.uint8 or dtype not in VALUE_DTYPES:
            raise TypeError(
                "Quantizer.decode takes uint8 wire and gives float32, bfloat16 or float16, "
                f"got {wire.dtype} and dtype={dtype}"
            )
        layout = self.layout(numel)
        if wire.numel() != layout.row_bytes:
            raise ValueError(
                f"{numel} values at bits={self.bits}, block_size={self.block_size} are "
                f"{layout.row_bytes} bytes on the wire, got {wire.numel()}"
            )
        values = torch.empty(1, numel, dtype=dtype, device=wire.device)
        backend_for(wire.device).decode(wire.reshape(1, -1).contiguous(), layout, values)
        return values[0]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_levels(quantizer: Quantizer) -> tuple[float, ...] | Literal["learned"]:
    assert quantizer.levels is not None
    if quantizer.rounding != "nearest":
        raise ValueError(
            'Quantizer(levels=...) rounds to the nearest level: set rounding="nearest", '
            f"got rounding={quantizer.rounding!r}"
        )
    if quantizer.levels == "learned":
        return "learned"
    if isinstance(quantizer.levels, str):
        raise ValueError(
            f'Quantizer(levels=...) must be "learned" or numbers, got {quantizer.levels!r}'
        )
    levels = tuple(float(level) for level in quantizer.levels)
    increasing = all(a < b for a, b in zip(levels, levels[1:], strict=False))
    if len(levels) != 1 << quantizer.bits or not increasing or levels[0] < 0 or levels[-1] > 1:
        raise ValueError(
            f"Quantizer(levels=...) must be {1 << quantizer.bits} increasing numbers from 0 to 1 "
            f"at bits={quantizer.bits}, got {len(levels)} numbers: {levels[:4]}..."
        )
    return levels
