"""What ranks remember of gradients for error feedback: :class:`Residuals`.

Plain tensors; nothing here knows of FSDP or of process groups.
"""

from __future__ import annotations

import torch

from qsdp.wire import WireLayout


class Residuals:
    """What quantization lost of each parameter, to be added to what is quantized next.

    By name, so that it does not matter which parameters are reduced together, and how often.
    """

    def __init__(self) -> None:
        self._of: dict[str, torch.Tensor] = {}
        self._together: dict[tuple[str | None, ...], torch.Tensor] = {}

    def together(
        self, names: tuple[str | None, ...], layout: WireLayout, num_rows: int, device: torch.device
    ) -> torch.Tensor:
        """Residuals of segments that are quantized as one: (num_rows, layout.numel) float32.

        The result is remembered, and changed in place by whoever quantizes.

        Args:
            names: of the segments; None for those that take no feedback, whose part is zero.
        """
        flat = self._together.get(names)
        if flat is None or flat.shape != (num_rows, layout.numel):
            # Sets that overlap are those of before: DDP rebuilds its buckets, layers come and go.
            mine = {name for name in names if name is not None}
            self._together = {k: v for k, v in self._together.items() if not mine & {*k}}
            with torch.inference_mode(False):
                flat = torch.zeros(num_rows, layout.numel, device=device)
            self._together[names] = flat
            for name, span in zip(names, layout.spans, strict=True):
                if name is None:
                    continue
                part = flat[:, span.values]
                known = self._of.get(name)
                if known is not None and known.shape == part.shape:
                    part.copy_(known)
                self._of[name] = part
        for name, span in zip(names, layout.spans, strict=True):
            if name is None:
                flat[:, span.values] = 0
        return flat

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of each parameter's residual, (num_rows, numel) float32."""
        return {name: part.clone() for name, part in self._of.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Continue with copies of what :meth:`state` gave; parameters it lacks start from zero."""
        self._together.clear()
        self._of = {name: part.clone() for name, part in state.items()}
