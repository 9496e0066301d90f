"""Device code of the Triton backend: decode and decode_sum.

The same table of runs as :mod:`qsdp.kernels.triton_encode` uses; a block that is larger than a tile
is spread over the third axis of the grid.
"""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels.triton_encode import FIELDS, TWO23, TWO23_BITS, block_numel, meta_pointer
from qsdp.kernels.triton_philox import draw_dither, shift_of
from qsdp.kernels.triton_transform import inverse_hadamard

FLOAT_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)

# Triton's interpreter truncates to bfloat16 where hardware rounds: there the kernel rounds by hand.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_SCALARS = ["num_raw", "numel", "num_rows", "row_bytes", "first_sender", "sender_step"]


@triton.jit(do_not_specialize=_SCALARS)
def decode_kernel(
    values,
    wire,
    table,
    levels,
    num_raw,
    numel,
    row_bytes,
    first_sender,
    sender_step,
    RAW: tl.constexpr,
    BF16: tl.constexpr,
    EXACT: tl.constexpr,
    VALUE_ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (programs, rows, tiles a block). ``values`` as in encode."""
    row = tl.program_id(1).to(tl.int64)
    start = tl.program_id(2) * FORMAT.tile
    run = table + tl.program_id(0) * FIELDS
    count = tl.load(run + 1).to(tl.int32)
    if tl.program_id(0) < num_raw:
        raw = (wire + row * row_bytes).to(tl.pointer_type(RAW)) + tl.load(run + 3)
        at = start + tl.arange(0, FORMAT.blocks * FORMAT.tile)
        target = values + row * numel + tl.load(run) + at
        if EXACT:  # full precision keeps its bits
            tl.store(target, tl.load(raw + at, mask=at < count, other=0), mask=at < count)
        else:
            exact = _load_raw(raw + at, at < count, RAW)
            _store_values(target, exact, at < count, BF16, True)
    else:
        out = values + tl.multiple_of(row * numel + tl.load(run), VALUE_ALIGNMENT)
        codes = wire + tl.multiple_of(row * row_bytes + tl.load(run + 3), CODE_ALIGNMENT)
        meta = meta_pointer(wire + row * row_bytes, tl.load(run + 2), FORMAT)
        levels += tl.load(run + 6)
        sender = first_sender + tl.program_id(1) * sender_step
        if count == FORMAT.blocks * FORMAT.quantizer.block_size:
            value = _decode_tile(codes, meta, levels, run, count, start, sender, FORMAT, True)
            value = _untransformed(value, count, start, FORMAT, True)
            _store_tile(out, value, count, start, BF16, FORMAT, True)
        else:
            value = _decode_tile(codes, meta, levels, run, count, start, sender, FORMAT, False)
            value = _untransformed(value, count, start, FORMAT, False)
            _store_tile(out, value, count, start, BF16, FORMAT, False)


@triton.jit(do_not_specialize=_SCALARS)
def decode_sum_kernel(
    out,
    wire,
    table,
    levels,
    num_raw,
    num_rows,
    row_bytes,
    multiply,
    divide,
    DIVIDE: tl.constexpr,
    RAW: tl.constexpr,
    BF16: tl.constexpr,
    VALUE_ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (programs, 1, tiles a block): every program sums its run over all rows, in order."""
    start = tl.program_id(2) * FORMAT.tile
    run = table + tl.program_id(0) * FIELDS
    count = tl.load(run + 1).to(tl.int32)
    if tl.program_id(0) < num_raw:
        at = start + tl.arange(0, FORMAT.blocks * FORMAT.tile)
        raw_at = tl.load(run + 3) + at
        exact = _load_raw(wire.to(tl.pointer_type(RAW)) + raw_at, at < count, RAW)
        for _ in range(1, num_rows):
            wire += row_bytes
            exact += _load_raw(wire.to(tl.pointer_type(RAW)) + raw_at, at < count, RAW)
        exact = _average(exact, multiply, divide, DIVIDE)
        _store_values(out + tl.load(run) + at, exact, at < count, BF16, True)
    else:
        out += tl.multiple_of(tl.load(run), VALUE_ALIGNMENT)
        if count == FORMAT.blocks * FORMAT.quantizer.block_size:
            total = _decode_rows(
                wire, levels, run, count, start, num_rows, row_bytes, CODE_ALIGNMENT, FORMAT, True
            )
            total = _untransformed(total, count, start, FORMAT, True)
            total = _average(total, multiply, divide, DIVIDE)
            _store_tile(out, total, count, start, BF16, FORMAT, True)
        else:
            total = _decode_rows(
                wire, levels, run, count, start, num_rows, row_bytes, CODE_ALIGNMENT, FORMAT, False
            )
            total = _untransformed(total, count, start, FORMAT, False)
            total = _average(total, multiply, divide, DIVIDE)
            _store_tile(out, total, count, start, BF16, FORMAT, False)


@triton.jit
def _average(total, multiply, divide, DIVIDE: tl.constexpr):
    """With DIVIDE off, ``divide`` is the exact inverse of a power of two: the same bits, faster."""
    if DIVIDE:
        return tl.div_rn(total * multiply, tl.zeros_like(total) + divide)
    else:
        return total * multiply * divide


@triton.jit
def _decode_rows(
    wire, levels, run, count, start, num_rows, row_bytes,
    CODE_ALIGNMENT: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Sum of one tile over all rows. It starts from row 0, not from zero: the sign of -0 counts."""
    meta = meta_pointer(wire, tl.load(run + 2), FORMAT)
    code_at = tl.multiple_of(tl.load(run + 3), CODE_ALIGNMENT)
    levels += tl.load(run + 6)
    total = _decode_tile(wire + code_at, meta, levels, run, count, start, 0, FORMAT, FULL)
    for row in range(1, num_rows):
        code_at += row_bytes
        codes = wire + tl.multiple_of(code_at, CODE_ALIGNMENT)
        meta += row_bytes // FORMAT.meta_bytes
        total += _decode_tile(codes, meta, levels, run, count, start, row, FORMAT, FULL)
    return total


@triton.jit
def _decode_tile(
    codes, meta, levels, run, count, start, sender, FORMAT: tl.constexpr, FULL: tl.constexpr
):
    """(blocks, tile) float32, transformed values if there is a transform; masked lanes mean
    nothing.
    """
    MASKED: tl.constexpr = (not FULL) or FORMAT.quantizer.block_size % FORMAT.tile != 0
    numel = block_numel(count, FORMAT, FULL)
    scale, offset = _load_meta(meta, numel, FORMAT, FULL)
    code = _load_codes(codes, numel, start, FORMAT, MASKED)
    if FORMAT.levels:
        grid = tl.load(levels + code)
    else:  # a small integer as the low bits of 2^23 + code
        grid = (code | TWO23_BITS).to(tl.float32, bitcast=True) - TWO23
    if FORMAT.quantizer.rounding == "dither":
        blocks = (tl.load(run + 4) + tl.arange(0, FORMAT.blocks)).to(tl.uint32)
        segment = tl.load(run + 5).to(tl.uint32)
        who = (tl.zeros_like(segment).to(tl.int32) + sender).to(tl.uint32)
        grid += shift_of(draw_dither(scale, offset, start, blocks, segment, who, FORMAT))
    value = tl.abs(scale)[:, None] * grid + offset[:, None]
    unscaled = tl.minimum(value * 4.0, FLOAT_MAX, propagate_nan=tl.PropagateNan.ALL)
    unscaled = tl.maximum(unscaled, -FLOAT_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.where((scale < 0)[:, None], unscaled, value)


@triton.jit
def _load_meta(meta, numel, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """Scale and offset of every block, (blocks,) float32; the scale keeps its mark."""
    NUMBERS: tl.constexpr = 1 if FORMAT.symmetric else 2
    at = meta + NUMBERS * tl.arange(0, FORMAT.blocks)
    scale = _load_number(at, numel, FORMAT, FULL)
    if FORMAT.symmetric:
        offset = tl.abs(scale) * (-0.5 * FORMAT.steps)
    else:
        offset = _load_number(at + 1, numel, FORMAT, FULL)
    return scale, offset


@triton.jit
def _load_number(pointers, numel, FORMAT: tl.constexpr, FULL: tl.constexpr):
    number = tl.load(pointers) if FULL else tl.load(pointers, mask=numel > 0, other=0)
    if FORMAT.meta_bytes == 2:
        return (number.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return number


@triton.jit
def _untransformed(value, count, start, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """A tile of decoded values, or of their sum, as it was before the transform."""
    if FORMAT.quantizer.transform == "hadamard":
        MASKED: tl.constexpr = (not FULL) or FORMAT.quantizer.block_size % FORMAT.tile != 0
        return inverse_hadamard(value, block_numel(count, FORMAT, FULL), start, MASKED)
    else:
        return value


@triton.jit
def _load_codes(codes, numel, start, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    """(blocks, tile) int32 from bit planes: see :func:`qsdp.wire.planes`."""
    BITS: tl.constexpr = FORMAT.quantizer.bits
    BLOCKS: tl.constexpr = FORMAT.blocks
    TILE: tl.constexpr = FORMAT.tile
    block = codes + (tl.arange(0, BLOCKS) * (FORMAT.quantizer.block_size * BITS // 8))[:, None]
    if BITS == 8:
        return _load_plane(block, numel, start, 8, TILE, MASKED)
    else:
        code = tl.zeros((BLOCKS, TILE), tl.int32)
        if BITS & 4:
            code |= _load_plane(block, numel, start, 4, TILE, MASKED)
            block += ((numel + 1) >> 1)[:, None]
        if BITS & 2:
            code |= _load_plane(block, numel, start, 2, TILE, MASKED) << (BITS & 4)
            block += ((numel + 3) >> 2)[:, None]
        if BITS & 1:
            code |= _load_plane(block, numel, start, 1, TILE, MASKED) << (BITS & 6)
        return code


@triton.jit
def _load_plane(block, numel, start, WIDTH: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """(blocks, tile) int32: WIDTH bits of every code."""
    PER: tl.constexpr = 8 // WIDTH
    byte = start // PER + tl.arange(0, TILE // PER)
    if MASKED:
        mask = (byte * PER)[None, :] < numel[:, None]
        packed = tl.load(block + byte[None, :], mask=mask, other=0)
    else:
        packed = tl.load(block + byte[None, :])
    if WIDTH == 8:
        return packed.to(tl.int32)
    else:
        shift = (tl.arange(0, PER) * WIDTH)[None, None, :]
        lanes = (packed.to(tl.int32)[:, :, None] >> shift) & ((1 << WIDTH) - 1)
        return tl.reshape(lanes, (block.shape[0], TILE))


@triton.jit
def _load_raw(pointers, mask, RAW: tl.constexpr):
    """Full-precision values as float32; bfloat16 comes as int16."""
    raw = tl.load(pointers, mask=mask, other=0)
    if RAW is tl.int16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)


@triton.jit
def _store_tile(
    out, value, count, start, BF16: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr
):
    MASKED: tl.constexpr = (not FULL) or FORMAT.quantizer.block_size % FORMAT.tile != 0
    numel = block_numel(count, FORMAT, FULL)
    column = start + tl.arange(0, FORMAT.tile)
    at = tl.arange(0, FORMAT.blocks)[:, None] * FORMAT.quantizer.block_size + column[None, :]
    if out.dtype.element_ty is tl.float16:  # what was finite stays so
        largest = 65504.0
        limited = tl.minimum(tl.maximum(value, -largest), largest)
        value = tl.where(tl.abs(value) < float("inf"), limited, value)
    _store_values(out + at, value, column[None, :] < numel[:, None], BF16, MASKED)


@triton.jit
def _store_values(pointers, value, mask, BF16: tl.constexpr, MASKED: tl.constexpr):
    """Round float32 once, half to even, to the pointers' dtype, or to bfloat16 bits, and store."""
    if not BF16:
        rounded = value.to(pointers.dtype.element_ty)
    elif INTERPRETED:
        bits = value.to(tl.uint32, bitcast=True)
        odd = (bits >> 16) & 1
        bits = tl.add(tl.add(bits, 0x7FFF, sanitize_overflow=False), odd, sanitize_overflow=False)
        rounded = tl.where(value == value, bits >> 16, 0x7FC0).to(tl.int16)
    else:
        rounded = value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    if MASKED:
        tl.store(pointers, rounded, mask=mask)
    else:
        tl.store(pointers, rounded)
