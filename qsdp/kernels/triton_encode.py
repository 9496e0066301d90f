"""Device code of the Triton backend: encode. :mod:`qsdp.kernels.triton_gpu` launches it.

A program handles one run: whole blocks of at most ``FORMAT.tile`` values, or one block in tiles.
Shapes are powers of two; where a block is none, or a run is short, lanes are masked. Everything is
done twice at compile time, for full runs without run-time masks (so that loads and stores are
vectors) and for the rest.

[Note: the same bits under Triton] Compiled without fused multiply-add and dividing by ``div_rn``,
every operation rounds once, as in the reference. Rounding to an integer adds 2^23: in [2^23, 2^24)
the floats are the integers, so the sum rounds half to even, keeps the parity and has the result in
its low bits. Where numbers reach 2^24 (8 bits only) what exceeds 2^23, which is an integer already,
is added on its own. ``-x`` would be ``0 - x``, which loses the sign of zero: where that counts,
numbers are multiplied by a negative one.
"""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels.triton_maps import BYTE, store_map
from qsdp.kernels.triton_mean import HUGE, INFINITY_BITS, TINY, scaled_exponent, sum_magnitudes
from qsdp.kernels.triton_philox import draw_dither, draw_per_value, philox, shift_of
from qsdp.kernels.triton_runs import (
    block_numel,
    codes_at,
    copy_raw,
    find_span,
    from_words,
    load_tile_words,
    meta_of,
    row_number,
    row_offset,
    run_of,
    zero_tail,
)
from qsdp.kernels.triton_transform import hadamard

TWO23 = tl.constexpr(2.0**23)
TWO23_BITS = tl.constexpr(0x4B000000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)

# Scalars are not specialised on their values (a new kernel for each that 16 divides): what may be
# assumed of offsets is a compile-time argument of its own.
_SCALARS = ["num_raw", "value_outer", "value_inner", "wire_outer", "wire_inner", "tail"]
_SCALARS += ["row_bytes", "key_lo", "key_hi", "first_row", "sender"]


