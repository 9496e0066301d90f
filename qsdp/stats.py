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
    is what FSDP2's own collective would have sent for the same calls. ``all_reduce`` is that of
    gradients between HSDP's replicas, where it is quantized. ``inter_node_sent`` is the part of
    what was sent that left the node. Times are wall time on CPU and stream time on CUDA;
    ``network_s`` includes waiting for the other ranks.
    """

    all_gather_sent: int = 0
    all_gather_received: int = 0
    reduce_scatter_sent: int = 0
    reduce_scatter_received: int = 0
    all_reduce_sent: int = 0
    all_reduce_received: int = 0
    stock_all_gather: int = 0
    stock_reduce_scatter: int = 0
    stock_all_reduce: int = 0
    inter_node_sent: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    network_s: float = 0.0

    @property
    def sent(self) -> int:
        """Bytes sent by all collectives."""
        return self.all_gather_sent + self.reduce_scatter_sent + self.all_reduce_sent

    @property
    def received(self) -> int:
        """Bytes received by all collectives."""
        return self.all_gather_received + self.reduce_scatter_received + self.all_reduce_received

    @property
    def stock_sent(self) -> int:
        """Bytes that stock FSDP2 would have sent."""
        return self.stock_all_gather + self.stock_reduce_scatter + self.stock_all_reduce

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than stock; 1.0 if nothing was sent."""
        return self.stock_sent / self.sent if self.sent else 1.0

    def __add__(self, other: CommStats) -> CommStats:
        return CommStats(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


class CommMeter:
    """Counts one module's collectives of one kind. Not thread-safe.

    Args:
        ranks_per_node: how many ranks of the group share this rank's node.
    """

    def __init__(self, ranks_per_node: int = 1) -> None:
        self.ranks_per_node = ranks_per_node
        self.reset()

    def reset(self) -> None:
        self.sent = self.received = self.stock = self.inter_node = 0
        self._seconds: dict[Phase, float] = {"encode": 0.0, "network": 0.0, "decode": 0.0}
        # CUDA phases whose events have not been read yet, oldest first.
        self._pending: deque[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = deque()

    def count(self, *, moved: int, stock: int, inter_node: int) -> None:
        """Add one collective: bytes to others (as many came from them), of these to other nodes,
        and what stock would have sent."""
        self.sent += moved
        self.received += moved
        self.stock += stock
        self.inter_node += inter_node

    def count_rows(self, row_bytes: int, num_ranks: int, *, stock: int) -> None:
        """Add one flat exchange: a row to every other rank of the group."""
        elsewhere = num_ranks - min(self.ranks_per_node, num_ranks)
        self.count(moved=(num_ranks - 1) * row_bytes, stock=stock, inter_node=elsewhere * row_bytes)

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
