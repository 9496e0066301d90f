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

    def keep(self, rows: torch.Tensor) -> None:
        """Keep ``rows`` (num_ranks, numel); they become what is computed with, in place.

        Values that are not finite stay so in ``rows`` and are kept as zeros: a difference to them
        would never be finite again.
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

    def keep(self, rows: torch.Tensor) -> None:
        torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0, out=self._rows)

    def raw(self) -> torch.Tensor:
        return self._rows


class QuantizedRows(KeptRows):
    """Encoded by a quantizer; rounding is deterministic, so all ranks keep the same bytes."""

    def __init__(self, num_ranks: int, layout: WireLayout, device: torch.device) -> None:
        self.numel, self.layout = layout.numel, layout
        self._wire = torch.zeros(num_ranks, layout.row_bytes, dtype=torch.uint8, device=device)

    def read(self) -> torch.Tensor:
        num_ranks, device = len(self._wire), self._wire.device
        rows = pool.take(num_ranks * self.layout.numel, self.layout.dtype, device)
        rows = rows.view(num_ranks, -1)
        backend_for(device).decode(self._wire, self.layout, rows)
        return torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0, out=rows)

    def keep(self, rows: torch.Tensor) -> None:
        backend = backend_for(self._wire.device)
        backend.encode(rows, self.layout, self._wire, key=0)
        backend.decode(self._wire, self.layout, rows)

    def raw(self) -> torch.Tensor:
        return self._wire


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
