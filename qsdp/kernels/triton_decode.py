"""Device code of the Triton backend: decode and decode_sum.

The same programs as in :mod:`qsdp.kernels.triton_encode`; but the tiles of a block that is larger
than one are programs of their own.
"""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels.triton_encode import TWO23, TWO23_BITS
from qsdp.kernels.triton_maps import BYTE, is_zero, load_map
from qsdp.kernels.triton_philox import draw_dither, shift_of
from qsdp.kernels.triton_runs import (
    block_numel,
    codes_at,
    copy_raw,
    decoded_words,
    find_span,
    from_words,
    gathered,
    load_meta,
    load_planes,
    meta_of,
    row_number,
    row_offset,
    run_of,
    spread,
    store_tile_words,
    to_words,
)
from qsdp.kernels.triton_transform import inverse_hadamard

FLOAT_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
MINUS_ZERO_BITS = tl.constexpr(-(2**31))
AHEAD = tl.constexpr(4)  # rows of a sum that are loaded before the first of them is decoded

_SCALARS = ["num_raw", "value_outer", "value_inner", "wire_outer", "wire_inner"]
_SCALARS += ["num_rows", "row_stride", "first_sender", "sender_step"]


@triton.jit(do_not_specialize=_SCALARS)
def decode_kernel(
    values,
    wire,
    programs,
    spans,
    levels,
    num_raw,
    value_outer,
    value_inner,
    wire_outer,
    wire_inner,
    first_sender,
    sender_step,
    RAW: tl.constexpr,
    BF16: tl.constexpr,
    EXACT: tl.constexpr,
    MAPS: tl.constexpr,
    VALUE_ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (programs times tiles, inner rows, outer rows). ``values`` as in encode."""
    program = tl.program_id(0) // FORMAT.tiles
    start = tl.program_id(0) % FORMAT.tiles * FORMAT.tile
    row_values = row_offset(value_outer, value_inner)
    row_start = row_offset(wire_outer, wire_inner)
    span, index = find_span(program, programs, spans)
    if program < num_raw:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.tile)
        raw = (wire + row_start).to(tl.pointer_type(RAW)) + tl.load(span + 4) + at
        target = values + row_values + tl.load(span + 2) + at
        if EXACT:
            copy_raw(raw, target, start, count, FORMAT.blocks * FORMAT.tile)
        else:
            lane = start + tl.arange(0, FORMAT.blocks * FORMAT.tile)
            exact = load_raw(raw + lane, lane < count, RAW)
            words = to_words(exact, values.dtype.element_ty, BF16)
            tl.store(target + lane, words, mask=lane < count)
    else:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.quantizer.block_size)
        out = values + tl.multiple_of(row_values + tl.load(span + 2) + at, VALUE_ALIGNMENT)
        codes = wire + tl.multiple_of(row_start + codes_at(span, index, FORMAT), CODE_ALIGNMENT)
        meta = meta_of(wire + row_start, span, index, FORMAT)
        zeros = wire + row_start + tl.load(span + 7) + at // BYTE
        table = levels + tl.load(span + 6)
        sender = first_sender + row_number() * sender_step
        place = decode_place(span, index, sender, FORMAT)
        if count == FORMAT.blocks * FORMAT.quantizer.block_size:
            _decode_run(
                out, codes, meta, zeros, table, count, start, place, BF16, MAPS, FORMAT, True
            )
        else:
            _decode_run(
                out, codes, meta, zeros, table, count, start, place, BF16, MAPS, FORMAT, False
            )


@triton.jit
def _decode_run(
    out, codes, meta, zeros, levels, count, start, place,
    BF16: tl.constexpr, MAPS: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    value = decode_tile(codes, meta, levels, count, start, place, FORMAT, FULL)
    value = unrotated(value, count, start, FORMAT, FULL)
    if MAPS:
        packed = load_map(zeros, start, count, FORMAT.blocks * FORMAT.tile)
        value = tl.where(is_zero(packed, value), 0.0, value)
    store_decoded(out, value, count, start, BF16, FORMAT, FULL)


@triton.jit(do_not_specialize=_SCALARS)
def decode_sum_kernel(
    out,
    wire,
    programs,
    spans,
    levels,
    num_raw,
    num_rows,
    row_stride,
    multiply,
    divide,
    DIVIDE: tl.constexpr,
    RAW: tl.constexpr,
    BF16: tl.constexpr,
    MAPS: tl.constexpr,
    VALUE_ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (programs times tiles): every program sums its run over all rows, in order."""
    program = tl.program_id(0) // FORMAT.tiles
    start = tl.program_id(0) % FORMAT.tiles * FORMAT.tile
    span, index = find_span(program, programs, spans)
    if program < num_raw:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.tile)
        lane = start + tl.arange(0, FORMAT.blocks * FORMAT.tile)
        raw_at = tl.load(span + 4) + at + lane
        exact = load_raw(wire.to(tl.pointer_type(RAW)) + raw_at, lane < count, RAW)
        for _ in range(1, num_rows):
            wire += row_stride
            exact += load_raw(wire.to(tl.pointer_type(RAW)) + raw_at, lane < count, RAW)
        exact = _average(exact, multiply, divide, DIVIDE)
        words = to_words(exact, out.dtype.element_ty, BF16)
        tl.store(out + tl.load(span + 2) + at + lane, words, mask=lane < count)
    else:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.quantizer.block_size)
        out += tl.multiple_of(tl.load(span + 2) + at, VALUE_ALIGNMENT)
        if count == FORMAT.blocks * FORMAT.quantizer.block_size:
            _decode_sum_run(
                out, wire, levels, span, index, at, count, start, num_rows, row_stride,
                multiply, divide, DIVIDE, BF16, MAPS, CODE_ALIGNMENT, FORMAT, True,
            )  # fmt: skip
        else:
            _decode_sum_run(
                out, wire, levels, span, index, at, count, start, num_rows, row_stride,
                multiply, divide, DIVIDE, BF16, MAPS, CODE_ALIGNMENT, FORMAT, False,
            )  # fmt: skip


