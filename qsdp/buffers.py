"""Reuse of CPU buffers: memory that is fresh for every call costs several times a copy in faults.

CUDA tensors come from torch's caching allocator and are not pooled here.
"""

from __future__ import annotations

from threading import Lock

import torch

# Private, checked on torch 2.9 to 2.15: the number of references to a storage, views included.
# FSDP2 keeps views of what `allocate` returns (gradients are views of the reduce-scatter output),
# so only the storage knows when a buffer is free.
from torch._C import _storage_Use_Count

DEFAULT_MAX_BYTES = 1 << 30
_STEPS = 3  # sizes between one power of two and the next are 2^_STEPS: at most an eighth is unused


class BufferPool:
    """Hands out CPU tensors, reusing the memory of those that nobody refers to any more.

    At most ``max_bytes`` are kept; beyond that, tensors come fresh and are not kept.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.kept_bytes = 0  # of all buffers, in use or not
        self._by_size: dict[int, list[torch.Tensor]] = {}  # uint8
        self._lock = Lock()  # backward may run in another thread than forward

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised (numel,) tensor that nobody else refers to."""
        num_bytes = numel * dtype.itemsize
        if device.type != "cpu" or num_bytes == 0 or num_bytes > self.max_bytes:
            return torch.empty(numel, dtype=dtype, device=device)
        with self._lock:
            if not torch.is_inference_mode_enabled():
                return self._buffer(_size_class(num_bytes))[:num_bytes].view(dtype)
            # Inference tensors are of no use to whoever takes the buffer next.
            with torch.inference_mode(False):
                return self._buffer(_size_class(num_bytes))[:num_bytes].view(dtype)

    def _buffer(self, size: int) -> torch.Tensor:
        buffers = self._by_size.setdefault(size, [])
        for buffer in buffers:
            if _is_free(buffer):
                return buffer
        self._make_room(size)
        buffer = torch.empty(size, dtype=torch.uint8)
        if self.kept_bytes + size <= self.max_bytes:
            buffers.append(buffer)
            self.kept_bytes += size
        return buffer

    def _make_room(self, size: int) -> None:
        """Forget free buffers of other sizes until there is room, the least recently made first."""
        for other, buffers in list(self._by_size.items()):
            if self.kept_bytes + size <= self.max_bytes:
                return
            in_use = [buffer for buffer in buffers if not _is_free(buffer)]
            self.kept_bytes -= other * (len(buffers) - len(in_use))
            self._by_size[other] = in_use


def _size_class(num_bytes: int) -> int:
    """The size of the buffer for so many bytes, rounded up so that similar requests share it."""
    step = 1 << max((num_bytes - 1).bit_length() - _STEPS - 1, 6)
    return -(-num_bytes // step) * step


def _is_free(buffer: torch.Tensor) -> bool:
    # The pool's tensor and this object are the only two references. It must be held: torch 2.9 lets
    # go of one that nobody holds before it is counted.
    storage = buffer.untyped_storage()
    return int(_storage_Use_Count(storage._cdata)) <= 2


pool = BufferPool()
