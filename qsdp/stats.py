"""Bytes on the wire and where the time of a collective goes."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

# Private, checked on torch 2.11 to 2.15: the public record_function costs as much while nobody
# profiles as while somebody does.
from torch._C._autograd import _profiler_enabled

from qsdp.columns import format_columns

Phase = Literal["encode", "network", "decode"]

_NOTHING: AbstractContextManager[None] = nullcontext()
_MOST_EVENTS = 64  # that are kept before somebody looks which of them have passed


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
    ``inter_node_sent`` is the part of what was sent that left the node. Times are counted from
    :func:`qsdp.observe_comms` on: wall time on CPU and stream time on CUDA, of what the device has
    finished; ``network_s`` includes waiting for the other ranks.

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
        label: of the module, in a profiler's record.

    Attributes:
        timing: whether phases are timed; off until somebody asks, because it costs the host time.
    """

    def __init__(self, ranks_per_node: int = 1, label: str = "") -> None:
        self.ranks_per_node, self.label, self.timing = ranks_per_node, label, False
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self.calls = self.sent = self.stock = self.inter_node = 0
        self._seconds: dict[Phase, float] = {"encode": 0.0, "network": 0.0, "decode": 0.0}
        # CUDA phases whose events have not been read yet, oldest first.
        self._pending: deque[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = deque()

    def count_rows(self, row_bytes: int, num_ranks: int, *, stock: int) -> None:
        """Add one flat exchange: a row to every other rank, and what stock would have sent."""
        self.count_sent((num_ranks - 1) * row_bytes, num_ranks, stock=stock)

    def count_sent(self, sent: int, num_ranks: int, *, stock: int) -> None:
        """The same for rows of any sizes, which leave the node in proportion to who is elsewhere.

        Args:
            sent: bytes to all other ranks.
        """
        elsewhere = num_ranks - min(self.ranks_per_node, num_ranks)
        between = sent * elsewhere // max(num_ranks - 1, 1)
        self.count_hops(between, sent - between, stock=stock)

    def count_ring(self, sent: int, num_ranks: int) -> None:
        """Add a collective of the backend's own, as a ring of ranks in order.

        A node then passes on to others what one of its ranks sends: a share of it for each rank.
        """
        per_node = min(self.ranks_per_node, num_ranks)
        between = sent // per_node if per_node < num_ranks else 0
        self.count_hops(between, sent - between, stock=sent)

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

    def phase(self, name: Phase, device: torch.device) -> AbstractContextManager[None]:
        """Time the body as ``name``, if times are asked for, and show it to a profiler.

        Nothing synchronizes: on CUDA it takes events.
        """
        if not self.timing and not _profiler_enabled():
            return _NOTHING
        return _Phase(self, name, device)

    def seconds(self, name: Phase) -> float:
        """Seconds spent in a phase, of what the device has finished."""
        while self._pending and self._pending[0][2].query():
            phase, begin, end = self._pending.popleft()
            self._seconds[phase] += begin.elapsed_time(end) / 1e3
        return self._seconds[name]

    def add(self, name: Phase, seconds: float) -> None:
        """Add to the time of a phase."""
        self._seconds[name] += seconds

    def add_events(self, name: Phase, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Add the time between two events, once the device has reached them."""
        self._pending.append((name, begin, end))
        if len(self._pending) > _MOST_EVENTS:
            self.seconds(name)


class _Phase(AbstractContextManager[None]):
    """One phase of one call."""

    def __init__(self, meter: CommMeter, name: Phase, device: torch.device) -> None:
        self._meter, self._name, self._on_cuda = meter, name, device.type == "cuda"
        word = "exchange" if name == "network" else name
        self._record = torch.profiler.record_function(f"qsdp.{word} {meter.label}".rstrip())

    def __enter__(self) -> None:
        self._record.__enter__()
        if self._on_cuda and self._meter.timing:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()
        self._start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        if self._meter.timing and not self._on_cuda:
            self._meter.add(self._name, time.perf_counter() - self._start)
        elif self._meter.timing:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._meter.add_events(self._name, self._begin, end)
        self._record.__exit__(*error)
