"""When a unit's levels are learned, and on which of its values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from qsdp.levels import LevelSchedule, learn_levels
from qsdp.units import Unit
from qsdp.wire import WireLayout


@dataclass
class LevelLearner:
    """Learns the tables of one unit when its schedule says so; all ranks of its group alike.

    Attributes:
        reductions: reduce-scatters of the unit so far: its clock.
        learned_at: the clock at the last tables, by direction.
    """

    unit: Unit
    schedule: LevelSchedule
    reductions: int = 0
    learned_at: dict[str, int] = field(default_factory=dict)

    def learn_if_due(
        self, direction: str, rows: torch.Tensor, layout: WireLayout, group: dist.ProcessGroup
    ) -> bool:
        """Learn from what is about to be encoded; a collective call if it is due.

        Args:
            direction: ``weights`` or ``gradients``.
            rows: (num_rows, layout.numel), this rank's values.
            layout: of one row.
            group: the ranks that share the tables.

        Returns:
            Whether there are new tables, so that layouts have changed.
        """
        if not self.schedule.due(self.reductions, self.learned_at.get(direction)):
            return False
        indices = range(len(self.unit.params)) if direction == "weights" else self.unit.trainable
        if len(indices) != len(layout.spans):
            return False  # some gradients are missing, and which is not known: another time
        quantizers = self.unit.quantizers[direction]
        learning = [
            (self.unit.names[i], span)
            for i, span in zip(indices, layout.spans, strict=True)
            if (quantizer := quantizers[i]) is not None and quantizer.learns
        ]
        self.learned_at[direction] = self.reductions
        if not learning:
            return False
        parts = [
            rows[:, span.value_offset : span.value_offset + span.segment.numel]
            for _, span in learning
        ]
        segments = [span.segment for _, span in learning]
        tables = learn_levels(parts, segments, self.schedule.method, group)
        names = [name for name, _ in learning]
        self.unit.learn(direction, dict(zip(names, tables, strict=True)))
        return True
