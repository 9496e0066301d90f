"""What collectives do, stage by stage: encode, move rows, decode. Nothing here knows of FSDP.

Each is a generator that yields the transfers it has started and goes on once they are done: see
:func:`qsdp.exchange.run`. The contracts are those of the functions in :mod:`qsdp.collectives`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qsdp.buffers import pool
from qsdp.exchange import (
    Route,
    Stages,
    own_row,
    rows_of_all,
    swap_rows,
)
from qsdp.kernels.philox import derive_key
from qsdp.ragged import gather_encoded, swap_encoded
from qsdp.rows import decode_rows, encode_rows, sum_rows, take_rows
from qsdp.stats import CommMeter
from qsdp.wire import WireLayout, wire_layout


def gather_stages(
    output: torch.Tensor,
    input: torch.Tensor,
    way: Route,
    layout: WireLayout,
    key: int,
    meter: CommMeter,
) -> Stages:
    """:func:`all_gather_quantized` as stages."""
    device = input.device
    wire = take_rows(way.size, layout, device)
    rows = rows_of_all(wire, layout.row_bytes, way)
    with meter.phase("encode", device):
        values, own = input.view(1, -1), own_row(rows, way)
        encode_rows(values, layout, own, key=key, first_row=way.rank, sender=way.rank)
    yield from gather_encoded(rows, layout, way, meter, stock=(way.size - 1) * input.nbytes)
    with meter.phase("decode", device):
        decode_rows(rows, layout, output.view(*rows.shape[:-1], -1), way.global_ranks)


def reduce_stages(
    output: torch.Tensor,
    input: torch.Tensor,
    way: Route,
    layout: WireLayout,
    factors: tuple[float, float],
    key: int,
    meter: CommMeter,
    *,
    inside: WireLayout,
    residuals: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    reuse_input: bool = False,
) -> Stages:
    """:func:`reduce_scatter_quantized` as stages.

    Args:
        layout: between nodes, where rows take two hops: of sums, which are float32.
        inside: inside nodes, where rows take two hops.
        residuals: for error feedback, inside nodes, and of what reaches the owners.
        reuse_input: rows that arrive may be written over ``input`` once it is encoded.
    """
    if not way.two_level:
        return _one_hop(
            output, input, way, layout, factors, key, meter, residuals[1], reuse_input=reuse_input
        )
    return _two_hops(
        *(output, input, way, inside, layout, factors, key, meter, residuals, reuse_input)
    )


def _one_hop(
    output: torch.Tensor,
    input: torch.Tensor,
    way: Route,
    layout: WireLayout,
    factors: tuple[float, float],
    key: int,
    meter: CommMeter,
    residual: torch.Tensor | None,
    reuse_input: bool = False,
) -> Stages:
    device = input.device
    rows = input.view(way.size, -1)
    wire = take_rows(way.size, layout, device)
    with meter.phase("encode", device):
        _encode_with(residual, rows, layout, wire, derive_key(key, way.rank), way.rank)
    stock = (way.size - 1) * output.numel() * input.element_size()
    arrived = _rows_to_receive(wire, input if reuse_input else None)

    def count(sent: int) -> None:
        meter.count_sent(sent, way.size, stock=stock)

    yield from swap_encoded(arrived, wire, layout, range(way.size), way, meter, count)
    with meter.phase("decode", device):
        multiply, divide = factors
        sum_rows(arrived, layout, output, way.global_ranks, multiply=multiply, divide=divide)


def _two_hops(
    output: torch.Tensor,
    input: torch.Tensor,
    way: Route,
    inside: WireLayout,
    layout: WireLayout,
    factors: tuple[float, float],
    key: int,
    meter: CommMeter,
    residuals: tuple[torch.Tensor | None, torch.Tensor | None],
    reuse_input: bool,
) -> Stages:
    of_inside, of_sums = residuals
    per_node, num_nodes, device = way.ranks_per_node, way.num_nodes, input.device
    key = derive_key(key, way.rank)
    stock = (way.size - 1) * output.numel() * input.element_size()

    def count(between: int) -> None:
        within = (per_node - 1) * num_nodes * inside.row_bytes
        meter.count_hops(between, within, stock=stock)

    with meter.phase("encode", device):
        # To the rank of a place goes what this place owns, for every node.
        to_places = take_rows(way.size, inside, device).view(per_node, num_nodes, -1)
        by_ranks = input.view(num_nodes, per_node, -1)
        if of_inside is not None:
            of_inside = of_inside.view(by_ranks.shape)
        _encode_with(of_inside, by_ranks, inside, to_places.transpose(0, 1), key, way.place)
    from_places = _rows_to_receive(to_places, input if reuse_input else None)
    yield swap_rows(from_places, to_places, way.neighbours, way)
    del to_places  # its memory serves the rest
    sums = pool.take(num_nodes * output.numel(), torch.float32, device).view(num_nodes, -1)
    with meter.phase("decode", device):
        senders = way.global_ranks[way.neighbours.start : way.neighbours.stop]
        for node in range(num_nodes):
            sum_rows(from_places[:, node], inside, sums[node], senders)
    with meter.phase("encode", device):
        to_nodes, from_nodes = (take_rows(num_nodes, layout, device) for _ in range(2))
        _encode_with(of_sums, sums, layout, to_nodes, derive_key(key, 1), way.node)
    yield from swap_encoded(from_nodes, to_nodes, layout, way.counterparts, way, meter, count)
    with meter.phase("decode", device):
        senders = tuple(way.global_ranks[rank] for rank in way.counterparts)
        multiply, divide = factors
        sum_rows(from_nodes, layout, output, senders, multiply=multiply, divide=divide)


def all_reduce_stages(
    tensor: torch.Tensor,
    way: Route,
    layout: WireLayout,
    factors: tuple[float, float],
    key: int,
    meter: CommMeter,
    residuals: tuple[torch.Tensor, torch.Tensor] | None,
) -> Stages:
    """:func:`all_reduce_quantized` as stages."""
    pieces = piece_layout(layout, way.size)
    rows = tensor.new_zeros(way.size, pieces.numel)
    for span, piece in zip(layout.spans, pieces.spans, strict=True):
        cut = rows[:, piece.values]
        padding = cut.numel() - span.segment.numel
        cut.copy_(torch.nn.functional.pad(tensor[span.values], (0, padding)).view(cut.shape))
    own = rows.new_empty(pieces.numel)
    sent, forwarded = residuals or (None, None)
    yield from _one_hop(own, rows.view(-1), way, pieces, factors, key, meter, sent)
    if forwarded is not None:
        forwarded += own
        own.copy_(forwarded.view(-1))
    yield from gather_stages(rows.view(-1), own, way, pieces, derive_key(key, 1), meter)
    if forwarded is not None:
        forwarded -= rows[way.rank]
        _drop_what_is_not_finite(forwarded)
    for span, piece in zip(layout.spans, pieces.spans, strict=True):
        tensor[span.values] = rows[:, piece.values].reshape(-1)[: span.segment.numel]


def _rows_to_receive(wire: torch.Tensor, reusable: torch.Tensor | None) -> torch.Tensor:
    """Uninitialised, of the shape of ``wire``; in ``reusable``'s memory if it is large enough."""
    if reusable is not None and reusable.nbytes >= wire.nbytes:
        return reusable.view(torch.uint8)[: wire.numel()].view(wire.shape)
    return pool.take(wire.numel(), torch.uint8, wire.device).view(wire.shape)


def _encode_with(
    residual: torch.Tensor | None,
    rows: torch.Tensor,
    layout: WireLayout,
    wire: torch.Tensor,
    key: int,
    sender: int,
) -> None:
    """Encode rows plus what was lost of those before, if that is remembered, which is replaced."""
    if residual is None:
        return encode_rows(rows, layout, wire, key=key, sender=sender)
    residual += rows
    exact = residual if rows.dtype == residual.dtype else residual.to(rows.dtype)
    encode_rows(exact, layout, wire, key=key, sender=sender)
    _keep_what_was_lost(residual, wire, layout, sender)


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


def piece_layout(layout: WireLayout, num_ranks: int) -> WireLayout:
    """Layout of the row that one rank reduces: its piece of every segment of ``layout``."""
    pieces = (replace(s, numel=-(-s.numel // num_ranks)) for s in layout.segments)
    zeros = bool(layout.zero_maps)
    return wire_layout(tuple(pieces), layout.dtype, layout.checksum, zeros=zeros)
