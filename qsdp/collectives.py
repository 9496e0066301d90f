"""Quantized collectives on flat tensors and process groups; nothing here knows of FSDP.

Both move one contiguous byte row a rank (:mod:`qsdp.wire`). A contribution is quantized once;
partial sums never are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from qsdp.buffers import pool
from qsdp.kernels import VALUE_DTYPES, backend_for
from qsdp.kernels.philox import derive_key
from qsdp.quantizer import Quantizer
from qsdp.stats import CommMeter
from qsdp.wire import WireLayout, damaged_rows, seal, wire_layout
from qsdp.works import complete

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


def all_gather_quantized(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    quantizer: Quantizer | WireLayout,
    key: int = 0,
    async_op: bool = False,
    meter: CommMeter | None = None,
) -> dist.Work | None:
    """All-gather that moves quantized values.

    1. Encode this rank's ``input`` (one row).
    2. All-gather the rows: every rank sends and receives ``(num_ranks - 1) * row_bytes``.
    3. Decode every row, this rank's own included, so all ranks hold bit-identical ``output``.

    Args:
        output: (num_ranks * input.numel(),), overwritten. ``input`` may be a view into it.
        input: (numel,) float32, bfloat16 or float16, contiguous, of equal size on all ranks.
        group: process group; None is the default group.
        quantizer: how to encode, equal on all ranks: a Quantizer for the whole input, or the
            layout of one row.
        key: 64 bits for random rounding; draws also depend on the rank in ``group``.
        async_op: return a Work whose ``wait`` decodes; ``input`` may be changed at once, ``output``
            must not be read before.
        meter: adds bytes and times to it.

    Raises:
        ValueError, TypeError: sizes or dtypes that do not fit together.
    """
    group = _group_or_default(group)
    layout = _layout_for(quantizer, input)
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    _check_sizes(output, input, num_ranks, "all_gather_quantized", gather=True)
    meter = meter or CommMeter()
    backend, device = backend_for(input.device), input.device
    wire = _wire_rows(num_ranks, layout, device)
    with meter.phase("encode", device):
        own = wire[rank : rank + 1]
        backend.encode(input.view(1, -1), layout, own, key=key, first_row=rank)
        seal_if_asked(own, layout)
    stock = (num_ranks - 1) * input.numel() * input.element_size()
    meter.count_rows(layout.row_bytes, num_ranks, stock=stock)

    def finish() -> None:
        with meter.phase("decode", device):
            check_if_asked(wire, layout, group)
            backend.decode(wire, layout, output.view(num_ranks, -1))

    works = exchange_rows(wire, rank, group)
    return complete(works, finish, async_op, meter, device)


def reduce_scatter_quantized(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    quantizer: Quantizer | WireLayout,
    op: ReduceOp = dist.ReduceOp.AVG,
    key: int = 0,
    async_op: bool = False,
    meter: CommMeter | None = None,
    contribution: torch.Tensor | None = None,
) -> dist.Work | None:
    """Reduce-scatter that moves quantized values.

    1. Encode ``input`` as one row for each destination.
    2. One all-to-all of rows: every rank sends and receives ``(num_ranks - 1) * row_bytes``.
    3. Decode and sum the rows in float32 in rank order, this rank's own contribution included,
       apply ``op``, round once to the output's dtype. Deterministic.

    Args:
        output: (numel,), overwritten.
        input: (num_ranks * numel,) float32, bfloat16 or float16, contiguous; not modified.
        group: process group; None is the default group.
        quantizer: how to encode, equal on all ranks: a Quantizer for a rank's whole part, or the
            layout of one row.
        op: SUM, AVG, or PREMUL_SUM with its factor (also on backends that refuse it).
        key: 64 bits for random rounding; draws also depend on the rank in ``group`` and the
            destination, so that the ranks' errors are independent.
        async_op: return a Work whose ``wait`` decodes; ``input`` may be changed at once, ``output``
            must not be read before.
        meter: adds bytes and times to it.
        contribution: float32 of ``input``'s size, overwritten with what its receivers decode.

    Raises:
        ValueError, TypeError: sizes, dtypes or an op that do not fit.
    """
    group = _group_or_default(group)
    layout = _layout_for(quantizer, output)
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    _check_sizes(output, input, num_ranks, "reduce_scatter_quantized", gather=False)
    multiply, divide = reduce_factors(op, num_ranks)
    meter = meter or CommMeter()
    backend, device = backend_for(input.device), input.device
    wire_in, wire_out = (_wire_rows(num_ranks, layout, device) for _ in range(2))
    with meter.phase("encode", device):
        rows = input.view(num_ranks, -1)
        backend.encode(rows, layout, wire_in, key=derive_key(key, rank))
        seal_if_asked(wire_in, layout)
        if contribution is not None:
            backend.decode(wire_in, layout, contribution.view(num_ranks, -1))
    stock = (num_ranks - 1) * output.numel() * input.element_size()
    meter.count_rows(layout.row_bytes, num_ranks, stock=stock)

    def finish() -> None:
        with meter.phase("decode", device):
            check_if_asked(wire_out, layout, group)
            backend.decode_sum(wire_out, layout, output, multiply=multiply, divide=divide)

    works = exchange_parts(wire_out, wire_in, rank, group)
    return complete(works, finish, async_op, meter, device)


def all_reduce_quantized(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    quantizer: Quantizer | WireLayout,
    op: ReduceOp = dist.ReduceOp.AVG,
    key: int = 0,
    meter: CommMeter | None = None,
) -> None:
    """All-reduce in place that moves quantized values: our reduce-scatter, then our all-gather.

    Each segment is cut into one piece a rank, padded with zeros to equal sizes. Contributions are
    quantized once, then their sum once, so all ranks end with bit-identical values.

    Args:
        tensor: (numel,) float32, bfloat16 or float16, contiguous; equal size on all ranks.
        quantizer: for the whole tensor, or the layout of its segments.
        op, key, meter: as for :func:`reduce_scatter_quantized`.

    Raises:
        ValueError, TypeError: as :func:`reduce_scatter_quantized`.
    """
    for _ in all_reduce_stages(
        tensor, group, quantizer=quantizer, op=op, key=key, meter=meter, async_op=False
    ):
        pass


@dataclass(frozen=True)
class Feedback:
    """What quantization lost in one all-reduce, to be added to the next of the same tensor.

    Attributes:
        contribution: (numel,) float32: of this rank's own values.
        reduced: (numel of a piece row,) float32: of the result that this rank forwards.
    """

    contribution: torch.Tensor
    reduced: torch.Tensor


def piece_layout(layout: WireLayout, num_ranks: int) -> WireLayout:
    """Layout of the row that one rank reduces: its piece of every segment of ``layout``."""
    pieces = (replace(s.segment, numel=-(-s.segment.numel // num_ranks)) for s in layout.spans)
    return wire_layout(tuple(pieces), layout.dtype, layout.checksum)


def all_reduce_stages(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    quantizer: Quantizer | WireLayout,
    op: ReduceOp = dist.ReduceOp.AVG,
    key: int = 0,
    meter: CommMeter | None = None,
    feedback: Feedback | None = None,
    async_op: bool = True,
) -> Iterator[None]:
    """:func:`all_reduce_quantized` step by step, so that several can be under way.

    Yields while the reduce-scatter is under way, then while the all-gather is; ``tensor`` holds the
    result at the end. Ranks must take the steps of all their all-reduces in the same order.

    Args:
        feedback: error feedback. Its errors are added before quantizing and then replaced by the
            new ones; those of values that are not finite are dropped, or they would never end.
    """
    group = _group_or_default(group)
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = _layout_for(quantizer, tensor)
    pieces = piece_layout(whole, num_ranks)
    rows = tensor.new_zeros(num_ranks, pieces.numel)

    def spans(flat: torch.Tensor, cut: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each segment of ``flat`` and its pieces, a rank a row of ``cut``."""
        for span, piece in zip(whole.spans, pieces.spans, strict=True):
            end = span.value_offset + span.segment.numel
            width = slice(piece.value_offset, piece.value_offset + piece.segment.numel)
            yield flat[span.value_offset : end], cut[:, width]

    exact = tensor if feedback is None else tensor.float() + feedback.contribution
    for segment, cut in spans(exact, rows):
        padded = torch.nn.functional.pad(segment, (0, cut.numel() - segment.numel()))
        cut.copy_(padded.view(cut.shape))
    decoded = None if feedback is None else rows.new_empty(rows.shape, dtype=torch.float32)
    own = rows.new_empty(pieces.numel)
    work = reduce_scatter_quantized(
        own,
        rows.view(-1),
        group,
        quantizer=pieces,
        op=op,
        key=key,
        async_op=async_op,
        meter=meter,
        contribution=None if decoded is None else decoded.view(-1),
    )
    if feedback is not None and decoded is not None:
        for segment, cut in spans(exact, decoded):
            segment -= cut.reshape(-1)[: segment.numel()]
        _keep_finite(feedback.contribution, exact)
    yield
    if work is not None:
        work.wait()
    exact_own = own if feedback is None else own.float() + feedback.reduced
    work = all_gather_quantized(
        rows.view(-1),
        own.copy_(exact_own),
        group,
        quantizer=pieces,
        key=derive_key(key, 1),
        async_op=async_op,
        meter=meter,
    )
    yield
    if work is not None:
        work.wait()
    if feedback is not None:
        _keep_finite(feedback.reduced, exact_own - rows[rank])
    for segment, cut in spans(tensor, rows):
        segment.copy_(cut.reshape(-1)[: segment.numel()])


