"""The eager PyTorch backend: readable first, and the specification of the other backends.

Every other backend gives the same bytes and the same values, bit for bit (NaN counts as NaN).
All arithmetic is float32 with one rounding an operation (no fused multiply-add); every statement
below is one of those operations, so it can be transcribed.

[Note: quantizing a block] ``L``, the number of steps of the grid, is ``2^bits - 1``; lo and hi are
the block's extremes. With symmetric scaling hi is the larger magnitude, ``lo = -hi``, and L is
``2^bits - 2``, so that zero lies on the grid. With levels L is 1.

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

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from qsdp.kernels.philox import MASK32, random16_per_block, random16_per_value
from qsdp.kernels.transform import hadamard, inverse_hadamard
from qsdp.kernels.zeros import map_zeros as map_zeros
from qsdp.quantizer import Quantizer
from qsdp.wire import Span, WireLayout, code_bytes, planes

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
        part, quantizer = values[:, span.values], span.segment.quantizer
        if quantizer is None:
            layout.raw(wire, span).copy_(part.contiguous().view(torch.uint8))
        if quantizer is None or not span.segment.numel:
            continue
        wire[:, span.meta_offset : span.meta_offset + span.segment.meta_bytes] = 0
        meta, codes = layout.meta(wire, span), layout.codes(wire, span)
        if quantizer.transform is not None:
            part = hadamard(part.float())
        for blocks, block_at, code_slice in _block_parts(part, span):
            scale, offset, code = quantize_blocks(
                blocks.float(), quantizer, key, index, first_row, block_at
            )
            numbers = torch.stack((scale, offset)[: span.segment.meta_numbers], dim=-1)
            if quantizer.scale_dtype == "bfloat16":
                # Upper halves: exact, and one NaN; torch's cast knows two, depending on strides.
                halves = numbers.view(torch.int32) >> 16
                numbers = halves.to(torch.int16).view(torch.bfloat16)
            meta[:, block_at : block_at + blocks.shape[1]] = numbers
            codes[:, code_slice] = pack(code, quantizer.bits).flatten(1)


def decode(wire: torch.Tensor, layout: WireLayout, values: torch.Tensor) -> None:
    """Decode rows: the inverse of :func:`encode`. Writes all of ``values``, in its dtype."""
    for index, span in enumerate(layout.spans):
        rows = _decode_span(wire, layout, span, index)
        values[:, span.values] = inverse_hadamard(rows) if _is_rotated(span) else rows


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
        if _is_rotated(span):
            total = inverse_hadamard(total)
        out[span.values] = total * multiply / torch.full_like(total, divide)


def accumulate_by(encode: Callable[..., Any], decode: Callable[..., Any]) -> Callable[..., None]:
    """The ``accumulate`` of a backend whose ``encode`` and ``decode`` these are, step by step."""

    def accumulate(
        values: torch.Tensor, layout: WireLayout, before: torch.Tensor, wire: torch.Tensor
    ) -> None:
        """Add what ``before`` holds to ``values``, encode the sums, and decode them again.

        Args:
            values: (num_rows, layout.numel), replaced by what ``wire`` holds then. Values of
                segments in full precision are taken as they are: nothing is added to them.
            before: (num_rows, layout.row_bytes) uint8; where it holds no finite number, it counts
                as zero.
            wire: (num_rows, layout.row_bytes) uint8, written completely; not ``before``. Random
                rounding has key 0.
        """
        kept = torch.empty_like(values)
        decode(before, layout, kept)
        torch.nan_to_num(kept, nan=0.0, posinf=0.0, neginf=0.0, out=kept)
        for span in layout.spans:
            if span.segment.quantizer is not None:
                values[:, span.values] += kept[:, span.values]
        encode(values, layout, wire, key=0)
        decode(wire, layout, values)

    return accumulate


accumulate = accumulate_by(encode, decode)


def quantize_blocks(
    x: torch.Tensor,
    quantizer: Quantizer,
    key: int,
    segment_index: int,
    first_row: int,
    first_block: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[Note: quantizing a block] for (num_rows, num_blocks, block) float32.

    Returns scale and offset (num_rows, num_blocks) float32 and codes (same shape as x) uint8.
    """
    num_rows, num_blocks, numel = x.shape
    grid = block_grid(x, quantizer)
    rows = torch.arange(first_row, first_row + num_rows, device=x.device)[:, None]
    blocks = torch.arange(first_block, first_block + num_blocks, device=x.device)[None, :]
    content = x.view(torch.int32).sum(-1, dtype=torch.int64) & MASK32
    counter = (blocks, segment_index, rows)
    philox_key = (key & MASK32, (key >> 32) ^ content)
    if quantizer.rounding == "nearest":
        r = torch.full_like(content, FRACTION // 2)
    elif quantizer.rounding == "shift":
        r = random16_per_block(counter, philox_key)
    elif quantizer.rounding == "dither":
        r = dither(grid.scale, grid.offset, quantizer, numel, segment_index, first_block)
    else:
        r = random16_per_value(numel, counter, philox_key)
    return quantize_on(grid, x, quantizer, r)


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


def block_grid(x: torch.Tensor, quantizer: Quantizer) -> BlockGrid:
    """Steps 1, 2 and 5 of [Note: quantizing a block] for (..., numel) float32."""
    top = quantizer.steps
    symmetric, rounded = quantizer.symmetric, quantizer.scale_dtype == "bfloat16"
    finite = x.isfinite().all(-1)
    x = torch.where(finite[..., None], x, 0.0)
    lo, hi = x.amin(-1) + 0.0, x.amax(-1) + 0.0  # adding 0.0 turns -0.0 into 0.0
    if symmetric:
        hi = torch.maximum(lo.abs(), hi.abs())
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
    grid: BlockGrid, x: torch.Tensor, quantizer: Quantizer, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps 3 to 6 of [Note: quantizing a block]: scale, offset and codes."""
    x = torch.where(grid.finite[..., None], x, 0.0)
    q = torch.round((x * grid.p[..., None] - grid.base[..., None]) * grid.inverse[..., None])
    q = q.clamp(0.0, float(FRACTION * quantizer.steps)).to(torch.int64)
    offset = grid.offset
    if quantizer.levels is not None:
        code = torch.bucketize(q, level_thresholds(quantizer.levels).to(x.device), right=True)
    else:
        code = round_positions(q, r[..., None] if r.ndim < x.ndim else r)
        if quantizer.rounding == "shift":
            offset = offset + grid.scale.abs() * shift_of(r).float()
    code = torch.where(grid.finite[..., None], code, 0)
    return grid.scale, offset, code.to(torch.uint8)


def dither(
    scale: torch.Tensor,
    offset: torch.Tensor,
    quantizer: Quantizer,
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
    if quantizer.symmetric:
        key1 = torch.zeros_like(key1)
    return random16_per_value(numel, (blocks, segment_index, 0), (key0, key1))


def round_positions(q: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Step 4: positions in 65,536ths of a step and 16 random bits each to integer codes."""
    return (q + r) >> 16


def shift_of(r: torch.Tensor) -> torch.Tensor:
    """What random shift adds to the offset, in steps: within (-1/2, 1/2), exact in float64."""
    return (FRACTION - 1 - 2 * r).double() * (0.5 / FRACTION)


def level_thresholds(levels: tuple[float, ...]) -> torch.Tensor:
    """(2^bits - 1,) int64: code j is taken from threshold j-1 (included) to threshold j."""
    table = torch.tensor(levels, dtype=torch.float64)
    return torch.round((table[1:] + table[:-1]) * (FRACTION / 2)).to(torch.int64)


def dequantize_blocks(
    scale: torch.Tensor,
    offset: torch.Tensor,
    code: torch.Tensor,
    quantizer: Quantizer,
    r: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values of blocks, float32: the inverse of :func:`quantize_blocks` up to its error.

    ``r`` is the encoder's, for dither.
    """
    if quantizer.levels is None:
        grid = code.float()
        if quantizer.rounding == "dither":
            assert r is not None
            grid = grid + shift_of(r).float()
    else:
        grid = torch.tensor(quantizer.levels, dtype=torch.float32, device=code.device)[code.long()]
    value = scale.abs()[..., None] * grid + offset[..., None]
    unscaled = (value * 4.0).clamp(-FLOAT_MAX, FLOAT_MAX)
    return torch.where(scale[..., None] < 0, unscaled, value)


def round_down_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """float32 to the next float32 below, or itself, that bfloat16 holds."""
    bits = x.view(torch.int32)
    return (torch.where(x < 0, bits + 0xFFFF, bits) & ~0xFFFF).view(torch.float32)


def round_up_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """float32 x >= 0 to the next float32 above, or itself, that bfloat16 holds."""
    return ((x.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def pack(code: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., numel) uint8 codes to (..., code_bytes) uint8; the order is in :mod:`qsdp.wire`."""
    parts = []
    for width, shift in planes(bits):
        per_byte = 8 // width
        plane = (code >> shift) & ((1 << width) - 1)
        plane = torch.nn.functional.pad(plane, (0, -plane.shape[-1] % per_byte))
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=code.device)
        parts.append((plane.unflatten(-1, (-1, per_byte)) << places).sum(-1, dtype=torch.uint8))
    return torch.cat(parts, dim=-1)


def unpack(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    """(..., code_bytes) uint8 to (..., numel) uint8 codes."""
    code = torch.zeros(*packed.shape[:-1], numel, dtype=torch.uint8, device=packed.device)
    at = 0
    for width, shift in planes(bits):
        size = -(-numel * width // 8)
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
        plane = (packed[..., at : at + size, None] >> places) & ((1 << width) - 1)
        code |= plane.flatten(-2)[..., :numel] << shift
        at += size
    return code


def _is_rotated(span: Span) -> bool:
    quantizer = span.segment.quantizer
    return quantizer is not None and quantizer.transform is not None


def _decode_span(wire: torch.Tensor, layout: WireLayout, span: Span, index: int) -> torch.Tensor:
    """(num_rows, segment.numel) float32; transformed values where there is a transform."""
    segment, quantizer = span.segment, span.segment.quantizer
    if not segment.numel:
        return torch.empty(wire.shape[0], 0, device=wire.device)
    if quantizer is None:
        raw = layout.raw(wire, span).clone(memory_format=torch.contiguous_format)
        return raw.view(layout.dtype).float()
    meta, codes = layout.meta(wire, span), layout.codes(wire, span)
    out = torch.empty(wire.shape[0], segment.numel, device=wire.device)
    for blocks, block_at, code_slice in _block_parts(out, span):
        num_blocks, numel = blocks.shape[1:]
        packed = codes[:, code_slice].unflatten(1, (num_blocks, -1))
        numbers = meta[:, block_at : block_at + num_blocks].float().unbind(-1)
        scale = numbers[0]
        offset = numbers[1] if len(numbers) == 2 else -(scale.abs() * (quantizer.steps / 2))
        code = unpack(packed, quantizer.bits, numel)
        r = None
        if quantizer.rounding == "dither":
            r = dither(scale, offset, quantizer, numel, index, block_at)
        blocks.copy_(dequantize_blocks(scale, offset, code, quantizer, r))
    return out


def _block_parts(values: torch.Tensor, span: Span) -> list[tuple[torch.Tensor, int, slice]]:
    """Split (num_rows, segment.numel) into its full blocks and its short last one.

    Returns for each part a view (num_rows, num_blocks, block), the index of its first block, and
    its bytes among the segment's codes.
    """
    size, bits = span.segment.format.block_size, span.segment.format.bits
    full, rest = divmod(span.segment.numel, size)
    cut, full_bytes = full * size, full * code_bytes(size, bits)
    parts = []
    if full:
        parts.append((values[:, :cut].unflatten(1, (full, size)), 0, slice(0, full_bytes)))
    if rest:
        end = full_bytes + code_bytes(rest, bits)
        parts.append((values[:, cut:].unflatten(1, (1, rest)), full, slice(full_bytes, end)))
    return parts
