"""Bytes on the wire and where the time of a collective goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal

import torch

Phase = Literal["encode", "network", "decode"]


@dataclass(frozen=True)
class CommStats:
    """What this rank's collectives moved and took, summed over a model's FSDP modules.

    Bytes count what crosses to or from other ranks, not what a rank keeps for itself. ``stock_*``
    is what FSDP2's own collective would have sent for the same calls. Times are wall time on CPU
    and stream time on CUDA; ``network_s`` includes waiting for the other ranks.
    """

    all_gather_sent: int = 0
    all_gather_received: int = 0
    reduce_scatter_sent: int = 0
    reduce_scatter_received: int = 0
    stock_all_gather: int = 0
    stock_reduce_scatter: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    network_s: float = 0.0

    @property
    def sent(self) -> int:
        """Bytes sent in both directions."""
        return self.all_gather_sent + self.reduce_scatter_sent

    @property
    def received(self) -> int:
        """Bytes received in both directions."""
        return self.all_gather_received + self.reduce_scatter_received

    @property
    def stock_sent(self) -> int:
        """Bytes that stock FSDP2 would have sent in both directions."""
        return self.stock_all_gather + self.stock_reduce_scatter

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than stock; 1.0 if nothing was sent."""
        return self.stock_sent / self.sent if self.sent else 1.0

    def __add__(self, other: CommStats) -> CommStats:
        return CommStats(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


class CommMeter:
    """Counts one module's collectives in one direction. Not thread-safe."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sent = self.received = self.stock = 0
        self._seconds: dict[Phase, float] = {"encode": 0.0, "network": 0.0, "decode": 0.0}
        # CUDA phases whose events have not been read yet, oldest first.
        self._pending: deque[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = deque()

    def count(self, *, sent: int, received: int, stock: int) -> None:
        """Add one collective: bytes to others, from others, and what stock would have sent."""
        self.sent += sent
        self.received += received
        self.stock += stock

    @contextmanager
    def phase(self, name: Phase, device: torch.device) -> Iterator[None]:
        """Time the body as ``name``, with events on CUDA so that nothing synchronizes."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - start
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._pending.append((name, begin, end))
        while self._pending and self._pending[0][2].query():
            self._fold()

    def seconds(self, name: Phase) -> float:
        """Seconds spent in a phase; waits for CUDA work that was recorded."""
        while self._pending:
            self._pending[0][2].synchronize()
            self._fold()
        return self._seconds[name]

    def _fold(self) -> None:
        name, begin, end = self._pending.popleft()
        self._seconds[name] += begin.elapsed_time(end) / 1e3
