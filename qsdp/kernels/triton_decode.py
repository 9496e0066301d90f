"""Device code of the Triton backend: decode and decode_sum.

The same table of runs as :mod:`qsdp.kernels.triton_encode` uses; a block that is larger than a tile
is spread over the third axis of the grid.
"""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels.triton_encode import FIELDS, TWO23, TWO23_BITS, block_numel

FLOAT_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)

# Triton's interpreter truncates to bfloat16 where hardware rounds: there the kernel rounds by hand.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_SCALARS = ["num_raw", "numel", "num_rows", "row_bytes"]


@triton.jit(do_not_specialize=_SCALARS)
def decode_kernel(
    values,
    wire,
    table,
    levels,
    num_raw,
    numel,
    row_bytes,
    RAW: tl.constexpr,
    BF16: tl.constexpr,
    VALUE_ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Grid (programs, rows, tiles a block). ``values`` as in encode."""
    row = tl.program_id(1).to(tl.int64)
    start = tl.program_id(2) * TILE
    run = table + tl.program_id(0) * FIELDS
    count = tl.load(run + 1).to(tl.int32)
    levels += tl.load(run + 6)
    if tl.program_id(0) < num_raw:
        raw = (wire + row * row_bytes).to(tl.pointer_type(RAW)) + tl.load(run + 3)
        at = start + tl.arange(0, BLOCKS * TILE)
        exact = _load_raw(raw + at, at < count, RAW)
        _store_values(values + row * numel + tl.load(run) + at, exact, at < count, BF16, True)
    else:
        out = values + tl.multiple_of(row * numel + tl.load(run), VALUE_ALIGNMENT)
        codes = wire + tl.multiple_of(row * row_bytes + tl.load(run + 3), CODE_ALIGNMENT)
        meta = (wire + row * row_bytes).to(tl.pointer_type(tl.float32)) + tl.load(run + 2)
        if count == BLOCKS * BLOCK_SIZE:
            value = _decode_tile(
                codes, meta, levels, count, start, BITS, BLOCK_SIZE, BLOCKS, TILE, LEVELS, True
            )
            _store_tile(out, value, count, start, BF16, BLOCK_SIZE, BLOCKS, TILE, True)
        else:
            value = _decode_tile(
                codes, meta, levels, count, start, BITS, BLOCK_SIZE, BLOCKS, TILE, LEVELS, False
            )
            _store_tile(out, value, count, start, BF16, BLOCK_SIZE, BLOCKS, TILE, False)


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
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Grid (programs, 1, tiles a block): every program sums its run over all rows, in order."""
    start = tl.program_id(2) * TILE
    run = table + tl.program_id(0) * FIELDS
    count = tl.load(run + 1).to(tl.int32)
    levels += tl.load(run + 6)
    if tl.program_id(0) < num_raw:
        at = start + tl.arange(0, BLOCKS * TILE)
        raw_at = tl.load(run + 3) + at
        exact = _load_raw(wire.to(tl.pointer_type(RAW)) + raw_at, at < count, RAW)
        for _ in range(1, num_rows):
            wire += row_bytes
            exact += _load_raw(wire.to(tl.pointer_type(RAW)) + raw_at, at < count, RAW)
        exact = _average(exact, multiply, divide, DIVIDE)
        _store_values(out + tl.load(run) + at, exact, at < count, BF16, True)
    else:
        out += tl.multiple_of(tl.load(run), VALUE_ALIGNMENT)
        meta_at = tl.load(run + 2)
        code_at = tl.multiple_of(tl.load(run + 3), CODE_ALIGNMENT)
        if count == BLOCKS * BLOCK_SIZE:
            total = _decode_rows(
                wire, levels, count, start, meta_at, code_at, num_rows, row_bytes,
                CODE_ALIGNMENT, BITS, BLOCK_SIZE, BLOCKS, TILE, LEVELS, True,
            )  # fmt: skip
            total = _average(total, multiply, divide, DIVIDE)
            _store_tile(out, total, count, start, BF16, BLOCK_SIZE, BLOCKS, TILE, True)
        else:
            total = _decode_rows(
                wire, levels, count, start, meta_at, code_at, num_rows, row_bytes,
                CODE_ALIGNMENT, BITS, BLOCK_SIZE, BLOCKS, TILE, LEVELS, False,
            )  # fmt: skip
            total = _average(total, multiply, divide, DIVIDE)
            _store_tile(out, total, count, start, BF16, BLOCK_SIZE, BLOCKS, TILE, False)


@triton.jit
def _average(total, multiply, divide, DIVIDE: tl.constexpr):
    """With DIVIDE off, ``divide`` is the exact inverse of a power of two: the same bits, faster."""
    if DIVIDE:
        return tl.div_rn(total * multiply, tl.zeros_like(total) + divide)
    else:
        return total * multiply * divide


@triton.jit
def _decode_rows(
    wire, levels, count, start, meta_at, code_at, num_rows, row_bytes,
    CODE_ALIGNMENT: tl.constexpr, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Sum of one tile over all rows. It starts from row 0, not from zero: the sign of -0 counts."""
    meta = wire.to(tl.pointer_type(tl.float32)) + meta_at
    total = _decode_tile(
        wire + code_at, meta, levels, count, start, BITS, BLOCK_SIZE, BLOCKS, TILE, LEVELS, FULL
    )
    for _ in range(1, num_rows):
        code_at += row_bytes
        codes = wire + tl.multiple_of(code_at, CODE_ALIGNMENT)
        meta += row_bytes // 4
        total += _decode_tile(
            codes, meta, levels, count, start, BITS, BLOCK_SIZE, BLOCKS, TILE, LEVELS, FULL
        )
    return total


@triton.jit
def _decode_tile(
    codes, meta, levels, count, start, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """(BLOCKS, TILE) float32; masked lanes mean nothing."""
    MASKED: tl.constexpr = (not FULL) or BLOCK_SIZE % TILE != 0
    numel = block_numel(count, BLOCK_SIZE, BLOCKS, FULL)
    place = tl.arange(0, BLOCKS)
    if FULL:
        scale = tl.load(meta + 2 * place)
        offset = tl.load(meta + 2 * place + 1)
    else:
        scale = tl.load(meta + 2 * place, mask=numel > 0, other=0.0)
        offset = tl.load(meta + 2 * place + 1, mask=numel > 0, other=0.0)
    code = _load_codes(codes, numel, start, BITS, BLOCK_SIZE, BLOCKS, TILE, MASKED)
    if LEVELS:
        grid = tl.load(levels + code)
    else:  # a small integer as the low bits of 2^23 + code
        grid = (code | TWO23_BITS).to(tl.float32, bitcast=True) - TWO23
    value = tl.abs(scale)[:, None] * grid + offset[:, None]
    unscaled = tl.minimum(value * 4.0, FLOAT_MAX, propagate_nan=tl.PropagateNan.ALL)
    unscaled = tl.maximum(unscaled, -FLOAT_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.where((scale < 0)[:, None], unscaled, value)


@triton.jit
def _load_codes(
    codes, numel, start, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(BLOCKS, TILE) int32 from bit planes: see :func:`qsdp.wire.planes`."""
    block = codes + (tl.arange(0, BLOCKS) * (BLOCK_SIZE * BITS // 8))[:, None]
    if BITS == 8:
        return _load_plane(block, numel, start, 8, BLOCKS, TILE, MASKED)
    else:
        code = tl.zeros((BLOCKS, TILE), tl.int32)
        if BITS & 4:
            code |= _load_plane(block, numel, start, 4, BLOCKS, TILE, MASKED)
            block += ((numel + 1) >> 1)[:, None]
        if BITS & 2:
            plane = _load_plane(block, numel, start, 2, BLOCKS, TILE, MASKED)
            code |= plane << (BITS & 4)
            block += ((numel + 3) >> 2)[:, None]
        if BITS & 1:
            plane = _load_plane(block, numel, start, 1, BLOCKS, TILE, MASKED)
            code |= plane << (BITS & 6)
        return code


@triton.jit
def _load_plane(
    block, numel, start, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """(BLOCKS, TILE) int32: WIDTH bits of every code."""
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
        return tl.reshape(lanes, (BLOCKS, TILE))


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
    out, value, count, start, BF16: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    MASKED: tl.constexpr = (not FULL) or BLOCK_SIZE % TILE != 0
    numel = block_numel(count, BLOCK_SIZE, BLOCKS, FULL)
    column = start + tl.arange(0, TILE)
    at = tl.arange(0, BLOCKS)[:, None] * BLOCK_SIZE + column[None, :]
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
