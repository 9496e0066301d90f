"""What a rank keeps of the weights that all ranks decoded last, for differences to it."""

from __future__ import annotations

from typing import Protocol

import torch

from qsdp.kernels import backend_for
from qsdp.quantizer import Quantizer
from qsdp.wire import Segment, WireLayout, wire_layout


class KeptRows(Protocol):
    """The rows of all ranks, bit-identical on all of them.

    Values that are not finite are kept as zeros: a difference to them would never be finite again.

    Attributes:
        numel: values in a row.
    """

    numel: int

    def read(self, out: torch.Tensor, row: int | None = None) -> None:
        """Write what is kept to ``out`` (num_ranks, numel), or of one row to (numel,)."""
        ...

    def keep(self, rows: torch.Tensor) -> None:
        """Keep ``rows`` (num_ranks, numel); they become what is computed with, in place."""
        ...

    def add(self, rows: torch.Tensor) -> None:
        """The same of what was kept and ``rows``, which hold differences.

        Where parameters travel in full precision they hold values. A row without differences stays
        as it is, bit for bit.
        """
        ...

    def raw(self) -> torch.Tensor:
        """(num_ranks, ...): what is kept, as it lies in memory; not a copy."""
        ...


class PlainRows(KeptRows):
    """In the dtype that FSDP2 gathers."""

    def __init__(self, num_ranks: int, layout: WireLayout, device: torch.device) -> None:
        self.numel = layout.numel
        self._raw_values = full_precision_values(layout, device)
        self._rows = torch.zeros(num_ranks, layout.numel, dtype=layout.dtype, device=device)

    def read(self, out: torch.Tensor, row: int | None = None) -> None:
        out.copy_(self._rows if row is None else self._rows[row])

    def keep(self, rows: torch.Tensor) -> None:
        torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0, out=self._rows)

    def add(self, rows: torch.Tensor) -> None:
        self._rows[:, self._raw_values] = 0
        rows += self._rows
        self.keep(rows)

    def raw(self) -> torch.Tensor:
        return self._rows


class QuantizedRows(KeptRows):
    """Encoded by a quantizer; rounding is deterministic, so all ranks keep the same bytes."""

    def __init__(self, num_ranks: int, layout: WireLayout, device: torch.device) -> None:
        self.numel, self.layout = layout.numel, layout
        self._raw_values = full_precision_values(layout, device)
        # Two, because accumulating reads the one while it writes the other.
        self._wire = torch.zeros(num_ranks, layout.row_bytes, dtype=torch.uint8, device=device)
        self._spare = torch.empty_like(self._wire)

    def read(self, out: torch.Tensor, row: int | None = None) -> None:
        backend = backend_for(self._wire.device)
        if row is None:
            backend.decode(self._wire, self.layout, out)
        else:
            backend.decode(self._wire[row : row + 1], self.layout, out.view(1, -1))
        # A sum is finite only if all of its terms are, and reads without writing.
        if out.device.type != "cpu" or not out.sum().isfinite():
            torch.nan_to_num(out, nan=0.0, posinf=0.0, neginf=0.0, out=out)

    def keep(self, rows: torch.Tensor) -> None:
        backend = backend_for(self._wire.device)
        backend.encode(rows, self.layout, self._wire, key=0)
        backend.decode(self._wire, self.layout, rows)

    def add(self, rows: torch.Tensor) -> None:
        changed = self._with_differences(rows)
        backend, before = backend_for(self._wire.device), self._wire
        backend.accumulate(rows, self.layout, before, self._spare)
        self._wire, self._spare = self._spare, before
        # On CPUs it costs nothing to see that there is nothing to put back.
        if changed.device.type == "cpu" and changed.all():
            return
        # Encoding what was decoded may move a scale by its last bit.
        renewed = changed[:, None].expand_as(before).clone()
        for span in self.layout.spans:
            if span.segment.bits is None:
                end = span.data_offset + span.segment.numel * rows.element_size()
                renewed[:, span.data_offset : end] = True
        torch.where(renewed, self._wire, before, out=self._wire)
        backend.decode(self._wire, self.layout, rows)

    def _with_differences(self, rows: torch.Tensor) -> torch.Tensor:
        """(num_ranks,) bool: rows that hold anything but zeros where they are quantized."""
        values = rows[:, self._raw_values]
        rows[:, self._raw_values] = 0
        if rows.device.type == "cpu":
            # Where rows hold something, the first values nearly always tell.
            changed = torch.tensor([bool(row[:1024].any()) or bool(row.any()) for row in rows])
        else:
            changed = rows.any(1)
        rows[:, self._raw_values] = values
        return changed

    def raw(self) -> torch.Tensor:
        return self._wire


def kept_rows(
    num_ranks: int, layout: WireLayout, quantizer: Quantizer | None, device: torch.device
) -> KeptRows:
    """For rows that travel in ``layout``; ``quantizer`` None keeps them as they are."""
    if quantizer is None:
        return PlainRows(num_ranks, layout, device)
    segments = tuple(_kept_segment(span.segment, quantizer) for span in layout.spans)
    return QuantizedRows(num_ranks, wire_layout(segments, layout.dtype), device)


def full_precision_values(layout: WireLayout, device: torch.device) -> torch.Tensor:
    """Indices of the values of a row that travel in full precision."""
    indices = [
        torch.arange(span.value_offset, span.value_offset + span.segment.numel)
        for span in layout.spans
        if span.segment.bits is None
    ]
    return (torch.cat(indices) if indices else torch.empty(0, dtype=torch.long)).to(device)


def _kept_segment(travelling: Segment, quantizer: Quantizer) -> Segment:
    """What travels in full precision is kept so."""
    if travelling.bits is None:
        return travelling
    return quantizer.segment(travelling.numel)
