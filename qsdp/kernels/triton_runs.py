"""Device code that all kernels of the Triton backend share: runs, values in memory, rounding.

``FORMAT`` is a compile-time object, of :class:`qsdp.kernels.triton_plan.Format`. bfloat16 is handed
in as int16 (``BF16``): Triton's interpreter has no bfloat16 of its own.
"""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels.triton_plan import COLUMNS

FIELDS = tl.constexpr(COLUMNS)
FLOAT16_MAX = tl.constexpr(65504.0)

# Triton's interpreter truncates to bfloat16 where hardware rounds: there the kernel rounds by hand.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def find_span(program, programs, spans):
    """A program's line of ``spans``, and which of that segment's programs it is."""
    span = spans + tl.load(programs + program) * FIELDS
    return span, program - tl.load(span).to(tl.int32)


@triton.jit
def row_offset(outer_stride, inner_stride):
    """Of the row that the second and third axis of the grid stand for."""
    outer = tl.program_id(2).to(tl.int64) * outer_stride
    return outer + tl.program_id(1).to(tl.int64) * inner_stride


@triton.jit
def row_number():
    """Row-major over the leading dimensions."""
    return tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def run_of(span, index, LENGTH: tl.constexpr):
    """Where a run begins in its segment, and how many values it has."""
    at = index.to(tl.int64) * LENGTH
    return at, tl.minimum(tl.load(span + 1) - at, LENGTH).to(tl.int32)


@triton.jit
def meta_of(row, span, index, FORMAT: tl.constexpr):
    """Pointer to the first number of a run: float32, or bfloat16 as int16."""
    NUMBERS: tl.constexpr = 1 if FORMAT.symmetric else 2
    at = tl.load(span + 3) + index * (FORMAT.blocks * NUMBERS)
    if FORMAT.meta_bytes == 2:
        return row.to(tl.pointer_type(tl.int16)) + at
    else:
        return row.to(tl.pointer_type(tl.float32)) + at


@triton.jit
def codes_at(span, index, FORMAT: tl.constexpr):
    """Offset in a row of a run's codes."""
    BYTES: tl.constexpr = FORMAT.blocks * FORMAT.quantizer.block_size * FORMAT.quantizer.bits // 8
    return tl.load(span + 4) + index.to(tl.int64) * BYTES