@triton.jit(do_not_specialize=_SCALARS)
def encode_kernel(
    values,
    wire,
    programs,
    spans,
    thresholds,
    num_raw,
    value_outer,
    value_inner,
    wire_outer,
    wire_inner,
    tail,
    row_bytes,
    key_lo,
    key_hi,
    first_row,
    sender,
    BF16: tl.constexpr,
    MAPS: tl.constexpr,
    VALUE_ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (programs, inner rows, outer rows). The first program also clears from ``tail`` on."""
    program = tl.program_id(0)
    row_start = row_offset(wire_outer, wire_inner)
    row_values = row_offset(value_outer, value_inner)
    span, index = find_span(program, programs, spans)
    if program == 0:
        zero_tail(wire + row_start, tail, row_bytes)
    if program < num_raw:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.tile)
        raw = (wire + row_start).to(tl.pointer_type(values.dtype.element_ty))
        raw += tl.load(span + 4) + at
        source = values + row_values + tl.load(span + 2) + at
        copy_raw(source, raw, 0, count, FORMAT.blocks * FORMAT.tile)
    else:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.quantizer.block_size)
        source_at = row_values + tl.load(span + 2) + at
        source = values + tl.multiple_of(source_at, VALUE_ALIGNMENT)
        codes = wire + tl.multiple_of(row_start + codes_at(span, index, FORMAT), CODE_ALIGNMENT)
        meta = meta_of(wire + row_start, span, index, FORMAT)
        zeros = wire + row_start + tl.load(span + 7) + at // BYTE
        pad_meta(meta, span, at, count, FORMAT)
        thresholds += tl.load(span + 6)
        draw_row = (first_row + row_number()).to(tl.uint32)
        who = (row_number() * 0 + sender).to(tl.uint32)
        place = draw_place(span, index, draw_row, who, FORMAT)
        key = (key_lo.to(tl.uint32, bitcast=True), key_hi)
        if count == FORMAT.blocks * FORMAT.quantizer.block_size:
            _encode_run(
                source, codes, meta, zeros, thresholds, count, place, key,
                BF16, MAPS, FORMAT, True,
            )  # fmt: skip
        else:
            _encode_run(
                source, codes, meta, zeros, thresholds, count, place, key,
                BF16, MAPS, FORMAT, False,
            )  # fmt: skip


@triton.jit
def _encode_run(
    source, codes, meta, zeros, thresholds, count, place, key,
    BF16: tl.constexpr, MAPS: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    BLOCK_SIZE: tl.constexpr = FORMAT.quantizer.block_size
    TILE: tl.constexpr = FORMAT.tile
    MASKED: tl.constexpr = (not FULL) or BLOCK_SIZE % TILE != 0
    numel = block_numel(count, FORMAT, FULL)

    x = _load_tile(source, numel, 0, BF16, FORMAT, MASKED)
    if MAPS:
        store_map(x, zeros, 0, count)
    x = rotated(x, numel, 0, FORMAT, MASKED)
    lo, hi, content, magnitude = extremes(x, numel, 0, MASKED)
    for start in range(TILE, BLOCK_SIZE, TILE):
        x = _load_tile(source, numel, start, BF16, FORMAT, MASKED)
        if MAPS:
            store_map(x, zeros, start, count)
        x = rotated(x, numel, start, FORMAT, MASKED)
        lo_, hi_, content_, magnitude_ = extremes(x, numel, start, MASKED)
        lo = tl.minimum(lo, lo_)
        hi = tl.maximum(hi, hi_)
        content = tl.add(content, content_, sanitize_overflow=False)
        magnitude = tl.maximum(magnitude, magnitude_)
    total = tl.zeros_like(magnitude).to(tl.int64)
    if FORMAT.quantizer.scaling == "mean":
        for start in range(0, BLOCK_SIZE, TILE):
            if TILE < BLOCK_SIZE:
                x = _load_tile(source, numel, start, BF16, FORMAT, MASKED)
                x = rotated(x, numel, start, FORMAT, MASKED)
            total += sum_magnitudes(x, magnitude)
    found = (lo, hi, content, magnitude, total)
    grid = block_grid(found, numel, place, key, FORMAT)
    scale, offset = grid[4], grid[5]
    store_meta(meta, meta_words(scale, FORMAT), meta_words(offset, FORMAT), numel, FORMAT)

    for start in range(0, BLOCK_SIZE, TILE):
        if TILE < BLOCK_SIZE:  # a block that did not stay in registers
            x = _load_tile(source, numel, start, BF16, FORMAT, MASKED)
            x = rotated(x, numel, start, FORMAT, MASKED)
        code = tile_codes(x, grid, thresholds, numel, start, place, FORMAT, MASKED)
        store_codes(codes, code, numel, start, FORMAT, MASKED)


@triton.jit
def draw_place(span, index, row, sender, FORMAT: tl.constexpr):
    """What a draw depends on beside its key: blocks, segment, row and sender, all uint32."""
    block = index * FORMAT.blocks + tl.arange(0, FORMAT.blocks)
    return block.to(tl.uint32), tl.load(span + 5).to(tl.uint32), row, sender


@triton.jit
def pad_meta(meta, span, at, count, FORMAT: tl.constexpr):
    """Zeros after a segment's last scale, up to a multiple of 4 bytes."""
    if FORMAT.symmetric and FORMAT.meta_bytes == 2:  # others need no padding
        last = (at + count == tl.load(span + 1)) & (tl.load(span + 8) > 0)
        end = meta + tl.cdiv(count, FORMAT.quantizer.block_size)
        tl.store(end, tl.zeros((), tl.int16), mask=last)


@triton.jit
def block_grid(found, numel, place, key, FORMAT: tl.constexpr):
    """Of every block, from what :func:`extremes` and :func:`sum_magnitudes` found: whether it is
    finite, where its grid lies (p, base, inverse), scale and offset as stored, the draw of shift,
    and the key of its draws.
    """
    blocks, segment, row = place[0], place[1], place[2]
    lo, hi, content, magnitude, total = found
    finite = magnitude < INFINITY_BITS
    if FORMAT.symmetric:  # so that nothing else is looked for
        hi = magnitude.to(tl.float32, bitcast=True)
        lo = hi
    lo = tl.where(finite, lo, 0.0) + 0.0
    hi = tl.where(finite, hi, 0.0) + 0.0
    p, base, inverse, scale, offset, huge = _grid(lo, hi, total, numel, FORMAT)
    key_lo = key[0] + tl.zeros_like(blocks)
    key_hi = (content ^ key[1]).to(tl.uint32, bitcast=True)
    draw = tl.zeros_like(content)
    if FORMAT.quantizer.rounding == "shift":
        zero = tl.zeros_like(blocks)
        words = philox(zero, blocks, segment, row, key_lo, key_hi)
        draw = (words[0] & 0xFFFF).to(tl.int32)
        offset = offset + scale * shift_of(draw)
    scale = tl.where(finite, tl.where(huge, -scale, scale), float("nan"))
    offset = tl.where(finite, offset, float("nan"))
    return finite, p, base, inverse, scale, offset, draw, key_lo, key_hi


@triton.jit
def tile_codes(
    x, grid, thresholds, numel, start, place, FORMAT: tl.constexpr, MASKED: tl.constexpr
):
    """Codes of a tile, int32; zero in masked lanes."""
    finite, p, base, inverse, scale, offset, draw, key_lo, key_hi = grid
    blocks, segment, row, sender = place
    sign = (x >= 0).to(tl.int32)
    rare = tl.where(finite & (p == 1.0), 0, 1)
    if tl.max(rare, axis=0) > 0:  # zeros have code zero, whatever is drawn
        x = tl.where(finite[:, None], x, 0.0) * p[:, None]
    q = _positions(x, base, inverse, FORMAT)
    if FORMAT.quantizer.scaling == "mean":
        code = tl.where(finite[:, None], sign, 0)
    elif FORMAT.levels:
        code = _level_codes(q, thresholds, FORMAT.quantizer.bits)
        code = tl.where(finite[:, None], code, 0)
    elif FORMAT.quantizer.rounding == "stochastic":
        r = draw_per_value(start, blocks, segment, row, key_lo, key_hi, FORMAT)
        code = (q + r) >> 16
    elif FORMAT.quantizer.rounding == "dither":
        code = (q + draw_dither(scale, offset, start, blocks, segment, sender, FORMAT)) >> 16
    elif FORMAT.quantizer.rounding == "shift":
        code = (q + draw[:, None]) >> 16
    else:
        code = (q + 32768) >> 16
    if MASKED:
        column = start + tl.arange(0, FORMAT.tile)
        code = tl.where(column[None, :] < numel[:, None], code, 0)
    return code


@triton.jit
def meta_words(number, FORMAT: tl.constexpr):
    """A scale or an offset as it is stored."""
    if FORMAT.meta_bytes == 2:  # exact: the grid was made of bfloat16 numbers
        return (number.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    else:
        return number


@triton.jit
def store_meta(meta, scale, offset, numel, FORMAT: tl.constexpr):
    place = tl.arange(0, FORMAT.blocks)
    if FORMAT.symmetric:
        tl.store(meta + place, scale, mask=numel > 0)
    else:
        tl.store(meta + 2 * place, scale, mask=numel > 0)
        tl.store(meta + 2 * place + 1, offset, mask=numel > 0)


@triton.jit
def _load_tile(
    source, numel, start, BF16: tl.constexpr, FORMAT: tl.constexpr, MASKED: tl.constexpr
):
    """(blocks, tile) float32; masked lanes are zero."""
    return from_words(load_tile_words(source, numel, start, FORMAT, MASKED), BF16)


@triton.jit
def rotated(x, numel, start, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    """A tile as it is quantized: transformed, if the format says so."""
    if FORMAT.quantizer.transform == "hadamard":
        x = hadamard(x, numel, start, MASKED)
    return x


@triton.jit
def extremes(x, numel, start, MASKED: tl.constexpr):
    """Of every block: least and greatest value, sum of the bit patterns, greatest magnitude's bits.

    A NaN or an infinity shows in the magnitude; the extremes then mean nothing.
    """
    bits = x.to(tl.int32, bitcast=True)
    content = tl.sum(bits, axis=1)
    magnitude = tl.max(bits & MAGNITUDE_BITS, axis=1)
    if MASKED:
        mask = (start + tl.arange(0, x.shape[1]))[None, :] < numel[:, None]
        lo = tl.min(tl.where(mask, x, float("inf")), axis=1)
        hi = tl.max(tl.where(mask, x, float("-inf")), axis=1)
    else:
        lo = tl.min(x, axis=1)
        hi = tl.max(x, axis=1)
    return lo, hi, content, magnitude


@triton.jit
def _grid(lo, hi, total, numel, FORMAT: tl.constexpr):
    """:func:`qsdp.kernels.reference.block_grid` from extremes: but for what is not finite, and the
    mark, which is returned last.
    """
    largest = hi
    if FORMAT.symmetric:
        lo = -hi
    extreme = tl.maximum(tl.abs(lo), tl.abs(hi)) > HUGE
    quarter = tl.where(extreme, 0.25, 1.0)
    lo, hi = lo * quarter, hi * quarter
    if FORMAT.meta_bytes == 2 and not FORMAT.symmetric:
        bits = lo.to(tl.int32, bitcast=True)  # rounded down to bfloat16
        lo = (tl.where(lo < 0, bits + 0xFFFF, bits) & -0x10000).to(tl.float32, bitcast=True)
    spread = hi - lo
    huge = extreme & (spread != 0)
    tiny = (spread < TINY) & (spread != 0)
    restored = tl.where(extreme & (spread == 0), 4.0, tl.where(tiny, 1 / TINY, 1.0))
    base = lo * restored
    dp = hi * restored - base
    if FORMAT.quantizer.scaling == "mean":
        up = ((scaled_exponent(largest)[1] - 21) << 23).to(tl.float32, bitcast=True)
        dp = tl.div_rn(total.to(tl.float32), tl.maximum(numel, 1).to(tl.float32)) * up
    unit = tl.div_rn(dp, tl.zeros_like(dp) + 1.0 * FORMAT.steps)
    scale = tl.where(tiny, unit * TINY, unit)
    if FORMAT.meta_bytes == 2:
        bits = scale.to(tl.int32, bitcast=True)  # rounded up to bfloat16
        scale = ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
        unit = tl.where(tiny, scale * (1 / TINY), scale)
        dp = unit * FORMAT.steps
        if FORMAT.symmetric:
            base = unit * (-0.5 * FORMAT.steps)
    inverse = tl.where(dp == 0, 0.0, tl.div_rn(tl.zeros_like(dp) + 65536.0 * FORMAT.steps, dp))
    p = tl.where(huge, 0.25, tl.where(tiny, 1 / TINY, 1.0))
    return p, base, inverse, scale, tl.where(tiny, lo, base), huge


@triton.jit
def _positions(x, base, inverse, FORMAT: tl.constexpr):
    """q of every value times p, int32; see [Note: the same bits under Triton]."""
    t = (x - base[:, None]) * inverse[:, None]
    t = tl.minimum(t, 65536.0 * FORMAT.steps)
    if FORMAT.meta_bytes == 2:  # a symmetric grid with a denormal scale may begin above a value
        t = tl.maximum(t, 0.0)
    if FORMAT.steps < 128:
        return (t + TWO23).to(tl.int32, bitcast=True) - TWO23_BITS
    else:
        low = tl.minimum(t, TWO23)  # two numbers up to 2^23, of which one is 0 or 2^23
        bits = (low + TWO23).to(tl.int32, bitcast=True) - TWO23_BITS
        return bits + ((t - low + TWO23).to(tl.int32, bitcast=True) - TWO23_BITS)


@triton.jit
def _level_codes(q, thresholds, BITS: tl.constexpr):
    """How many thresholds are at or below q: a binary search."""
    code = tl.zeros_like(q)
    for step in tl.static_range(BITS):
        probe = code + (1 << (BITS - 1 - step))
        code = tl.where(tl.load(thresholds + probe - 1) <= q, probe, code)
    return code


@triton.jit
def store_codes(codes, code, numel, start, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    """Pack a tile of codes into bit planes: see :func:`qsdp.wire.planes`."""
    BITS: tl.constexpr = FORMAT.quantizer.bits
    block = (
        codes + (tl.arange(0, FORMAT.blocks) * (FORMAT.quantizer.block_size * BITS // 8))[:, None]
    )
    if BITS == 8:
        _store_plane(block, code, numel, start, 8, MASKED)
    if BITS & 4:
        _store_plane(block, code, numel, start, 4, MASKED)
        block += ((numel + 1) >> 1)[:, None]
    if BITS & 2:
        _store_plane(block, code >> (BITS & 4), numel, start, 2, MASKED)
        block += ((numel + 3) >> 2)[:, None]
    if BITS & 1:
        _store_plane(block, code >> (BITS & 6), numel, start, 1, MASKED)


@triton.jit
def _store_plane(block, code, numel, start, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """The lowest WIDTH bits of every code, 8 // WIDTH values a byte."""
    PER: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = code.shape[1] // PER
    if WIDTH == 8:
        packed = code
    else:
        lanes = tl.reshape(code & ((1 << WIDTH) - 1), (code.shape[0], BYTES, PER))
        packed = tl.sum(lanes << (tl.arange(0, PER) * WIDTH)[None, None, :], axis=2)
    byte = start // PER + tl.arange(0, BYTES)
    if MASKED:
        mask = (byte * PER)[None, :] < numel[:, None]
        tl.store(block + byte[None, :], packed.to(tl.uint8), mask=mask)
    else:
        tl.store(block + byte[None, :], packed.to(tl.uint8))
