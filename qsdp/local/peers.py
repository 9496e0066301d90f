"""With whom a rank synchronises: the ranks of other replicas that hold its part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from qsdp.agreement import all_gather_json, require_agreement
from qsdp.exchange import Route, route, run
from qsdp.stages import all_reduce_stages
from qsdp.stats import CommMeter
from qsdp.wire import Segment, WireLayout, wire_layout

_DIGEST_BYTES = 32  # that ranks exchange when they agree


class Peers:
    """The ranks of one process group, and what it costs to talk to them.

    Args:
        group: the ranks, one of each replica.
        device: of what travels.
        key: of the random rounding, equal on all of them.
        checksums: whether rows in full precision carry one.

    Attributes:
        way: of rows between them.
        meter: counts all that is sent, over changes of the group.

    Raises:
        TypeError: ``group`` is none.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, key: int, checksums: bool
    ) -> None:
        self.device, self._key, self._checksums = device, key, checksums
        self.meter = CommMeter()
        self.meter.timing = True  # synchronisations are too rare for it to cost anything
        self.use(group)

    def use(self, group: dist.ProcessGroup) -> None:
        """Talk to the ranks of another group from now on."""
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "ReplicaSync takes the process group of one rank of each replica third, or a "
                f"Meeting, got {type(group).__name__}"
            )
        self.group = group
        self.way: Route = route(group, self.device)

    @property
    def size(self) -> int:
        return self.way.size

    def agree(self, facts: Mapping[str, Any], error: str | None = None) -> None:
        """:func:`qsdp.agreement.require_agreement` between replicas, counted."""
        require_agreement(facts, error, self.group, self.device)
        self.meter.count_rows(_DIGEST_BYTES, self.size, stock=0)

    def ask(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in the order of the group."""
        return all_gather_json(value, self.group, self.device)

    def average(
        self,
        flat: torch.Tensor,
        layout: WireLayout,
        residuals: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Average ``flat``, (numel,) float32, over the ranks in place, as its layout says.

        Args:
            residuals: of both ends, changed in place.
            async_op: return what finishes it.
        """
        factors = (1.0, float(self.size))
        stages = all_reduce_stages(
            flat, self.way, layout, factors, self._key, self.meter, residuals
        )
        return run(stages, async_op, self.meter, flat.device, (flat,))

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """The average in full precision, in place; and ``flat``, (numel,) float32, itself."""
        layout = wire_layout((Segment(flat.numel()),), torch.float32, self._checksums)
        self.average(flat, layout)
        return flat

    def mean_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean of one tensor over replicas, in its own dtype, as a copy."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not local.is_floating_point():
            return tensor.clone()
        flat = local.detach().flatten().to(self.device, torch.float32, copy=True)
        found = self.mean(flat).view(local.shape).to(local)
        if isinstance(tensor, DTensor):
            return DTensor.from_local(
                *(found, tensor.device_mesh, tensor.placements),
                run_check=False, shape=tensor.shape, stride=tensor.stride(),
            )  # fmt: skip
        return found

    def give(self, flat: torch.Tensor, giver: int) -> None:
        """Set ``flat``, (numel,) float32, to that of one rank of the group, bit for bit.

        As a sum to which the others add zeros, so that it travels and is counted as all else.
        """
        if self.way.rank != giver:
            flat.zero_()
        layout = wire_layout((Segment(flat.numel()),), torch.float32, self._checksums)
        stages = all_reduce_stages(flat, self.way, layout, (1.0, 1.0), 0, self.meter, None)
        run(stages, False, self.meter, flat.device, (flat,))
