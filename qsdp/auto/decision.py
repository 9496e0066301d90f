"""What was decided, why, and what the alternatives were predicted to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from qsdp.config import QSDPConfig

STOCK = "stock"


class Link(NamedTuple):
    """What was measured between nodes, or between ranks where one node holds them all.

    Attributes:
        mbit_per_s: of a node's (or rank's) link in each direction, while both are busy.
        latency_ms: of the smallest exchange.
        between_nodes: which of the two.
    """

    mbit_per_s: float
    latency_ms: float
    between_nodes: bool

    def __str__(self) -> str:
        rate = f"{self.mbit_per_s:.3g} Mbit/s"
        if self.mbit_per_s >= 1000:
            rate = f"{self.mbit_per_s / 1000:.3g} Gbit/s"
        where = "nodes" if self.between_nodes else "ranks"
        return f"{rate} and {self.latency_ms:.2g} ms between {where}"


@dataclass(frozen=True)
class Decision:
    """A way to communicate, equal on all ranks. Printing it gives the line that rank 0 logs.

    Attributes:
        name: ``stock`` (FSDP2 as it is), ``unquantized`` (qsdp's transport), or a preset's; with
            ``-flat`` where nodes have several ranks and flat collectives are faster.
        config: what to apply; it quantizes nothing for ``stock``.
        predicted_s: of every way, seconds in which a step communicates, coding included, if nothing
            of it is hidden behind computation. Empty where nothing was measured.
        link: the slowest that was measured, or None.
        kept_bytes: memory that each rank needs for differences of weights.
        measured_s: how long measuring took.
        reason: why, where nothing was measured; empty otherwise.
    """

    name: str
    config: QSDPConfig
    predicted_s: Mapping[str, float]
    link: Link | None
    kept_bytes: int
    measured_s: float
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON values; what ``config`` holds is for :meth:`qsdp.QSDPConfig.from_json`."""
        found = asdict(self) | {"config": self.config.to_json()}
        return found | {"link": self.link._asdict() if self.link else None}

    def __str__(self) -> str:
        chosen = {STOCK: "full precision, FSDP2's own collectives"}.get(self.name, self.name)
        if self.reason:
            return f"auto chose {chosen}: {self.reason}"
        ordered = sorted(self.predicted_s, key=lambda name: self.predicted_s[name])
        steps = ", ".join(f"{name} {_seconds(self.predicted_s[name])}" for name in ordered)
        kept = f"; it keeps {self.kept_bytes / 1e6:.3g} MB on every rank" * bool(self.kept_bytes)
        return (
            f"auto chose {chosen}: measured {self.link} in {self.measured_s:.1f} s; predicted "
            f"communication of a step: {steps}{kept}"
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
