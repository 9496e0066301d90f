"""Codes in numbers of variable length: blocks and rows, there and back. The specification.

A row is encoded by a backend as always; its coded form is what travels, and becomes the same row
again, byte for byte, before anybody decodes it. So nothing else depends on how codes are written.

[Note: coded blocks] ``k = code - top`` is an integer from ``-top`` to ``top``. A block is written
in one of three modes, whichever takes the fewest bytes, the earlier one if they are equal:

- FIXED: its packed codes, as the row has them. The header's length is 0: it follows from sizes.
  So is a block with a code above ``2 * top``, which no backend writes.
- DENSE: of every value the magnitude, then, unless that is 0, a bit that says whether k < 0.
- SPARSE, if at most three quarters of the values are not 0: of each of those the gap (its place
  minus that of the one before, from 1 on), the sign, the magnitude. If all are 0 the stream is
  empty.

Numbers N >= 1 are written as Elias omega, E(N): a 0, before which, while N > 1, N in binary is put
and then becomes its number of bits minus 1. Numbers N >= 0 as Rice with parameter r: N >> r ones, a
0, the r low bits of N, lowest first.

- elias: dense E(magnitude + 1); sparse E(gap), E(magnitude).
- rice: the stream begins with r in 4 bits, for sparse with that of gaps and that of magnitudes,
  lowest bit first. Dense magnitude; sparse gap - 1, magnitude - 1. For magnitudes r is what makes
  the block shortest (the smallest such), among as many as a code has bits. For gaps it follows from
  how many of the values are zeros: see :func:`gap_parameter`.

Streams fill bytes from the lowest bit on and the last one with ones, which complete no number.

[Note: damaged streams] A decoder stops at the end of a block's stream, and at what no encoder
writes: a magnitude above top, a place behind the block. What is missing then is 0. A header of no
known mode, a fixed one with a length, lengths that do not add up to the row's: the row is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from qsdp.kernels.reference import pack, unpack
from qsdp.wire import BLOCK_HEADER_BYTES, LENGTH_BYTES, Span, WireLayout, code_bytes

FIXED, DENSE, SPARSE = range(3)
MAX_LENGTH = (1 << 14) - 1
Numbers = Literal["elias", "rice"]


def elias(n: int) -> str:
    """E(n) for n >= 1, as ones and zeros in the order in which they are written."""
    bits = "0"
    while n > 1:
        group = f"{n:b}"
        bits, n = group + bits, len(group) - 1
    return bits


def rice(n: int, r: int) -> str:
    """n >= 0 with parameter r, as ones and zeros in the order in which they are written."""
    return "1" * (n >> r) + "0" + _low_bits(n, r)


def gap_parameter(numel: int, nonzero: int) -> int:
    """The Rice parameter of gaps: near the best where zeros are spread by chance."""
    zeros = numel - nonzero
    return min(15, max(1, 77 * (2 * zeros + nonzero) // (160 * nonzero)).bit_length() - 1)


def encode_block(values: Sequence[int], top: int, coding: Numbers, limit: int) -> tuple[int, bytes]:
    """The mode and the stream of a block's integers.

    Args:
        limit: bytes of the packed codes; FIXED and no bytes where neither stream has fewer.
    """
    nonzero = sum(map(bool, values))
    if max(map(abs, values), default=0) > top:
        return FIXED, b""
    streams = [_dense(values, top, coding)]
    if 4 * nonzero <= 3 * len(values):
        streams.append(_sparse(values, top, coding, nonzero))
    sizes = [-(-len(stream) // 8) for stream in streams]
    best = min(range(len(sizes)), key=lambda i: sizes[i])
    if sizes[best] >= limit or sizes[best] > MAX_LENGTH:
        return FIXED, b""
    bits = streams[best] + "1" * (8 * sizes[best] - len(streams[best]))
    return (DENSE, SPARSE)[best], int(bits[::-1] or "0", 2).to_bytes(sizes[best], "little")


def decode_block(mode: int, stream: bytes, numel: int, top: int, coding: Numbers) -> list[int]:
    """The integers of a block in mode DENSE or SPARSE; damaged ones as the note says."""
    values = [0] * numel
    bits = _Bits(stream)
    at = -1
    try:
        if mode == DENSE:
            parameters = [bits.low_bits(4)] if coding == "rice" else [0]
        else:
            parameters = [bits.low_bits(4), bits.low_bits(4)] if coding == "rice" else [0, 0]
        while at + 1 < numel:
            gap = 1
            if mode == SPARSE:
                gap = bits.elias() if coding == "elias" else bits.rice(parameters[0]) + 1
                negative = bits.take() == "1"
            first = bits.elias() if coding == "elias" else bits.rice(parameters[-1])
            magnitude = first - (coding == "elias") + (mode == SPARSE)
            if mode == DENSE:
                negative = magnitude > 0 and bits.take() == "1"
            at += gap
            if magnitude > top or at >= numel:
                break
            values[at] = -magnitude if negative else magnitude
    except EOFError:
        pass
    return values


def _dense(values: Sequence[int], top: int, coding: Numbers) -> str:
    signs = ["" if k == 0 else "1" if k < 0 else "0" for k in values]
    if coding == "elias":
        return "".join(elias(abs(k) + 1) + sign for k, sign in zip(values, signs, strict=True))
    streams = (
        _low_bits(r, 4)
        + "".join(rice(abs(k), r) + sign for k, sign in zip(values, signs, strict=True))
        for r in _parameters(top)
    )
    return min(streams, key=len)


def _sparse(values: Sequence[int], top: int, coding: Numbers, nonzero: int) -> str:
    if not nonzero:
        return ""
    places = [place for place, k in enumerate(values) if k]
    gaps = [b - a for a, b in zip([-1, *places], places, strict=False)]
    kept = [(gap, "01"[values[i] < 0], abs(values[i])) for gap, i in zip(gaps, places, strict=True)]
    if coding == "elias":
        return "".join(elias(gap) + sign + elias(magnitude) for gap, sign, magnitude in kept)
    r = gap_parameter(len(values), nonzero)
    streams = (
        _low_bits(r, 4)
        + _low_bits(own, 4)
        + "".join(rice(gap - 1, r) + sign + rice(size - 1, own) for gap, sign, size in kept)
        for own in _parameters(top)
    )
    return min(streams, key=len)


def _parameters(top: int) -> range:
    """Of Rice numbers up to top: as many as a code has bits."""
    return range(top.bit_length() + 1)


def _low_bits(n: int, count: int) -> str:
    return "".join("01"[n >> i & 1] for i in range(count))


class _Bits:
    """Reads a stream; EOFError at its end and at numbers that are too large for any block."""

    def __init__(self, stream: bytes) -> None:
        self._bits, self._at = "".join(f"{byte:08b}"[::-1] for byte in stream), 0

    def take(self, count: int = 1) -> str:
        self._at += count
        if self._at > len(self._bits):
            raise EOFError
        return self._bits[self._at - count : self._at]

    def low_bits(self, count: int) -> int:
        return int(self.take(count)[::-1] or "0", 2)

    def elias(self) -> int:
        n = 1
        while self.take() == "1":
            if n > 16:
                raise EOFError
            n = int("1" + self.take(n), 2)
        return n

    def rice(self, r: int) -> int:
        n = 0
        while self.take() == "1":
            n += 1
        return (n << r) + self.low_bits(r)


class Block(NamedTuple):
    """A block of a coded segment: its values, and where its packed codes lie in a row."""

    numel: int
    bits: int
    top: int
    coding: Numbers
    place: slice


def blocks_of(span: Span) -> Iterator[Block]:
    """Of a coded segment, the short last one included."""
    form, at = span.segment.format, span.data_offset
    assert form.coding != "fixed"
    for first in range(0, span.segment.numel, form.block_size):
        numel = min(form.block_size, span.segment.numel - first)
        end = at + code_bytes(numel, form.bits)
        yield Block(numel, form.bits, form.steps // 2, form.coding, slice(at, end))
        at = end


def compact(row: torch.Tensor, layout: WireLayout, coded: torch.Tensor) -> int:
    """Write the coded form of a row.

    Args:
        row: (layout.row_bytes,) uint8 on the CPU, contiguous, encoded by any backend.
        coded: (layout.capacity,) uint8, written; what lies behind the coded row is undefined.

    Returns:
        Bytes of the coded row.
    """
    content = bytes(row.tolist())
    parts, headers, streams = [content[place] for place in layout.plain_places], [], []
    for span in layout.coded_spans:
        for block in blocks_of(span):
            packed = content[block.place]
            codes = unpack(_tensor(packed), block.bits, block.numel).to(torch.int16) - block.top
            limit = len(packed)
            mode, stream = encode_block(codes.tolist(), block.top, block.coding, limit)
            headers.append((len(stream) | mode << 14).to_bytes(BLOCK_HEADER_BYTES, "little"))
            streams.append(packed if mode == FIXED else stream)
    found = b"".join((*parts, *headers, *streams))
    length = LENGTH_BYTES + len(found)
    coded[:length] = _tensor(length.to_bytes(LENGTH_BYTES, "little") + found)
    return length


def expand(coded: torch.Tensor, layout: WireLayout, row: torch.Tensor) -> bool:
    """The inverse of :func:`compact`.

    Args:
        coded: (bytes of the coded row,) uint8 on the CPU, contiguous; nothing behind is read.
        row: (layout.row_bytes,) uint8, written; its content is undefined if the row is refused.

    Returns:
        Whether the row is sound, as far as its lengths say: see [Note: damaged streams].
    """
    content, at = bytes(coded.tolist()), LENGTH_BYTES
    if len(content) < at or int.from_bytes(content[:at], "little") != len(content):
        return False
    for place in layout.plain_places:
        part, at = content[at : at + place.stop - place.start], at + place.stop - place.start
        if at > len(content):
            return False
        row[place] = _tensor(part)
    blocks = [block for span in layout.coded_spans for block in blocks_of(span)]
    headers = range(at, at + BLOCK_HEADER_BYTES * len(blocks), BLOCK_HEADER_BYTES)
    at = headers.stop
    if at > len(content):
        return False
    for header, block in zip(headers, blocks, strict=True):
        word = int.from_bytes(content[header : header + BLOCK_HEADER_BYTES], "little")
        mode, size = word >> 14, word & MAX_LENGTH
        fixed = block.place.stop - block.place.start
        if mode > SPARSE or (size if mode == FIXED else size >= fixed):
            return False
        size = fixed if mode == FIXED else size
        stream, at = content[at : at + size], at + size
        if at > len(content):
            return False
        if mode != FIXED:
            values = decode_block(mode, stream, block.numel, block.top, block.coding)
            codes = torch.tensor(values, dtype=torch.int16) + block.top
            row[block.place] = pack(codes.to(torch.uint8), block.bits)
        else:
            row[block.place] = _tensor(stream)
    return at == len(content)


def _tensor(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)
