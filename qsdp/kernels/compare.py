"""Does a backend give the reference's bytes and values? Used by `qsdp check`, tests, benchmarks.

The reference always runs on the CPU: that is the specification. The formats that are compared are
:func:`qsdp.quantizer.every_format`, whoever asks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
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
        # Four are two by two where they are scattered; two are faster.
        values = example_values(4 if dtype == torch.float32 else 2, layout.numel, dtype)
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
    wire = torch.full((len(values), layout.row_bytes), 0x5A, dtype=torch.uint8)
    reference.encode(values, layout, wire, key=KEY, first_row=FIRST_ROW, sender=SENDER)
    found = _encode_mismatches(backend, layout, values, wire, device)
    for dtype, factors in zip(VALUE_DTYPES, FACTORS, strict=True):
        found += _decode_mismatches(backend, layout, wire, dtype, factors, device)
    plain = wire_layout(layout.segments, layout.dtype)  # changes need no maps of zeros
    for travels, kept in change_layouts(plain):
        found += change_mismatches(backend, travels, kept, values, device)
    return found


def change_layouts(layout: WireLayout) -> Iterator[tuple[WireLayout, WireLayout]]:
    """Pairs: a layout of changes, and of the same segments as they are kept.

    In the layout's formats it changes or is kept; the other one is in 8 bits, in other blocks.
    """
    others = (Quantizer(8, 1024, "nearest"), Quantizer(8, 96, "nearest"))
    segments = [
        s if s.quantizer is None else replace(s, quantizer=others[s.format.block_size > 96])
        for s in layout.segments
    ]
    other = wire_layout(tuple(segments), layout.dtype, mark=True)
    yield layout, other
    yield other, wire_layout(layout.segments, layout.dtype, mark=True)


def _encode_mismatches(
    backend: Backend,
    layout: WireLayout,
    values: torch.Tensor,
    expected: torch.Tensor,
    device: torch.device,
) -> list[str]:
    """Of contiguous rows, and of the same rows scattered in two dimensions."""
    found = []
    draws = {"key": KEY, "first_row": FIRST_ROW, "sender": SENDER}
    wire = torch.full_like(expected, 0xA5, device=device)
    backend.encode(values.to(device), layout, wire, **draws)
    if not torch.equal(wire.cpu(), expected):
        found.append("encode")
    scattered = Scattered(torch.full_like(expected, 0xA5), device, gap=24)
    backend.encode(Scattered(values, device, gap=3).rows, layout, scattered.rows, **draws)
    if not torch.equal(scattered.gathered(), expected) or not scattered.gaps_are_untouched():
        found.append("encode of scattered rows")
    return found


def _decode_mismatches(
    backend: Backend,
    layout: WireLayout,
    expected: torch.Tensor,
    dtype: torch.dtype,
    factors: dict[str, float],
    device: torch.device,
) -> list[str]:
    """Of rows, scattered rows, and their sum, in one dtype."""
    found, name = [], dtype_name(dtype)
    wire, scattered = expected.to(device), Scattered(expected, device, gap=24)
    wanted = torch.full((len(wire), layout.numel), 3.0, dtype=dtype)
    got = torch.full_like(wanted, 5.0, device=device)
    into = Scattered(got.cpu(), device, gap=3)
    senders = {"first_sender": SENDER, "sender_step": VALUE_DTYPES.index(dtype)}
    reference.decode(expected, layout, wanted, **senders)
    backend.decode(wire, layout, got, **senders)
    backend.decode(scattered.rows, layout, into.rows, **senders)
    raw = [span.values for span in layout.spans if span.segment.quantizer is None]
    for rows, what in ((got.cpu(), "decode"), (into.gathered(), "decode of scattered rows")):
        exact = all(torch.equal(_words(rows[:, part]), _words(wanted[:, part])) for part in raw)
        if not same_bits(rows, wanted) or (dtype == layout.dtype and not exact):
            found.append(f"{what} to {name}")
    if not into.gaps_are_untouched():
        found.append(f"decode to {name} writes between rows")
    # What is contiguous of a sum's rows is each row alone.
    for rows, what in (
        (wire, "decode_sum"),
        (scattered.rows[:, 0], "decode_sum of scattered rows"),
    ):
        reference.decode_sum(rows.cpu(), layout, wanted[0], **factors)
        backend.decode_sum(rows, layout, got[0], **factors)
        if not same_bits(got[0].cpu(), wanted[0]):
            found.append(f"{what} to {name}")
    return found


def change_mismatches(
    backend: Backend,
    layout: WireLayout,
    kept_layout: WireLayout,
    values: torch.Tensor,
    device: torch.device,
) -> list[str]:
    """Of what is kept, moved a little, and of other values; added, where some changes are zero."""
    found = []
    kept = torch.full((len(values), kept_layout.row_bytes), 0x5A, dtype=torch.uint8)
    reference.encode(values, kept_layout, kept, key=0)
    wire = torch.full((len(values), layout.row_bytes), 0x5A, dtype=torch.uint8)
    draws = {"key": KEY, "first_row": FIRST_ROW, "sender": SENDER}
    for row in (values[0] * 1.01, values[0].flip(0)):
        wanted = torch.full((len(layout.spans), 4), 7.0, dtype=torch.float64)
        stats = torch.full_like(wanted, 9.0, device=device)
        got = torch.full_like(wire[0], 0xA5, device=device)
        reference.encode_changes(row, layout, wire[0], kept[0], kept_layout, wanted, **draws)
        row, known = row.to(device), kept[0].to(device)
        backend.encode_changes(row, layout, got, known, kept_layout, stats, **draws)
        if not torch.equal(got.cpu(), wire[0]):
            found.append("encode_changes")
        if not same_stats(stats.cpu(), wanted):
            found.append("what encode_changes counts")
    changes = values.flip(1).clone()
    changes[:, changes.shape[1] // 4 : changes.shape[1] // 2] *= 0.0  # of both signs; not for NaN
    reference.encode(changes, layout, wire, **draws)
    sums, rows = torch.full_like(values, 3.0), torch.full_like(values, 5.0, device=device)
    held, senders = kept.to(device, copy=True), {"first_sender": SENDER, "sender_step": 2}
    reference.add_changes(wire, layout, kept, kept_layout, sums, **senders)
    backend.add_changes(wire.to(device), layout, held, kept_layout, rows, **senders)
    if not torch.equal(held.cpu(), kept):
        found.append("what add_changes keeps")
    if not same_bits(rows.cpu(), sums):
        found.append("add_changes")
    return found


def same_stats(stats: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether counts are equal, and sums of squares nearly; these only where float32 holds them."""
    sums, wanted = stats[:, :2], expected[:, :2]
    held = ((wanted > 1e-30) & (wanted < 1e30)) | (wanted == 0)
    near = torch.isclose(sums, wanted, rtol=1e-4, atol=0.0)
    return torch.equal(stats[:, 2:], expected[:, 2:]) and bool((near | ~held).all())


