"""The comm objects that FSDP2 calls: from a unit's plan to a collective."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from qsdp.buffers import pool
from qsdp.collectives import (
    ReduceOp,
    all_reduce_quantized,
    gather_stages,
    piece_layout,
    reduce_scatter_quantized,
)
from qsdp.exchange import Stages, gather_in_hops, run
from qsdp.memory import KeptWeights
from qsdp.param_group import AllGather, ParamGroup, ReduceScatter
from qsdp.stats import CommMeter
from qsdp.unit import Part, Unit
from qsdp.wire import VALUE_DTYPES

Size = Sequence[int | torch.SymInt]


class ObservedAllGather(AllGather):
    """FSDP2's own all-gather, counted and timed."""

    def __init__(self, handle: ParamGroup) -> None:
        self.stock: AllGather = handle.all_gather_comm
        self.meter = CommMeter(ranks_per_node(handle.group))

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

    def __init__(self, handle: ParamGroup) -> None:
        self.stock: ReduceScatter = handle.reduce_scatter_comm
        self.meter = CommMeter(ranks_per_node(handle.group))

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
    """All-gather of weights in the unit's ways.

    Equal weights give equal wire bytes however often they are gathered (see philox.py), so forward,
    backward and all micro-batches between two optimizer steps see the same decoded weights.
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit.handle)
        self.unit = unit

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
        # No parts: a buffer that somebody else has packed.
        parts = self.unit.parts(input_tensor.dtype, input_tensor.numel())
        if group is not self.unit.handle.group or not parts:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        if len(parts) == 1:
            stages = self._gather(parts[0], output_tensor, input_tensor, group)
        else:
            stages = self._gather_each(parts, output_tensor, input_tensor, group)
        return run(stages, async_op, self.meter, input_tensor.device)

    def _gather_each(
        self,
        parts: list[Part],
        output: torch.Tensor,
        input: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> Stages:
        """Parameters of several dtypes, which FSDP2 packs as bytes in their order."""
        handle = self.unit.handle
        kinds = zip(handle.shard_numels, handle.gather_dtypes, strict=True)
        sizes = [numel * dtype.itemsize for numel, dtype in kinds]
        own, rows = input.split(sizes), output.view(group.size(), -1).split(sizes, dim=1)
        for part in parts:
            values = torch.cat([own[i] for i in part.indices]).view(part.dtype)
            found = pool.take(group.size() * values.numel(), part.dtype, values.device)
            yield from self._gather(part, found, values, group)
            decoded = found.view(group.size(), -1).view(torch.uint8)
            pieces = decoded.split([sizes[i] for i in part.indices], dim=1)
            for index, piece in zip(part.indices, pieces, strict=True):
                rows[index].copy_(piece)

    def _gather(
        self, part: Part, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup
    ) -> Stages:
        """Values of one dtype."""
        unit, kept, in_backward = self.unit, part.kept, self.unit.handle.in_backward
        # In backward the weights must be those of the forward, tables included.
        if unit.learns and not in_backward and (kept is None or kept.started):
            unit.learn("weights", part.indices, input.view(1, -1), part.dtype)
        if kept is not None and kept.started and in_backward:
            return self._again(kept, output)
        if kept is not None:
            return self._differences(part, kept, output, input, group)
        layout = unit.layout("weights", part.indices, part.dtype)
        return gather_stages(output, input, group, unit.nodes, layout, unit.weights_key, self.meter)

    def _again(self, kept: KeptWeights, output: torch.Tensor) -> Stages:
        """What was decoded last is still there: nothing moves."""
        rows = output.view(kept.num_ranks, -1)
        with self.meter.phase("decode", output.device):
            kept.read(rows)
        self.meter.count_hops(0, 0, stock=rows[1:].nbytes)
        yield from ()

    def _differences(
        self,
        part: Part,
        kept: KeptWeights,
        output: torch.Tensor,
        values: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> Stages:
        """Gather what has changed, and rows that have changed by too much whole."""
        unit, meter, device = self.unit, self.meter, output.device
        rows, numel = output.view(kept.num_ranks, -1), values.numel()
        if not kept.started:
            values = values.clone()  # now, because it may lie in the output
            layout = unit.raw_layout(numel, values.dtype)
            yield from gather_stages(output, values, group, unit.nodes, layout, 0, meter)
            with meter.phase("decode", device):
                kept.start(rows, values)
            return
        layout = unit.layout("weights", part.indices, part.dtype)
        with meter.phase("encode", device):
            change, whole = kept.outgoing(values, unit.learner.reductions)
        marks = yield from gather_stages(
            output, change, group, unit.nodes, layout, unit.weights_key, meter, mark=whole
        )
        with meter.phase("decode", device):
            kept.arrived(rows)
        if marks.any():
            with meter.phase("encode", device):
                kept.renew(whole)
            yield from gather_in_hops(kept.wire, group, unit.nodes, meter, stock=0)
            with meter.phase("decode", device):
                kept.read(rows)


class QuantizedReduceScatter(ObservedReduceScatter):
    """Reduce-scatter of gradients in the unit's ways."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit.handle)
        self.unit = unit

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
        unit, numel, dtype = self.unit, output_tensor.numel(), input_tensor.dtype
        if dtype not in VALUE_DTYPES:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        indices = unit.reduced(numel)
        layout = inside = unit.raw_layout(numel, dtype)
        residual = None
        if indices is not None:
            if unit.learns:
                unit.learn("gradients", indices, input_tensor.view(-1, numel), dtype)
            layout = unit.layout("gradients", indices, dtype)
            inside = unit.layout("inside_node", indices, dtype)
            residual = unit.residual(indices, layout)
        return reduce_scatter_quantized(
            output_tensor,
            input_tensor,
            group,
            quantizer=layout,
            op=op,
            key=unit.gradients_key,
            nodes=unit.nodes,
            inside=inside,
            residual=residual,
            async_op=async_op,
            meter=self.meter,
        )


