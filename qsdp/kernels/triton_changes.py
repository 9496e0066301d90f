"""Device code of the Triton backend: changes of remembered weights, in one pass over memory.

For layouts of which :func:`qsdp.kernels.triton_plan.in_one_pass` says that a program's values are
the same for changes and for what is kept. ``CHANGE`` is the format of changes, ``FORMAT`` that of
what is kept. Blocks of both fit in one tile, so nothing is read twice, and what one kernel hands to
the next where there are two, :mod:`qsdp.kernels.triton_update`, stays in registers here.
"""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels.triton_decode import decode_place, load_tile
from qsdp.kernels.triton_encode import (
    block_grid,
    draw_place,
    extremes,
    meta_words,
    pad_meta,
    rotated,
    store_codes,
    store_meta,
    tile_codes,
)
from qsdp.kernels.triton_mean import sum_magnitudes
from qsdp.kernels.triton_runs import (
    block_numel,
    codes_at,
    find_span,
    from_words,
    has_value,
    in_pieces,
    joined,
    load_tile_words,
    load_words,
    meta_of,
    row_number,
    row_offset,
    run_of,
    spread_places,
    to_words,
    zero_tail,
)
from qsdp.kernels.triton_update import accumulate_run, count_raw, count_tile, kept_values

_SCALARS = ["num_raw", "value_stride", "wire_stride", "kept_stride", "first_sender", "sender_step"]
_SCALARS += ["first_partial", "num_partials", "tail", "row_bytes", "key_lo", "key_hi"]
_SCALARS += ["first_row", "sender"]


