"""Encoded rows between ranks, in their coded forms where their layout has any.

Coded rows have sizes of their own: ranks first tell each other the sizes, an int64 a row, and then
exact slices travel point to point. Where rows take two hops, they are coded between nodes alone.
Other rows are moved by :mod:`qsdp.exchange` as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from qsdp.buffers import pool
from qsdp.exchange import (
    Route,
    Stages,
    count_gather,
    gather_between,
    gather_in_hops,
    gather_inside,
    swap_parts,
    swap_rows,
)
from qsdp.rows import compact_rows, expand_rows
from qsdp.stats import CommMeter
from qsdp.wire import WireLayout

SIZE_BYTES = 8  # of a row's size, where ranks tell each other


def gather_encoded(
    rows: torch.Tensor, layout: WireLayout, way: Route, meter: CommMeter, stock: int
) -> Stages:
    """:func:`qsdp.exchange.gather_in_hops` of encoded rows of ``layout``."""
    if not layout.coded_spans:
        yield from gather_in_hops(rows, way, meter, stock)
        return
    if not way.two_level:
        yield from gather_encoded_between(rows, layout, way, meter, 0, stock)
        return
    columns = rows.transpose(0, 1)
    own = columns[way.place]
    yield from gather_encoded_between(own, layout, way, meter, layout.row_bytes, stock)
    yield gather_inside(columns, own, way)


def gather_encoded_between(
    rows: torch.Tensor,
    layout: WireLayout,
    way: Route,
    meter: CommMeter,
    inside: int,
    stock: int,
) -> Stages:
    """All-gather encoded rows in place among the counterparts: the first hop of two, or all.

    Args:
        rows: (len(way.counterparts), layout.row_bytes) uint8, contiguous; this rank's own is there.
        meter: counts what is sent.
        inside: bytes of a row that follows inside a node, where rows take two hops.
        stock: bytes that FSDP2 would have sent.

    Raises:
        RuntimeError: naming the ranks whose coded rows arrived damaged.
    """
    me = way.counterparts.index(way.rank)
    if not layout.coded_spans:
        count_gather(layout.row_bytes, inside, way, meter, stock)
        yield gather_between(rows, way)
        return
    with meter.phase("encode", rows.device):
        (own,) = compact_rows(rows[me : me + 1], layout)
    count_gather(SIZE_BYTES + own.numel(), inside, way, meter, stock)
    sizes = torch.zeros(len(rows), 1, dtype=torch.int64, device=rows.device)
    sizes[me] = own.numel()
    yield gather_between(sizes.view(torch.uint8), way)
    parts = _room_for(sizes, layout, way.counterparts, way)
    yield swap_parts(parts, [own] * len(parts), way.counterparts, way, tag=0)
    with meter.phase("decode", rows.device):
        _expand_others(parts, layout, rows, way.counterparts, way)


def swap_encoded(
    into: torch.Tensor,
    out: torch.Tensor,
    layout: WireLayout,
    peers: range,
    way: Route,
    meter: CommMeter,
    count: Callable[[int], None],
) -> Stages:
    """:func:`qsdp.exchange.swap_rows` of encoded rows of ``layout``.

    Args:
        meter: takes the time of coding.
        count: called once, with the bytes that this rank sends to the others.

    Raises:
        RuntimeError: naming the ranks whose coded rows arrived damaged.
    """
    if not layout.coded_spans:
        count((len(peers) - 1) * layout.row_bytes)
        yield swap_rows(into, out, peers, way)
        return
    me = peers.index(way.rank)
    with meter.phase("encode", out.device):
        sent = [*compact_rows(out[:me], layout), out[me], *compact_rows(out[me + 1 :], layout)]
        into[me].copy_(out[me])
    others = [part.numel() for i, part in enumerate(sent) if i != me]
    count(SIZE_BYTES * len(others) + sum(others))
    told = torch.tensor([[part.numel()] for part in sent], device=out.device)
    sizes = torch.empty_like(told)
    yield swap_rows(sizes.view(torch.uint8), told.view(torch.uint8), peers, way)
    parts = _room_for(sizes, layout, peers, way)
    yield swap_parts(parts, sent, peers, way)
    with meter.phase("decode", out.device):
        _expand_others(parts, layout, into, peers, way)


def _room_for(
    sizes: torch.Tensor, layout: WireLayout, peers: range, way: Route
) -> list[torch.Tensor]:
    """Where the others' coded rows of ``sizes`` (num_peers, 1) arrive; one's own gets nothing."""
    told = sizes.flatten().tolist()
    ranks = way.global_ranks_of(peers)
    for size, peer, rank in zip(told, peers, ranks, strict=True):
        if peer != way.rank and not 0 < size <= layout.most_bytes:
            raise RuntimeError(
                f"rank {dist.get_rank()} was told of a coded row of {size} bytes by rank {rank}, "
                f"of at most {layout.most_bytes}: check the network or memory between them"
            )
    return [
        pool.take(0 if peer == way.rank else size, torch.uint8, sizes.device)
        for size, peer in zip(told, peers, strict=True)
    ]


def _expand_others(
    parts: Sequence[torch.Tensor], layout: WireLayout, rows: torch.Tensor, peers: range, way: Route
) -> None:
    others = [i for i, peer in enumerate(peers) if peer != way.rank]
    ranks = way.global_ranks_of(peers)
    expand_rows(
        [parts[i] for i in others], layout, [rows[i] for i in others], [ranks[i] for i in others]
    )
