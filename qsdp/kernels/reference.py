"""The eager PyTorch backend: readable first, and the specification of the other backends.

Every other backend gives the same bytes and the same values, bit for bit (NaN counts as NaN). This
file has what is done with rows; :mod:`qsdp.kernels.blocks` has what becomes of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch

from qsdp.kernels.blocks import dequantize_blocks, dither, quantize_blocks
from qsdp.kernels.transform import hadamard, inverse_hadamard
from qsdp.kernels.zeros import map_zeros, write_zeros
from qsdp.wire import Span, WireLayout, code_bytes, planes

NAME = "reference"


def encode(
    values: torch.Tensor,
    layout: WireLayout,
    wire: torch.Tensor,
    *,
    key: int,
    first_row: int = 0,
    sender: int = 0,
) -> None:
    """Encode rows of values, which have one or two leading dimensions and count in row-major order.

    Args:
        values: (..., layout.numel), float32, bfloat16 or float16. Values of a row are neighbours;
            strides over the leading dimensions are free.
        layout: where the bytes go.
        wire: (..., layout.row_bytes) uint8, the same leading dimensions, whose strides are
            multiples of 8; rows are written completely.
        key: 64 bits; see [Note: where the random bits come from].
        first_row: the index of the first row in the random counter.
        sender: who sends the rows, for dither: the decoder must know it.
    """
    for first, part, into in _matrices(values, wire):
        _encode(part, layout, into, key, first_row + first, sender)


def _encode(
    values: torch.Tensor,
    layout: WireLayout,
    wire: torch.Tensor,
    key: int,
    first_row: int,
    sender: int,
) -> None:
    wire[:, layout.payload_bytes :] = 0
    for span, maps in layout.maps(wire):
        map_zeros(values[:, span.values], maps)
    for index, span in enumerate(layout.spans):
        part, quantizer = values[:, span.values], span.segment.quantizer
        if quantizer is None:
            layout.raw(wire, span).copy_(part.contiguous().view(torch.uint8))
        if quantizer is None or not span.segment.numel:
            continue
        wire[:, span.meta_offset : span.meta_offset + span.segment.meta_bytes] = 0
        meta, codes = layout.meta(wire, span), layout.codes(wire, span)
        if quantizer.transform is not None:
            part = hadamard(part.float())
        for blocks, block_at, code_slice in _block_parts(part, span):
            scale, offset, code = quantize_blocks(
                blocks.float(), quantizer, key, index, first_row, block_at, sender
            )
            numbers = torch.stack((scale, offset)[: span.segment.meta_numbers], dim=-1)
            if quantizer.scale_dtype == "bfloat16":
                # Upper halves: exact, and one NaN; torch's cast knows two, depending on strides.
                halves = numbers.view(torch.int32) >> 16
                numbers = halves.to(torch.int16).view(torch.bfloat16)
            meta[:, block_at : block_at + blocks.shape[1]] = numbers
            codes[:, code_slice] = pack(code, quantizer.bits).flatten(1)


def decode(
    wire: torch.Tensor,
    layout: WireLayout,
    values: torch.Tensor,
    *,
    first_sender: int = 0,
    sender_step: int = 1,
) -> None:
    """Decode rows: the inverse of :func:`encode`. Writes all of ``values``, in its dtype.

    Row i, in row-major order, came from sender ``first_sender + i * sender_step``. Segments in full
    precision keep their bits, NaN and all, if the dtype is theirs. Where the layout has a map of
    zeros, what it says is zero becomes zero.
    """
    for first, part, into in _matrices(wire, values):
        senders = torch.arange(first, first + len(part), device=wire.device)
        _decode(part, layout, into, first_sender + sender_step * senders)


def _decode(
    wire: torch.Tensor, layout: WireLayout, values: torch.Tensor, senders: torch.Tensor
) -> None:
    for index, span in enumerate(layout.spans):
        if span.segment.quantizer is None and values.dtype == layout.dtype:
            values[:, span.values].view(torch.uint8).copy_(layout.raw(wire, span))
            continue
        rows = _decode_span(wire, layout, span, index, senders)
        rows = inverse_hadamard(rows) if _is_rotated(span) else rows
        values[:, span.values] = _limited(rows, span, values.dtype)
    for span, maps in layout.maps(wire):
        write_zeros(values[:, span.values], maps)


def decode_sum(
    wire: torch.Tensor,
    layout: WireLayout,
    out: torch.Tensor,
    *,
    multiply: float = 1.0,
    divide: float = 1.0,
) -> None:
    """Decode rows and sum them in float32 in row order: ``out = sum * multiply / divide``.

    Row i came from sender i. What maps of zeros say is zero in all rows becomes zero.

    Args:
        wire: (num_rows, layout.row_bytes) uint8, at least one row; its stride over rows is free.
        out: (layout.numel,), contiguous, written completely; rounded once, to its dtype.
    """
    for index, span in enumerate(layout.spans):
        rows = _decode_span(wire, layout, span, index, torch.arange(len(wire), device=wire.device))
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        if _is_rotated(span):
            total = inverse_hadamard(total)
        total = total * multiply / torch.full_like(total, divide)
        out[span.values] = _limited(total, span, out.dtype)
    for span, maps in layout.maps(wire):
        common = reduce(torch.bitwise_and, maps)
        write_zeros(out[None, span.values], common[None])


def accumulate_by(encode: Callable[..., Any], decode: Callable[..., Any]) -> Callable[..., None]:
    """The ``accumulate`` of a backend whose ``encode`` and ``decode`` these are, step by step."""

    def accumulate(
        values: torch.Tensor, layout: WireLayout, before: torch.Tensor, wire: torch.Tensor
    ) -> None:
        """Add what ``before`` holds to ``values``, encode the sums, and decode them again.

        A block to which nothing is added keeps its bytes: where all of a block's ``values`` are
        zero, of either sign, its scale, offset and codes in ``wire`` are those of ``before``.

        Args:
            values: (num_rows, layout.numel), replaced by what ``wire`` holds then. Values of
                segments in full precision are taken as they are: nothing is added to them.
            layout: without maps of zeros.
            before: (num_rows, layout.row_bytes) uint8; where it holds no finite number, it counts
                as zero.
            wire: (num_rows, layout.row_bytes) uint8, written completely; not ``before``. Random
                rounding has key 0.
        """
        assert not any(layout.zero_maps)
        kept = torch.empty_like(values)
        decode(before, layout, kept)
        torch.nan_to_num(kept, nan=0.0, posinf=0.0, neginf=0.0, out=kept)
        idle = []
        for span in layout.spans:
            if span.segment.quantizer is not None and span.segment.numel:
                parts = _block_parts(values[:, span.values], span)
                idle.append((span, [(~blocks.any(-1), place) for blocks, _, place in parts]))
                values[:, span.values] += kept[:, span.values]
        encode(values, layout, wire, key=0)
        for span, blocks in idle:
            _keep_bytes(layout, span, before, wire, blocks)
        decode(wire, layout, values)

    return accumulate


def _keep_bytes(
    layout: WireLayout,
    span: Span,
    before: torch.Tensor,
    wire: torch.Tensor,
    idle: list[tuple[torch.Tensor, slice]],
) -> None:
    """Copy scales, offsets and codes of some of a segment's blocks from ``before`` to ``wire``.

    ``idle`` says which: for its full blocks and its short last one, (num_rows, num_blocks) bool and
    their bytes among the segment's codes.
    """
    flags = torch.cat([which for which, _ in idle], dim=1)
    pairs = [(flags, layout.meta(before, span), layout.meta(wire, span))]
    for which, place in idle:
        old, new = (
            layout.codes(rows, span)[:, place].unflatten(1, (which.shape[1], -1))
            for rows in (before, wire)
        )
        pairs.append((which, old, new))
    for which, old, new in pairs:
        new.copy_(torch.where(which[..., None], old, new))


def difference_by(decode: Callable[..., Any]) -> Callable[..., None]:
    """The ``difference`` of a backend whose ``decode`` this is, step by step."""

    def difference(
        values: torch.Tensor,
        layout: WireLayout,
        before: torch.Tensor,
        sent: torch.Tensor,
        change: torch.Tensor,
        stats: torch.Tensor,
    ) -> None:
        """What one row's values differ by from what ``before`` holds; ``sent`` becomes ``values``.

        Segments in full precision are taken as they are: nothing is subtracted.

        Args:
            values: (layout.numel,) of layout.dtype, contiguous, as are ``sent`` and ``change``.
            layout: without maps of zeros.
            before: (layout.row_bytes,) uint8, of sender 0; where it decodes to no finite number, it
                counts as zero.
            sent: overwritten with ``values``.
            change: written: ``values`` minus what ``before`` holds, rounded once.
            stats: (number of segments, 4) float64, written. Of a quantized segment: the sum of
                squares of ``change``, that of ``values``, how many values differ from ``sent`` as
                it was (NaN from everything, -0 not from 0), how many of ``change`` are not finite.
                Of full precision the third alone; the others are zero. Sums of squares are within
                a relative 1e-4, if float32 holds them, and the same for every number of threads.
        """
        assert not any(layout.zero_maps)
        kept = torch.empty_like(values)
        decode(before[None], layout, kept[None])
        torch.nan_to_num(kept, nan=0.0, posinf=0.0, neginf=0.0, out=kept)
        stats.zero_()
        for span, row in zip(layout.spans, stats, strict=True):
            new, moved = values[span.values], change[span.values]
            row[2] = (new != sent[span.values]).sum()
            if span.segment.quantizer is None:
                moved.copy_(new)
                continue
            torch.sub(new, kept[span.values], out=moved)
            row[0], row[1] = moved.double().square().sum(), new.double().square().sum()
            row[3] = (~moved.isfinite()).sum()
        sent.copy_(values)

    return difference


accumulate = accumulate_by(encode, decode)
difference = difference_by(decode)


def pack(code: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., numel) uint8 codes to (..., code_bytes) uint8; the order is in :mod:`qsdp.wire`."""
    parts = []
    for width, shift in planes(bits):
        per_byte = 8 // width
        plane = (code >> shift) & ((1 << width) - 1)
        plane = torch.nn.functional.pad(plane, (0, -plane.shape[-1] % per_byte))
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=code.device)
        parts.append((plane.unflatten(-1, (-1, per_byte)) << places).sum(-1, dtype=torch.uint8))
    return torch.cat(parts, dim=-1)


