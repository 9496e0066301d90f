"""The wire format: where every byte of an encoded row lies.

A *row* is one rank's flat values, made of *segments*: one segment a parameter. A quantized segment
is split into blocks; a block never straddles two segments. Everything follows from sizes alone, so
all ranks compute the same layout, and this file is the only place that knows it:

    row = scales and offsets of all quantized segments, block after block
        | bytes of all full-precision segments
        | packed codes of all quantized segments, block after block
        | maps of zeros, if asked for: a bit for every 32 values (kernels/zeros.py)
        | zeros | an int64 mark | an int64 checksum, if asked for

The zeros fill the row up to a multiple of ROW_ALIGNMENT bytes where it travels: collectives and
kernels have their widest paths for that. What holds nothing before the mark gets no zeros.

Codes of one block are packed as bit planes of 4, 2 and 1 bits (a whole byte at 8 bits), lowest bits
first, each plane padded to a byte: 3 bits = a 2-bit and a 1-bit plane, 7 bits = 4 + 2 + 1. Inside a
plane the first value sits in the lowest bits of a byte.

A block has two numbers, scale and offset, where scaling is min-max, and its scale alone otherwise;
as float32 or as bfloat16. A segment's numbers are padded to a multiple of META_ALIGNMENT.

Where segments are coded (``Quantizer(coding=...)``), what travels is another form of the same row,
of a size of its own (:mod:`qsdp.kernels.coded`):

    coded row = an int64: its bytes, all of them
              | the row's bytes that are no codes of coded segments, in their order
              | a uint16 for each of their blocks: 14 bits length, 2 bits mode
              | the blocks' streams of bytes, block after block
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch

from qsdp.quantizer import Quantizer

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what can be encoded
ROW_ALIGNMENT = 128  # of rows that travel
TENSOR_ALIGNMENT = 8  # of single tensors; whatever the alignment, marks are int64
MARK_BYTES = CHECKSUM_BYTES = 8
ZERO_GROUP = 32  # values that share a bit in a map of zeros
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as int64
META_ALIGNMENT = 4
LENGTH_BYTES = 8  # of a coded row: what it begins with
BLOCK_HEADER_BYTES = 2
# Behind a coded row: encoders write their parts of it apart, and whole words.
_CODED_SLACK = 1024


@dataclass(frozen=True)
class Segment:
    """One parameter's span in a flat buffer: how many values, and how they travel.

    ``quantizer`` None is full precision: the bytes of the buffer's own dtype. Learned levels are
    the quantizer's ``levels``.
    """

    numel: int
    quantizer: Quantizer | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of a quantized segment, the short last one included."""
        return -(-self.numel // self.format.block_size)

    @property
    def format(self) -> Quantizer:
        """The quantizer of a quantized segment."""
        assert self.quantizer is not None
        return self.quantizer

    @property
    def meta_numbers(self) -> int:
        """Numbers a block: scale, and offset where it does not follow from the scale."""
        return 1 if self.format.symmetric else 2

    @property
    def meta_dtype(self) -> torch.dtype:
        """Of scales and offsets on the wire."""
        return torch.bfloat16 if self.format.scale_dtype == "bfloat16" else torch.float32

    @property
    def meta_bytes(self) -> int:
        """Bytes of all scales and offsets, padding included."""
        used = self.num_blocks * self.meta_numbers * self.meta_dtype.itemsize
        return -(-used // META_ALIGNMENT) * META_ALIGNMENT

    @property
    def code_bytes(self) -> int:
        """Bytes of all packed codes."""
        full, rest = divmod(self.numel, self.format.block_size)
        bits = self.format.bits
        return full * code_bytes(self.format.block_size, bits) + code_bytes(rest, bits)


@dataclass(frozen=True)
class Span:
    """A segment and where it lies: values in elements, the rest in bytes from the row's start.

    ``meta_offset`` is unused for a full-precision segment, whose bytes start at ``data_offset``.
    """

    segment: Segment
    value_offset: int
    meta_offset: int
    data_offset: int

    @property
    def values(self) -> slice:
        """Where the segment's values lie in a row of values."""
        return slice(self.value_offset, self.value_offset + self.segment.numel)


@lru_cache(maxsize=16)
def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """``(width, shift)`` of every bit plane of a code, lowest bits first."""
    widths = [8] if bits == 8 else [width for width in (4, 2, 1) if bits & width]
    shifts = accumulate([0, *widths[:-1]])
    return tuple(zip(widths, shifts, strict=True))


def code_bytes(numel: int, bits: int) -> int:
    """Bytes of one block of ``numel`` packed codes."""
    return sum(-(-numel * width // 8) for width, _ in planes(bits))


def map_bytes(numel: int) -> int:
    """Bytes of a map of zeros of ``numel`` values."""
    return -(-numel // (8 * ZERO_GROUP))


@dataclass(frozen=True)
class WireLayout:
    """Layout of one row. Build it with :func:`wire_layout`, which caches.

    Attributes:
        spans: the segments in order of their values.
        dtype: of the values, and so of full-precision segments on the wire.
        numel: values a row.
        row_bytes: bytes a row, a multiple of the alignment; an empty row has at most a mark and a
            checksum.
        payload_bytes: the same without what kernels leave zero: padding, mark, checksum.
        checksum: whether the row ends with a checksum.
        mark: whether it holds a number beside its values, for whoever sends it to say something.
        zero_maps: of each segment, where its map of zeros lies; None where it has none.
    """

    spans: tuple[Span, ...]
    dtype: torch.dtype
    numel: int
    row_bytes: int
    payload_bytes: int
    checksum: bool = False
    mark: bool = False
    zero_maps: tuple[slice | None, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, without where they lie."""
        return tuple(span.segment for span in self.spans)

    @property
    def quantized(self) -> bool:
        """Whether a segment is quantized."""
        return any(segment.quantizer is not None for segment in self.segments)

    @cached_property
    def coded_spans(self) -> tuple[Span, ...]:
        """Segments whose codes travel in numbers of variable length; without empty ones."""
        return tuple(
            span
            for span in self.spans
            if span.segment.quantizer is not None
            and span.segment.quantizer.coded
            and span.segment.numel
        )

    @cached_property
    def plain_places(self) -> tuple[slice, ...]:
        """Where a row's bytes lie that are no codes of coded segments, in their order."""
        places, at = [], 0
        for span in self.coded_spans:
            if span.data_offset > at:
                places.append(slice(at, span.data_offset))
            at = span.data_offset + span.segment.code_bytes
        return (*places, slice(at, self.row_bytes)) if at < self.row_bytes else tuple(places)

    @cached_property
    def most_bytes(self) -> int:
        """The most bytes that a row takes where it travels; from sizes alone."""
        if not self.coded_spans:
            return self.row_bytes
        blocks = sum(span.segment.num_blocks for span in self.coded_spans)
        return LENGTH_BYTES + self.row_bytes + BLOCK_HEADER_BYTES * blocks

    @cached_property
    def capacity(self) -> int:
        """Bytes of the memory in which the coded form of a row is written."""
        return -(-(self.most_bytes + _CODED_SLACK) // ROW_ALIGNMENT) * ROW_ALIGNMENT

    def meta(self, wire: torch.Tensor, span: Span) -> torch.Tensor:
        """Typed view: (..., num_blocks, meta_numbers), scale and offset of every block."""
        segment = span.segment
        size = segment.num_blocks * segment.meta_numbers * segment.meta_dtype.itemsize
        part = wire[..., span.meta_offset : span.meta_offset + size].view(segment.meta_dtype)
        meta: torch.Tensor = part.unflatten(-1, (segment.num_blocks, segment.meta_numbers))
        return meta

    def marks(self, wire: torch.Tensor) -> torch.Tensor:
        """View: (...) int64, a number a row, zero unless the sender has written something."""
        end = self.row_bytes - CHECKSUM_BYTES * self.checksum
        mark: torch.Tensor = wire[..., end - MARK_BYTES : end].view(torch.int64)[..., 0]
        return mark

    def maps(self, wire: torch.Tensor) -> Iterator[tuple[Span, torch.Tensor]]:
        """Spans that have a map of zeros, and views (..., bytes) uint8 of these."""
        for span, place in zip(self.spans, self.zero_maps, strict=bool(self.zero_maps)):
            if place is not None:
                yield span, wire[..., place]

    def codes(self, wire: torch.Tensor, span: Span) -> torch.Tensor:
        """View: (..., bytes) uint8, the packed codes of the segment."""
        return wire[..., span.data_offset : span.data_offset + span.segment.code_bytes]

    def places(self, span: Span) -> tuple[slice, ...]:
        """Where bytes of a segment lie in a row: its scales and offsets, and its codes."""
        segment, start = span.segment, span.data_offset
        if segment.quantizer is None:
            return (slice(start, start + self.raw_bytes(span)),)
        meta = slice(span.meta_offset, span.meta_offset + segment.meta_bytes)
        return meta, slice(start, start + segment.code_bytes)

    def raw(self, wire: torch.Tensor, span: Span) -> torch.Tensor:
        """View: (..., bytes) uint8, a full-precision segment."""
        return wire[..., span.data_offset : span.data_offset + self.raw_bytes(span)]

    def raw_bytes(self, span: Span) -> int:
        """Bytes of a full-precision segment."""
        return span.segment.numel * self.dtype.itemsize


@lru_cache(maxsize=1024)
def wire_layout(
    segments: tuple[Segment, ...],
    dtype: torch.dtype,
    checksum: bool = False,
    mark: bool = False,
    zeros: bool = False,
    alignment: int = ROW_ALIGNMENT,
) -> WireLayout:
    """Lay out ``segments``, in this order, for values of ``dtype``. Pure and cached.

    Args:
        zeros: zeros are to arrive as zeros: a map for each segment whose format does not keep them.
        alignment: of a row's bytes, a multiple of 8.
    """
    quantized = [s for s in segments if s.quantizer is not None]
    raw_start = sum(s.meta_bytes for s in quantized)
    raw_bytes = sum(s.numel for s in segments if s.quantizer is None) * dtype.itemsize
    value_at, meta_at, raw_at, codes_at = 0, 0, raw_start, raw_start + raw_bytes
    spans = []
    for segment in segments:
        if segment.quantizer is None:
            spans.append(Span(segment, value_at, 0, raw_at))
            raw_at += segment.numel * dtype.itemsize
        else:
            spans.append(Span(segment, value_at, meta_at, codes_at))
            meta_at += segment.meta_bytes
            codes_at += segment.code_bytes
        value_at += segment.numel
    maps: list[slice | None] = []
    maps_at = codes_at
    for segment in segments if zeros else ():
        has_map = segment.quantizer is not None and not segment.quantizer.keeps_zeros
        end = maps_at + map_bytes(segment.numel) * has_map
        maps.append(slice(maps_at, end) if has_map and segment.numel else None)
        maps_at = end
    row_bytes = maps_at + MARK_BYTES * mark + CHECKSUM_BYTES * checksum
    if maps_at:
        row_bytes = -(-row_bytes // alignment) * alignment
    return WireLayout(
        tuple(spans), dtype, value_at, row_bytes, maps_at, checksum, mark, tuple(maps)
    )


def tensor_layout(
    numel: int, quantizer: Quantizer | None, dtype: torch.dtype = torch.float32
) -> WireLayout:
    """The layout of one row that is one segment of ``numel`` values."""
    return wire_layout((Segment(numel, quantizer),), dtype, alignment=TENSOR_ALIGNMENT)


def row_checksums(wire: torch.Tensor) -> torch.Tensor:
    """Checksum of each row (..., row_bytes) without its last 8 bytes: (...) int64.

    A sum modulo 2^64 of the row's 64-bit words times odd numbers that differ by place: a change in
    one word always changes it, and so does, nearly always, any other damage or exchange of words.
    """
    words = wire[..., :-CHECKSUM_BYTES].view(torch.int64)
    places = torch.arange(words.shape[-1], dtype=torch.int64, device=wire.device)
    return (words * (places * _GOLDEN | 1)).sum(-1)


def seal(wire: torch.Tensor) -> None:
    """Write each row's checksum into its last 8 bytes."""
    wire[..., -CHECKSUM_BYTES:].view(torch.int64)[..., 0] = row_checksums(wire)


def damaged_rows(wire: torch.Tensor) -> list[int]:
    """Indices of the rows that do not match their checksum, counted in row-major order."""
    expected = wire[..., -CHECKSUM_BYTES:].view(torch.int64)[..., 0]
    return (row_checksums(wire) != expected).flatten().nonzero().flatten().tolist()
