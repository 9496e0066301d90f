"""Quantized collectives on flat tensors and process groups; nothing here knows of FSDP.

Each moves one contiguous byte row a rank (:mod:`qsdp.wire`), in one hop or, where nodes have
several ranks of the group, in two: one between nodes and one inside them, so that what leaves a
node falls by the number of ranks in it. A contribution is quantized once for each hop that
it is summed after; codes that are forwarded are never quantized again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from qsdp.exchange import route, run
from qsdp.quantizer import Quantizer
from qsdp.stages import all_reduce_stages, gather_stages, reduce_stages
from qsdp.stats import CommMeter
from qsdp.wire import VALUE_DTYPES, WireLayout, tensor_layout, wire_layout

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


def all_gather_quantized(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    quantizer: Quantizer | WireLayout,
    key: int = 0,
    ranks_per_node: int | None = None,
    async_op: bool = False,
    meter: CommMeter | None = None,
) -> dist.Work | None:
    """All-gather that moves quantized values.

    1. Encode this rank's ``input`` (one row).
    2. All-gather the rows: every rank sends and receives ``(num_ranks - 1) * row_bytes``. With
       ``ranks_per_node`` first between ranks of one place, ``num_nodes - 1`` rows, then inside the
       node.
    3. Decode every row, this rank's own included, so all ranks hold bit-identical ``output``.

    Args:
        output: (num_ranks * input.numel(),), overwritten. ``input`` may be a view into it.
        input: (numel,) float32, bfloat16 or float16, contiguous, of equal size on all ranks.
        group: process group; None is the default group.
        quantizer: how to encode, equal on all ranks: a Quantizer for the whole input, or the
            layout of one row.
        key: 64 bits for random rounding; draws also depend on the rank in ``group``.
        ranks_per_node: ranks of ``group`` in each node, consecutive in it, for two hops; the result
            is the same, bit for bit.
        async_op: return a Work to wait for; on CPUs its ``wait`` decodes. ``output`` must not be
            read before; ``input`` may be changed at once, in the stream of the call.
        meter: adds bytes and times to it.

    Raises:
        ValueError, TypeError: sizes or dtypes that do not fit together.
    """
    way = route(_group_or_default(group), input.device, ranks_per_node)
    layout = _layout_for(quantizer, input)
    _check_sizes(output, input, way.size, "all_gather_quantized", gather=True)
    meter = meter or CommMeter()
    stages = gather_stages(output, input, way, layout, key, meter)
    return run(stages, async_op, meter, input.device, (output, input))


def reduce_scatter_quantized(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    quantizer: Quantizer | WireLayout,
    op: ReduceOp = dist.ReduceOp.AVG,
    key: int = 0,
    ranks_per_node: int | None = None,
    inside: Quantizer | WireLayout | None = None,
    residual: torch.Tensor | None = None,
    inside_residual: torch.Tensor | None = None,
    async_op: bool = False,
    meter: CommMeter | None = None,
) -> dist.Work | None:
    """Reduce-scatter that moves quantized values.

    1. Encode ``input`` as one row for each destination.
    2. One all-to-all of rows: every rank sends and receives ``(num_ranks - 1) * row_bytes``.
    3. Decode and sum the rows in float32 in rank order, this rank's own contribution included,
       apply ``op``, round once to the output's dtype. Deterministic.

    With ``ranks_per_node`` the same happens twice: inside the node, in rows of ``inside``, where
    each rank sums what its place owns on every node; then these sums between ranks of one place,
    ``num_nodes - 1`` rows a rank.

    Args:
        output: (numel,), overwritten.
        input: (num_ranks * numel,) float32, bfloat16 or float16, contiguous; not modified.
        group: process group; None is the default group.
        quantizer: how to encode, equal on all ranks: a Quantizer for a rank's whole part, or the
            layout of one row. With two hops, between nodes.
        op: SUM, AVG, or PREMUL_SUM with its factor (also on backends that refuse it).
        key: 64 bits for random rounding; draws also depend on the rank in ``group`` and the
            destination, so that the ranks' errors are independent.
        ranks_per_node: ranks of ``group`` in each node, consecutive in it, for two hops.
        inside: how to encode inside a node; None for the input's own dtype.
        residual: (num_ranks, numel) float32, for error feedback: added to ``input`` before
            quantizing, then replaced by what was lost; what is not finite becomes zero. With two
            hops (num_nodes, numel), of the sums between nodes.
        inside_residual: (num_ranks, numel) float32, with two hops the same of ``input``.
        async_op: as for :func:`all_gather_quantized`; but ``input`` must not be changed before on
            accelerators.
        meter: adds bytes and times to it.

    Raises:
        ValueError, TypeError: sizes, dtypes or an op that do not fit.
    """
    way = route(_group_or_default(group), input.device, ranks_per_node)
    layout = _layout_for(quantizer, output)
    _check_sizes(output, input, way.size, "reduce_scatter_quantized", gather=False)
    if isinstance(inside, Quantizer) and inside.coded:
        raise ValueError(
            f"reduce_scatter_quantized(inside=...) has coding={inside.coding!r}, and rows are "
            'coded between nodes alone: set coding="fixed" there'
        )
    if inside is None or isinstance(inside, Quantizer):
        inside = tensor_layout(output.numel(), inside, input.dtype)
    if way.two_level:
        zeros = bool(layout.zero_maps)
        layout = wire_layout(layout.segments, torch.float32, layout.checksum, zeros=zeros)
    factors = reduce_factors(op, way.size)
    meter = meter or CommMeter()
    stages = reduce_stages(
        *(output, input, way, layout, factors, key, meter),
        inside=inside,
        residuals=(inside_residual, residual),
    )
    return run(stages, async_op, meter, input.device, (output, input))


def all_reduce_quantized(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    quantizer: Quantizer | WireLayout,
    op: ReduceOp = dist.ReduceOp.AVG,
    key: int = 0,
    residuals: tuple[torch.Tensor, torch.Tensor] | None = None,
    async_op: bool = False,
    meter: CommMeter | None = None,
) -> dist.Work | None:
    """All-reduce in place that moves quantized values: our reduce-scatter, then our all-gather.

    Each segment is cut into one piece a rank, padded with zeros to equal sizes. Contributions are
    quantized once, then their sum once, so all ranks end with bit-identical values.

    Args:
        tensor: (numel,) float32, bfloat16 or float16, contiguous; equal size on all ranks.
        quantizer: for the whole tensor, or the layout of its segments.
        op, key, meter: as for :func:`reduce_scatter_quantized`.
        residuals: for error feedback at both ends, float32 in :func:`piece_layout`: of what this
            rank contributes, (num_ranks, numel of a row), and of the sum that it forwards, (1,
            numel of a row). Both are used and replaced as by :func:`reduce_scatter_quantized`.
        async_op: return a Work to wait for; ``tensor`` must not be touched before. On CPUs it is a
            :class:`~qsdp.exchange.Pending`, whose steps ranks must take in the same order for all
            their all-reduces.

    Raises:
        ValueError, TypeError: as :func:`reduce_scatter_quantized`.
    """
    way = route(_group_or_default(group), tensor.device)
    layout = _layout_for(quantizer, tensor)
    factors = reduce_factors(op, way.size)
    meter = meter or CommMeter()
    stages = all_reduce_stages(tensor, way, layout, factors, key, meter, residuals)
    return run(stages, async_op, meter, tensor.device, (tensor,))


def reduce_factors(op: ReduceOp, num_ranks: int) -> tuple[float, float]:
    """``(multiply, divide)`` that turn the sum of all contributions into what ``op`` gives.

    Raises:
        ValueError: an op other than SUM, AVG and PREMUL_SUM.
    """
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.SUM:
        return 1.0, 1.0
    if kind == dist.ReduceOp.AVG:
        return 1.0, float(num_ranks)
    # (kind, factor) for an op with a factor; torch names the latter since 2.13 only.
    state = op.__getstate__()
    if kind == dist.ReduceOp.PREMUL_SUM and isinstance(state, tuple):
        return float(state[1]), 1.0
    raise ValueError(f"reduce_scatter_quantized takes op SUM, AVG or PREMUL_SUM(number), got {op}")


def _group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group: call torch.distributed.init_process_group first")
    return group


def _layout_for(quantizer: Quantizer | WireLayout, part: torch.Tensor) -> WireLayout:
    if isinstance(quantizer, WireLayout):
        return quantizer
    return tensor_layout(part.numel(), quantizer, part.dtype)


def _check_sizes(
    output: torch.Tensor, input: torch.Tensor, num_ranks: int, name: str, *, gather: bool
) -> None:
    small, large = (input, output) if gather else (output, input)
    if input.dtype not in VALUE_DTYPES or output.dtype != input.dtype:
        raise TypeError(
            f"{name} takes input and output of one dtype, float32, bfloat16 or float16, "
            f"got {input.dtype} and {output.dtype}"
        )
    if large.numel() != num_ranks * small.numel():
        raise ValueError(
            f"{name} over {num_ranks} ranks needs "
            f"{'output' if gather else 'input'} of {num_ranks * small.numel()} elements "
            f"({num_ranks} x {small.numel()}), got {large.numel()}"
        )
    if not (input.is_contiguous() and output.is_contiguous()):
        raise ValueError(f"{name} needs contiguous tensors: call .contiguous() on them")
