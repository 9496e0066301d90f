"""Device code of the Triton backend: what remembered weights are updated with, step by step.

``accumulate`` decodes, adds, encodes and decodes again in registers; ``difference`` subtracts and
counts in one pass. :mod:`qsdp.kernels.triton_changes` uses their parts to do without the steps.

[Note: partial sums] Programs finish in any order, so each writes its own partial sums, and a second
kernel adds those of a segment in their order: the same result every time, without atomics.
"""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels import changes
from qsdp.kernels.triton_decode import (
    decode_place,
    decoded,
    dequantized,
    load_tile,
    store_decoded,
    tile_of_planes,
    unrotated,
)
from qsdp.kernels.triton_encode import (
    block_grid,
    draw_place,
    extremes,
    meta_words,
    rotated,
    store_codes,
    store_meta,
    tile_codes,
)
from qsdp.kernels.triton_mean import sum_magnitudes
from qsdp.kernels.triton_runs import (
    block_numel,
    codes_at,
    copy_raw,
    decoded_words,
    find_span,
    from_words,
    has_value,
    load_meta,
    load_planes,
    load_tile_words,
    meta_of,
    row_number,
    row_offset,
    run_of,
    store_tile_words,
    to_words,
)

COUNTS = 4  # columns of the statistics
TOTAL_LANES = tl.constexpr(2048)
TOTAL_WARPS = 8

_SCALARS = ["num_raw", "value_stride", "kept_stride", "first_partial", "num_partials"]
# Of digests: see qsdp/kernels/changes.py.
PLACE = tl.constexpr(changes.PLACE)
NAN_BITS = tl.constexpr(0x7FC00000)
DIGEST_MASK = tl.constexpr((1 << changes.DIGEST_BITS) - 1)
DIGEST_COLUMN = tl.constexpr(2)


