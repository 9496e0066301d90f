"""The eager PyTorch backend: readable first, and the specification of the other backends.

Every other backend gives the same bytes and the same values, bit for bit (NaN counts as NaN). This
file has what is done with rows; :mod:`qsdp.kernels.blocks` has what becomes of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qsdp.kernels.blocks import dequantize_blocks, dither, quantize_blocks
from qsdp.kernels.transform import hadamard, inverse_hadamard
from qsdp.kernels.zeros import map_zeros as map_zeros
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
    """Encode rows of values.

    Args:
        values: (num_rows, layout.numel), float32, bfloat16 or float16, contiguous.
        layout: where the bytes go.
        wire: (num_rows, layout.row_bytes) uint8, contiguous; written completely.
        key: 64 bits; see [Note: where the random bits come from].
        first_row: the row index of ``values[0]`` in the random counter.
        sender: who sends the rows, for dither: the decoder must know it.
    """
    wire[:, layout.payload_bytes :] = 0
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

    Row i came from sender ``first_sender + i * sender_step``. Segments in full precision keep their
    bits, NaN and all, if the dtype is theirs.
    """
    senders = first_sender + sender_step * torch.arange(len(wire), device=wire.device)
    for index, span in enumerate(layout.spans):
        if span.segment.quantizer is None and values.dtype == layout.dtype:
            values[:, span.values].view(torch.uint8).copy_(layout.raw(wire, span))
            continue
        rows = _decode_span(wire, layout, span, index, senders)
        rows = inverse_hadamard(rows) if _is_rotated(span) else rows
        values[:, span.values] = _limited(rows, span, values.dtype)


def decode_sum(
    wire: torch.Tensor,
    layout: WireLayout,
    out: torch.Tensor,
    *,
    multiply: float = 1.0,
    divide: float = 1.0,
) -> None:
    """Decode rows and sum them in float32 in row order: ``out = sum * multiply / divide``.

    Row i came from sender i.

    Args:
        wire: (num_rows, layout.row_bytes) uint8, at least one row.
        out: (layout.numel,), written completely; rounded once, to its dtype.
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


def accumulate_by(encode: Callable[..., Any], decode: Callable[..., Any]) -> Callable[..., None]:
    """The ``accumulate`` of a backend whose ``encode`` and ``decode`` these are, step by step."""

    def accumulate(
        values: torch.Tensor, layout: WireLayout, before: torch.Tensor, wire: torch.Tensor
    ) -> None:
        """Add what ``before`` holds to ``values``, encode the sums, and decode them again.

        Args:
            values: (num_rows, layout.numel), replaced by what ``wire`` holds then. Values of
                segments in full precision are taken as they are: nothing is added to them.
            before: (num_rows, layout.row_bytes) uint8; where it holds no finite number, it counts
                as zero.
            wire: (num_rows, layout.row_bytes) uint8, written completely; not ``before``. Random
                rounding has key 0.
        """
        kept = torch.empty_like(values)
        decode(before, layout, kept)
        torch.nan_to_num(kept, nan=0.0, posinf=0.0, neginf=0.0, out=kept)
        for span in layout.spans:
            if span.segment.quantizer is not None:
                values[:, span.values] += kept[:, span.values]
        encode(values, layout, wire, key=0)
        decode(wire, layout, values)

    return accumulate


accumulate = accumulate_by(encode, decode)


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