class Scattered:
    """Rows in two leading dimensions, in another order in memory and with gaps between them.

    Attributes:
        rows: a view (outer, inner, size) of a copy of (num_rows, size): row-major, it is the same.
    """

    def __init__(self, rows: torch.Tensor, device: torch.device, gap: int) -> None:
        num_rows, self.size = rows.shape
        outer = 2 if num_rows % 2 == 0 else 1
        shape = num_rows // outer, outer, self.size + gap
        self.memory = torch.ones(shape, dtype=rows.dtype, device=device)
        self.rows = self.memory.transpose(0, 1)[..., : self.size]
        self.rows.copy_(rows.unflatten(0, (outer, -1)))

    def gathered(self) -> torch.Tensor:
        """(num_rows, size) on the CPU."""
        return self.rows.cpu().flatten(0, 1)

    def gaps_are_untouched(self) -> bool:
        """Whether nobody has written there."""
        return bool((self.memory[..., self.size :] == 1).all())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit patterns, or both NaN, everywhere."""
    return bool(((_words(a) == _words(b)) | (a.isnan() & b.isnan())).all())


def _words(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def with_bits(form: Quantizer, bits: int, block_size: int = 1024) -> Quantizer:
    """A format at another block size, and at another width if it can have that one.

    Levels get a table that fits.
    """
    bits = (
        1 if form.scaling == "mean" else max(bits, 2 if form.scaling in ("symmetric", "l2") else 1)
    )
    levels = uneven_levels(bits) if form.levels else None
    return replace(form, bits=bits, block_size=block_size, levels=levels)


def example_layout(form: Quantizer, dtype: torch.dtype) -> WireLayout:
    """Segments of several block sizes, short last blocks, full precision between, maps of zeros."""
    parts = [
        Segment(2 * 1024 + 333, replace(form, block_size=1024)),
        Segment(77),
        Segment(97, replace(form, block_size=1024)),
        Segment(0),
        Segment(0, replace(form, block_size=32)),
        Segment(1250, replace(form, block_size=96)),
    ]
    return wire_layout(tuple(parts), dtype, zeros=True)


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
    rows[:, 3300:3400] = 0.0  # all rows, so sums too
    return rows.to(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def describe(backend: Backend) -> str:
    """The backend's name and, where it tells, its instruction set."""
    isa = getattr(backend, "isa", None)
    return f"{backend.NAME} ({isa()})" if isa is not None else backend.NAME
