"""Bytes on the wire and where the time of a collective goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from qsdp.columns import format_columns

Phase = Literal["encode", "network", "decode"]


@dataclass(frozen=True)
class ModuleStats:
    """One collective of one FSDP module.

    Attributes:
        module: its path.
        collective: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        parameters: of the module, and how many of them are quantized in this direction.
        way: how the quantized ones travel; ``stock`` where FSDP2's own collective does it.
        note: why something is not quantized; empty if nothing is to be said.
        calls: so far.
        sent: bytes to other ranks, and what stock would have sent.
        seconds: encoding, decoding and in the network.
    """

    module: str
    collective: str
    parameters: tuple[int, int]
    way: str
    note: str
    calls: int
    sent: tuple[int, int]
    seconds: float


@dataclass(frozen=True)
class CommStats:
    """What this rank's collectives moved and took; printing it shows a table by module.

    Bytes count what goes to other ranks (as much comes from them), not what a rank keeps for
    itself. ``stock_*`` is what FSDP2's own collective would have sent for the same calls.
    ``all_reduce`` is that of gradients between HSDP's replicas, where it is quantized.
    ``inter_node_sent`` is the part of what was sent that left the node. Times are wall time on CPU
    and stream time on CUDA; ``network_s`` includes waiting for the other ranks.

    Attributes:
        modules: the same by FSDP module and collective, of those that qsdp counts.
    """

    all_gather_sent: int = 0
    reduce_scatter_sent: int = 0
    all_reduce_sent: int = 0
    stock_all_gather: int = 0
    stock_reduce_scatter: int = 0
    stock_all_reduce: int = 0
    inter_node_sent: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    network_s: float = 0.0
    modules: tuple[ModuleStats, ...] = field(default=(), compare=False, repr=False)

    @property
    def sent(self) -> int:
        """Bytes sent by all collectives."""
        return self.all_gather_sent + self.reduce_scatter_sent + self.all_reduce_sent

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

    def __str__(self) -> str:
        header = ("module", "collective", "quantized", "way", "calls", "MB", "fewer", "ms")
        rows, notes = [], []
        for module in self.modules:
            (total, quantized), (sent, stock) = module.parameters, module.sent
            mark = ""
            if module.note:
                notes += [module.note] if module.note not in notes else []
                mark = f" [{notes.index(module.note) + 1}]"
            rows.append(
                (
                    *(module.module, module.collective, f"{quantized} of {total}"),
                    *(module.way + mark, str(module.calls), f"{sent / 1e6:.3f}"),
                    *(f"{stock / sent:.2f}x" if sent else "-", f"{1e3 * module.seconds:.1f}"),
                )
            )
        lines = [f"[{number}] {note}" for number, note in enumerate(notes, 1)]
        summary = f"sent {self.sent / 1e6:.3f} MB, {self.ratio:.2f} times fewer than stock FSDP2"
        return "\n".join([format_columns(header, rows), *lines, summary])


class CommMeter:
    """Counts one module's collectives of one kind. Not thread-safe.

    Args:
        ranks_per_node: how many ranks of the group share this rank's node.
    """

    def __init__(self, ranks_per_node: int = 1) -> None:
        self.ranks_per_node = ranks_per_node
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self.calls = self.sent = self.stock = self.inter_node = 0
        self._seconds: dict[Phase, float] = {"encode": 0.0, "network": 0.0, "decode": 0.0}
        # CUDA phases whose events have not been read yet, oldest first.
        self._pending: deque[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = deque()

    def count_rows(self, row_bytes: int, num_ranks: int, *, stock: int) -> None:
        """Add one flat exchange: a row to every other rank, and what stock would have sent."""
        elsewhere = num_ranks - min(self.ranks_per_node, num_ranks)
        self.count_hops(elsewhere * row_bytes, (num_ranks - 1 - elsewhere) * row_bytes, stock=stock)

    def count_hops(self, between: int, inside: int, *, stock: int) -> None:
        """Add one exchange: bytes to other nodes, bytes inside this one, and stock's."""
        self.calls += 1
        self.sent += between + inside
        self.stock += stock
        self.inter_node += between

    def read(self, name: str) -> CommStats:
        """The counts, as those of ``all_gather``, ``reduce_scatter`` or ``all_reduce``."""
        counts: dict[str, Any] = {f"{name}_sent": self.sent, f"stock_{name}": self.stock}
        return CommStats(
            **counts,
            inter_node_sent=self.inter_node,
            encode_s=self.seconds("encode"),
            decode_s=self.seconds("decode"),
            network_s=self.seconds("network"),
        )

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
