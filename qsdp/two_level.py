"""Two-level collectives for nodes with several ranks: one hop inside the node, one between nodes.

A flat exchange sends every rank's part to every rank of the other nodes. Here the ranks of a node
share that work: what leaves a node falls by the number of ranks in it. Codes that arrive from
another node are forwarded as codes, never quantized again; gradients are summed inside the node
first, and the node's sum is what is quantized for the slow link.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from qsdp.buffers import pool
from qsdp.collectives import (
    ReduceOp,
    check_if_asked,
    exchange_parts,
    exchange_rows,
    reduce_factors,
    seal_if_asked,
)
from qsdp.kernels import backend_for
from qsdp.kernels.philox import derive_key
from qsdp.stats import CommMeter
from qsdp.wire import WireLayout


@dataclass(frozen=True)
class NodeGroups:
    """A group's ranks as nodes of equal size, consecutive in the order of the group.

    Attributes:
        intra: the ranks of this rank's node.
        inter: the ranks with this rank's place in every node.
    """

    intra: dist.ProcessGroup
    inter: dist.ProcessGroup

    @property
    def ranks_per_node(self) -> int:
        return dist.get_world_size(self.intra)

    @property
    def num_nodes(self) -> int:
        return dist.get_world_size(self.inter)


def make_node_groups(group: dist.ProcessGroup, ranks_per_node: int) -> NodeGroups:
    """Split ``group`` into nodes; every rank of ``group`` calls it, no other needs to.

    Raises:
        ValueError: the group's size is no multiple of ``ranks_per_node``.
    """
    ranks = dist.get_process_group_ranks(group)
    check_node_size(len(ranks), ranks_per_node)
    node, place = divmod(dist.get_rank(group), ranks_per_node)
    intra = ranks[node * ranks_per_node : (node + 1) * ranks_per_node]
    inter = ranks[place::ranks_per_node]
    backend = dist.get_backend(group)
    groups = [
        dist.new_group(members, backend=backend, use_local_synchronization=True)
        for members in (intra, inter)
    ]
    return NodeGroups(*groups)


def check_node_size(num_ranks: int, ranks_per_node: int) -> None:
    """Raises ValueError unless a group of ``num_ranks`` splits into nodes of ``ranks_per_node``."""
    if num_ranks % ranks_per_node:
        raise ValueError(
            f"IntraNode(ranks={ranks_per_node}) does not divide the {num_ranks} ranks of an FSDP "
            "group: set it to the ranks that a node holds of that group"
        )


def all_gather_two_level(
    output: torch.Tensor,
    input: torch.Tensor,
    nodes: NodeGroups,
    *,
    layout: WireLayout,
    key: int,
    meter: CommMeter,
) -> None:
    """:func:`qsdp.all_gather_quantized` in two hops; the result is the same, bit for bit.

    1. Encode this rank's ``input``.
    2. Between nodes, ranks of one place exchange rows: ``(num_nodes - 1) * row_bytes`` a rank.
    3. Inside the node, ranks exchange what arrived: ``(ranks_per_node - 1) * num_nodes`` rows.
    4. Decode every row.
    """
    per_node, num_nodes = nodes.ranks_per_node, nodes.num_nodes
    node, place = dist.get_rank(nodes.inter), dist.get_rank(nodes.intra)
    backend, device = backend_for(input.device), input.device
    row = layout.row_bytes
    # (ranks_per_node, num_nodes, row): what each local rank gathered between the nodes.
    columns = pool.take(per_node * num_nodes * row, torch.uint8, device)
    columns = columns.view(per_node, num_nodes, row)
    with meter.phase("encode", device):
        own = columns[place, node : node + 1]
        backend.encode(input.view(1, -1), layout, own, key=key, first_row=node * per_node + place)
        seal_if_asked(own, layout)
    with meter.phase("network", device):
        for work in exchange_rows(columns[place], node, nodes.inter):
            work.wait()
        for work in exchange_rows(columns.flatten(1), place, nodes.intra):
            work.wait()
    with meter.phase("decode", device):
        for column in columns:
            check_if_asked(column, layout, nodes.inter)
        rows = columns.transpose(0, 1).reshape(per_node * num_nodes, row)
        backend.decode(rows, layout, output.view(per_node * num_nodes, -1))
    between = (num_nodes - 1) * row
    moved = between + (per_node - 1) * num_nodes * row
    stock = (per_node * num_nodes - 1) * input.numel() * input.element_size()
    meter.count(moved=moved, stock=stock, inter_node=between)


def reduce_scatter_two_level(
    output: torch.Tensor,
    input: torch.Tensor,
    nodes: NodeGroups,
    *,
    intra_layout: WireLayout,
    inter_layout: WireLayout,
    op: ReduceOp,
    key: int,
    meter: CommMeter,
) -> None:
    """:func:`qsdp.reduce_scatter_quantized` in two hops.

    1. Inside the node, an all-to-all of rows of ``intra_layout``; each rank sums, in float32 and
       rank order, what its place owns on every node: ``(ranks_per_node - 1) * num_nodes`` rows.
    2. Between nodes, an all-to-all of those sums in ``inter_layout`` (float32 values):
       ``num_nodes - 1`` rows a rank; decode, sum, apply ``op``.
    """
    per_node, num_nodes = nodes.ranks_per_node, nodes.num_nodes
    num_ranks = per_node * num_nodes
    node, place = dist.get_rank(nodes.inter), dist.get_rank(nodes.intra)
    multiply, divide = reduce_factors(op, num_ranks)
    key = derive_key(key, node * per_node + place)
    backend, device = backend_for(input.device), input.device
    sums = pool.take(num_nodes * output.numel(), torch.float32, device).view(num_nodes, -1)
    row = intra_layout.row_bytes
    with meter.phase("encode", device):
        rows = pool.take(num_ranks * row, torch.uint8, device).view(num_ranks, row)
        backend.encode(input.view(num_ranks, -1), intra_layout, rows, key=key)
        seal_if_asked(rows, intra_layout)
        # To local rank r goes what place r owns, for every node.
        to_places = rows.view(num_nodes, per_node, row).transpose(0, 1).contiguous()
    with meter.phase("network", device):
        from_places = torch.empty_like(to_places)
        for work in exchange_parts(
            from_places.view(per_node, -1), to_places.view(per_node, -1), place, nodes.intra
        ):
            work.wait()
    with meter.phase("decode", device):
        for target, parts in zip(sums, from_places.transpose(0, 1).contiguous(), strict=True):
            check_if_asked(parts, intra_layout, nodes.intra)
            backend.decode_sum(parts, intra_layout, target)
    with meter.phase("encode", device):
        to_nodes = pool.take(num_nodes * inter_layout.row_bytes, torch.uint8, device)
        to_nodes = to_nodes.view(num_nodes, -1)
        backend.encode(sums, inter_layout, to_nodes, key=derive_key(key, 1))
        seal_if_asked(to_nodes, inter_layout)
    with meter.phase("network", device):
        from_nodes = torch.empty_like(to_nodes)
        for work in exchange_parts(from_nodes, to_nodes, node, nodes.inter):
            work.wait()
    with meter.phase("decode", device):
        check_if_asked(from_nodes, inter_layout, nodes.inter)
        backend.decode_sum(from_nodes, inter_layout, output, multiply=multiply, divide=divide)
    between = (num_nodes - 1) * inter_layout.row_bytes
    moved = between + (per_node - 1) * num_nodes * row
    stock = (num_ranks - 1) * output.numel() * input.element_size()
    meter.count(moved=moved, stock=stock, inter_node=between)
