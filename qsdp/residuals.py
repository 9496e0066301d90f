"""What ranks remember of gradients for error feedback: :class:`Residuals`.

Plain tensors; nothing here knows of FSDP or of process groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qsdp.rows import decode_rows, encode_rows
from qsdp.ways import Feedback
from qsdp.wire import WireLayout, tensor_layout

_PLAIN: Mapping[str, Feedback] = {}


class Residuals:
    """What quantization lost of each parameter, to be added to what is quantized next.

    By name, so that it does not matter which parameters are reduced together, and how often.

    Args:
        ways: of parameters that keep it otherwise than whole in float32.
    """

    def __init__(self, ways: Mapping[str, Feedback] = _PLAIN) -> None:
        self._ways = ways
        self._of: dict[str, torch.Tensor] = {}
        self._together: dict[tuple[str | None, ...], torch.Tensor] = {}

    def together(
        self, names: tuple[str | None, ...], layout: WireLayout, num_rows: int, device: torch.device
    ) -> torch.Tensor:
        """Residuals of segments that are quantized as one: (num_rows, layout.numel) float32.

        What is to be added, so times ``decay``. The result is remembered, and changed in place by
        whoever quantizes; then :meth:`keep` takes what has a memory of its own.

        Args:
            names: of the segments; None for those that take no feedback, whose part is zero.
        """
        flat = self._together.get(names)
        if flat is None or flat.shape != (num_rows, layout.numel):
            flat = self._join(names, layout, num_rows, device)
        for name, span in zip(names, layout.spans, strict=True):
            part = flat[:, span.values]
            way = self._ways.get(name) if name is not None else None
            if name is None:
                part.zero_()
            elif way is not None and way.decay != 1.0:
                part *= way.decay
        return flat

    def _join(
        self, names: tuple[str | None, ...], layout: WireLayout, num_rows: int, device: torch.device
    ) -> torch.Tensor:
        # Sets that overlap are those of before: DDP rebuilds its buckets, layers come and go.
        mine = {name for name in names if name is not None}
        self._together = {k: v for k, v in self._together.items() if not mine & {*k}}
        with torch.inference_mode(False):
            flat = torch.zeros(num_rows, layout.numel, device=device)
        self._together[names] = flat
        for name, span in zip(names, layout.spans, strict=True):
            if name is None:
                continue
            part, known = flat[:, span.values], self._of.get(name)
            packed = self._layout(name, span.segment.numel)
            if packed is not None:
                if known is not None and known.shape == (num_rows, packed.row_bytes):
                    decode_rows(known, packed, part, own=0)
                continue
            if known is not None and known.shape == part.shape:
                part.copy_(known)
            self._of[name] = part
        return flat

    def keep(self, names: tuple[str | None, ...], layout: WireLayout) -> None:
        """Pack what :meth:`together` gave for the same names where it has a memory of its own.

        Others stay as they are. The tensor must not be used after it.
        """
        if not any(name is not None and self._memory(name) for name in names):
            return
        flat = self._together.pop(names)
        for name, span in zip(names, layout.spans, strict=True):
            if name is None:
                continue
            part = flat[:, span.values]
            packed = self._layout(name, span.segment.numel)
            if packed is None:
                self._of[name] = part.clone()  # the rest of the tensor is to go
                continue
            with torch.inference_mode(False):
                size = len(part), packed.row_bytes
                wire = torch.empty(size, dtype=torch.uint8, device=part.device)
            encode_rows(part, packed, wire, key=0)
            self._of[name] = wire

    def blank(self, name: str, num_rows: int, numel: int, device: torch.device) -> torch.Tensor:
        """What :meth:`state` has of a parameter of which nothing was lost yet."""
        packed = self._layout(name, numel)
        if packed is None:
            return torch.zeros(num_rows, numel, device=device)
        return torch.zeros(num_rows, packed.row_bytes, dtype=torch.uint8, device=device)

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of each parameter's residual, (num_rows, numel) float32 or as it is packed."""
        return {name: part.clone() for name, part in self._of.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Continue with copies of what :meth:`state` gave; parameters it lacks start from zero."""
        self._together.clear()
        self._of = {name: part.clone() for name, part in state.items()}

    def _memory(self, name: str) -> bool:
        way = self._ways.get(name)
        return way is not None and way.memory is not None

    def _layout(self, name: str, numel: int) -> WireLayout | None:
        """In which a parameter's residual is kept; None for float32."""
        return tensor_layout(numel, self._ways[name].memory) if self._memory(name) else None
