"""Device code of the Triton backend: encode. :mod:`qsdp.kernels.triton_gpu` launches it.

A program handles one run (a row of the table): whole blocks of at most ``FORMAT.tile`` values, or
one block in tiles. Shapes are powers of two; where a block is none, or a run is short, lanes are
masked. Everything is done twice at compile time, for full runs without run-time masks (so that
loads and stores are vectors) and for the rest. ``FORMAT`` is a compile-time object, of
:class:`qsdp.kernels.triton_gpu.Format`.

[Note: the same bits under Triton] Compiled without fused multiply-add and dividing by ``div_rn``,
every operation rounds once, as in the reference. Rounding to an integer adds 2^23: in [2^23, 2^24)
the floats are the integers, so the sum rounds half to even, keeps the parity and has the result in
its low bits. From 2^23 on (8 bits only) a float is an integer already. ``-x`` would be ``0 - x``,
which loses the sign of zero: where that counts, numbers are multiplied by a negative one.
"""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels.triton_philox import draw_dither, draw_per_value, philox, shift_of
from qsdp.kernels.triton_transform import hadamard

# Of the table: value offset, count, meta offset, code offset, block, segment, levels, meta padding.
COLUMNS = 8

FIELDS = tl.constexpr(COLUMNS)
HUGE = tl.constexpr(2.0**126)
TINY = tl.constexpr(2.0**-64)
TWO23 = tl.constexpr(2.0**23)
TWO23_BITS = tl.constexpr(0x4B000000)
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)

# Scalars are not specialised on their values (a new kernel for each that 16 divides): what may be
# assumed of offsets is a compile-time argument of its own.
_SCALARS = ["num_raw", "numel", "num_rows", "row_bytes", "payload_bytes"]
_SCALARS += ["key_lo", "key_hi", "first_row", "sender"]