@triton.jit
def block_numel(count, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """Values of each block of a run, (blocks,) int32; zero past its end."""
    if FULL:
        return tl.full((FORMAT.blocks,), FORMAT.quantizer.block_size, tl.int32)
    else:
        left = count - tl.arange(0, FORMAT.blocks) * FORMAT.quantizer.block_size
        return tl.minimum(tl.maximum(left, 0), FORMAT.quantizer.block_size)


@triton.jit
def tile_places(numel, start, FORMAT: tl.constexpr):
    """Of each lane of a tile (blocks, tile): its place in the run, and whether it has a value."""
    column = start + tl.arange(0, FORMAT.tile)
    at = tl.arange(0, FORMAT.blocks)[:, None] * FORMAT.quantizer.block_size + column[None, :]
    return at, column[None, :] < numel[:, None]


@triton.jit
def has_value(numel, start, FORMAT: tl.constexpr):
    """Which lanes of a tile are no masked ones."""
    return (start + tl.arange(0, FORMAT.tile))[None, :] < numel[:, None]


@triton.jit
def spread_places(numel, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """:func:`tile_places` in the shape (pieces, blocks, piece of a block), for small blocks.

    Loaded or stored like that, the threads of a warp share out the blocks, where the compiler would
    give each thread a piece of every block: then each computes the grid of one block in place of
    all, and what blocks and transforms combine is mostly in the same thread.
    """
    WIDTH: tl.constexpr = 32 // FORMAT.blocks * (128 // DTYPE.primitive_bitwidth)
    PIECES: tl.constexpr = FORMAT.tile // WIDTH
    column = WIDTH * tl.arange(0, PIECES)[:, None, None] + tl.arange(0, WIDTH)[None, None, :]
    at = tl.arange(0, FORMAT.blocks)[None, :, None] * FORMAT.quantizer.block_size + column
    return at, column < numel[None, :, None]


@triton.jit
def spread(x, VALUES: tl.constexpr):
    """(blocks, tile) in the shape (values, blocks, threads a block), for the same purpose where
    nothing is loaded or stored; ``VALUES`` neighbours stay in a thread.
    """
    BLOCKS: tl.constexpr = x.shape[0]
    THREADS: tl.constexpr = 32 // BLOCKS
    PIECES: tl.constexpr = x.shape[1] // (THREADS * VALUES)
    y = tl.permute(tl.reshape(x, (BLOCKS, PIECES, THREADS, VALUES)), (1, 3, 0, 2))
    return tl.reshape(y, (PIECES * VALUES, BLOCKS, THREADS))


@triton.jit
def gathered(y, VALUES: tl.constexpr):
    """The inverse of :func:`spread`."""
    BLOCKS: tl.constexpr = y.shape[1]
    THREADS: tl.constexpr = y.shape[2]
    PIECES: tl.constexpr = y.shape[0] // VALUES
    x = tl.permute(tl.reshape(y, (PIECES, VALUES, BLOCKS, THREADS)), (2, 0, 3, 1))
    return tl.reshape(x, (BLOCKS, PIECES * THREADS * VALUES))


@triton.jit
def load_tile_words(source, numel, start, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    """(blocks, tile) values as they lie in memory; masked lanes are zero."""
    if FORMAT.blocks == 1:
        at, mask = tile_places(numel, start, FORMAT)
        return load_words(source + at, mask, MASKED)
    else:
        at, mask = spread_places(numel, source.dtype.element_ty, FORMAT)
        return joined(load_words(source + at, mask, MASKED))


@triton.jit
def store_tile_words(out, words, numel, start, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    if FORMAT.blocks == 1:
        at, mask = tile_places(numel, start, FORMAT)
        store_words(out + at, words, mask, MASKED)
    else:
        at, mask = spread_places(numel, out.dtype.element_ty, FORMAT)
        store_words(out + at, in_pieces(words, at), mask, MASKED)


@triton.jit
def in_pieces(x, places):
    """(blocks, tile) in the shape of :func:`spread_places`."""
    pieces = tl.reshape(x, (places.shape[1], places.shape[0], places.shape[2]))
    return tl.permute(pieces, (1, 0, 2))


@triton.jit
def joined(pieces):
    """The inverse of :func:`in_pieces`."""
    BLOCKS: tl.constexpr = pieces.shape[1]
    TILE: tl.constexpr = pieces.shape[0] * pieces.shape[2]
    return tl.reshape(tl.permute(pieces, (1, 0, 2)), (BLOCKS, TILE))


@triton.jit
def load_words(pointers, mask, MASKED: tl.constexpr):
    """Values as they lie in memory; masked lanes are zero."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def store_words(pointers, words, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, words, mask=mask)
    else:
        tl.store(pointers, words)


@triton.jit
def from_words(words, BF16: tl.constexpr):
    """float32, exact."""
    if BF16:
        return (words.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return words.to(tl.float32)


@triton.jit
def to_words(value, DTYPE: tl.constexpr, BF16: tl.constexpr):
    """Round float32 once, half to even, to ``DTYPE``, or to bfloat16 bits."""
    if not BF16:
        return value.to(DTYPE)
    elif INTERPRETED:
        bits = value.to(tl.uint32, bitcast=True)
        odd = (bits >> 16) & 1
        bits = tl.add(tl.add(bits, 0x7FFF, sanitize_overflow=False), odd, sanitize_overflow=False)
        return tl.where(value == value, bits >> 16, 0x7FC0).to(tl.int16)
    else:
        return value.to(tl.bfloat16).to(tl.int16, bitcast=True)


@triton.jit
def decoded_words(value, DTYPE: tl.constexpr, BF16: tl.constexpr):
    """The same for what was decoded: what was finite stays so in float16."""
    if DTYPE is tl.float16:
        limited = tl.minimum(tl.maximum(value, -FLOAT16_MAX), FLOAT16_MAX)
        value = tl.where(tl.abs(value) < float("inf"), limited, value)
    return to_words(value, DTYPE, BF16)


@triton.jit
def copy_raw(source, target, start, count, LANES: tl.constexpr):
    """Full precision keeps its bits."""
    at = start + tl.arange(0, LANES)
    tl.store(target + at, tl.load(source + at, mask=at < count, other=0), mask=at < count)


@triton.jit
def zero_tail(row, tail, row_bytes):
    """Zeros from ``tail`` to the end of a row: what follows its codes and maps."""
    for at in range(tail, row_bytes, 256):
        place = at + tl.arange(0, 256)
        tl.store(row + place, tl.zeros((256,), tl.uint8), mask=place < row_bytes)


@triton.jit
def load_meta(meta, count, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """Scale and offset of a run's blocks; where a format has no offset, the scale twice."""
    NUMBERS: tl.constexpr = 1 if FORMAT.symmetric else 2
    numel = block_numel(count, FORMAT, FULL)
    number = meta + NUMBERS * tl.arange(0, FORMAT.blocks)
    scale = tl.load(number, mask=numel > 0, other=0)
    offset = scale
    if not FORMAT.symmetric:
        offset = tl.load(number + 1, mask=numel > 0, other=0)
    return scale, offset


@triton.jit
def load_planes(codes, count, start, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """Three bit planes of a tile; those that a format does not have are a zero."""
    MASKED: tl.constexpr = (not FULL) or FORMAT.quantizer.block_size % FORMAT.tile != 0
    BITS: tl.constexpr = FORMAT.quantizer.bits
    numel = block_numel(count, FORMAT, FULL)
    block = (
        codes + (tl.arange(0, FORMAT.blocks) * (FORMAT.quantizer.block_size * BITS // 8))[:, None]
    )
    nothing = tl.zeros((1,), tl.uint8)
    four, two, one = nothing, nothing, nothing
    if BITS == 8:
        four = _load_plane(block, numel, start, 8, FORMAT.tile, MASKED)
    if BITS & 4:
        four = _load_plane(block, numel, start, 4, FORMAT.tile, MASKED)
        block += ((numel + 1) >> 1)[:, None]
    if BITS & 2:
        two = _load_plane(block, numel, start, 2, FORMAT.tile, MASKED)
        block += ((numel + 3) >> 2)[:, None]
    if BITS & 1:
        one = _load_plane(block, numel, start, 1, FORMAT.tile, MASKED)
    return four, two, one


@triton.jit
def _load_plane(block, numel, start, WIDTH: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """(blocks, bytes of a tile) uint8: WIDTH bits of every code."""
    PER: tl.constexpr = 8 // WIDTH
    byte = start // PER + tl.arange(0, TILE // PER)
    if MASKED:
        mask = (byte * PER)[None, :] < numel[:, None]
        return tl.load(block + byte[None, :], mask=mask, other=0)
    else:
        return tl.load(block + byte[None, :])