def unpack(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    """(..., code_bytes) uint8 to (..., numel) uint8 codes."""
    code = torch.zeros(*packed.shape[:-1], numel, dtype=torch.uint8, device=packed.device)
    at = 0
    for width, shift in planes(bits):
        size = -(-numel * width // 8)
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
        plane = (packed[..., at : at + size, None] >> places) & ((1 << width) - 1)
        code |= plane.flatten(-2)[..., :numel] << shift
        at += size
    return code


def _matrices(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Rows of one or two leading dimensions as matrices, and how many rows came before each."""
    assert a.shape[:-1] == b.shape[:-1] and a.ndim in (2, 3), (a.shape, b.shape)
    if a.ndim == 2:
        yield 0, a, b
        return
    for index, (part, other) in enumerate(zip(a, b, strict=True)):
        yield index * a.shape[1], part, other


def _is_rotated(span: Span) -> bool:
    quantizer = span.segment.quantizer
    return quantizer is not None and quantizer.transform is not None


def _limited(values: torch.Tensor, span: Span, dtype: torch.dtype) -> torch.Tensor:
    """What was finite and quantized stays finite: its error may take it past float16's largest."""
    if dtype != torch.float16 or span.segment.quantizer is None:
        return values
    largest = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-largest, largest), values)


def _decode_span(
    wire: torch.Tensor, layout: WireLayout, span: Span, index: int, senders: torch.Tensor
) -> torch.Tensor:
    """(num_rows, segment.numel) float32; transformed values where there is a transform."""
    segment, quantizer = span.segment, span.segment.quantizer
    if not segment.numel:
        return torch.empty(wire.shape[0], 0, device=wire.device)
    if quantizer is None:
        raw = layout.raw(wire, span).clone(memory_format=torch.contiguous_format)
        return raw.view(layout.dtype).float()
    meta, codes = layout.meta(wire, span), layout.codes(wire, span)
    out = torch.empty(wire.shape[0], segment.numel, device=wire.device)
    for blocks, block_at, code_slice in _block_parts(out, span):
        num_blocks, numel = blocks.shape[1:]
        packed = codes[:, code_slice].unflatten(1, (num_blocks, -1))
        numbers = meta[:, block_at : block_at + num_blocks].float().unbind(-1)
        scale = numbers[0]
        offset = numbers[1] if len(numbers) == 2 else -(scale.abs() * (quantizer.steps / 2))
        code = unpack(packed, quantizer.bits, numel)
        r = None
        if quantizer.rounding == "dither":
            r = dither(scale, offset, quantizer, numel, index, block_at, senders[:, None])
        blocks.copy_(dequantize_blocks(scale, offset, code, quantizer, r))
    return out


def _block_parts(values: torch.Tensor, span: Span) -> list[tuple[torch.Tensor, int, slice]]:
    """Split (num_rows, segment.numel) into its full blocks and its short last one.

    Returns for each part a view (num_rows, num_blocks, block), the index of its first block, and
    its bytes among the segment's codes.
    """
    size, bits = span.segment.format.block_size, span.segment.format.bits
    full, rest = divmod(span.segment.numel, size)
    cut, full_bytes = full * size, full * code_bytes(size, bits)
    parts = []
    if full:
        parts.append((values[:, :cut].unflatten(1, (full, size)), 0, slice(0, full_bytes)))
    if rest:
        end = full_bytes + code_bytes(rest, bits)
        parts.append((values[:, cut:].unflatten(1, (1, rest)), full, slice(full_bytes, end)))
    return parts
