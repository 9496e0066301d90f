"""Device code of the Triton backend: encode. :mod:`qsdp.kernels.triton_gpu` launches it.

A program handles one run (a row of the table): ``BLOCKS`` whole blocks of at most ``TILE`` values,
or one block in tiles. Shapes are powers of two; where a block is none, or a run is short, lanes are
masked. Everything is done twice at compile time, for full runs without run-time masks (so that
loads and stores are vectors) and for the rest.

[Note: the same bits under Triton] Compiled without fused multiply-add and dividing by ``div_rn``,
every operation rounds once, as in the reference. Rounding to an integer adds 2^23: in [2^23, 2^24)
the floats are the integers, so the sum rounds half to even, keeps the parity and has the result in
its low bits. From 2^23 on (8 bits only) a float is an integer already.
"""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels.philox import MULTIPLIERS, ROUNDS, WEYL

COLUMNS = 8  # of the table: value offset, count, meta offset, code offset, block, segment, levels

STOCHASTIC = tl.constexpr(1)
SHIFT = tl.constexpr(2)

FIELDS = tl.constexpr(COLUMNS)
PHILOX_ROUNDS = tl.constexpr(ROUNDS)
M0, M1 = (tl.constexpr(word) for word in MULTIPLIERS)
W0, W1 = (tl.constexpr(word) for word in WEYL)
HUGE = tl.constexpr(2.0**126)
TINY = tl.constexpr(2.0**-64)
TWO23 = tl.constexpr(2.0**23)
TWO23_BITS = tl.constexpr(0x4B000000)
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)

# Scalars are not specialised on their values (a new kernel for each that 16 divides): what may be
# assumed of offsets is a compile-time argument of its own.
_SCALARS = ["num_raw", "numel", "num_rows", "row_bytes", "payload_bytes"]
_SCALARS += ["key_lo", "key_hi", "first_row"]


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
    ROUNDING: tl.constexpr,
    BF16: tl.constexpr,
    VALUE_ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
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
        at = tl.arange(0, BLOCKS * TILE)
        raw_source = values + row_values + tl.load(run) + at
        raw = (wire + row_start).to(tl.pointer_type(values.dtype.element_ty)) + tl.load(run + 3)
        tl.store(raw + at, tl.load(raw_source, mask=at < count), mask=at < count)
    else:
        source = values + tl.multiple_of(row_values + tl.load(run), VALUE_ALIGNMENT)
        codes = wire + tl.multiple_of(row_start + tl.load(run + 3), CODE_ALIGNMENT)
        meta = (wire + row_start).to(tl.pointer_type(tl.float32)) + tl.load(run + 2)
        block = tl.load(run + 4).to(tl.uint32)
        segment = tl.load(run + 5).to(tl.uint32)
        thresholds += tl.load(run + 6)
        draw_row = (first_row + row).to(tl.uint32)
        key = key_lo.to(tl.uint32, bitcast=True)
        if count == BLOCKS * BLOCK_SIZE:
            _encode_run(
                source, codes, meta, thresholds, count, block, segment, draw_row, key, key_hi,
                ROUNDING, BF16, BITS, BLOCK_SIZE, BLOCKS, TILE, LEVELS, True,
            )  # fmt: skip
        else:
            _encode_run(
                source, codes, meta, thresholds, count, block, segment, draw_row, key, key_hi,
                ROUNDING, BF16, BITS, BLOCK_SIZE, BLOCKS, TILE, LEVELS, False,
            )  # fmt: skip