class QuantizedAllReduce:
    """HSDP's all-reduce of gradients between replicas: see ``ParamGroup.set_all_reduce_hook``."""

    def __init__(self, unit: Unit) -> None:
        group = unit.handle.replicate_group
        assert group is not None
        self.unit, self.group = unit, group
        self.meter = CommMeter(ranks_per_node(group))

    def __call__(self, reduce_output: torch.Tensor) -> None:
        unit, numel, dtype = self.unit, reduce_output.numel(), reduce_output.dtype
        if reduce_output.device.type == "cuda":
            # FSDP2 allocated it in another stream and may free it while this one works on it.
            reduce_output.record_stream(torch.cuda.current_stream())
        indices = unit.reduced(numel)
        layout, residuals = unit.raw_layout(numel, dtype), None
        if indices is not None:
            layout = unit.layout("replicas", indices, dtype)
            pieces = piece_layout(layout, self.group.size())
            residuals = unit.replica_residual(indices, pieces, self.group.size())
        all_reduce_quantized(
            reduce_output,
            self.group,
            quantizer=layout,
            op=dist.ReduceOp.SUM if unit.handle.sums_gradients else dist.ReduceOp.AVG,
            key=unit.replicas_key,
            residuals=residuals,
            meter=self.meter,
        )


def ranks_per_node(group: dist.ProcessGroup) -> int:
    """How many ranks of ``group`` run on this rank's node, by what torchrun says; for counting."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    node = dist.get_rank() // local_size
    return sum(rank // local_size == node for rank in dist.get_process_group_ranks(group))


def _count_stock(meter: CommMeter, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    num_ranks = dist.get_world_size(group)
    meter.count_rows(part.nbytes, num_ranks, stock=(num_ranks - 1) * part.nbytes)
