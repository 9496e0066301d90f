"""FakeQuantizer: on which grid the weights of a forward pass lie, as an immutable value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from qsdp.quantizer import BLOCK_MULTIPLE, MAX_BITS, MAX_BLOCK, Quantizer

Per = Literal["channel", "tensor", "block"]
Step = Literal["learned", "largest"]
MIN_BITS = 2  # with less there is no step to each side of zero
# Up to here a grid with bfloat16 steps reaches its own largest point again: fake_quantize of what
# it gave changes nothing. At 8 bits a step that was rounded up to bfloat16 can miss it by one code.
_MAX_WIRE_BITS = 7


@dataclass(frozen=True)
class FakeQuantizer:
    """How weights are quantized in the forward pass, while training keeps full-precision masters.

    ``step="learned"`` is QT-DoG's quantizer (section 3.2 there; LSQ, arXiv 1902.08153): values are
    ``s * round(clip(w / s, -2^(b-1), 2^(b-1) - 1))``, and ``s`` is trained with the weights.

    ``step="largest"`` takes the step from the largest magnitude that shares it, so that nothing is
    clipped and nothing is learned: ``2^b - 1`` values, symmetric around zero. These are bit for
    bit the values of :class:`qsdp.Quantizer` with symmetric scaling, nearest rounding and bfloat16
    scales, so the weights can travel in ``bits`` bits without any error
    (:meth:`FakeQuantization.on_the_wire`).

    Attributes:
        bits: of a weight, 2 to 8.
        per: what shares a step: an output ``channel`` (a row of a linear layer), the whole
            ``tensor``, or a ``block`` of a row.
        step: ``learned`` or ``largest``.
        block_size: consecutive values of a row that share a step, a multiple of 32; with
            ``per="block"`` alone, which takes ``step="largest"``.
        start_step: optimizer steps in full precision before weights are quantized.

    Raises:
        ValueError: a field out of range, or fields that exclude each other.
    """

    bits: int = 7
    per: Per = "channel"
    step: Step = "learned"
    block_size: int | None = None
    start_step: int = 0

    def __post_init__(self) -> None:
        if not _is_int(self.bits) or not MIN_BITS <= self.bits <= MAX_BITS:
            raise ValueError(
                f"FakeQuantizer(bits=...) must be an integer from {MIN_BITS} to {MAX_BITS}, "
                f"got {self.bits!r}"
            )
        for name, kind in (("per", Per), ("step", Step)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"FakeQuantizer({name}=...) must be one of {', '.join(get_args(kind))}, "
                    f"got {getattr(self, name)!r}"
                )
        if not _is_int(self.start_step) or self.start_step < 0:
            raise ValueError(
                f"FakeQuantizer(start_step=...) must be an integer of at least 0, "
                f"got {self.start_step!r}"
            )
        self._check_block()

    def _check_block(self) -> None:
        if self.per != "block":
            if self.block_size is not None:
                raise ValueError(
                    'FakeQuantizer(block_size=...) needs per="block", got '
                    f"per={self.per!r}: set it, or leave block_size out"
                )
            return
        size = self.block_size
        if size is None or not _is_int(size) or not 0 < size <= MAX_BLOCK or size % BLOCK_MULTIPLE:
            raise ValueError(
                f'FakeQuantizer(per="block") needs block_size, a multiple of {BLOCK_MULTIPLE} up '
                f"to {MAX_BLOCK}, got {size!r}"
            )
        if self.step != "largest":
            raise ValueError(
                'FakeQuantizer(per="block") takes step="largest": steps are learned for channels '
                f"and tensors, got step={self.step!r}"
            )

    @property
    def lowest(self) -> int:
        """The lowest code, such as -8 at 4 bits; -7 where the grid is symmetric."""
        return -(1 << (self.bits - 1)) + (self.step == "largest")

    @property
    def highest(self) -> int:
        """The highest code, such as 7 at 4 bits."""
        return (1 << (self.bits - 1)) - 1

    def wire(self, block_size: int) -> Quantizer:
        """The quantizer of the wire whose grid this is, for blocks of ``block_size`` values.

        Raises:
            ValueError: no quantizer of the wire has this grid.
        """
        if self.step != "largest":
            raise ValueError(
                "learned steps are on no grid of the wire, which takes its steps from the values "
                'that it sends: give FakeQuantizer(step="largest")'
            )
        if self.bits > _MAX_WIRE_BITS:
            raise ValueError(
                f"weights of {self.bits} bits do not travel exactly, those of {MIN_BITS} to "
                f"{_MAX_WIRE_BITS} bits do: lower FakeQuantizer(bits=...)"
            )
        return self.grid(block_size)

    def grid(self, block_size: int) -> Quantizer:
        """The format in which blocks with ``step="largest"`` are computed."""
        return Quantizer(
            self.bits, block_size, "nearest", scaling="symmetric", scale_dtype="bfloat16"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