@triton.jit
def _decode_sum_run(
    out, wire, levels, span, index, at, count, start, num_rows, row_stride, multiply, divide,
    DIVIDE: tl.constexpr, BF16: tl.constexpr, MAPS: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    VALUES: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    total = _sum_rows(
        wire, levels, span, index, count, start, num_rows, row_stride,
        VALUES, CODE_ALIGNMENT, FORMAT, FULL,
    )  # fmt: skip
    total = unrotated(total, count, start, FORMAT, FULL)
    total = _average(total, multiply, divide, DIVIDE)
    if MAPS:
        zeros = wire + tl.load(span + 7) + at // BYTE
        packed = load_map(zeros, start, count, FORMAT.blocks * FORMAT.tile)
        for _ in range(1, num_rows):
            zeros += row_stride
            packed &= load_map(zeros, start, count, FORMAT.blocks * FORMAT.tile)
        total = tl.where(is_zero(packed, total), 0.0, total)
    store_decoded(out, total, count, start, BF16, FORMAT, FULL)


@triton.jit
def _average(total, multiply, divide, DIVIDE: tl.constexpr):
    """With DIVIDE off, ``divide`` is the exact inverse of a power of two: the same bits, faster."""
    if DIVIDE:
        return tl.div_rn(total * multiply, tl.zeros_like(total) + divide)
    else:
        return total * multiply * divide


@triton.jit
def _sum_rows(
    wire, levels, span, index, count, start, num_rows, row_stride,
    VALUES: tl.constexpr, ALIGNED: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Sum of one tile over all rows. It starts from -0, which changes no sum, not even of -0.

    Several rows are loaded before the first of them is decoded: a load takes long, and decoding the
    rows one by one would wait for each.
    """
    BLOCKS: tl.constexpr = FORMAT.blocks
    TILE: tl.constexpr = FORMAT.tile
    levels += tl.load(span + 6)
    total = tl.full((BLOCKS, TILE), MINUS_ZERO_BITS, tl.int32).to(tl.float32, bitcast=True)
    if BLOCKS > 1:
        total = spread(total, VALUES)
    done = 0
    if FULL and FORMAT.ahead:
        done = num_rows // AHEAD * AHEAD
        for row in range(0, done, AHEAD):
            a = _load_row(wire, span, index, count, start, row, row_stride, ALIGNED, FORMAT, FULL)
            row1 = row + 1
            b = _load_row(wire, span, index, count, start, row1, row_stride, ALIGNED, FORMAT, FULL)
            row2 = row + 2
            c = _load_row(wire, span, index, count, start, row2, row_stride, ALIGNED, FORMAT, FULL)
            row3 = row + 3
            d = _load_row(wire, span, index, count, start, row3, row_stride, ALIGNED, FORMAT, FULL)
            total = _plus(total, a, levels, span, index, start, row, VALUES, FORMAT)
            total = _plus(total, b, levels, span, index, start, row1, VALUES, FORMAT)
            total = _plus(total, c, levels, span, index, start, row2, VALUES, FORMAT)
            total = _plus(total, d, levels, span, index, start, row3, VALUES, FORMAT)
    for row in range(done, num_rows):
        one = _load_row(wire, span, index, count, start, row, row_stride, ALIGNED, FORMAT, FULL)
        total = _plus(total, one, levels, span, index, start, row, VALUES, FORMAT)
    if BLOCKS > 1:
        total = gathered(total, VALUES)
    return total


@triton.jit
def _plus(
    total, loaded, levels, span, index, start, row, VALUES: tl.constexpr, FORMAT: tl.constexpr
):
    value = decoded(loaded, levels, start, decode_place(span, index, row, FORMAT), FORMAT)
    if FORMAT.blocks > 1:
        value = spread(value, VALUES)
    return total + value


@triton.jit
def _load_row(
    wire, span, index, count, start, row, row_stride,
    ALIGNED: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    row_start = tl.zeros((), tl.int64) + row
    row_start *= row_stride
    codes = wire + tl.multiple_of(row_start + codes_at(span, index, FORMAT), ALIGNED)
    meta = meta_of(wire + row_start, span, index, FORMAT)
    return load_tile(codes, meta, count, start, FORMAT, FULL)


@triton.jit
def decode_place(span, index, sender, FORMAT: tl.constexpr):
    """What dither depends on beside what the wire holds: blocks, segment and sender, uint32."""
    block = index * FORMAT.blocks + tl.arange(0, FORMAT.blocks)
    who = tl.zeros((), tl.int32) + sender
    return block.to(tl.uint32), tl.load(span + 5).to(tl.uint32), who.to(tl.uint32)


@triton.jit
def decode_tile(codes, meta, levels, count, start, place, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """(blocks, tile) float32, transformed values if there is a transform; masked lanes mean
    nothing.
    """
    return decoded(load_tile(codes, meta, count, start, FORMAT, FULL), levels, start, place, FORMAT)


@triton.jit
def load_tile(codes, meta, count, start, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """What the wire holds of a tile: scale and offset as they are stored, and three bit planes."""
    scale, offset = load_meta(meta, count, FORMAT, FULL)
    four, two, one = load_planes(codes, count, start, FORMAT, FULL)
    return scale, offset, four, two, one


@triton.jit
def decoded(loaded, levels, start, place, FORMAT: tl.constexpr):
    """Values of a tile from what :func:`load_tile` gave."""
    code = tile_of_planes(loaded, FORMAT)
    return dequantized(loaded[0], loaded[1], code, levels, start, place, FORMAT)


@triton.jit
def dequantized(scale, offset, code, levels, start, place, FORMAT: tl.constexpr):
    """Values of codes (blocks, tile) int32; scale and offset as they are stored."""
    scale = from_words(scale, FORMAT.meta_bytes == 2)
    if FORMAT.symmetric:
        offset = tl.abs(scale) * (-0.5 * FORMAT.steps)
    else:
        offset = from_words(offset, FORMAT.meta_bytes == 2)
    if FORMAT.levels:
        grid = tl.load(levels + code)
    else:  # a small integer as the low bits of 2^23 + code
        grid = (code | TWO23_BITS).to(tl.float32, bitcast=True) - TWO23
    if FORMAT.quantizer.rounding == "dither":
        blocks, segment, who = place
        grid += shift_of(draw_dither(scale, offset, start, blocks, segment, who, FORMAT))
    value = tl.abs(scale)[:, None] * grid + offset[:, None]
    if tl.max((scale < 0).to(tl.int32), axis=0) > 0:  # huge blocks, which hold quarters
        unscaled = tl.minimum(value * 4.0, FLOAT_MAX, propagate_nan=tl.PropagateNan.ALL)
        unscaled = tl.maximum(unscaled, -FLOAT_MAX, propagate_nan=tl.PropagateNan.ALL)
        value = tl.where((scale < 0)[:, None], unscaled, value)
    return value


@triton.jit
def tile_of_planes(loaded, FORMAT: tl.constexpr):
    """Codes (blocks, tile) int32 from bit planes: see :func:`qsdp.wire.planes`."""
    BITS: tl.constexpr = FORMAT.quantizer.bits
    BLOCKS: tl.constexpr = FORMAT.blocks
    TILE: tl.constexpr = FORMAT.tile
    four, two, one = loaded[2], loaded[3], loaded[4]
    if BITS == 8:
        return four.to(tl.int32)
    else:
        code = tl.zeros((BLOCKS, TILE), tl.int32)
        if BITS & 4:
            code |= _unpacked(four, 4)
        if BITS & 2:
            code |= _unpacked(two, 2) << (BITS & 4)
        if BITS & 1:
            code |= _unpacked(one, 1) << (BITS & 6)
        return code


@triton.jit
def _unpacked(packed, WIDTH: tl.constexpr):
    """(blocks, tile) int32 from one plane of WIDTH bits."""
    PER: tl.constexpr = 8 // WIDTH
    shift = (tl.arange(0, PER) * WIDTH)[None, None, :]
    lanes = (packed.to(tl.int32)[:, :, None] >> shift) & ((1 << WIDTH) - 1)
    return tl.reshape(lanes, (packed.shape[0], packed.shape[1] * PER))


@triton.jit
def unrotated(value, count, start, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """A tile of decoded values, or of their sum, as it was before the transform."""
    if FORMAT.quantizer.transform == "hadamard":
        MASKED: tl.constexpr = (not FULL) or FORMAT.quantizer.block_size % FORMAT.tile != 0
        return inverse_hadamard(value, block_numel(count, FORMAT, FULL), start, MASKED)
    else:
        return value


@triton.jit
def load_raw(pointers, mask, RAW: tl.constexpr):
    """Full-precision values as float32; bfloat16 comes as int16."""
    return from_words(tl.load(pointers, mask=mask, other=0), RAW is tl.int16)


@triton.jit
def store_decoded(
    out, value, count, start, BF16: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr
):
    MASKED: tl.constexpr = (not FULL) or FORMAT.quantizer.block_size % FORMAT.tile != 0
    words = decoded_words(value, out.dtype.element_ty, BF16)
    store_tile_words(out, words, block_numel(count, FORMAT, FULL), start, FORMAT, MASKED)
