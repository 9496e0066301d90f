"""An average under way while its replica goes on (``SyncConfig.overlap_steps``)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from qsdp.exchange import Pending
from qsdp.local.parts import Part


class Flight:
    """One part that was sent and has not been taken up.

    Args:
        part: what was sent.
        start: (numel,) float32, its values when it was.
        average: (numel,) float32, what :meth:`Part.moved` gave; the average once it has arrived.
        sent: after which step.
        arrives: after which step it is taken up.
        work: to wait for; None once it has arrived.
    """

    def __init__(
        self,
        part: Part,
        start: torch.Tensor,
        average: torch.Tensor,
        sent: int,
        arrives: int,
        work: dist.Work | None,
    ) -> None:
        self.part, self.start, self.average = part, start, average
        self.sent, self.arrives, self.work = sent, arrives, work
        self._advanced = False

    @property
    def half_way(self) -> int:
        """After which step its first exchange is to be through, and the second starts."""
        return self.sent + (self.arrives - self.sent + 1) // 2

    def advance(self) -> None:
        """On CPUs nothing moves by itself from one exchange to the next: once, wait and go on."""
        if isinstance(self.work, Pending) and not self._advanced:
            self._advanced = True
            self.work.advance()

    def wait(self) -> None:
        """Wait for the average; may be called repeatedly."""
        if self.work is not None:
            self.work.wait()
            self.work = None
