"""Reuse of CPU buffers: memory that is fresh for every call costs several times a copy in faults.

CUDA tensors come from torch's caching allocator and are not pooled here.
"""

from __future__ import annotations

import torch

# Private, checked on torch 2.13: the number of references to a storage, views included. FSDP2
# keeps views of what `allocate` returns (gradients are views of the reduce-scatter output), so
# only the storage knows when a buffer is free.
from torch._C import _storage_Use_Count

DEFAULT_MAX_BYTES = 1 << 30


class BufferPool:
    """Hands out CPU tensors, reusing the memory of those that nobody refers to any more.

    At most ``max_bytes`` are kept; beyond that, tensors come fresh and are not kept.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffers: list[torch.Tensor] = []  # uint8, most recently used last

    @property
    def kept_bytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised (numel,) tensor that nobody else refers to."""
        num_bytes = numel * dtype.itemsize
        if device.type != "cpu" or num_bytes == 0 or num_bytes > self.max_bytes:
            return torch.empty(numel, dtype=dtype, device=device)
        for index, buffer in enumerate(self._buffers):
            # Not more than twice the size, so that small requests do not hold large buffers.
            if num_bytes <= buffer.numel() <= 2 * num_bytes + 4096 and _is_free(buffer):
                self._buffers.append(self._buffers.pop(index))
                break
        else:
            self._make_room(num_bytes)
            with torch.inference_mode(False):  # for whoever takes it next, training or not
                buffer = torch.empty(num_bytes, dtype=torch.uint8)
            if self.kept_bytes + num_bytes <= self.max_bytes:
                self._buffers.append(buffer)
        with torch.inference_mode(False):
            return buffer[:num_bytes].view(dtype)

    def _make_room(self, num_bytes: int) -> None:
        excess = self.kept_bytes + num_bytes - self.max_bytes
        for buffer in [b for b in self._buffers if _is_free(b)]:
            if excess <= 0:
                return
            excess -= buffer.numel()
            self._buffers = [b for b in self._buffers if b is not buffer]


def _is_free(buffer: torch.Tensor) -> bool:
    # The pool's tensor and the storage object made here are the only two references.
    return int(_storage_Use_Count(buffer.untyped_storage()._cdata)) <= 2


pool = BufferPool()
