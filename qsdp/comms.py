"""The comm objects that FSDP2 calls: from a unit's plan to a collective."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from qsdp.buffers import pool
from qsdp.collectives import ReduceOp, reduce_factors
from qsdp.exchange import (
    Route,
    Stages,
    Transfers,
    count_gather,
    gather_in_hops,
    gather_inside,
    own_row,
    route,
    rows_of_all,
    run,
)
from qsdp.feedback import Reduction
from qsdp.memory import KeptWeights
from qsdp.param_group import AllGather, ParamGroup, ReduceScatter
from qsdp.ragged import gather_encoded_between
from qsdp.rows import decode_rows, take_rows
from qsdp.stages import all_reduce_stages, gather_stages, piece_layout, reduce_stages
from qsdp.stats import CommMeter
from qsdp.streams import hold
from qsdp.unit import Part, Unit
from qsdp.wire import VALUE_DTYPES

Size = Sequence[int | torch.SymInt]


class ObservedAllGather(AllGather):
    """FSDP2's own all-gather, counted and timed."""

    def __init__(self, handle: ParamGroup) -> None:
        self.stock: AllGather = handle.all_gather_comm
        self.meter = CommMeter(ranks_per_node(handle.group), handle.path)

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
        self.meter = CommMeter(ranks_per_node(handle.group), handle.path)

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
        if group is not self.unit.gather_route.group or not parts:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        if len(parts) == 1:
            stages = self._gather(parts[0], output_tensor, input_tensor)
        else:
            stages = self._gather_each(parts, output_tensor, input_tensor)
        device = input_tensor.device
        return run(stages, async_op, self.meter, device, (output_tensor, input_tensor))

    def _gather_each(self, parts: list[Part], output: torch.Tensor, input: torch.Tensor) -> Stages:
        """Parameters of several dtypes, which FSDP2 packs as bytes in their order."""
        num_ranks = self.unit.gather_route.size
        kinds = zip(self.unit.sizes, self.unit.handle.gather_dtypes, strict=True)
        sizes = [numel * dtype.itemsize for numel, dtype in kinds]
        own, rows = input.split(sizes), output.view(num_ranks, -1).split(sizes, dim=1)
        for part in parts:
            values = torch.cat([own[i] for i in part.indices]).view(part.dtype)
            found = pool.take(num_ranks * values.numel(), part.dtype, values.device)
            yield from self._gather(part, found, values)
            decoded = found.view(num_ranks, -1).view(torch.uint8)
            pieces = decoded.split([sizes[i] for i in part.indices], dim=1)
            for index, piece in zip(part.indices, pieces, strict=True):
                rows[index].copy_(piece)

    def _gather(self, part: Part, output: torch.Tensor, input: torch.Tensor) -> Stages:
        """Values of one dtype."""
        unit, kept, in_backward = self.unit, part.kept, self.unit.handle.in_backward
        # In backward the weights must be those of the forward, tables included.
        if unit.learns and not in_backward and (kept is None or kept.started):
            unit.learn("weights", part.indices, input.view(1, -1), part.layout)
        if kept is None:
            return gather_stages(
                output, input, unit.gather_route, part.layout, unit.weights_key, self.meter
            )
        if not kept.started:
            return self._start(kept, output, input)
        if in_backward:
            return self._again(kept, output)
        return self._differences(part, kept, output, input)

    def _start(self, kept: KeptWeights, output: torch.Tensor, values: torch.Tensor) -> Stages:
        """The first gather: the values themselves, of which all ranks keep the same."""
        unit, meter, device = self.unit, self.meter, output.device
        values = values.clone()  # now, because it may lie in the output
        layout = unit.raw_layout(values.numel(), values.dtype)
        with unit.turns:
            yield from gather_stages(output, values, unit.gather_route, layout, 0, meter)
            with meter.phase("decode", device):
                kept.start(output.view(unit.gather_route.size, -1))

    def _again(self, kept: KeptWeights, output: torch.Tensor) -> Stages:
        """What was decoded last is still there: nothing moves between nodes."""
        way, size = self.unit.gather_route, self.unit.gather_route.size
        with self.unit.turns:
            with self.meter.phase("decode", output.device):
                kept.read(_kept_rows(output, way))
            stock = (size - 1) * output.nbytes // size
            count_gather(0, kept.layout.row_bytes, way, self.meter, stock)
            if way.two_level:
                yield from self._inside(kept, output)

    def _differences(
        self, part: Part, kept: KeptWeights, output: torch.Tensor, values: torch.Tensor
    ) -> Stages:
        """Gather what has changed, and rows that have changed by too much whole."""
        unit, meter, device, way = self.unit, self.meter, output.device, self.unit.gather_route
        layout, ranks = part.layout, way.global_ranks_of(kept.senders)
        with unit.turns:
            looks, due = kept.on_host or unit.watch.notices(), kept.due()
            wire = take_rows(len(kept.senders), layout, device)
            with meter.phase("encode", device):
                mark = kept.outgoing(
                    *(values, layout, wire[kept.own], unit.weights_key),
                    *(unit.learner.reductions, looks),
                )
                # It may lie in the output.
                values = values.clone() if kept.may_travel_whole(mark, looks, due) else values
            stock = (way.size - 1) * values.nbytes
            inside = kept.layout.row_bytes
            yield from gather_encoded_between(wire, layout, way, meter, inside, stock)
            with meter.phase("decode", device):
                kept.arrived(wire, layout, _kept_rows(output, way), ranks)
            marks = layout.marks(wire)
            if way.two_level:
                marks = yield from self._inside(kept, output)
            whole = kept.to_renew(marks, looks, due)
            if whole is not None:
                yield from self._renew(kept, whole, values, output)

    def _inside(
        self, kept: KeptWeights, output: torch.Tensor
    ) -> Generator[Transfers, None, torch.Tensor]:
        """Rows that the other places of this node keep; returns the marks of all rows."""
        way, layout, device = self.unit.gather_route, kept.layout, output.device
        wire = take_rows(way.size, layout, device)
        columns = wire.view(way.ranks_per_node, way.num_nodes, -1)
        own = kept.rows()
        yield gather_inside(columns, own, way)
        rows = output.view(way.num_nodes, way.ranks_per_node, -1)
        with self.meter.phase("decode", device):
            layout.marks(columns[way.place]).copy_(layout.marks(own))
            for place in range(way.ranks_per_node):
                if place != way.place:
                    senders = way.global_ranks_of(range(place, way.size, way.ranks_per_node))
                    decode_rows(columns[place], layout, rows[:, place], senders)
        return layout.marks(columns.transpose(0, 1)).flatten()

    def _renew(
        self, kept: KeptWeights, whole: list[bool], values: torch.Tensor, output: torch.Tensor
    ) -> Stages:
        """Gather some rows whole; the others are in their places and travel along."""
        way, meter, device = self.unit.gather_route, self.meter, output.device
        row_bytes = kept.layout.row_bytes
        there = rows_of_all(take_rows(way.size, kept.layout, device), row_bytes, way)
        with meter.phase("encode", device):
            own_row(there, way).copy_(kept.own_row(whole, values))
        yield from gather_in_hops(there, way, meter, stock=0)
        with meter.phase("decode", device):
            kept.refill(there[:, way.place] if way.two_level else there)
            rows = output.view(*there.shape[:-1], -1)
            decode_rows(there, kept.layout, rows, way.global_ranks)


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
        # One rank: torch 2.9 calls it all the same.
        alone = unit.reduce_route.size == 1
        if dtype not in VALUE_DTYPES or alone or not unit.reduces_in(group):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        reduction = unit.reduction(numel, dtype)
        if unit.learns and reduction.indices is not None:
            rows = input_tensor.view(-1, numel)
            if unit.learn("gradients", reduction.indices, rows, reduction.layout):
                reduction = unit.reduction(numel, dtype)
        stages = self._reduce(output_tensor, input_tensor, reduction, op)
        tensors = output_tensor, input_tensor
        return run(stages, async_op, self.meter, input_tensor.device, tensors)

    def _reduce(
        self, output: torch.Tensor, input: torch.Tensor, reduction: Reduction, op: ReduceOp
    ) -> Stages:
        unit, way = self.unit, self.unit.reduce_route
        with unit.turns if reduction.feedback else nullcontext():
            yield from reduce_stages(
                *(output, input, way, reduction.layout, reduce_factors(op, way.size)),
                *(unit.gradients_key, self.meter),
                inside=reduction.inside,
                reuse_input=True,  # FSDP2 keeps it alive and does not look at it again
                residuals=unit.fed_back.of(reduction, way),
            )
            unit.fed_back.keep(reduction, way)