@triton.jit
def _encode_run(
    source, codes, meta, thresholds, count, block, segment, row, key_lo, key_hi,
    ROUNDING: tl.constexpr, BF16: tl.constexpr, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    TOP: tl.constexpr = 1 if LEVELS else (1 << BITS) - 1
    MASKED: tl.constexpr = (not FULL) or BLOCK_SIZE % TILE != 0
    place = tl.arange(0, BLOCKS)
    numel = block_numel(count, BLOCK_SIZE, BLOCKS, FULL)

    x = _load_tile(source, numel, 0, BF16, BLOCK_SIZE, BLOCKS, TILE, MASKED)
    lo, hi, content, magnitude = _extremes(x, numel, 0, TILE, MASKED)
    for start in range(TILE, BLOCK_SIZE, TILE):
        x = _load_tile(source, numel, start, BF16, BLOCK_SIZE, BLOCKS, TILE, MASKED)
        lo_, hi_, content_, magnitude_ = _extremes(x, numel, start, TILE, MASKED)
        lo = tl.minimum(lo, lo_)
        hi = tl.maximum(hi, hi_)
        content = tl.add(content, content_, sanitize_overflow=False)
        magnitude = tl.maximum(magnitude, magnitude_)
    finite = magnitude < INFINITY_BITS
    lo = tl.where(finite, lo, 0.0) + 0.0
    hi = tl.where(finite, hi, 0.0) + 0.0
    p, low, inverse, scale, offset, huge = _grid(lo, hi, TOP)

    key_hi = (content ^ key_hi).to(tl.uint32, bitcast=True)
    blocks = block + place.to(tl.uint32)
    if ROUNDING == SHIFT:
        zero = tl.zeros((BLOCKS,), tl.uint32)
        word, _, _, _ = _philox(zero, blocks, segment, row, key_lo, key_hi)
        draw = (word & 0xFFFF).to(tl.int32)
        offset = offset + scale * ((65535 - 2 * draw).to(tl.float32) * (0.5 / 65536))
    scale = tl.where(finite, tl.where(huge, -scale, scale), float("nan"))
    offset = tl.where(finite, offset, float("nan"))
    tl.store(meta + 2 * place, scale, mask=numel > 0)
    tl.store(meta + 2 * place + 1, offset, mask=numel > 0)

    for start in range(0, BLOCK_SIZE, TILE):
        if TILE < BLOCK_SIZE:  # a block that did not stay in registers
            x = _load_tile(source, numel, start, BF16, BLOCK_SIZE, BLOCKS, TILE, MASKED)
        q = _positions(x, p, low, inverse, TOP)
        if LEVELS:
            code = _level_codes(q, thresholds, BITS)
        elif ROUNDING == STOCHASTIC:
            r = _draws(start, blocks, segment, row, key_lo, key_hi, BLOCKS, TILE)
            code = (q + r) >> 16
        elif ROUNDING == SHIFT:
            code = (q + draw[:, None]) >> 16
        else:
            code = (q + 32768) >> 16
        code = tl.where(finite[:, None], code, 0)
        if MASKED:
            column = start + tl.arange(0, TILE)
            code = tl.where(column[None, :] < numel[:, None], code, 0)
        _store_codes(codes, code, numel, start, BITS, BLOCK_SIZE, BLOCKS, TILE, MASKED)


@triton.jit
def block_numel(count, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr, FULL: tl.constexpr):
    """Values of each block of a run, (BLOCKS,) int32; zero past its end."""
    if FULL:
        return tl.full((BLOCKS,), BLOCK_SIZE, tl.int32)
    else:
        left = count - tl.arange(0, BLOCKS) * BLOCK_SIZE
        return tl.minimum(tl.maximum(left, 0), BLOCK_SIZE)


@triton.jit
def _load_tile(
    source, numel, start, BF16: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(BLOCKS, TILE) float32; masked lanes are zero."""
    column = start + tl.arange(0, TILE)
    at = tl.arange(0, BLOCKS)[:, None] * BLOCK_SIZE + column[None, :]
    if MASKED:
        x = tl.load(source + at, mask=column[None, :] < numel[:, None], other=0)
    else:
        x = tl.load(source + at)
    if BF16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _extremes(x, numel, start, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Of every block: least and greatest value, sum of the bit patterns, greatest magnitude's bits.

    A NaN or an infinity shows in the magnitude; the extremes then mean nothing.
    """
    bits = x.to(tl.int32, bitcast=True)
    content = tl.sum(bits, axis=1)
    magnitude = tl.max(bits & MAGNITUDE_BITS, axis=1)
    if MASKED:
        mask = (start + tl.arange(0, TILE))[None, :] < numel[:, None]
        lo = tl.min(tl.where(mask, x, float("inf")), axis=1)
        hi = tl.max(tl.where(mask, x, float("-inf")), axis=1)
    else:
        lo = tl.min(x, axis=1)
        hi = tl.max(x, axis=1)
    return lo, hi, content, magnitude


@triton.jit
def _grid(lo, hi, TOP: tl.constexpr):
    """Steps 2, 3 and 5 of [Note: quantizing a block], but for the shift and the mark."""
    spread = hi - lo
    varies = spread != 0
    huge = (tl.maximum(tl.abs(lo), tl.abs(hi)) > HUGE) & varies
    tiny = (spread < TINY) & varies
    p = tl.where(huge, 0.25, tl.where(tiny, 1 / TINY, 1.0))
    low = lo * p
    dp = hi * p - low
    inverse = tl.where(varies, tl.div_rn(tl.zeros_like(dp) + 65536.0 * TOP, dp), 0.0)
    unit = tl.div_rn(dp, tl.zeros_like(dp) + 1.0 * TOP)
    scale = tl.where(tiny, unit * TINY, unit)
    offset = tl.where(huge, lo * 0.25, lo)
    return p, low, inverse, scale, offset, huge


@triton.jit
def _positions(x, p, low, inverse, TOP: tl.constexpr):
    """q of every value, int32; see [Note: the same bits under Triton]."""
    t = (x * p[:, None] - low[:, None]) * inverse[:, None]
    t = tl.minimum(t, 65536.0 * TOP)
    if TOP < 128:
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
def _philox(c0, c1, c2, c3, k0, k1):
    """:func:`qsdp.kernels.philox.philox4x32` for uint32 tensors."""
    for _ in tl.static_range(PHILOX_ROUNDS):
        high0, low0 = tl.umulhi(c0, M0), tl.mul(c0, M0, sanitize_overflow=False)
        high1, low1 = tl.umulhi(c2, M1), tl.mul(c2, M1, sanitize_overflow=False)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, W0, sanitize_overflow=False)
        k1 = tl.add(k1, W1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _draws(start, block, segment, row, k0, k1, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """16 random bits a value, (BLOCKS, TILE) int32: [Note: where the random bits come from].

    The four words of a counter serve values 32 apart, their halves values 16 apart.
    """
    GROUPS: tl.constexpr = TILE // 128 if TILE >= 128 else 1
    group = start // 128 + tl.arange(0, GROUPS)
    counter = (16 * group[:, None] + tl.arange(0, 16)[None, :]).to(tl.uint32)
    w0, w1, w2, w3 = _philox(
        counter[None, :, :], block[:, None, None], segment, row, k0, k1[:, None, None]
    )
    if TILE >= 128:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (..., 16, a, b): word 2a + b
        words = tl.reshape(tl.permute(words, (0, 1, 3, 4, 2)), (BLOCKS, GROUPS * 4, 1, 16))
        words = tl.broadcast_to(words, (BLOCKS, GROUPS * 4, 2, 16))
    elif TILE == 64:
        words = tl.reshape(tl.permute(tl.join(w0, w1), (0, 1, 3, 2)), (BLOCKS, 2, 1, 16))
        words = tl.broadcast_to(words, (BLOCKS, 2, 2, 16))
    else:
        words = tl.broadcast_to(tl.reshape(w0, (BLOCKS, 1, 1, 16)), (BLOCKS, 1, 2, 16))
    half = ((tl.arange(0, TILE) >> 4) & 1).to(tl.uint32)
    return ((tl.reshape(words, (BLOCKS, TILE)) >> (half * 16)[None, :]) & 0xFFFF).to(tl.int32)


@triton.jit
def _store_codes(
    codes, code, numel, start, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Pack a tile of codes into bit planes: see :func:`qsdp.wire.planes`."""
    block = codes + (tl.arange(0, BLOCKS) * (BLOCK_SIZE * BITS // 8))[:, None]
    if BITS == 8:
        _store_plane(block, code, numel, start, 8, BLOCKS, TILE, MASKED)
    if BITS & 4:
        _store_plane(block, code, numel, start, 4, BLOCKS, TILE, MASKED)
        block += ((numel + 1) >> 1)[:, None]
    if BITS & 2:
        _store_plane(block, code >> (BITS & 4), numel, start, 2, BLOCKS, TILE, MASKED)
        block += ((numel + 3) >> 2)[:, None]
    if BITS & 1:
        _store_plane(block, code >> (BITS & 6), numel, start, 1, BLOCKS, TILE, MASKED)


@triton.jit
def _store_plane(
    block, code, numel, start, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The lowest WIDTH bits of every code, 8 // WIDTH values a byte."""
    PER: tl.constexpr = 8 // WIDTH
    if WIDTH == 8:
        packed = code
    else:
        lanes = tl.reshape(code & ((1 << WIDTH) - 1), (BLOCKS, TILE // PER, PER))
        packed = tl.sum(lanes << (tl.arange(0, PER) * WIDTH)[None, None, :], axis=2)
    byte = start // PER + tl.arange(0, TILE // PER)
    if MASKED:
        mask = (byte * PER)[None, :] < numel[:, None]
        tl.store(block + byte[None, :], packed.to(tl.uint8), mask=mask)
    else:
        tl.store(block + byte[None, :], packed.to(tl.uint8))
