"""What a rank keeps of the weights that all ranks decoded last, for differences to it."""

from __future__ import annotations

from typing import Protocol

import torch

from qsdp.buffers import pool
from qsdp.kernels import backend_for
from qsdp.quantizer import Quantizer
from qsdp.wire import Segment, WireLayout, wire_layout


class KeptRows(Protocol):
    """The rows of all ranks, bit-identical on all of them.

    Attributes:
        numel: values in a row.
    """

    numel: int

    def read(self) -> torch.Tensor:
        """(num_ranks, numel), finite; overwritten by the next call of either method."""
        ...

    def keep(self, rows: torch.Tensor, changed: torch.Tensor | None = None) -> None:
        """Keep ``rows`` (num_ranks, numel); they become what is computed with, in place.

        Values that are not finite stay so in ``rows`` and are kept as zeros: a difference to them
        would never be finite again.

        Args:
            changed: (num_ranks,) bool: rows whose quantized values are not those that were read
                last; the others stay as they are, bit for bit. None: all.
        """
        ...

    def raw(self) -> torch.Tensor:
        """(num_ranks, ...): what is kept, as it lies in memory; not a copy."""
        ...


class PlainRows(KeptRows):
    """In the dtype that FSDP2 gathers."""

    def __init__(self, num_ranks: int, numel: int, dtype: torch.dtype, device: torch.device):
        self.numel = numel
        self._rows = torch.zeros(num_ranks, numel, dtype=dtype, device=device)

    def read(self) -> torch.Tensor:
        return self._rows

    def keep(self, rows: torch.Tensor, changed: torch.Tensor | None = None) -> None:
        torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0, out=self._rows)

    def raw(self) -> torch.Tensor:
        return self._rows


class QuantizedRows(KeptRows):
    """Encoded by a quantizer; rounding is deterministic, so all ranks keep the same bytes."""

    def __init__(self, num_ranks: int, layout: WireLayout, device: torch.device) -> None:
        self.numel, self.layout = layout.numel, layout
        self._wire = torch.zeros(num_ranks, layout.row_bytes, dtype=torch.uint8, device=device)
        self._spare = torch.empty_like(self._wire)
        self._full_precision = torch.zeros(layout.row_bytes, dtype=torch.bool, device=device)
        for span in layout.spans:
            if span.segment.bits is None:
                end = span.data_offset + span.segment.numel * layout.dtype.itemsize
                self._full_precision[span.data_offset : end] = True

    def read(self) -> torch.Tensor:
        num_ranks, device = len(self._wire), self._wire.device
        rows = pool.take(num_ranks * self.layout.numel, self.layout.dtype, device)
        rows = rows.view(num_ranks, -1)
        backend_for(device).decode(self._wire, self.layout, rows)
        # A sum is finite only if all of its terms are, and reads without writing.
        if device.type != "cpu" or not rows.sum().isfinite():
            torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0, out=rows)
        return rows

    def keep(self, rows: torch.Tensor, changed: torch.Tensor | None = None) -> None:
        backend, before = backend_for(self._wire.device), self._wire
        self._wire, self._spare = self._spare, before
        backend.encode(rows, self.layout, self._wire, key=0)
        # On CPUs it costs nothing to see that there is nothing to put back.
        if changed is not None and not (changed.device.type == "cpu" and changed.all()):
            # Encoding what was decoded may move a scale by its last bit.
            renewed = changed[:, None] | self._full_precision
            torch.where(renewed, self._wire, before, out=self._wire)
        backend.decode(self._wire, self.layout, rows)

    def raw(self) -> torch.Tensor:
        return self._wire


def rows_with_values(rows: torch.Tensor) -> torch.Tensor:
    """(num_rows,) bool: which of ``rows`` (num_rows, numel) hold anything but zeros."""
    if rows.device.type != "cpu":
        return rows.any(1)
    # Where rows hold something, the first values nearly always tell.
    return torch.tensor([bool(row[:1024].any()) or bool(row.any()) for row in rows])


def kept_rows(
    num_ranks: int, layout: WireLayout, quantizer: Quantizer | None, device: torch.device
) -> KeptRows:
    """For rows that travel in ``layout``; ``quantizer`` None keeps them as they are."""
    if quantizer is None:
        return PlainRows(num_ranks, layout.numel, layout.dtype, device)
    segments = tuple(_kept_segment(span.segment, quantizer) for span in layout.spans)
    return QuantizedRows(num_ranks, wire_layout(segments, layout.dtype), device)


def _kept_segment(travelling: Segment, quantizer: Quantizer) -> Segment:
    """What travels in full precision is kept so."""
    if travelling.bits is None:
        return travelling
    return quantizer.segment(travelling.numel)
