"""Does a backend give the reference's bytes and values? Used by `qsdp check`, tests, benchmarks.

The reference always runs on the CPU: that is the specification. The formats that are compared are
:func:`qsdp.quantizer.every_format`, whoever asks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from qsdp.kernels import Backend, reference
from qsdp.quantizer import MAX_BITS, MIN_BITS, Quantizer, every_format, format_name, uneven_levels
from qsdp.wire import VALUE_DTYPES, Segment, WireLayout, wire_layout

KEY = 0x0123456789ABCDEF
FIRST_ROW = 3
SENDER = 5
FACTORS = (
    {"multiply": 0.3, "divide": 3.0},
    {"multiply": 1.0, "divide": 1.0},
    {"multiply": 1.0, "divide": 4.0},
)
# Formats in their plain form are compared at every width; in all forms, widths take turns.
PLAIN = [f for f in every_format() if f == Quantizer(f.bits, rounding=f.rounding, levels=f.levels)]


class Comparison(NamedTuple):
    """What :func:`compare` found."""

    cases: int
    differences: list[str]


def compare(
    backend: Backend, device: torch.device, formats: Sequence[Quantizer] | None = None
) -> Comparison:
    """Compare with the reference over widths, formats, dtypes and special values.

    Args:
        formats: None for every format in every dtype while widths take turns, and the plain ones
            at every width beside.
    """
    widths = range(MIN_BITS, MAX_BITS + 1)
    cases = [(bits, form, dtype) for form in PLAIN for bits in widths for dtype in VALUE_DTYPES]
    if formats is None:
        formats = [form for form in every_format() if form not in PLAIN]
    turns = itertools.cycle(widths)
    cases += [(next(turns), form, dtype) for form in formats for dtype in VALUE_DTYPES]
    found = []
    for bits, form, dtype in cases:
        layout = example_layout(with_bits(form, bits), dtype)
        values = example_values(2, layout.numel, dtype)
        for name in mismatches(backend, layout, values, device):
            found.append(f"{name}: {bits} bits, {format_name(form)}, {dtype_name(dtype)}")
    return Comparison(len(cases), found)


def mismatches(
    backend: Backend, layout: WireLayout, values: torch.Tensor, device: torch.device
) -> list[str]:
    """Run every operation in ``backend`` and in the reference; name those that differ.

    Args:
        values: (num_rows, layout.numel) on the CPU.
        device: where the backend runs.

    Wire bytes must be equal; values too, bit for bit, except that any NaN equals any other.
    Buffers are filled with noise before, so what is not written shows.
    """
    num_rows, found = len(values), []
    expected = torch.full((num_rows, layout.row_bytes), 0x5A, dtype=torch.uint8)
    wire = torch.full_like(expected, 0xA5, device=device)
    draws = {"key": KEY, "first_row": FIRST_ROW, "sender": SENDER}
    reference.encode(values, layout, expected, **draws)
    backend.encode(values.to(device), layout, wire, **draws)
    if not torch.equal(wire.cpu(), expected):
        found.append("encode")
    wire = expected.to(device)
    for dtype, factors in zip(VALUE_DTYPES, FACTORS, strict=True):
        wanted = torch.full((num_rows, layout.numel), 3.0, dtype=dtype)
        got = torch.full_like(wanted, 5.0, device=device)
        senders = {"first_sender": SENDER, "sender_step": VALUE_DTYPES.index(dtype)}
        reference.decode(expected, layout, wanted, **senders)
        backend.decode(wire, layout, got, **senders)
        raw = [span.values for span in layout.spans if span.segment.quantizer is None]
        exact = all(
            torch.equal(_words(got[:, part].cpu()), _words(wanted[:, part])) for part in raw
        )
        if not same_bits(got.cpu(), wanted) or (dtype == layout.dtype and not exact):
            found.append(f"decode to {dtype_name(dtype)}")
        reference.decode_sum(expected, layout, wanted[0], **factors)
        backend.decode_sum(wire, layout, got[0], **factors)
        if not same_bits(got[0].cpu(), wanted[0]):
            found.append(f"decode_sum to {dtype_name(dtype)}")
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit patterns, or both NaN, everywhere."""
    return bool(((_words(a) == _words(b)) | (a.isnan() & b.isnan())).all())


def _words(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def with_bits(form: Quantizer, bits: int, block_size: int = 1024) -> Quantizer:
    """A format at another width and block size; levels with a table that fits."""
    levels = uneven_levels(bits) if form.levels else None
    return replace(form, bits=bits, block_size=block_size, levels=levels)


def example_layout(form: Quantizer, dtype: torch.dtype) -> WireLayout:
    """Segments of several block sizes, short last blocks, full precision between them."""
    parts = [
        Segment(2 * 1024 + 333, replace(form, block_size=1024)),
        Segment(77),
        Segment(97, replace(form, block_size=1024)),
        Segment(0),
        Segment(0, replace(form, block_size=32)),
        Segment(1250, replace(form, block_size=96)),
    ]
    return wire_layout(tuple(parts), dtype)


def example_values(num_rows: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that hold what is hard: every fourth run of 100 values is of another nature.

    Normal numbers of many sizes; among them runs of signed zeros, constants, denormals, tiny
    ranges, numbers near the largest, and single NaNs and infinities.
    """
    generator = torch.Generator().manual_seed(numel)
    size = torch.exp(6 * torch.randn(num_rows, -(-numel // 100), generator=generator))
    rows = torch.randn(num_rows, numel, generator=generator)
    rows *= size.repeat_interleave(100, dim=1)[:, :numel]
    largest = torch.finfo(dtype).max
    rows.clamp_(-largest, largest)
    kinds = (
        torch.tensor([0.0, -0.0]),
        torch.tensor([-3.25]),
        torch.tensor([torch.finfo(dtype).tiny / 3, -torch.finfo(dtype).tiny / 5, 0.0]),
        torch.tensor([1.0, 1.0 + torch.finfo(dtype).eps]),
        torch.tensor([largest, -largest, largest / 2, 1.0]),
        torch.tensor([1.0, torch.nan, 2.0]),
        torch.tensor([torch.inf, 1.0]),
        torch.tensor([0.5, -torch.inf]),
    )
    for place, kind in enumerate(kinds):
        start = 100 + 400 * place
        for row in range(place % 2, num_rows, 2):
            part = rows[row, start : start + 100]
            part.copy_(kind.repeat(100)[: len(part)])
    return rows.to(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def describe(backend: Backend) -> str:
    """The backend's name and, where it tells, its instruction set."""
    isa = getattr(backend, "isa", None)
    return f"{backend.NAME} ({isa()})" if isa is not None else backend.NAME
