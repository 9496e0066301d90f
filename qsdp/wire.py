"""The wire format: where every byte of an encoded row lies.

A *row* is one rank's flat values, made of *segments*: one segment a parameter. A quantized segment
is split into blocks; a block never straddles two segments. Everything follows from sizes alone, so
all ranks compute the same layout, and this file is the only place that knows it:

    row = scales and offsets of all quantized segments, block after block
        | bytes of all full-precision segments
        | packed codes of all quantized segments, block after block
        | zeros up to a multiple of ROW_ALIGNMENT | an int64 checksum, if asked for

Codes of one block are packed as bit planes of 4, 2 and 1 bits (a whole byte at 8 bits), lowest bits
first, each plane padded to a byte: 3 bits = a 2-bit and a 1-bit plane, 7 bits = 4 + 2 + 1. Inside a
plane the first value sits in the lowest bits of a byte.

A block has two numbers, scale and offset, where scaling is min-max, and its scale alone otherwise;
as float32 or as bfloat16. A segment's numbers are padded to a multiple of META_ALIGNMENT.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

ROW_ALIGNMENT = 8
CHECKSUM_BYTES = 8
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as int64
META_ALIGNMENT = 4


@dataclass(frozen=True)
class Segment:
    """One parameter's span in a flat buffer.

    ``bits=None`` travels in full precision, in the buffer's own dtype; the other fields then have
    no meaning. ``levels``, if given, holds ``2**bits`` increasing numbers in [0, 1] that replace
    the uniform grid. The others are those of :class:`qsdp.Quantizer`.
    """

    numel: int
    bits: int | None = None
    block_size: int = 1024
    rounding: str = "nearest"
    levels: tuple[float, ...] | None = None
    scaling: str = "minmax"
    scale_dtype: str = "float32"
    transform: str | None = None

    @property
    def num_blocks(self) -> int:
        return -(-self.numel // self.block_size)

    @property
    def meta_numbers(self) -> int:
        """Numbers a block: scale, and offset where it does not follow from the scale."""
        return 2 if self.scaling == "minmax" else 1

    @property
    def meta_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.scale_dtype == "bfloat16" else torch.float32

    @property
    def meta_bytes(self) -> int:
        """Bytes of all scales and offsets, padding included."""
        used = self.num_blocks * self.meta_numbers * self.meta_dtype.itemsize
        return -(-used // META_ALIGNMENT) * META_ALIGNMENT


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
    def num_blocks(self) -> int:
        return self.segment.num_blocks


@lru_cache(maxsize=16)
def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """``(width, shift)`` of every bit plane of a code, lowest bits first."""
    widths = [8] if bits == 8 else [width for width in (4, 2, 1) if bits & width]
    shifts = accumulate([0, *widths[:-1]])
    return tuple(zip(widths, shifts, strict=True))


def code_bytes(numel: int, bits: int) -> int:
    """Bytes of one block of ``numel`` packed codes."""
    return sum(-(-numel * width // 8) for width, _ in planes(bits))


def segment_code_bytes(segment: Segment) -> int:
    """Bytes of all packed codes of a quantized segment."""
    assert segment.bits is not None
    full, rest = divmod(segment.numel, segment.block_size)
    return full * code_bytes(segment.block_size, segment.bits) + code_bytes(rest, segment.bits)


@dataclass(frozen=True)
class WireLayout:
    """Layout of one row. Build it with :func:`wire_layout`, which caches.

    Attributes:
        spans: the segments in order of their values.
        dtype: of the values, and so of full-precision segments on the wire.
        numel: values a row.
        row_bytes: bytes a row, a multiple of ``ROW_ALIGNMENT``; zero for an empty row.
        payload_bytes: the same without the padding and the checksum at the end, which ``encode``
            leaves zero.
        checksum: whether the row ends with a checksum.
        has_norms: whether a segment is scaled by 2-norms, which only the reference computes.
    """

    spans: tuple[Span, ...]
    dtype: torch.dtype
    numel: int
    row_bytes: int
    payload_bytes: int
    checksum: bool = False
    has_norms: bool = False

    def meta(self, wire: torch.Tensor, span: Span) -> torch.Tensor:
        """Typed view: (num_rows, num_blocks, meta_numbers), scale and offset of every block."""
        segment = span.segment
        size = segment.num_blocks * segment.meta_numbers * segment.meta_dtype.itemsize
        part = wire[:, span.meta_offset : span.meta_offset + size].view(segment.meta_dtype)
        meta: torch.Tensor = part.unflatten(1, (segment.num_blocks, segment.meta_numbers))
        return meta

    def codes(self, wire: torch.Tensor, span: Span) -> torch.Tensor:
        """View: (num_rows, bytes) uint8, the packed codes of the segment."""
        size = segment_code_bytes(span.segment)
        return wire[:, span.data_offset : span.data_offset + size]

    def raw(self, wire: torch.Tensor, span: Span) -> torch.Tensor:
        """View: (num_rows, bytes) uint8, a full-precision segment."""
        size = span.segment.numel * self.dtype.itemsize
        return wire[:, span.data_offset : span.data_offset + size]


@lru_cache(maxsize=1024)
def wire_layout(
    segments: tuple[Segment, ...], dtype: torch.dtype, checksum: bool = False
) -> WireLayout:
    """Lay out ``segments``, in this order, for values of ``dtype``. Pure and cached."""
    quantized = [s for s in segments if s.bits is not None]
    raw_start = sum(s.meta_bytes for s in quantized)
    raw_bytes = sum(s.numel for s in segments if s.bits is None) * dtype.itemsize
    value_at, meta_at, raw_at, codes_at = 0, 0, raw_start, raw_start + raw_bytes
    spans = []
    for segment in segments:
        if segment.bits is None:
            spans.append(Span(segment, value_at, 0, raw_at))
            raw_at += segment.numel * dtype.itemsize
        else:
            spans.append(Span(segment, value_at, meta_at, codes_at))
            meta_at += segment.meta_bytes
            codes_at += segment_code_bytes(segment)
        value_at += segment.numel
    row_bytes = -(-codes_at // ROW_ALIGNMENT) * ROW_ALIGNMENT + (CHECKSUM_BYTES if checksum else 0)
    has_norms = any(segment.scaling == "norm" for segment in quantized)
    return WireLayout(tuple(spans), dtype, value_at, row_bytes, codes_at, checksum, has_norms)


def row_checksums(wire: torch.Tensor) -> torch.Tensor:
    """Checksum of each row without its last 8 bytes: (num_rows,) int64.

    A sum modulo 2^64 of the row's 64-bit words times odd numbers that differ by place: a change in
    one word always changes it, and so does, nearly always, any other damage or exchange of words.
    """
    words = wire[:, :-CHECKSUM_BYTES].view(torch.int64)
    places = torch.arange(words.shape[1], dtype=torch.int64, device=wire.device)
    return (words * (places * _GOLDEN | 1)).sum(1)


def seal(wire: torch.Tensor) -> None:
    """Write each row's checksum into its last 8 bytes."""
    wire[:, -CHECKSUM_BYTES:].view(torch.int64)[:, 0] = row_checksums(wire)


def damaged_rows(wire: torch.Tensor) -> list[int]:
    """Indices of the rows that do not match their checksum."""
    expected = wire[:, -CHECKSUM_BYTES:].view(torch.int64)[:, 0]
    return (row_checksums(wire) != expected).nonzero().flatten().tolist()
