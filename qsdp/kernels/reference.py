"""The eager PyTorch backend: readable first, and the specification of the other backends.

Every other backend gives the same bytes and the same values, bit for bit (NaN counts as NaN).
All arithmetic is float32 with one rounding an operation (no fused multiply-add); every statement
below is one of those operations, so it can be transcribed.

[Note: quantizing a block] With ``L = 2^bits - 1`` and lo, hi the block's extremes:

1. A NaN or infinity anywhere: scale and offset are NaN, all codes zero; the block decodes to NaN.
2. ``p`` is a power of two that keeps the arithmetic in range: 1, or 2^64 for a range below 2^-64,
   or 1/4 where a value exceeds 2^126 ("huge"). ``dp = hi*p - lo*p``.
3. ``q = round((x*p - lo*p) * (65536*L / dp))``, at most ``65536*L``: the position on the grid, with
   16 fractional bits. A constant block has q = 0.
4. ``code = (q + r) >> 16``. Rounding is where the 16 bits r come from: ``nearest`` 32768,
   ``stochastic`` random for every value, ``shift`` random for the block.
5. ``scale = (dp / L) / p``, ``offset = lo``; for shift the offset moves by the average of what the
   code moved: ``offset = lo + scale * ((65535 - 2r) / 131072)``.
6. A huge block stores a quarter of its offset, and minus a quarter of its scale as the mark.

So ``E[code] = q / 65536`` exactly over the 65,536 outcomes of r (Hermite's identity), for shift
the error is at most ``scale/2`` and for stochastic under ``scale``, beside float32 roundings.

With levels, steps 3 and 4 become: ``q`` with L = 1, and the code is the number of thresholds at or
below q; the thresholds are the rounded midpoints of neighbouring levels on the same 65536 grid.
Decode is then ``offset + |scale| * levels[code]``, with scale = dp / p.
"""

from __future__ import annotations

import torch

from qsdp.kernels.philox import MASK32, random16_per_block, random16_per_value
from qsdp.wire import Segment, Span, WireLayout, code_bytes, planes

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
        meta, codes = layout.meta(wire, span), layout.codes(wire, span)
        for blocks, block_at, code_slice in _block_parts(part, span):
            scale, offset, code = quantize_blocks(
                blocks.float(), span.segment, key, index, first_row, block_at
            )
            num_blocks = blocks.shape[1]
            meta[:, block_at : block_at + num_blocks] = torch.stack((scale, offset), dim=-1)
            codes[:, code_slice] = pack(code, span.segment.bits).flatten(1)


def decode(wire: torch.Tensor, layout: WireLayout, values: torch.Tensor) -> None:
    """Decode rows: the inverse of :func:`encode`. Writes all of ``values``, in its dtype."""
    for span in layout.spans:
        part = values[:, span.value_offset : span.value_offset + span.segment.numel]
        part.copy_(_decode_span(wire, layout, span))


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
    for span in layout.spans:
        rows = _decode_span(wire, layout, span)
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        total = total * multiply / torch.full_like(total, divide)
        out[span.value_offset : span.value_offset + span.segment.numel].copy_(total)


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
    content = x.view(torch.int32).sum(-1, dtype=torch.int64) & MASK32
    rows = torch.arange(first_row, first_row + num_rows, device=x.device)[:, None]
    blocks = torch.arange(first_block, first_block + num_blocks, device=x.device)[None, :]
    counter = (blocks, segment_index, rows)
    philox_key = (key & MASK32, (key >> 32) ^ content)
    if segment.rounding == "nearest":
        r = torch.full_like(content, FRACTION // 2)
    elif segment.rounding == "shift":
        r = random16_per_block(counter, philox_key)
    else:
        r = random16_per_value(numel, counter, philox_key)
    return quantize_blocks_with(x, segment, r)


def quantize_blocks_with(
    x: torch.Tensor, segment: Segment, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`quantize_blocks` with the 16 random bits given: (..., numel) or one a block (...)."""
    assert segment.bits is not None
    top = 1 if segment.levels is not None else (1 << segment.bits) - 1
    finite = x.isfinite().all(-1)
    x = torch.where(finite[..., None], x, 0.0)
    lo, hi = x.amin(-1) + 0.0, x.amax(-1) + 0.0  # adding 0.0 turns -0.0 into 0.0
    spread = hi - lo
    constant = spread == 0
    huge = (torch.maximum(lo.abs(), hi.abs()) > HUGE) & ~constant
    tiny = (spread < TINY) & ~constant
    p = torch.where(huge, 0.25, torch.where(tiny, 1 / TINY, 1.0))
    dp = hi * p - lo * p
    # Divide tensor by tensor: with a number on either side torch multiplies by a reciprocal.
    inverse = torch.where(constant, 0.0, torch.full_like(dp, FRACTION * top) / dp)
    q = torch.round((x * p[..., None] - (lo * p)[..., None]) * inverse[..., None])
    q = q.clamp(max=float(FRACTION * top)).to(torch.int64)

    unit = dp / torch.full_like(dp, top)
    scale = torch.where(tiny, unit * TINY, unit)
    offset = torch.where(huge, lo * 0.25, lo)
    if segment.levels is not None:
        code = torch.bucketize(q, level_thresholds(segment.levels).to(x.device), right=True)
    else:
        code = round_positions(q, r[..., None] if r.ndim < x.ndim else r)
        if segment.rounding == "shift":
            offset = offset + scale * shift_of(r).float()
    scale = torch.where(huge, -scale, scale)
    scale = torch.where(finite, scale, torch.nan)
    offset = torch.where(finite, offset, torch.nan)
    code = torch.where(finite[..., None], code, 0)
    return scale, offset, code.to(torch.uint8)


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
    points of ``step * (Z + shift)``, QSDP's random-shift quantizer (section 4, definition 1).

    Args:
        x: (num_rows, numel) float64, finite, with ``|x| < 2^36 * step``; positions are rounded to
            65,536ths of a step.
        key: 64 bits; other keys, other draws. Rows draw independently.
        per_value: one shift for every value, in place of one a row.

    Returns:
        A tensor like ``x``.
    """
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
    return step * (lattice + shift_of(r) if rounding == "shift" else lattice)


def level_thresholds(levels: tuple[float, ...]) -> torch.Tensor:
    """(2^bits - 1,) int64: code j is taken from threshold j-1 (included) to threshold j."""
    table = torch.tensor(levels, dtype=torch.float64)
    return torch.round((table[1:] + table[:-1]) * (FRACTION / 2)).to(torch.int64)


def dequantize_blocks(
    scale: torch.Tensor, offset: torch.Tensor, code: torch.Tensor, segment: Segment
) -> torch.Tensor:
    """Values of blocks, float32: the inverse of :func:`quantize_blocks` up to its error."""
    if segment.levels is None:
        grid = code.float()
    else:
        grid = torch.tensor(segment.levels, dtype=torch.float32, device=code.device)[code.long()]
    value = scale.abs()[..., None] * grid + offset[..., None]
    unscaled = (value * 4.0).clamp(-FLOAT_MAX, FLOAT_MAX)
    return torch.where(scale[..., None] < 0, unscaled, value)


def pack(code: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., numel) uint8 codes to (..., code_bytes) uint8."""
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


def _decode_span(wire: torch.Tensor, layout: WireLayout, span: Span) -> torch.Tensor:
    """(num_rows, segment.numel) float32."""
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
        scale, offset = meta[:, block_at : block_at + num_blocks].unbind(-1)
        code = unpack(packed, segment.bits, numel)
        blocks.copy_(dequantize_blocks(scale, offset, code, segment))
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
