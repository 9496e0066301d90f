"""The eager PyTorch backend: readable first, and the specification of the other backends.

Every other backend gives the same bytes and the same values, bit for bit (NaN counts as NaN).
All arithmetic is float32 with one rounding an operation (no fused multiply-add); every statement
below is one of those operations, so it can be transcribed.

[Note: quantizing a block] ``L``, the number of steps of the grid, is ``2^bits - 1``; lo and hi are
the block's extremes. With symmetric scaling hi is the larger magnitude, ``lo = -hi``, and L is
``2^bits - 2``, so that zero lies on the grid. ``norm`` is the same with the block's 2-norm in place
of the larger magnitude. With levels L is 1.

1. A NaN or infinity anywhere: scale and offset are NaN, all codes zero; the block decodes to NaN.
2. ``p`` is a power of two that keeps the arithmetic in range: 1, or 2^64 for a range below 2^-64,
   or 1/4 where a value exceeds 2^126 ("huge"). ``dp = hi*p - lo*p``, ``unit = dp / L``.
3. ``q = round((x*p - lo*p) * (65536*L / dp))`` within 0 and ``65536*L``: the position on the grid,
   with 16 fractional bits. A constant block has q = 0.
4. ``code = (q + r) >> 16``. Rounding is where the 16 bits r come from: ``nearest`` 32768,
   ``stochastic`` and ``dither`` random for every value, ``shift`` random for the block. With levels
   the code is the number of thresholds at or below q; thresholds are the rounded midpoints of
   neighbouring levels on the same 65536 grid.
5. ``scale = unit / p``, ``offset = lo``; for shift the offset moves by the average of what the code
   moved: ``offset = lo + scale * ((65535 - 2r) / 131072)``. Symmetric blocks send no offset: it is
   ``-(scale * L/2)``.
6. A huge block stores a quarter of its offset, and minus a quarter of its scale as the mark.
7. Decode is ``offset + |scale| * grid``: grid is the code, or its level, or for dither
   ``code + (65535 - 2r) / 131072`` with the encoder's r, which both draw from scale and offset.

So ``E[code] = q / 65536`` exactly over the 65,536 outcomes of r (Hermite's identity), for shift and
dither the error is at most ``scale/2``, for stochastic under ``scale``, beside float32 roundings.

[Note: bfloat16 scales] lo (in a huge block, its quarter) is rounded down to bfloat16 before step 2;
``unit / p`` is rounded up to bfloat16, ``dp`` becomes L times that, and with symmetric scaling lo
becomes ``-(unit * L/2)``: products of 8 by 8 bits, exact. The grid covers the block. It is coarser
by less than 1/128, and by |lo|/128 where the block lies far from zero.

With a transform all this holds for the transformed values: see :mod:`qsdp.kernels.transform`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qsdp.kernels.accumulate import stepwise
from qsdp.kernels.bfloat16 import round_down_to_bfloat16, round_up_to_bfloat16
from qsdp.kernels.packing import pack, unpack
from qsdp.kernels.philox import MASK32, random16_per_block, random16_per_value
from qsdp.kernels.transform import hadamard, inverse_hadamard
from qsdp.wire import Segment, Span, WireLayout, code_bytes

NAME = "reference"

FRACTION = 1 << 16
HUGE = 2.0**126
TINY = 2.0**-64
FLOAT_MAX = torch.finfo(torch.float32).max


def encode(
    values: torch.Tensor, layout: WireLayout, wire: torch.Tensor, *, key: int, first_row: int = 0
) -> None:
    """Encode rows of values.

    Args:
        values: (num_rows, layout.numel), float32, bfloat16 or float16, contiguous.
        layout: where the bytes go.
        wire: (num_rows, layout.row_bytes) uint8, contiguous; written completely.
        key: 64 bits; see [Note: where the random bits come from].
        first_row: the row index of ``values[0]`` in the random counter.
    """
    wire[:, layout.payload_bytes :] = 0
    for index, span in enumerate(layout.spans):
        part = values[:, span.value_offset : span.value_offset + span.segment.numel]
        if not span.segment.numel:
            continue
        if span.segment.bits is None:
            layout.raw(wire, span).copy_(part.contiguous().view(torch.uint8))
            continue
        wire[:, span.meta_offset : span.meta_offset + span.segment.meta_bytes] = 0
        meta, codes = layout.meta(wire, span), layout.codes(wire, span)
        if span.segment.transform is not None:
            part = hadamard(part.float())
        for blocks, block_at, code_slice in _block_parts(part, span):
            scale, offset, code = quantize_blocks(
                blocks.float(), span.segment, key, index, first_row, block_at
            )
            numbers = torch.stack((scale, offset)[: span.segment.meta_numbers], dim=-1)
            if span.segment.scale_dtype == "bfloat16":
                # Upper halves: exact, and one NaN; torch's cast knows two, depending on strides.
                halves = numbers.view(torch.int32) >> 16
                numbers = halves.to(torch.int16).view(torch.bfloat16)
            meta[:, block_at : block_at + blocks.shape[1]] = numbers
            codes[:, code_slice] = pack(code, span.segment.bits).flatten(1)


def decode(wire: torch.Tensor, layout: WireLayout, values: torch.Tensor) -> None:
    """Decode rows: the inverse of :func:`encode`. Writes all of ``values``, in its dtype."""
    for index, span in enumerate(layout.spans):
        part = values[:, span.value_offset : span.value_offset + span.segment.numel]
        rows = _decode_span(wire, layout, span, index)
        part.copy_(rows if span.segment.transform is None else inverse_hadamard(rows))


def decode_sum(
    wire: torch.Tensor,
    layout: WireLayout,
    out: torch.Tensor,
    *,
    multiply: float = 1.0,
    divide: float = 1.0,
) -> None:
    """Decode rows and sum them in float32 in row order: ``out = sum * multiply / divide``.

    Args:
        wire: (num_rows, layout.row_bytes) uint8, at least one row.
        out: (layout.numel,), written completely; rounded once, to its dtype.
    """
    for index, span in enumerate(layout.spans):
        rows = _decode_span(wire, layout, span, index)
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        if span.segment.transform is not None:
            total = inverse_hadamard(total)
        total = total * multiply / torch.full_like(total, divide)
        out[span.value_offset : span.value_offset + span.segment.numel].copy_(total)


accumulate = stepwise(encode, decode)


def quantize_blocks(
    x: torch.Tensor,
    segment: Segment,
    key: int,
    segment_index: int,
    first_row: int,
    first_block: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[Note: quantizing a block] for (num_rows, num_blocks, block) float32.

    Returns scale and offset (num_rows, num_blocks) float32 and codes (same shape as x) uint8.
    """
    num_rows, num_blocks, numel = x.shape
    grid = block_grid(x, segment)
    rows = torch.arange(first_row, first_row + num_rows, device=x.device)[:, None]
    blocks = torch.arange(first_block, first_block + num_blocks, device=x.device)[None, :]
    content = x.view(torch.int32).sum(-1, dtype=torch.int64) & MASK32
    counter = (blocks, segment_index, rows)
    philox_key = (key & MASK32, (key >> 32) ^ content)
    if segment.rounding == "nearest":
        r = torch.full_like(content, FRACTION // 2)
    elif segment.rounding == "shift":
        r = random16_per_block(counter, philox_key)
    elif segment.rounding == "dither":
        r = dither(grid.scale, grid.offset, segment, numel, segment_index, first_block)
    else:
        r = random16_per_value(numel, counter, philox_key)
    return quantize_on(grid, x, segment, r)


def quantize_blocks_with(
    x: torch.Tensor, segment: Segment, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`quantize_blocks` with the 16 random bits given: (..., numel) or one a block (...)."""
    return quantize_on(block_grid(x, segment), x, segment, r)


class BlockGrid(NamedTuple):
    """Where the grids of blocks lie; every field has one float32 or bool a block.

    ``q = round((x * p - base) * inverse)``; ``scale`` and ``offset`` are as the wire holds them,
    but for the shift.
    """

    finite: torch.Tensor
    p: torch.Tensor
    base: torch.Tensor
    inverse: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor


def block_grid(x: torch.Tensor, segment: Segment) -> BlockGrid:
    """Steps 1, 2 and 5 of [Note: quantizing a block] for (..., numel) float32."""
    top = grid_steps(segment)
    symmetric, rounded = segment.scaling != "minmax", segment.scale_dtype == "bfloat16"
    finite = x.isfinite().all(-1)
    x = torch.where(finite[..., None], x, 0.0)
    lo, hi = x.amin(-1) + 0.0, x.amax(-1) + 0.0  # adding 0.0 turns -0.0 into 0.0
    if symmetric:
        hi = torch.maximum(lo.abs(), hi.abs())
        if segment.scaling == "norm":
            hi = x.double().square().sum(-1).sqrt().float()
            finite &= hi.isfinite()
            hi = torch.where(finite, hi, 0.0)
        lo = -hi
    extreme = torch.maximum(lo.abs(), hi.abs()) > HUGE
    quarter = torch.where(extreme, 0.25, 1.0)
    lo, hi = lo * quarter, hi * quarter
    if rounded and not symmetric:
        lo = round_down_to_bfloat16(lo)
    spread = hi - lo
    huge = extreme & (spread != 0)
    tiny = (spread < TINY) & (spread != 0)
    restored = torch.where(extreme & ~huge, 4.0, torch.where(tiny, 1 / TINY, 1.0))
    base = lo * restored
    dp = hi * restored - base
    unit = dp / torch.full_like(dp, top)
    scale = torch.where(tiny, unit * TINY, unit)
    if rounded:
        scale = round_up_to_bfloat16(scale)
        unit = torch.where(tiny, scale * (1 / TINY), scale)
        dp = unit * top
        if symmetric:
            base = -(unit * (top / 2))
    # Divide tensor by tensor: with a number on either side torch multiplies by a reciprocal.
    inverse = torch.where(dp == 0, 0.0, torch.full_like(dp, FRACTION * top) / dp)
    offset = torch.where(tiny, lo, base)
    return BlockGrid(
        finite,
        torch.where(huge, 0.25, torch.where(tiny, 1 / TINY, 1.0)),
        base,
        inverse,
        torch.where(finite, torch.where(huge, -scale, scale), torch.nan),
        torch.where(finite, offset, torch.nan),
    )


def quantize_on(
    grid: BlockGrid, x: torch.Tensor, segment: Segment, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps 3 to 6 of [Note: quantizing a block]: scale, offset and codes."""
    x = torch.where(grid.finite[..., None], x, 0.0)
    q = torch.round((x * grid.p[..., None] - grid.base[..., None]) * grid.inverse[..., None])
    q = q.clamp(0.0, float(FRACTION * grid_steps(segment))).to(torch.int64)
    offset = grid.offset
    if segment.levels is not None:
        code = torch.bucketize(q, level_thresholds(segment.levels).to(x.device), right=True)
    else:
        code = round_positions(q, r[..., None] if r.ndim < x.ndim else r)
        if segment.rounding == "shift":
            offset = offset + grid.scale.abs() * shift_of(r).float()
    code = torch.where(grid.finite[..., None], code, 0)
    return grid.scale, offset, code.to(torch.uint8)


def grid_steps(segment: Segment) -> int:
    """Steps between the lowest and the highest point of a block's grid."""
    assert segment.bits is not None
    if segment.levels is not None:
        return 1
    return (1 << segment.bits) - (1 if segment.scaling == "minmax" else 2)


def dither(
    scale: torch.Tensor,
    offset: torch.Tensor,
    segment: Segment,
    numel: int,
    segment_index: int,
    first_block: int,
) -> torch.Tensor:
    """(num_rows, num_blocks, numel): 16 bits for every value, from what the wire holds of a block.

    The key is the bit patterns of scale and offset as float32, zero for an offset that is not sent.
    """
    blocks = torch.arange(first_block, first_block + scale.shape[1], device=scale.device)[None, :]
    key0 = scale.view(torch.int32).to(torch.int64) & MASK32
    key1 = offset.contiguous().view(torch.int32).to(torch.int64) & MASK32
    if segment.meta_numbers == 1:
        key1 = torch.zeros_like(key1)
    return random16_per_value(numel, (blocks, segment_index, 0), (key0, key1))


def round_positions(q: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Step 4: positions in 65,536ths of a step and 16 random bits each to integer codes."""
    return (q + r) >> 16


def shift_of(r: torch.Tensor) -> torch.Tensor:
    """What random shift adds to the offset, in steps: within (-1/2, 1/2), exact in float64."""
    return (FRACTION - 1 - 2 * r).double() * (0.5 / FRACTION)


def round_to_lattice(
    x: torch.Tensor, step: float, rounding: str, *, key: int, per_value: bool = False
) -> torch.Tensor:
    """Round to the unbounded lattice of an absolute step: what the paper's theory quantizes with.

    The same rule and the same random bits as in a block, without extremes and without codes that
    must fit in a byte. ``nearest`` and ``stochastic`` give points of ``step * Z``; ``shift`` gives
    points of ``step * (Z + shift)``, QSDP's random-shift quantizer (section 4, definition 1), and
    ``dither`` the same with one shift for every value.

    Args:
        x: (num_rows, numel) float64, finite, with ``|x| < 2^36 * step``; positions are rounded to
            65,536ths of a step.
        key: 64 bits; other keys, other draws. Rows draw independently.
        per_value: ``shift`` with one shift for every value, in place of one a row: ``dither``.

    Returns:
        A tensor like ``x``.

    Raises:
        ValueError: an unknown rounding.
    """
    if rounding not in ("nearest", "stochastic", "shift", "dither"):
        raise ValueError(f"round_to_lattice knows no rounding {rounding!r}")
    shifted = rounding in ("shift", "dither")
    num_rows, numel = x.shape
    counter = (0, 0, torch.arange(num_rows, device=x.device))
    philox_key = (key & MASK32, key >> 32)
    if rounding == "nearest":
        r = torch.full_like(x, FRACTION // 2, dtype=torch.int64)
    elif rounding == "shift" and not per_value:
        r = random16_per_block(counter, philox_key)[:, None]
    else:
        r = random16_per_value(numel, counter, philox_key)
    lattice = round_positions(torch.round(x / step * FRACTION).to(torch.int64), r).to(x.dtype)
    return step * (lattice + shift_of(r) if shifted else lattice)


def level_thresholds(levels: tuple[float, ...]) -> torch.Tensor:
    """(2^bits - 1,) int64: code j is taken from threshold j-1 (included) to threshold j."""
    table = torch.tensor(levels, dtype=torch.float64)
    return torch.round((table[1:] + table[:-1]) * (FRACTION / 2)).to(torch.int64)


def dequantize_blocks(
    scale: torch.Tensor,
    offset: torch.Tensor,
    code: torch.Tensor,
    segment: Segment,
    r: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values of blocks, float32: the inverse of :func:`quantize_blocks` up to its error.

    ``r`` is the encoder's, for dither.
    """
    if segment.levels is None:
        grid = code.float()
        if segment.rounding == "dither":
            assert r is not None
            grid = grid + shift_of(r).float()
    else:
        grid = torch.tensor(segment.levels, dtype=torch.float32, device=code.device)[code.long()]
    value = scale.abs()[..., None] * grid + offset[..., None]
    unscaled = (value * 4.0).clamp(-FLOAT_MAX, FLOAT_MAX)
    return torch.where(scale[..., None] < 0, unscaled, value)


def _decode_span(wire: torch.Tensor, layout: WireLayout, span: Span, index: int) -> torch.Tensor:
    """(num_rows, segment.numel) float32; transformed values where there is a transform."""
    segment = span.segment
    if not segment.numel:
        return torch.empty(wire.shape[0], 0, device=wire.device)
    if segment.bits is None:
        return (
            layout.raw(wire, span)
            .clone(memory_format=torch.contiguous_format)
            .view(layout.dtype)
            .float()
        )
    meta, codes = layout.meta(wire, span), layout.codes(wire, span)
    out = torch.empty(wire.shape[0], segment.numel, device=wire.device)
    for blocks, block_at, code_slice in _block_parts(out, span):
        num_blocks, numel = blocks.shape[1:]
        packed = codes[:, code_slice].unflatten(1, (num_blocks, -1))
        numbers = meta[:, block_at : block_at + num_blocks].float().unbind(-1)
        scale = numbers[0]
        offset = numbers[1] if len(numbers) == 2 else -(scale.abs() * (grid_steps(segment) / 2))
        code = unpack(packed, segment.bits, numel)
        r = None
        if segment.rounding == "dither":
            r = dither(scale, offset, segment, numel, index, block_at)
        blocks.copy_(dequantize_blocks(scale, offset, code, segment, r))
    return out


def _block_parts(values: torch.Tensor, span: Span) -> list[tuple[torch.Tensor, int, slice]]:
    """Split (num_rows, segment.numel) into its full blocks and its short last one.

    Returns for each part a view (num_rows, num_blocks, block), the index of its first block, and
    its bytes among the segment's codes.
    """
    segment = span.segment
    assert segment.bits is not None
    full, rest = divmod(segment.numel, segment.block_size)
    cut = full * segment.block_size
    full_bytes = full * code_bytes(segment.block_size, segment.bits)
    parts = []
    if full:
        blocks = values[:, :cut].unflatten(1, (full, segment.block_size))
        parts.append((blocks, 0, slice(0, full_bytes)))
    if rest:
        end = full_bytes + code_bytes(rest, segment.bits)
        parts.append((values[:, cut:].unflatten(1, (1, rest)), full, slice(full_bytes, end)))
    return parts