@triton.jit(do_not_specialize=_SCALARS)
def add_changes_kernel(
    values, wire, kept, programs, spans, kept_spans, wire_levels, thresholds, levels, num_raw,
    value_stride, wire_stride, kept_stride, first_sender, sender_step,
    BF16: tl.constexpr, VALUE_ALIGNMENT: tl.constexpr,
    WIRE_ALIGNMENT: tl.constexpr, KEPT_ALIGNMENT: tl.constexpr,
    CHANGE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Grid (programs, rows). Keys and senders are those of the reference: of what is kept, key 0,
    sender 0 for encode and the row's number for decode.
    """
    program = tl.program_id(0)
    row_values = row_offset(0, value_stride)
    wire_row, kept_row = row_offset(0, wire_stride), row_offset(0, kept_stride)
    span, index = find_span(program, programs, spans)
    kept_span, _ = find_span(program, programs, kept_spans)
    if program < num_raw:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.tile)
        lane = tl.arange(0, FORMAT.blocks * FORMAT.tile)
        raw = (wire + wire_row).to(tl.pointer_type(values.dtype.element_ty)) + tl.load(span + 4)
        words = tl.load(raw + at + lane, mask=lane < count, other=0)
        raw = (kept + kept_row).to(tl.pointer_type(values.dtype.element_ty))
        tl.store(raw + tl.load(kept_span + 4) + at + lane, words, mask=lane < count)
        tl.store(values + row_values + tl.load(span + 2) + at + lane, words, mask=lane < count)
    else:
        at, count = run_of(span, index, FORMAT.blocks * FORMAT.quantizer.block_size)
        out = values + tl.multiple_of(row_values + tl.load(span + 2) + at, VALUE_ALIGNMENT)
        sender = first_sender + row_number() * sender_step
        change = (
            wire + tl.multiple_of(wire_row + codes_at(span, index, CHANGE), WIRE_ALIGNMENT),
            meta_of(wire + wire_row, span, index, CHANGE),
            wire_levels + tl.load(span + 6),
            decode_place(span, index, sender, CHANGE),
        )
        codes_from = kept_row + codes_at(kept_span, index, FORMAT)
        codes = kept + tl.multiple_of(codes_from, KEPT_ALIGNMENT)
        meta = meta_of(kept + kept_row, kept_span, index, FORMAT)
        thresholds += tl.load(kept_span + 6)
        levels += tl.load(kept_span + 6)
        zero = (row_number() * 0).to(tl.uint32)
        draws = draw_place(kept_span, index, row_number().to(tl.uint32), zero, FORMAT)
        place = decode_place(kept_span, index, row_number(), FORMAT)
        if count == FORMAT.blocks * FORMAT.quantizer.block_size:
            accumulate_run(
                out, change, codes, meta, thresholds, levels, count, draws, place,
                BF16, CHANGE, FORMAT, True,
            )  # fmt: skip
        else:
            accumulate_run(
                out, change, codes, meta, thresholds, levels, count, draws, place,
                BF16, CHANGE, FORMAT, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=_SCALARS)
def encode_changes_kernel(
    values, wire, kept, partials, programs, spans, kept_spans, thresholds, levels, num_raw,
    first_partial, num_partials, tail, row_bytes, key_lo, key_hi, first_row, sender,
    BF16: tl.constexpr, VALUE_ALIGNMENT: tl.constexpr,
    WIRE_ALIGNMENT: tl.constexpr, KEPT_ALIGNMENT: tl.constexpr,
    CHANGE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): one row. The first program also clears from ``tail`` on. ``partials`` as
    for :func:`qsdp.kernels.triton_update.difference_kernel`.
    """
    program = tl.program_id(0)
    span, index = find_span(program, programs, spans)
    kept_span, _ = find_span(program, programs, kept_spans)
    into = partials + first_partial + program
    if program == 0:
        zero_tail(wire, tail, row_bytes)
    if program < num_raw:
        at, count = run_of(span, index, CHANGE.blocks * CHANGE.tile)
        lane = tl.arange(0, CHANGE.blocks * CHANGE.tile)
        words = tl.load(values + tl.load(span + 2) + at + lane, mask=lane < count, other=0)
        raw = wire.to(tl.pointer_type(values.dtype.element_ty)) + tl.load(span + 4)
        tl.store(raw + at + lane, words, mask=lane < count)
        count_raw(words, at, lane, count, into, num_partials, BF16)
    else:
        at, count = run_of(span, index, CHANGE.blocks * CHANGE.quantizer.block_size)
        source = values + tl.multiple_of(tl.load(span + 2) + at, VALUE_ALIGNMENT)
        known = (
            kept + tl.multiple_of(codes_at(kept_span, index, FORMAT), KEPT_ALIGNMENT),
            meta_of(kept, kept_span, index, FORMAT),
            levels + tl.load(kept_span + 6),
            decode_place(kept_span, index, 0, FORMAT),
        )
        codes = wire + tl.multiple_of(codes_at(span, index, CHANGE), WIRE_ALIGNMENT)
        meta = meta_of(wire, span, index, CHANGE)
        pad_meta(meta, span, at, count, CHANGE)
        thresholds += tl.load(span + 6)
        draw_row = (first_row + row_number()).to(tl.uint32)
        who = (row_number() * 0 + sender).to(tl.uint32)
        draws = draw_place(span, index, draw_row, who, CHANGE)
        key = (key_lo.to(tl.uint32, bitcast=True), key_hi)
        if count == CHANGE.blocks * CHANGE.quantizer.block_size:
            _encode_changes_run(
                source, known, codes, meta, thresholds, at, count, draws, key, into, num_partials,
                BF16, CHANGE, FORMAT, True,
            )  # fmt: skip
        else:
            _encode_changes_run(
                source, known, codes, meta, thresholds, at, count, draws, key, into, num_partials,
                BF16, CHANGE, FORMAT, False,
            )  # fmt: skip


@triton.jit
def _encode_changes_run(
    source, known, codes, meta, thresholds, at, count, draws, key, into, num_partials,
    BF16: tl.constexpr, CHANGE: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """``known`` is what is kept: pointers to the run's codes, scales and levels, and its place."""
    MASKED: tl.constexpr = (not FULL) or CHANGE.quantizer.block_size % CHANGE.tile != 0
    DTYPE: tl.constexpr = source.dtype.element_ty
    numel = block_numel(count, CHANGE, FULL)
    loaded = load_tile(known[0], known[1], count, 0, FORMAT, FULL)
    kept = kept_values(loaded, known[2], count, 0, known[3], DTYPE, BF16, FORMAT, FULL)
    kept = tl.reshape(kept, (CHANGE.blocks, CHANGE.tile))
    if CHANGE.blocks == 1:
        x = from_words(load_tile_words(source, numel, 0, CHANGE, MASKED), BF16)
        moved = from_words(to_words(x - kept, DTYPE, BF16), BF16)
    else:  # subtracted as they are loaded, so that the compiler does not move the values
        places, mask = spread_places(numel, DTYPE, CHANGE)
        x = from_words(load_words(source + places, mask, MASKED), BF16)
        moved = from_words(to_words(x - in_pieces(kept, places), DTYPE, BF16), BF16)
        x, moved = joined(x), joined(moved)
    if MASKED:
        moved = tl.where(has_value(numel, 0, CHANGE), moved, 0.0)
    count_tile(x, moved, at, numel, 0, into, num_partials, CHANGE)

    moved = rotated(moved, numel, 0, CHANGE, MASKED)
    lo, hi, content, magnitude = extremes(moved, numel, 0, MASKED)
    total = tl.zeros_like(magnitude).to(tl.int64)
    if CHANGE.quantizer.scaling == "mean":
        total += sum_magnitudes(moved, magnitude)
    grid = block_grid((lo, hi, content, magnitude, total), numel, draws, key, CHANGE)
    store_meta(meta, meta_words(grid[4], CHANGE), meta_words(grid[5], CHANGE), numel, CHANGE)
    code = tile_codes(moved, grid, thresholds, numel, 0, draws, CHANGE, MASKED)
    store_codes(codes, code, numel, 0, CHANGE, MASKED)
