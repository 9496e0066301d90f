"""Quantized collectives on flat tensors and process groups; nothing here knows of FSDP.

Each moves one contiguous byte row a rank (:mod:`qsdp.wire`), in one hop or, given
:class:`~qsdp.exchange.NodeGroups`, in two: one between nodes and one inside them, so that what
leaves a node falls by the number of ranks in it. A contribution is quantized once for each hop that
it is summed after; codes that are forwarded are never quantized again.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
import torch.distributed as dist

from qsdp.buffers import pool
from qsdp.exchange import NodeGroups, Stages, Transfers, gather_in_hops, run, swap_rows
from qsdp.kernels.philox import derive_key
from qsdp.quantizer import Quantizer
from qsdp.rows import decode_rows, encode_rows, sum_rows, take_rows
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
    nodes: NodeGroups | None = None,
    async_op: bool = False,
    meter: CommMeter | None = None,
) -> dist.Work | None:
    """All-gather that moves quantized values.

    1. Encode this rank's ``input`` (one row).
    2. All-gather the rows: every rank sends and receives ``(num_ranks - 1) * row_bytes``. With
       ``nodes`` first between ranks of one place, ``num_nodes - 1`` rows, then inside the node.
    3. Decode every row, this rank's own included, so all ranks hold bit-identical ``output``.

    Args:
        output: (num_ranks * input.numel(),), overwritten. ``input`` may be a view into it.
        input: (numel,) float32, bfloat16 or float16, contiguous, of equal size on all ranks.
        group: process group; None is the default group.
        quantizer: how to encode, equal on all ranks: a Quantizer for the whole input, or the
            layout of one row.
        key: 64 bits for random rounding; draws also depend on the rank in ``group``.
        nodes: of ``group``, for two hops; the result is the same, bit for bit.
        async_op: return a Work whose ``wait`` decodes; ``input`` may be changed at once, ``output``
            must not be read before.
        meter: adds bytes and times to it.

    Raises:
        ValueError, TypeError: sizes or dtypes that do not fit together.
    """
    group = _group_or_default(group)
    layout = _layout_for(quantizer, input)
    _check_sizes(output, input, group.size(), "all_gather_quantized", gather=True)
    meter = meter or CommMeter()
    stages = gather_stages(output, input, group, nodes, layout, key, meter)
    return run(stages, async_op, meter, input.device)


def reduce_scatter_quantized(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    quantizer: Quantizer | WireLayout,
    op: ReduceOp = dist.ReduceOp.AVG,
    key: int = 0,
    nodes: NodeGroups | None = None,
    inside: Quantizer | WireLayout | None = None,
    residual: torch.Tensor | None = None,
    async_op: bool = False,
    meter: CommMeter | None = None,
) -> dist.Work | None:
    """Reduce-scatter that moves quantized values.

    1. Encode ``input`` as one row for each destination.
    2. One all-to-all of rows: every rank sends and receives ``(num_ranks - 1) * row_bytes``.
    3. Decode and sum the rows in float32 in rank order, this rank's own contribution included,
       apply ``op``, round once to the output's dtype. Deterministic.

    With ``nodes`` the same happens twice: inside the node, in rows of ``inside``, where each rank
    sums what its place owns on every node; then these sums between ranks of one place,
    ``num_nodes - 1`` rows a rank.

    Args:
        output: (numel,), overwritten.
        input: (num_ranks * numel,) float32, bfloat16 or float16, contiguous; not modified.
        group: process group; None is the default group.
        quantizer: how to encode, equal on all ranks: a Quantizer for a rank's whole part, or the
            layout of one row. With ``nodes``, between nodes.
        op: SUM, AVG, or PREMUL_SUM with its factor (also on backends that refuse it).
        key: 64 bits for random rounding; draws also depend on the rank in ``group`` and the
            destination, so that the ranks' errors are independent.
        nodes: of ``group``, for two hops.
        inside: how to encode inside a node; None for the input's own dtype.
        residual: (num_ranks, numel) float32, for error feedback in one hop: added to ``input``
            before quantizing, then replaced by what was lost; what is not finite becomes zero.
        async_op: return a Work whose ``wait`` decodes; ``input`` may be changed at once, ``output``
            must not be read before.
        meter: adds bytes and times to it.

    Raises:
        ValueError, TypeError: sizes, dtypes or an op that do not fit.
    """
    group = _group_or_default(group)
    layout = _layout_for(quantizer, output)
    _check_sizes(output, input, group.size(), "reduce_scatter_quantized", gather=False)
    if nodes is not None and residual is not None:
        raise ValueError("reduce_scatter_quantized takes a residual or nodes, not both")
    factors = reduce_factors(op, group.size())
    meter = meter or CommMeter()
    if nodes is None:
        stages = _reduce_stages(output, input, group, layout, factors, key, meter, residual)
    else:
        if inside is None or isinstance(inside, Quantizer):
            inside = tensor_layout(output.numel(), inside, input.dtype)
        stages = _two_level_reduce_stages(
            output, input, group, nodes, inside, layout, factors, key, meter
        )
    return run(stages, async_op, meter, input.device)


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
        async_op: return a :class:`~qsdp.exchange.Pending`, whose steps ranks must take in the same
            order for all their all-reduces; ``tensor`` must not be touched before it is done.

    Raises:
        ValueError, TypeError: as :func:`reduce_scatter_quantized`.
    """
    group = _group_or_default(group)
    layout = _layout_for(quantizer, tensor)
    factors = reduce_factors(op, group.size())
    meter = meter or CommMeter()
    stages = _all_reduce_stages(tensor, group, layout, factors, key, meter, residuals)
    return run(stages, async_op, meter, tensor.device)