def _keep_finite(errors: torch.Tensor, new: torch.Tensor) -> None:
    torch.nan_to_num(new, nan=0.0, posinf=0.0, neginf=0.0, out=errors)


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


def exchange_rows(wire: torch.Tensor, rank: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start an all-gather of the rows of ``wire`` in place; ``wire[rank]`` is this rank's own.

    Args:
        wire: (num_ranks, row_bytes) uint8, contiguous; complete once the returned works are waited.
    """
    num_ranks = wire.shape[0]
    if num_ranks == 1 or wire.numel() == 0:
        return []
    if dist.get_backend(group) != dist.Backend.GLOO:
        return [dist.all_gather_single(wire.view(-1), wire[rank], group=group, async_op=True)]
    # gloo's all-gather moves a third of what its point-to-point transfers of the same bytes do
    # (docs/design.md, "Transport").
    return _swap_with_all(wire, wire[rank].expand_as(wire), rank, group, tag=0)


def exchange_parts(
    output: torch.Tensor, input: torch.Tensor, rank: int, group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start an all-to-all of rows: row i of ``input`` goes to rank i, ``output`` gets one of each.

    Args:
        output: (num_ranks, row_bytes) uint8, contiguous; complete once the returned works are
            waited.
        input: the same shape; must not change before.
    """
    if dist.get_backend(group) != dist.Backend.GLOO or input.numel() == 0:
        return [dist.all_to_all_single(output.view(-1), input.view(-1), group=group, async_op=True)]
    output[rank].copy_(input[rank])
    return _swap_with_all(output, input, rank, group, tag=1)


def _swap_with_all(
    into: torch.Tensor, out: torch.Tensor, rank: int, group: dist.ProcessGroup, *, tag: int
) -> list[dist.Work]:
    """Point to point on gloo: ``out[i]`` to rank i, its row to ``into[i]``, for all others at once.

    Each rank starts with its right neighbour to spread the load. Receives are posted before sends:
    gloo announces a receive over the connection that carries the data, and behind a send that fills
    it the announcement waits until the send is through, so that the two directions take turns.
    """
    num_ranks = into.shape[0]
    peers = [(rank + step) % num_ranks for step in range(1, num_ranks)]
    ops = [
        dist.P2POp(op, rows[p], group=group, group_peer=p, tag=tag)
        for op, rows in ((dist.irecv, into), (dist.isend, out))
        for p in peers
    ]
    return dist.batch_isend_irecv(ops) if ops else []


def seal_if_asked(wire: torch.Tensor, layout: WireLayout) -> None:
    """Write the rows' checksums, where the layout has them."""
    if layout.checksum:
        seal(wire)


def check_if_asked(wire: torch.Tensor, layout: WireLayout, group: dist.ProcessGroup) -> None:
    """Verify received rows, one from each rank of ``group``, where the layout has checksums.

    Raises:
        RuntimeError: naming the ranks whose rows arrived damaged.
    """
    if not layout.checksum:
        return
    damaged = damaged_rows(wire)
    if damaged:
        ranks = [dist.get_global_rank(group, row) for row in damaged]
        raise RuntimeError(
            f"rank {dist.get_rank()} received damaged bytes from rank "
            f"{', '.join(map(str, ranks))} ({layout.row_bytes} bytes do not match their checksum): "
            "check the network or memory between them; QSDPConfig(verify=True) found it"
        )


def _group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group: call torch.distributed.init_process_group first")
    return group


def _wire_rows(num_ranks: int, layout: WireLayout, device: torch.device) -> torch.Tensor:
    rows = pool.take(num_ranks * layout.row_bytes, torch.uint8, device)
    return rows.view(num_ranks, layout.row_bytes)


def _layout_for(quantizer: Quantizer | WireLayout, part: torch.Tensor) -> WireLayout:
    if isinstance(quantizer, WireLayout):
        return quantizer
    return quantizer.layout(part.numel(), part.dtype)


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