class QuantizedAllReduce:
    """HSDP's all-reduce of gradients between replicas: see ``ParamGroup.set_all_reduce_hook``."""

    def __init__(self, unit: Unit) -> None:
        group = unit.handle.replicate_group
        assert group is not None
        self.unit, self.group = unit, group
        self.meter = CommMeter(ranks_per_node(group), unit.handle.path)
        self._way = route(group, unit.handle.device)

    def __call__(self, reduce_output: torch.Tensor) -> None:
        if self._way.size == 1:
            return  # a mesh with one replica: it has nobody to agree with
        # FSDP2 made it in another stream and may drop it while this one works on it.
        hold(reduce_output)
        device = reduce_output.device
        run(self._reduce(reduce_output), False, self.meter, device, (reduce_output,))

    def _reduce(self, values: torch.Tensor) -> Stages:
        unit, size = self.unit, self._way.size
        reduction = unit.reduction(values.numel(), values.dtype)
        layout = reduction.replicas
        op = dist.ReduceOp.SUM if unit.handle.sums_gradients else dist.ReduceOp.AVG
        with unit.turns:
            pieces = piece_layout(layout, size)
            residuals = unit.fed_back.of_replicas(reduction, pieces, size)
            yield from all_reduce_stages(
                *(values, self._way, layout, reduce_factors(op, size), unit.replicas_key),
                *(self.meter, residuals),
            )
            unit.fed_back.keep_replicas(reduction, pieces)


def _kept_rows(output: torch.Tensor, way: Route) -> torch.Tensor:
    """(rows, numel): of an all-gather's output those of the ranks whose rows this one keeps."""
    return output.view(way.num_nodes, way.ranks_per_node, -1)[:, way.place]


def ranks_per_node(group: dist.ProcessGroup) -> int:
    """How many ranks of ``group`` run on this rank's node, by what torchrun says; for counting."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    node = dist.get_rank() // local_size
    return sum(rank // local_size == node for rank in dist.get_process_group_ranks(group))


def _count_stock(meter: CommMeter, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    num_ranks = dist.get_world_size(group)
    meter.count_ring((num_ranks - 1) * part.nbytes, num_ranks)