def piece_layout(layout: WireLayout, num_ranks: int) -> WireLayout:
    """Layout of the row that one rank reduces: its piece of every segment of ``layout``."""
    pieces = (replace(s, numel=-(-s.numel // num_ranks)) for s in layout.segments)
    zeros = bool(layout.zero_maps)
    return wire_layout(tuple(pieces), layout.dtype, layout.checksum, zeros=zeros)


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
    if kind == dist.ReduceOp.PREMUL_SUM and isinstance(getattr(op, "factor", None), float):
        return float(op.factor), 1.0  # type: ignore[union-attr]
    raise ValueError(f"reduce_scatter_quantized takes op SUM, AVG or PREMUL_SUM(number), got {op}")


def gather_stages(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    nodes: NodeGroups | None,
    layout: WireLayout,
    key: int,
    meter: CommMeter,
    mark: bool | torch.Tensor = False,
) -> Generator[Transfers, None, torch.Tensor]:
    """:func:`all_gather_quantized` as stages; returns the marks of all rows, if ``layout`` has any.

    Args:
        mark: of this rank's row.
    """
    num_ranks, rank, device = group.size(), group.rank(), input.device
    wire = take_rows(num_ranks, layout, device)
    with meter.phase("encode", device):
        values, row = input.view(1, -1), wire[rank : rank + 1]
        encode_rows(values, layout, row, key=key, first_row=rank, sender=rank, mark=mark)
    yield from gather_in_hops(wire, group, nodes, meter, stock=(num_ranks - 1) * input.nbytes)
    with meter.phase("decode", device):
        senders = dist.get_process_group_ranks(group)
        decode_rows(wire, layout, output.view(num_ranks, -1), senders)
        return layout.marks(wire) if layout.mark else torch.zeros(0)


def _reduce_stages(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    layout: WireLayout,
    factors: tuple[float, float],
    key: int,
    meter: CommMeter,
    residual: torch.Tensor | None,
) -> Stages:
    num_ranks, rank, device = group.size(), group.rank(), input.device
    rows = input.view(num_ranks, -1)
    wire, arrived = (take_rows(num_ranks, layout, device) for _ in range(2))
    with meter.phase("encode", device):
        if residual is not None:
            residual += rows
            rows = residual.to(rows.dtype, copy=True)
        encode_rows(rows, layout, wire, key=derive_key(key, rank), sender=rank)
        if residual is not None:
            _keep_what_was_lost(residual, wire, layout, rank)
    stock = (num_ranks - 1) * output.numel() * input.element_size()
    meter.count_rows(layout.row_bytes, num_ranks, stock=stock)
    yield swap_rows(arrived, wire, rank, group)
    with meter.phase("decode", device):
        senders = dist.get_process_group_ranks(group)
        multiply, divide = factors
        sum_rows(arrived, layout, output, senders, multiply=multiply, divide=divide)


def _two_level_reduce_stages(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    nodes: NodeGroups,
    inside: WireLayout,
    layout: WireLayout,
    factors: tuple[float, float],
    key: int,
    meter: CommMeter,
) -> Stages:
    per_node, num_nodes, device = nodes.ranks_per_node, nodes.num_nodes, input.device
    num_ranks, rank = group.size(), group.rank()
    node, place = divmod(rank, per_node)
    key = derive_key(key, rank)
    # What is sent on holds sums, which are float32.
    zeros = bool(layout.zero_maps)
    layout = wire_layout(layout.segments, torch.float32, layout.checksum, zeros=zeros)
    between, within = num_nodes - 1, (per_node - 1) * num_nodes
    meter.count_hops(
        between * layout.row_bytes,
        within * inside.row_bytes,
        stock=(num_ranks - 1) * output.numel() * input.element_size(),
    )
    with meter.phase("encode", device):
        wire = take_rows(num_ranks, inside, device)
        encode_rows(input.view(num_ranks, -1), inside, wire, key=key, sender=place)
        # To local rank r goes what place r owns, for every node.
        to_places = wire.view(num_nodes, per_node, -1).transpose(0, 1).contiguous()
    from_places = torch.empty_like(to_places)
    yield swap_rows(
        from_places.view(per_node, -1), to_places.view(per_node, -1), place, nodes.intra
    )
    sums = pool.take(num_nodes * output.numel(), torch.float32, device).view(num_nodes, -1)
    with meter.phase("decode", device):
        senders = dist.get_process_group_ranks(nodes.intra)
        for target, parts in zip(sums, from_places.transpose(0, 1).contiguous(), strict=True):
            sum_rows(parts, inside, target, senders)
    with meter.phase("encode", device):
        to_nodes, from_nodes = (take_rows(num_nodes, layout, device) for _ in range(2))
        encode_rows(sums, layout, to_nodes, key=derive_key(key, 1), sender=node)
    yield swap_rows(from_nodes, to_nodes, node, nodes.inter)
    with meter.phase("decode", device):
        senders = dist.get_process_group_ranks(nodes.inter)
        multiply, divide = factors
        sum_rows(from_nodes, layout, output, senders, multiply=multiply, divide=divide)


def _all_reduce_stages(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    layout: WireLayout,
    factors: tuple[float, float],
    key: int,
    meter: CommMeter,
    residuals: tuple[torch.Tensor, torch.Tensor] | None,
) -> Stages:
    num_ranks, rank = group.size(), group.rank()
    pieces = piece_layout(layout, num_ranks)
    rows = tensor.new_zeros(num_ranks, pieces.numel)
    for span, piece in zip(layout.spans, pieces.spans, strict=True):
        cut = rows[:, piece.values]
        padding = cut.numel() - span.segment.numel
        cut.copy_(torch.nn.functional.pad(tensor[span.values], (0, padding)).view(cut.shape))
    own = rows.new_empty(pieces.numel)
    sent, forwarded = residuals or (None, None)
    yield from _reduce_stages(own, rows.view(-1), group, pieces, factors, key, meter, sent)
    if forwarded is not None:
        forwarded += own
        own.copy_(forwarded.view(-1))
    yield from gather_stages(rows.view(-1), own, group, None, pieces, derive_key(key, 1), meter)
    if forwarded is not None:
        forwarded -= rows[rank]
        _drop_what_is_not_finite(forwarded)
    for span, piece in zip(layout.spans, pieces.spans, strict=True):
        tensor[span.values] = rows[:, piece.values].reshape(-1)[: span.segment.numel]


def _keep_what_was_lost(
    exact: torch.Tensor, wire: torch.Tensor, layout: WireLayout, rank: int
) -> None:
    """Take what ``wire`` holds, all of it this rank's own, off ``exact``."""
    decoded = torch.empty_like(exact)
    decode_rows(wire, layout, decoded, own=rank)
    exact -= decoded
    _drop_what_is_not_finite(exact)


def _drop_what_is_not_finite(errors: torch.Tensor) -> None:
    """Errors of values that were not finite would never end."""
    torch.nan_to_num(errors, nan=0.0, posinf=0.0, neginf=0.0, out=errors)


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