@triton.jit(do_not_specialize=_SCALARS)
def accumulate_kernel(
    values,
    kept,
    programs,
    spans,
    thresholds,
    levels,
    num_raw,
    value_stride,
    kept_stride,
    BF16: tl.constexpr,
    VALUE_ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (programs, rows). Keys and senders are those of the reference: key 0, sender 0 for
    encode and the row's number for decode.
    """
    program = tl.program_id(0)
    row_values = row_offset(0, value_stride)
    row_start = row_offset(0, kept_stride)
    span, index = find_span(program, programs, spans)
    if program < num_raw:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.tile)
        raw = (kept + row_start).to(tl.pointer_type(values.dtype.element_ty))
        source = values + row_values + tl.load(span + 2) + at
        copy_raw(source, raw + tl.load(span + 4) + at, 0, count, FORMAT.blocks * FORMAT.tile)
    else:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.quantizer.block_size)
        source = values + tl.multiple_of(row_values + tl.load(span + 2) + at, VALUE_ALIGNMENT)
        codes = kept + tl.multiple_of(row_start + codes_at(span, index, FORMAT), CODE_ALIGNMENT)
        meta = meta_of(kept + row_start, span, index, FORMAT)
        level_at = tl.load(span + 6)
        zero = row_number() * 0
        draws = draw_place(span, index, row_number().to(tl.uint32), zero.to(tl.uint32), FORMAT)
        place = decode_place(span, index, row_number(), FORMAT)
        if count == FORMAT.blocks * FORMAT.quantizer.block_size:
            accumulate_run(
                source, None, codes, meta, thresholds + level_at, levels + level_at, count,
                draws, place, BF16, None, FORMAT, True,
            )  # fmt: skip
        else:
            accumulate_run(
                source, None, codes, meta, thresholds + level_at, levels + level_at, count,
                draws, place, BF16, None, FORMAT, False,
            )  # fmt: skip


@triton.jit
def accumulate_run(
    source, change, codes, meta, thresholds, levels, count, draws, place,
    BF16: tl.constexpr, CHANGE: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Add to a run of what is kept, keep the sums, and decode them to ``source``.

    What is added is there already; or, if ``CHANGE`` is a format, whose blocks fit in one tile, it
    is decoded from ``change``: pointers to the run's codes, scales and levels, and its place.
    """
    BLOCK_SIZE: tl.constexpr = FORMAT.quantizer.block_size
    TILE: tl.constexpr = FORMAT.tile
    MASKED: tl.constexpr = (not FULL) or BLOCK_SIZE % TILE != 0
    numel = block_numel(count, FORMAT, FULL)

    old_meta = load_meta(meta, count, FORMAT, FULL)
    x, old, added = _added(
        source, change, codes, old_meta, levels, count, 0, place, BF16, CHANGE, FORMAT, FULL
    )
    x = rotated(x, numel, 0, FORMAT, MASKED)
    lo, hi, content, magnitude = extremes(x, numel, 0, MASKED)
    for start in range(TILE, BLOCK_SIZE, TILE):
        x, old, added_ = _added(
            source, change, codes, old_meta, levels, count, start, place, BF16, CHANGE, FORMAT, FULL
        )
        x = rotated(x, numel, start, FORMAT, MASKED)
        lo_, hi_, content_, magnitude_ = extremes(x, numel, start, MASKED)
        lo = tl.minimum(lo, lo_)
        hi = tl.maximum(hi, hi_)
        content = tl.add(content, content_, sanitize_overflow=False)
        magnitude = tl.maximum(magnitude, magnitude_)
        added = tl.maximum(added, added_)
    zero = tl.zeros_like(content)
    total = tl.zeros_like(content).to(tl.int64)
    if FORMAT.quantizer.scaling == "mean":
        for start in range(0, BLOCK_SIZE, TILE):
            if TILE < BLOCK_SIZE:
                x, old, added_ = _added(source, change, codes, old_meta, levels, count, start,
                                        place, BF16, CHANGE, FORMAT, FULL)  # fmt: skip
                x = rotated(x, numel, start, FORMAT, MASKED)
            total += sum_magnitudes(x, magnitude)
    found = (lo, hi, content, magnitude, total)
    grid = block_grid(found, numel, draws, (zero.to(tl.uint32), zero), FORMAT)
    # A block to which nothing is added keeps its bytes.
    scale = tl.where(added > 0, meta_words(grid[4], FORMAT), old[0])
    offset = tl.where(added > 0, meta_words(grid[5], FORMAT), old[1])
    # Other threads of the program read what this one is about to write.
    tl.debug_barrier()
    store_meta(meta, scale, offset, numel, FORMAT)

    for start in range(0, BLOCK_SIZE, TILE):
        if TILE < BLOCK_SIZE:  # a block that did not stay in registers
            x, old, added_ = _added(source, change, codes, old_meta, levels, count, start, place,
                                      BF16, CHANGE, FORMAT, FULL)  # fmt: skip
            x = rotated(x, numel, start, FORMAT, MASKED)
            tl.debug_barrier()
        code = tile_codes(x, grid, thresholds, numel, start, draws, FORMAT, MASKED)
        code = tl.where((added > 0)[:, None], code, tile_of_planes(old, FORMAT))
        store_codes(codes, code, numel, start, FORMAT, MASKED)
        value = dequantized(scale, offset, code, levels, start, place, FORMAT)
        value = unrotated(value, count, start, FORMAT, FULL)
        store_decoded(source, value, count, start, BF16, FORMAT, FULL)


@triton.jit
def _added(
    source, change, codes, old_meta, levels, count, start, place,
    BF16: tl.constexpr, CHANGE: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """A tile's values plus what is kept of it, as the dtype rounds them, float32; what is kept as
    it lies on the wire; and, for every block, whether a value is not zero, 0 or 1.
    """
    MASKED: tl.constexpr = (not FULL) or FORMAT.quantizer.block_size % FORMAT.tile != 0
    DTYPE: tl.constexpr = source.dtype.element_ty
    numel = block_numel(count, FORMAT, FULL)
    if CHANGE is None:
        x = from_words(load_tile_words(source, numel, start, FORMAT, MASKED), BF16)
    else:
        loaded = load_tile(change[0], change[1], count, 0, CHANGE, FULL)
        x = decoded_values(loaded, change[2], count, 0, change[3], DTYPE, BF16, CHANGE, FULL)
        x = tl.reshape(x, (FORMAT.blocks, FORMAT.tile))
        if FULL and FORMAT.quantizer.bits != 8:
            # No value is loaded here, only codes, and a plane of eight bits is alone in lying as
            # values do. For others this load, of nothing, tells the compiler where to have them.
            past = count - FORMAT.blocks * FORMAT.tile
            nothing = load_tile_words(source, numel * 0 + past, 0, FORMAT, True)
            x = tl.where(past > 0, from_words(nothing, BF16), x)
        if MASKED:
            x = tl.where(has_value(numel, 0, FORMAT), x, 0.0)
    four, two, one = load_planes(codes, count, start, FORMAT, FULL)
    old = old_meta[0], old_meta[1], four, two, one
    kept = kept_values(old, levels, count, start, place, DTYPE, BF16, FORMAT, FULL)
    total = from_words(to_words(x + kept, DTYPE, BF16), BF16)
    # Sums are not finite only where something was added. Asking that too costs little, and lets the
    # compiler look for both in one arrangement of the values, where it would decode changes twice.
    added = tl.max(((x != 0) | (total != total)).to(tl.int32), axis=1)
    x = total
    if MASKED:
        x = tl.where(has_value(numel, start, FORMAT), x, 0.0)
    return x, old, added


@triton.jit
def kept_values(
    loaded, levels, count, start, place,
    DTYPE: tl.constexpr, BF16: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """:func:`decoded_values`, zero for what is not finite."""
    value = decoded_values(loaded, levels, count, start, place, DTYPE, BF16, FORMAT, FULL)
    return tl.where(tl.abs(value) < float("inf"), value, 0.0)


@triton.jit
def decoded_values(
    loaded, levels, count, start, place,
    DTYPE: tl.constexpr, BF16: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What a loaded tile decodes to in the values' dtype, float32; masked lanes mean nothing."""
    value = unrotated(decoded(loaded, levels, start, place, FORMAT), count, start, FORMAT, FULL)
    return from_words(decoded_words(value, DTYPE, BF16), BF16)


@triton.jit(do_not_specialize=_SCALARS)
def difference_kernel(
    values,
    kept,
    change,
    partials,
    programs,
    spans,
    levels,
    num_raw,
    first_partial,
    num_partials,
    BF16: tl.constexpr,
    VALUE_ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (programs times tiles). ``partials`` is (COUNTS, num_partials) float64: see
    [Note: partial sums].
    """
    program = tl.program_id(0) // FORMAT.tiles
    start = tl.program_id(0) % FORMAT.tiles * FORMAT.tile
    span, index = find_span(program, programs, spans)
    into = partials + first_partial + tl.program_id(0)
    if program < num_raw:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.tile)
        lane = start + tl.arange(0, FORMAT.blocks * FORMAT.tile)
        raw_at = tl.load(span + 2) + at + lane
        words = tl.load(values + raw_at, mask=lane < count, other=0)
        tl.store(change + raw_at, words, mask=lane < count)
        count_raw(words, at, lane, count, into, num_partials, BF16)
    else:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.quantizer.block_size)
        value_at = tl.multiple_of(tl.load(span + 2) + at, VALUE_ALIGNMENT)
        codes = kept + tl.multiple_of(codes_at(span, index, FORMAT), CODE_ALIGNMENT)
        meta = meta_of(kept, span, index, FORMAT)
        table = levels + tl.load(span + 6)
        place = decode_place(span, index, 0, FORMAT)
        if count == FORMAT.blocks * FORMAT.quantizer.block_size:
            _difference_run(
                values + value_at, change + value_at, codes, meta, table, at, count, start, place,
                into, num_partials, BF16, FORMAT, True,
            )  # fmt: skip
        else:
            _difference_run(
                values + value_at, change + value_at, codes, meta, table, at, count, start, place,
                into, num_partials, BF16, FORMAT, False,
            )  # fmt: skip


@triton.jit
def _difference_run(
    values, change, codes, meta, levels, at, count, start, place, into, num_partials,
    BF16: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    MASKED: tl.constexpr = (not FULL) or FORMAT.quantizer.block_size % FORMAT.tile != 0
    DTYPE: tl.constexpr = values.dtype.element_ty
    numel = block_numel(count, FORMAT, FULL)
    x = from_words(load_tile_words(values, numel, start, FORMAT, MASKED), BF16)
    loaded = load_tile(codes, meta, count, start, FORMAT, FULL)
    kept = kept_values(loaded, levels, count, start, place, DTYPE, BF16, FORMAT, FULL)
    moved_words = to_words(x - kept, DTYPE, BF16)
    store_tile_words(change, moved_words, numel, start, FORMAT, MASKED)
    moved = from_words(moved_words, BF16)
    if MASKED:
        moved = tl.where(has_value(numel, start, FORMAT), moved, 0.0)
    count_tile(x, moved, at, numel, start, into, num_partials, FORMAT)


@triton.jit
def count_tile(x, moved, at, numel, start, into, num_partials, FORMAT: tl.constexpr):
    """Write the partial sums of a tile of values and their changes, both zero in masked lanes."""
    strange = (tl.abs(moved) < float("inf")) == 0
    block = at + (tl.arange(0, FORMAT.blocks) * FORMAT.quantizer.block_size)[:, None]
    places = block + start + tl.arange(0, FORMAT.tile)[None, :]
    digest = _digest(x, places, has_value(numel, start, FORMAT))
    _store_counts(into, num_partials, _squares(moved), _squares(x), digest, _how_many(strange))


@triton.jit
def count_raw(words, at, lane, count, into, num_partials, BF16: tl.constexpr):
    """Write the partial sums of a run in full precision."""
    zero = tl.zeros((), tl.float64)
    digest = _digest(from_words(words, BF16), at + lane, lane < count)
    _store_counts(into, num_partials, zero, zero, digest, zero)


@triton.jit
def _digest(x, places, there):
    """The sum that changes.py has, of values at these places of their segment, that are there."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), NAN_BITS).to(tl.uint32, bitcast=True)
    key = tl.mul((2 * places + 1).to(tl.uint32), PLACE, sanitize_overflow=False).to(tl.int64)
    keyed = tl.mul(tl.where(there, bits, 0).to(tl.int64), key, sanitize_overflow=False)
    return (tl.sum(keyed) & DIGEST_MASK).to(tl.float64)


@triton.jit
def _squares(x):
    wide = x.to(tl.float64)
    return tl.sum(wide * wide)


@triton.jit
def _how_many(flags):
    return tl.sum(flags.to(tl.int32)).to(tl.float64)


@triton.jit
def _store_counts(into, num_partials, a, b, c, d):
    tl.store(into, a)
    tl.store(into + num_partials, b)
    tl.store(into + 2 * num_partials, c)
    tl.store(into + 3 * num_partials, d)


@triton.jit(do_not_specialize=_SCALARS)
def total_kernel(stats, partials, places, num_partials):
    """Grid (segments, COUNTS): sums of partial sums; ``places`` is (segments, 2) int64."""
    segment, column = tl.program_id(0), tl.program_id(1)
    first = partials + column.to(tl.int64) * num_partials + tl.load(places + 2 * segment)
    count = tl.load(places + 2 * segment + 1).to(tl.int32)
    if column == DIGEST_COLUMN:  # whole numbers, of which the last bits count
        digest = tl.zeros((TOTAL_LANES,), tl.int64)
        for at in range(0, count, TOTAL_LANES):
            lane = at + tl.arange(0, TOTAL_LANES)
            digest += tl.load(first + lane, mask=lane < count, other=0.0).to(tl.int64)
        total = (tl.sum(digest) & DIGEST_MASK).to(tl.float64)
        tl.store(stats + segment * 4 + column, total)
    else:
        sums = tl.zeros((TOTAL_LANES,), tl.float64)
        for at in range(0, count, TOTAL_LANES):
            lane = at + tl.arange(0, TOTAL_LANES)
            sums += tl.load(first + lane, mask=lane < count, other=0.0)
        tl.store(stats + segment * 4 + column, tl.sum(sums))
