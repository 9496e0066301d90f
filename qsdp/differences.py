"""Gathering weights as differences to what all ranks know of them (SDP4Bit)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from qsdp.buffers import pool
from qsdp.comms import ObservedAllGather, QuantizedAllGather
from qsdp.kept import KeptRows, full_precision_values, kept_rows
from qsdp.quantizer import Quantizer
from qsdp.two_level import NodeGroups
from qsdp.units import Unit
from qsdp.wire import WireLayout
from qsdp.works import done_work


class DifferenceAllGather(QuantizedAllGather):
    """All-gather of quantized differences to the weights that all ranks decoded last.

    The first gather moves the values themselves, raw; each later one what has changed since, the
    error of the one before included, so errors do not add up. In backward nothing is moved. A rank
    whose values have not changed since its last gather sends zeros: like values, differences give
    equal weights for equal masters, in all micro-batches and validations of a step.

    Args:
        memory: quantizer of what is kept; None keeps the gathered dtype.
    """

    def __init__(
        self,
        unit: Unit,
        key: int,
        nodes: NodeGroups | None = None,
        memory: Quantizer | None = None,
    ) -> None:
        super().__init__(unit, key, nodes)
        self.memory = memory
        self.kept: KeptRows | None = None
        self._start: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None  # what the last gather was about
        self._unquantized: tuple[WireLayout, torch.Tensor] | None = None

    def own_rows(self) -> dict[str, torch.Tensor]:
        """This rank's own: what is kept of its row, as it is kept, and what it last sent of.

        Nothing before the first gather.
        """
        known = self._start
        if self.kept is not None:
            known = self.kept.raw()[dist.get_rank(self.unit.group)]
        found = {"known": known, "sent": self._sent}
        return {name: row for name, row in found.items() if row is not None}

    def start_from(self, known: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Let the next gather take what :meth:`own_rows` gave for kept; on every rank.

        Raises:
            ValueError: the row was kept in another way than this model keeps it.
        """
        if (known.dtype == torch.uint8) != (self.memory is not None):
            raise ValueError(
                f"load_comm_tensors: the row of {self.unit.path!r} was kept with another "
                "weight_memory: apply the configuration that it was saved with first"
            )
        self._start, self.kept = known.clone(), None
        self._sent = None if sent is None else sent.clone()

    def gather(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        num_ranks, own = dist.get_world_size(group), dist.get_rank(group)
        output = output_tensor.view(num_ranks, -1)
        layout = self.unit.all_gather_layout(input_tensor.numel(), input_tensor.dtype)
        kept = self.kept
        if kept is None or kept.numel != input_tensor.numel():
            kept = kept_rows(num_ranks, layout, self.memory, input_tensor.device)
            if self._start is None:
                self._sent = input_tensor.clone()  # now: the input may lie in the output
                ObservedAllGather.__call__(self, output_tensor, input_tensor, group)
                kept.keep(output)
                self.kept = kept
                return done_work() if async_op else None
            row = self._start.to(kept.raw().dtype)
            ObservedAllGather.__call__(self, kept.raw().view(-1), row, group)
            self.kept, self._start = kept, None
        device = input_tensor.device
        if self.unit.in_backward:
            with self.meter.phase("decode", device):
                kept.read(output)
            self.meter.count_rows(0, num_ranks, stock=(num_ranks - 1) * input_tensor.nbytes)
            return done_work() if async_op else None
        with self.meter.phase("encode", device):
            change = self._change(input_tensor, kept, own, layout)
        self.exchange(output_tensor, change, group, layout)
        with self.meter.phase("decode", device):
            kept.add(output)
        return done_work() if async_op else None

    def _change(
        self, values: torch.Tensor, kept: KeptRows, own: int, layout: WireLayout
    ) -> torch.Tensor:
        """What to send: ``values`` less what is kept of them, zeros if that was sent already.

        In full precision the values themselves are sent. On GPUs nothing waits for the answer.
        """
        change = pool.take(values.numel(), values.dtype, values.device)
        kept.read(change, own)
        torch.sub(values, change, out=change)
        if self._sent is None or self._sent.shape != values.shape:
            self._sent = values.clone()
        else:
            # An infinity is equal to itself, but not known to the others.
            if values.device.type == "cpu":
                if torch.equal(values, self._sent) and change.isfinite().all():
                    change.zero_()
            else:
                send = (values != self._sent).any() | ~change.isfinite().all()
                change = torch.where(send, change, 0)
            self._sent.copy_(values)
        if self._unquantized is None or self._unquantized[0] is not layout:
            self._unquantized = (layout, full_precision_values(layout, values.device))
        raw = self._unquantized[1]
        change[raw] = values[raw]
        return change
