"""What becomes of a block: its grid, its codes, its values. The specification of the backends.

All arithmetic is float32 with one rounding an operation (no fused multiply-add); every statement
below is one of those operations, so it can be transcribed.

[Note: quantizing a block] ``L``, the number of steps of the grid, is ``2^bits - 1``; lo and hi are
the block's extremes. With symmetric scaling hi is the larger magnitude, ``lo = -hi``, and L is
``2^bits - 2``, so that zero lies on the grid. With "l2" scaling the same holds with the block's
norm as hi: see :func:`two_norm`. With levels L is 1.

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
   ``code + (65535 - 2r) / 131072`` with the encoder's r, which both draw from scale, offset and
   sender.

So ``E[code] = q / 65536`` exactly over the 65,536 outcomes of r (Hermite's identity), for shift and
dither the error is at most ``scale/2``, for stochastic under ``scale``, beside float32 roundings.

[Note: bfloat16 scales] lo (in a huge block, its quarter) is rounded down to bfloat16 before step 2;
``unit / p`` is rounded up to bfloat16, ``dp`` becomes L times that, and with symmetric scaling lo
becomes ``-(unit * L/2)``: products of 8 by 8 bits, exact. The grid covers the block. It is coarser
by less than 1/128, and by |lo|/128 where the block lies far from zero.

[Note: mean scaling] Codes are signs: 1 where x >= 0, else 0. The grid has two points, plus and
minus the mean magnitude: L is 1, and in step 2 dp is twice the mean of ``|x|*p``. That is a sum of
integers, so the order of adding does not matter: with ``2^e > hi*p >= 2^(e-1)`` and n values,

    dp = float32(sum of floor(|x|*p * 2^(23-e))) / n * 2^(e-22)

and zero in a block of zeros. With bfloat16 scales it is rounded up like any other.

With a transform all this holds for the transformed values: see :mod:`qsdp.kernels.transform`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qsdp.kernels.philox import MASK32, random16_per_block, random16_per_value
from qsdp.quantizer import Quantizer
from qsdp.wire import Span, code_bytes

FRACTION = 1 << 16
HUGE = 2.0**126
TINY = 2.0**-64
FLOAT_MAX = torch.finfo(torch.float32).max


def quantize_blocks(
    x: torch.Tensor,
    quantizer: Quantizer,
    key: int,
    segment_index: int,
    first_row: int,
    first_block: int,
    sender: int = 0,
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
        at = (segment_index, first_block, sender)
        r = dither(grid.scale, grid.offset, quantizer, numel, *at)
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
        hi = two_norm(x, hi) if quantizer.scaling == "l2" else hi
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
    if quantizer.scaling == "mean":
        dp = twice_the_mean(x, hi * restored, torch.where(huge, 0.25, restored))
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


def two_norm(x: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """2-norms of blocks (..., numel) float32, finite, whose largest magnitudes are ``most``.

    Magnitudes are cut to multiples of 2^(e - 23), with 2^e the power of two above the largest: so
    the sum of their squares is one of integers, and no order of summation matters. Its root is
    taken in float64 and rounded to float32. At least ``most``, so that the grid covers the block;
    and at most HUGE, or ``most`` where that is more.
    """
    small = torch.where(most < TINY, 1 / TINY, 1.0)
    exponent = ((most * small).view(torch.int32) >> 23) - 126
    up, down = ((exponent * sign + 127) << 23 for sign in (-1, 1))
    up, down = (up + (23 << 23)).view(torch.float32), (down - (23 << 23)).view(torch.float32)
    cut = ((x.abs() * small[..., None]) * up[..., None]).to(torch.int64)
    root = (cut * cut).sum(-1).double().sqrt().float()
    norm = (root * down) * torch.where(most < TINY, TINY, 1.0)
    usable = (most > 0) & (most <= HUGE)
    return torch.where(usable, torch.maximum(most, norm.clamp(max=HUGE)), most)


def twice_the_mean(x: torch.Tensor, largest: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """dp of [Note: mean scaling] for (..., numel) float32 and each block's hi*p and p."""
    exponent = largest.view(torch.int32) >> 23  # as it is stored: e + 126
    exponent = torch.where(largest == 0, 127, exponent)
    down, up = (bits.view(torch.float32) for bits in (276 - exponent << 23, exponent - 21 << 23))
    total = (x.abs() * p[..., None] * down[..., None]).to(torch.int64).sum(-1).float()
    return total / torch.full_like(total, x.shape[-1]) * up


def quantize_on(
    grid: BlockGrid, x: torch.Tensor, quantizer: Quantizer, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps 3 to 6 of [Note: quantizing a block]: scale, offset and codes."""
    x = torch.where(grid.finite[..., None], x, 0.0)
    q = torch.round((x * grid.p[..., None] - grid.base[..., None]) * grid.inverse[..., None])
    q = q.clamp(0.0, float(FRACTION * quantizer.steps)).to(torch.int64)
    offset = grid.offset
    if quantizer.scaling == "mean":
        code = (x >= 0).long()
    elif quantizer.levels is not None:
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
    senders: torch.Tensor | int,
) -> torch.Tensor:
    """(num_rows, num_blocks, numel): 16 bits for every value, from what the wire holds of a block.

    Who sent it takes the row's place in the counter: one for all rows, or (num_rows, 1). The key is
    the bit patterns of scale and offset as float32, zero for an offset that is not sent.
    """
    blocks = torch.arange(first_block, first_block + scale.shape[1], device=scale.device)[None, :]
    key0 = scale.view(torch.int32).to(torch.int64) & MASK32
    key1 = offset.contiguous().view(torch.int32).to(torch.int64) & MASK32
    if quantizer.symmetric:
        key1 = torch.zeros_like(key1)
    return random16_per_value(numel, (blocks, segment_index, senders), (key0, key1))


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


def block_parts(values: torch.Tensor, span: Span) -> list[tuple[torch.Tensor, int, slice]]:
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
