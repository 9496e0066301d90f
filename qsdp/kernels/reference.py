"""The eager PyTorch backend: readable first, and the specification of the other backends.

Every other backend gives the same bytes and the same values, bit for bit (NaN counts as NaN). This
file has what is done with rows, :mod:`qsdp.kernels.changes` what is done with rows that are
remembered, and :mod:`qsdp.kernels.blocks` what becomes of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch

from qsdp.kernels.blocks import block_parts, dequantize_blocks, dither, quantize_blocks
from qsdp.kernels.changes import accumulate_by, add_changes_by, difference_by, encode_changes_by
from qsdp.kernels.transform import hadamard, inverse_hadamard
from qsdp.kernels.zeros import map_zeros, write_zeros
from qsdp.wire import Span, WireLayout, planes

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
        for blocks, block_at, code_slice in block_parts(part, span):
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


accumulate = accumulate_by(encode, decode)
difference = difference_by(decode)
add_changes = add_changes_by(decode, accumulate)
encode_changes = encode_changes_by(encode, difference)


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
    for blocks, block_at, code_slice in block_parts(out, span):
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