@triton.jit(do_not_specialize=_SCALARS)
def encode_kernel(
    values,
    wire,
    table,
    thresholds,
    num_raw,
    numel,
    row_bytes,
    payload_bytes,
    key_lo,
    key_hi,
    first_row,
    sender,
    BF16: tl.constexpr,
    VALUE_ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (programs, rows). ``values`` is bfloat16 as int16, or another float dtype as itself."""
    row = tl.program_id(1)
    row_start = row.to(tl.int64) * row_bytes
    run = table + tl.program_id(0) * FIELDS
    row_values = row.to(tl.int64) * numel
    count = tl.load(run + 1).to(tl.int32)
    if tl.program_id(0) == 0:
        padding = payload_bytes + tl.arange(0, 8)
        tl.store(wire + row_start + padding, tl.zeros((8,), tl.uint8), mask=padding < row_bytes)
    if tl.program_id(0) < num_raw:
        at = tl.arange(0, FORMAT.blocks * FORMAT.tile)
        raw_source = values + row_values + tl.load(run) + at
        raw = (wire + row_start).to(tl.pointer_type(values.dtype.element_ty)) + tl.load(run + 3)
        tl.store(raw + at, tl.load(raw_source, mask=at < count), mask=at < count)
    else:
        source = values + tl.multiple_of(row_values + tl.load(run), VALUE_ALIGNMENT)
        codes = wire + tl.multiple_of(row_start + tl.load(run + 3), CODE_ALIGNMENT)
        meta = meta_pointer(wire + row_start, tl.load(run + 2), FORMAT)
        if FORMAT.symmetric and FORMAT.meta_bytes == 2:  # others need no padding
            end = meta + tl.cdiv(count, FORMAT.quantizer.block_size)
            tl.store(end, tl.zeros((), tl.int16), mask=tl.load(run + 7) > 0)
        block = tl.load(run + 4).to(tl.uint32)
        segment = tl.load(run + 5).to(tl.uint32)
        thresholds += tl.load(run + 6)
        draw_row = (first_row + row).to(tl.uint32)
        who = (row * 0 + sender).to(tl.uint32)
        key = key_lo.to(tl.uint32, bitcast=True)
        if count == FORMAT.blocks * FORMAT.quantizer.block_size:
            _encode_run(
                source, codes, meta, thresholds, count, block, segment, draw_row, who,
                key, key_hi, BF16, FORMAT, True,
            )  # fmt: skip
        else:
            _encode_run(
                source, codes, meta, thresholds, count, block, segment, draw_row, who,
                key, key_hi, BF16, FORMAT, False,
            )  # fmt: skip


@triton.jit
def _encode_run(
    source, codes, meta, thresholds, count, block, segment, row, sender, key_lo, key_hi,
    BF16: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    BLOCK_SIZE: tl.constexpr = FORMAT.quantizer.block_size
    TILE: tl.constexpr = FORMAT.tile
    MASKED: tl.constexpr = (not FULL) or BLOCK_SIZE % TILE != 0
    place = tl.arange(0, FORMAT.blocks)
    numel = block_numel(count, FORMAT, FULL)

    x = _load_tile(source, numel, 0, BF16, FORMAT, MASKED)
    lo, hi, content, magnitude = _extremes(x, numel, 0, MASKED)
    for start in range(TILE, BLOCK_SIZE, TILE):
        x = _load_tile(source, numel, start, BF16, FORMAT, MASKED)
        lo_, hi_, content_, magnitude_ = _extremes(x, numel, start, MASKED)
        lo = tl.minimum(lo, lo_)
        hi = tl.maximum(hi, hi_)
        content = tl.add(content, content_, sanitize_overflow=False)
        magnitude = tl.maximum(magnitude, magnitude_)
    finite = magnitude < INFINITY_BITS
    lo = tl.where(finite, lo, 0.0) + 0.0
    hi = tl.where(finite, hi, 0.0) + 0.0
    p, base, inverse, scale, offset, huge = _grid(lo, hi, FORMAT)

    key_lo = key_lo + tl.zeros_like(place).to(tl.uint32)
    key_hi = (content ^ key_hi).to(tl.uint32, bitcast=True)
    blocks = block + place.to(tl.uint32)
    if FORMAT.quantizer.rounding == "shift":
        zero = tl.zeros_like(blocks)
        word, _, _, _ = philox(zero, blocks, segment, row, key_lo, key_hi)
        draw = (word & 0xFFFF).to(tl.int32)
        offset = offset + scale * shift_of(draw)
    scale = tl.where(finite, tl.where(huge, -scale, scale), float("nan"))
    offset = tl.where(finite, offset, float("nan"))
    _store_meta(meta, scale, offset, numel, FORMAT)

    for start in range(0, BLOCK_SIZE, TILE):
        if TILE < BLOCK_SIZE:  # a block that did not stay in registers
            x = _load_tile(source, numel, start, BF16, FORMAT, MASKED)
        q = _positions(x, p, base, inverse, FORMAT)
        if FORMAT.levels:
            code = _level_codes(q, thresholds, FORMAT.quantizer.bits)
        elif FORMAT.quantizer.rounding == "stochastic":
            r = draw_per_value(start, blocks, segment, row, key_lo, key_hi, FORMAT)
            code = (q + r) >> 16
        elif FORMAT.quantizer.rounding == "dither":
            code = (q + draw_dither(scale, offset, start, blocks, segment, sender, FORMAT)) >> 16
        elif FORMAT.quantizer.rounding == "shift":
            code = (q + draw[:, None]) >> 16
        else:
            code = (q + 32768) >> 16
        code = tl.where(finite[:, None], code, 0)
        if MASKED:
            column = start + tl.arange(0, TILE)
            code = tl.where(column[None, :] < numel[:, None], code, 0)
        _store_codes(codes, code, numel, start, FORMAT, MASKED)


@triton.jit
def block_numel(count, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """Values of each block of a run, (blocks,) int32; zero past its end."""
    if FULL:
        return tl.full((FORMAT.blocks,), FORMAT.quantizer.block_size, tl.int32)
    else:
        left = count - tl.arange(0, FORMAT.blocks) * FORMAT.quantizer.block_size
        return tl.minimum(tl.maximum(left, 0), FORMAT.quantizer.block_size)


@triton.jit
def meta_pointer(row, index, FORMAT: tl.constexpr):
    """To a number in a row's scales and offsets: float32, or bfloat16 as int16."""
    if FORMAT.meta_bytes == 2:
        return row.to(tl.pointer_type(tl.int16)) + index
    else:
        return row.to(tl.pointer_type(tl.float32)) + index


@triton.jit
def _store_meta(meta, scale, offset, numel, FORMAT: tl.constexpr):
    place = tl.arange(0, FORMAT.blocks)
    if FORMAT.meta_bytes == 2:  # exact: the grid was made of bfloat16 numbers
        scale = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        offset = (offset.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    if FORMAT.symmetric:
        tl.store(meta + place, scale, mask=numel > 0)
    else:
        tl.store(meta + 2 * place, scale, mask=numel > 0)
        tl.store(meta + 2 * place + 1, offset, mask=numel > 0)


@triton.jit
def _load_tile(
    source, numel, start, BF16: tl.constexpr, FORMAT: tl.constexpr, MASKED: tl.constexpr
):
    """(blocks, tile) float32, transformed if the format says so; masked lanes are zero."""
    column = start + tl.arange(0, FORMAT.tile)
    at = tl.arange(0, FORMAT.blocks)[:, None] * FORMAT.quantizer.block_size + column[None, :]
    if MASKED:
        x = tl.load(source + at, mask=column[None, :] < numel[:, None], other=0)
    else:
        x = tl.load(source + at)
    x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if BF16 else x.to(tl.float32)
    if FORMAT.quantizer.transform == "hadamard":
        x = hadamard(x, numel, start, MASKED)
    return x


@triton.jit
def _extremes(x, numel, start, MASKED: tl.constexpr):
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
def _grid(lo, hi, FORMAT: tl.constexpr):
    """:func:`qsdp.kernels.reference.block_grid` from extremes: but for what is not finite, and the
    mark, which is returned last.
    """
    if FORMAT.symmetric:
        hi = tl.maximum(tl.abs(lo), tl.abs(hi))
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
def _positions(x, p, base, inverse, FORMAT: tl.constexpr):
    """q of every value, int32; see [Note: the same bits under Triton]."""
    t = (x * p[:, None] - base[:, None]) * inverse[:, None]
    t = tl.minimum(t, 65536.0 * FORMAT.steps)
    if FORMAT.meta_bytes == 2:  # a symmetric grid with a denormal scale may begin above a value
        t = tl.maximum(t, 0.0)
    if FORMAT.steps < 128:
        return (t + TWO23).to(tl.int32, bitcast=True) - TWO23_BITS
    else:
        whole = t >= TWO23
        bits = (t + tl.where(whole, 0.0, TWO23)).to(tl.int32, bitcast=True)
        return bits - tl.where(whole, TWO23_BITS - 0x800000, TWO23_BITS)


@triton.jit
def _level_codes(q, thresholds, BITS: tl.constexpr):
    """How many thresholds are at or below q: a binary search."""
    code = tl.zeros_like(q)
    for step in tl.static_range(BITS):
        probe = code + (1 << (BITS - 1 - step))
        code = tl.where(tl.load(thresholds + probe - 1) <= q, probe, code)
    return code


@triton.jit
def _store_codes(codes, code, numel, start, FORMAT: tl.constexpr, MASKED: tl.constexpr):
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
