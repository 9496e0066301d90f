"""One interface, several implementations side by side; ``reference`` defines the result.

A backend is a module with the functions of :class:`Backend` (contracts in
:mod:`qsdp.kernels.reference`, for changes in
:mod:`qsdp.kernels.changes`). :func:`backend_for` picks one by device, at the first call.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Protocol

import torch

from qsdp.kernels import reference
from qsdp.wire import WireLayout


class Coder(Protocol):
    """Writes and reads the coded forms of rows: :mod:`qsdp.kernels.coded` has the contracts."""

    def compact(self, row: torch.Tensor, layout: WireLayout, coded: torch.Tensor) -> int: ...

    def expand(self, coded: torch.Tensor, layout: WireLayout, row: torch.Tensor) -> bool: ...


class Backend(Protocol):
    """What every module in this folder that quantizes provides."""

    NAME: str

    def encode(
        self,
        values: torch.Tensor,
        layout: WireLayout,
        wire: torch.Tensor,
        *,
        key: int,
        first_row: int = 0,
        sender: int = 0,
    ) -> None: ...

    def decode(
        self,
        wire: torch.Tensor,
        layout: WireLayout,
        values: torch.Tensor,
        *,
        first_sender: int = 0,
        sender_step: int = 1,
    ) -> None: ...

    def decode_sum(
        self,
        wire: torch.Tensor,
        layout: WireLayout,
        out: torch.Tensor,
        *,
        multiply: float = 1.0,
        divide: float = 1.0,
    ) -> None: ...

    def encode_changes(
        self,
        values: torch.Tensor,
        layout: WireLayout,
        wire: torch.Tensor,
        kept: torch.Tensor,
        kept_layout: WireLayout,
        stats: torch.Tensor,
        *,
        key: int,
        first_row: int = 0,
        sender: int = 0,
    ) -> None: ...

    def add_changes(
        self,
        wire: torch.Tensor,
        layout: WireLayout,
        kept: torch.Tensor,
        kept_layout: WireLayout,
        values: torch.Tensor,
        *,
        first_sender: int = 0,
        sender_step: int = 1,
    ) -> None: ...


def backend_for(device: torch.device) -> Backend:
    """The fastest backend that works for tensors on ``device``."""
    if device.type == "cpu":
        return _cpu_backend()
    return _triton_backend() if device.type == "cuda" else reference


@lru_cache(maxsize=1)
def coder() -> Coder:
    """The native one, or the reference, of which the warning of :func:`backend_for` tells too."""
    from qsdp.kernels import coded, cpu, cpu_coded

    return cpu_coded if _cpu_backend() is cpu else coded


@lru_cache(maxsize=1)
def _cpu_backend() -> Backend:
    """The native kernels; without them the reference and, once, a warning."""
    from qsdp.kernels import cpu

    if cpu.available():
        return cpu
    warnings.warn(f"{cpu.why_unavailable()}. The slow reference runs.", stacklevel=3)
    return reference


@lru_cache(maxsize=1)
def _triton_backend() -> Backend:
    """The Triton kernels, also on ROCm; where they do not run the reference and, once, a warning.

    Whether they run shows at the first launch alone: Triton builds a launcher with a C compiler.
    """
    try:
        from qsdp.kernels import triton_gpu

        triton_gpu.try_out(torch.device("cuda"))
    except ImportError as error:
        text = f"Triton is not there ({error}); install it: pip install triton."
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        text = f"Triton's kernels do not run here ({what}): they need a C compiler (gcc or clang, "
        text += "or what CC names) and a GPU that Triton supports."
    else:
        return triton_gpu
    warnings.warn(f"{text} The slow reference runs on the GPU.", stacklevel=3)
    return reference
