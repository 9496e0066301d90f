"""The comm objects that FSDP2 calls: which layout a buffer has, and which collective carries it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from qsdp.buffers import pool
from qsdp.collectives import (
    ReduceOp,
    all_gather_quantized,
    all_reduce_quantized,
    reduce_scatter_quantized,
)
from qsdp.kernels import VALUE_DTYPES
from qsdp.learning import LevelLearner
from qsdp.stats import CommMeter
from qsdp.two_level import NodeGroups, all_gather_two_level, reduce_scatter_two_level
from qsdp.units import AllGather, ReduceScatter, Unit
from qsdp.wire import Segment, WireLayout, wire_layout

Size = Sequence[int | torch.SymInt]


class ObservedAllGather(AllGather):
    """FSDP2's own all-gather, counted and timed."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.stock: AllGather = unit.fsdp_group._all_gather_comm
        self.meter = CommMeter(ranks_per_node(unit.group))

    def allocate(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.stock.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        _count_stock(self.meter, input_tensor, group)
        with self.meter.phase("network", input_tensor.device):
            return self.stock(output_tensor, input_tensor, group, async_op)


class ObservedReduceScatter(ReduceScatter):
    """FSDP2's own reduce-scatter, counted and timed."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.stock: ReduceScatter = unit.fsdp_group._reduce_scatter_comm
        self.meter = CommMeter(ranks_per_node(unit.group))

    def allocate(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.stock.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        _count_stock(self.meter, output_tensor, group)
        with self.meter.phase("network", input_tensor.device):
            return self.stock(output_tensor, input_tensor, group, op, async_op)


class QuantizedAllGather(ObservedAllGather):
    """All-gather of quantized weights.

    Equal weights give equal wire bytes however often they are gathered (see philox.py), so forward,
    backward and all micro-batches between two optimizer steps see the same decoded weights.
    """

    def __init__(
        self,
        unit: Unit,
        key: int,
        nodes: NodeGroups | None = None,
        learner: LevelLearner | None = None,
    ) -> None:
        super().__init__(unit)
        self.key, self.nodes, self.learner = key, nodes, learner

    def allocate(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return pool.take(int(size[0]), dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        # Another group: with reshard_after_forward=<int> the backward gather runs on a smaller
        # one, over values that the forward decoded. Quantizing those again would change them.
        # Another dtype: uint8 is a buffer that somebody else has packed.
        if group is not self.unit.group or input_tensor.dtype not in VALUE_DTYPES:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        return self.gather(output_tensor, input_tensor, group, async_op)

    def gather(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """Gather the values of all ranks' inputs."""
        layout = self.unit.all_gather_layout(input_tensor.numel(), input_tensor.dtype)
        # In backward the weights must be those of the forward, tables included.
        if self.learner is not None and not self.unit.in_backward:
            rows = input_tensor.view(1, -1)
            if self.learner.learn_if_due("weights", rows, layout, group):
                layout = self.unit.all_gather_layout(input_tensor.numel(), input_tensor.dtype)
        return self.exchange(output_tensor, input_tensor, group, layout, async_op)

    def exchange(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        layout: WireLayout,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Move quantized values by one level of collectives or two."""
        if self.nodes is not None and not async_op:
            all_gather_two_level(
                output_tensor,
                input_tensor,
                self.nodes,
                layout=layout,
                key=self.key,
                meter=self.meter,
            )
            return None
        return all_gather_quantized(
            output_tensor,
            input_tensor,
            group,
            quantizer=layout,
            key=self.key,
            async_op=async_op,
            meter=self.meter,
        )


class QuantizedReduceScatter(ObservedReduceScatter):
    """Reduce-scatter of quantized gradients.

    Args:
        error_feedback: add what quantization lost of one gradient to the next.
    """

    def __init__(
        self,
        unit: Unit,
        key: int,
        nodes: NodeGroups | None = None,
        learner: LevelLearner | None = None,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(unit)
        self.key, self.nodes, self.learner = key, nodes, learner
        self.error_feedback = error_feedback
        self.lost: torch.Tensor | None = None  # of the gradient before, float32

    def allocate(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return pool.take(int(size[0]), dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        if input_tensor.dtype not in VALUE_DTYPES:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        layout = gradient_layout(self.unit, output_tensor, "gradients", input_tensor.dtype)
        if self.learner is not None:
            self.learner.reductions += 1
            rows = input_tensor.view(-1, output_tensor.numel())
            if self.learner.learn_if_due("gradients", rows, layout, group):
                layout = gradient_layout(self.unit, output_tensor, "gradients", input_tensor.dtype)
        if self.nodes is not None:
            intra_layout = gradient_layout(
                self.unit, output_tensor, "intra_node", input_tensor.dtype
            )
            segments = tuple(span.segment for span in layout.spans)
            reduce_scatter_two_level(
                output_tensor,
                input_tensor,
                self.nodes,
                intra_layout=intra_layout,
                inter_layout=wire_layout(segments, torch.float32, layout.checksum),
                op=op,
                key=self.key,
                meter=self.meter,
            )
            return None
        contribution = None
        if self.error_feedback:
            input_tensor, contribution = self._with_feedback(input_tensor)
        work = reduce_scatter_quantized(
            output_tensor,
            input_tensor,
            group,
            quantizer=layout,
            op=op,
            key=self.key,
            async_op=async_op,
            meter=self.meter,
            contribution=contribution,
        )
        if contribution is not None and self.lost is not None:
            self.lost -= contribution
            torch.nan_to_num(self.lost, nan=0.0, posinf=0.0, neginf=0.0, out=self.lost)
        return work

    def _with_feedback(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient and what was lost before, and room for what arrives of it.

        Afterwards ``lost`` holds the exact sum; what arrives is to be taken off.
        """
        if self.lost is None or self.lost.numel() != gradient.numel():
            self.lost = torch.zeros_like(gradient, dtype=torch.float32)
        self.lost += gradient
        return self.lost.to(gradient.dtype, copy=True), torch.empty_like(self.lost)


class QuantizedAllReduce:
    """HSDP's all-reduce of gradients between replicas, as FSDP2's all-reduce hook.

    FSDP2 runs the hook of a model without replicas after its reduce-scatter, and has no place for
    one instead of its own all-reduce. So while it is installed, the parameter group is told that it
    has no replicas (``Unit.hide_replicas``), and this hook does their part.
    """

    def __init__(self, unit: Unit, key: int) -> None:
        group = unit.replicate_group
        assert group is not None
        self.unit, self.key, self.group = unit, key, group
        self.meter = CommMeter(ranks_per_node(group))
        self._partial: torch.Tensor | None = None

    def __call__(self, reduce_output: torch.Tensor) -> None:
        if not self.unit.fsdp_group.all_reduce_grads:
            # set_requires_all_reduce(False): keep the sum of micro-batches for later, as FSDP2
            # does; the gradient that is set meanwhile adds nothing.
            partial = reduce_output.clone()
            self._partial = partial if self._partial is None else self._partial + partial
            reduce_output.zero_()
            return
        if self._partial is not None:
            reduce_output += self._partial
            self._partial = None
        layout = gradient_layout(self.unit, reduce_output, "all_reduce", reduce_output.dtype)
        own_factor = self.unit.fsdp_group.gradient_divide_factor is not None
        all_reduce_quantized(
            reduce_output,
            self.group,
            quantizer=layout,
            op=dist.ReduceOp.SUM if own_factor else dist.ReduceOp.AVG,
            key=self.key,
            meter=self.meter,
        )


def gradient_layout(
    unit: Unit, part: torch.Tensor, direction: str, dtype: torch.dtype
) -> WireLayout:
    """Layout of one rank's part of the gradients, all in full precision if it is ambiguous.

    Every rank decides alike: the answer follows from sizes alone.
    """
    layout = unit.reduce_scatter_layout(part.numel(), direction, dtype)
    if layout is not None:
        return layout
    warnings.warn(
        f"qsdp: gradients of {unit.names[0]} and {len(unit.names) - 1} more travel in full "
        f"precision: FSDP2 reduces {part.numel()} values a rank, and which parameters these are is "
        "not clear",
        stacklevel=3,
    )
    return wire_layout((Segment(part.numel()),), dtype, unit.checksum)


def ranks_per_node(group: dist.ProcessGroup) -> int:
    """How many ranks of ``group`` run on this rank's node, by what torchrun says; for counting."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    node = dist.get_rank() // local_size
    return sum(rank // local_size == node for rank in dist.get_process_group_ranks(group))


def _count_stock(meter: CommMeter, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    num_ranks, row_bytes = dist.get_world_size(group), part.numel() * part.element_size()
    meter.count_rows(row_bytes, num_ranks, stock=(num_ranks - 1) * row_bytes)
