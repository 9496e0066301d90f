"""Moving rows between ranks: who sends which row to whom, in one hop or two, and pending work.

Bytes in, bytes out: nothing here knows what a row holds. A collective is a generator that yields
the transfers it has started and goes on once they are done (:class:`Pending` drives it), so one
piece of code serves synchronous and asynchronous calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from qsdp.buffers import pool
from qsdp.stats import CommMeter

Transfers = list[dist.Work]
Stages = Iterator[Transfers]


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
        """Ranks in each node."""
        return dist.get_world_size(self.intra)

    @property
    def num_nodes(self) -> int:
        """Nodes of the group."""
        return dist.get_world_size(self.inter)


@lru_cache(maxsize=64)
def node_groups(group: dist.ProcessGroup, ranks_per_node: int) -> NodeGroups:
    """Split ``group`` into nodes, once; every rank of ``group`` calls it, no other needs to.

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
            f"ranks_per_node={ranks_per_node} does not divide the {num_ranks} ranks of an FSDP "
            "group: set QSDPConfig(ranks_per_node=...) to the ranks that a node holds of that group"
        )


class Pending(dist.Work):
    """A collective under way. Whoever waits for it does what is left, decoding among it.

    Args:
        stages: the collective; its first transfers are started here.
        meter: takes the time of waiting for transfers as ``network``.
    """

    def __init__(self, stages: Stages, meter: CommMeter, device: torch.device) -> None:
        super().__init__()
        self._stages, self._meter, self._device = stages, meter, device
        self._transfers = next(stages, None)

    def advance(self) -> bool:
        """Wait for the transfers under way and take the next stage; whether all is done."""
        if self._transfers is not None:
            with self._meter.phase("network", self._device):
                for work in self._transfers:
                    work.wait()
            self._transfers = next(self._stages, None)
        return self._transfers is None

    def wait(self, timeout: object = None) -> bool:
        """Finish; may be called repeatedly."""
        while not self.advance():
            pass
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited for all of it."""
        return self._transfers is None


def run(stages: Stages, async_op: bool, meter: CommMeter, device: torch.device) -> dist.Work | None:
    """Carry out a collective now, or start it and return what finishes it."""
    pending = Pending(stages, meter, device)
    if async_op:
        return pending
    pending.wait()
    return None


def gather_rows(wire: torch.Tensor, rank: int, group: dist.ProcessGroup) -> Transfers:
    """Start an all-gather of the rows of ``wire`` in place; ``wire[rank]`` is this rank's own.

    Args:
        wire: (num_ranks, row_bytes) uint8, contiguous; complete once the transfers are waited for.
    """
    num_ranks = wire.shape[0]
    if num_ranks == 1 or wire.numel() == 0:
        return []
    if not _is_gloo(group, wire.device):
        return [dist.all_gather_single(wire.view(-1), wire[rank], group=group, async_op=True)]
    # gloo's all-gather moves a third of what its point-to-point transfers of the same bytes do
    # (docs/design.md, "Transport").
    return _swap_with_all(wire, wire[rank].expand_as(wire), rank, group, tag=0)


def gather_in_hops(
    wire: torch.Tensor,
    group: dist.ProcessGroup,
    nodes: NodeGroups | None,
    meter: CommMeter,
    stock: int,
) -> Stages:
    """All-gather the rows of ``wire`` in place, in one hop, or between nodes and then inside.

    Args:
        wire: (num_ranks, row_bytes) uint8, contiguous, by ranks; this rank's own row is filled in.
        meter: counts it, beside the ``stock`` bytes that FSDP2 would have sent.
    """
    (num_ranks, row_bytes), rank = wire.shape, group.rank()
    if nodes is None:
        meter.count_rows(row_bytes, num_ranks, stock=stock)
        yield gather_rows(wire, rank, group)
        return
    per_node, num_nodes = nodes.ranks_per_node, nodes.num_nodes
    between, inside = (num_nodes - 1) * row_bytes, (per_node - 1) * num_nodes * row_bytes
    meter.count_hops(between, inside, stock=stock)
    node, place = divmod(rank, per_node)
    # By places in a node, then by nodes, so that both hops move rows that lie together.
    columns = pool.take(wire.numel(), torch.uint8, wire.device).view(per_node, num_nodes, -1)
    columns[place, node].copy_(wire[rank])
    yield gather_rows(columns[place], node, nodes.inter)
    yield gather_rows(columns.flatten(1), place, nodes.intra)
    wire.view(num_nodes, per_node, -1).copy_(columns.transpose(0, 1))


def swap_rows(
    into: torch.Tensor, out: torch.Tensor, rank: int, group: dist.ProcessGroup
) -> Transfers:
    """Start an all-to-all: row i of ``out`` goes to rank i, ``into`` gets one row of each rank.

    Args:
        into: (num_ranks, row_bytes) uint8, contiguous; complete once the transfers are waited for.
        out: of the same shape; must not change before.
    """
    if not _is_gloo(group, out.device) or out.numel() == 0:
        return [dist.all_to_all_single(into.view(-1), out.view(-1), group=group, async_op=True)]
    into[rank].copy_(out[rank])
    return _swap_with_all(into, out, rank, group, tag=1)


def _swap_with_all(
    into: Sequence[torch.Tensor] | torch.Tensor,
    out: Sequence[torch.Tensor] | torch.Tensor,
    rank: int,
    group: dist.ProcessGroup,
    *,
    tag: int,
) -> Transfers:
    """Point to point on gloo: ``out[i]`` to rank i, its row to ``into[i]``, for all others at once.

    Rows may be of different sizes, as long as sender and receiver agree. Each rank starts with its
    right neighbour to spread the load. Receives are posted before sends: gloo announces a receive
    over the connection that carries the data, and behind a send that fills it the announcement
    waits until the send is through, so that the two directions take turns.
    """
    num_ranks = len(into)
    peers = [(rank + step) % num_ranks for step in range(1, num_ranks)]
    ops = [
        dist.P2POp(op, rows[p], group=group, group_peer=p, tag=tag)
        for op, rows in ((dist.irecv, into), (dist.isend, out))
        for p in peers
    ]
    return dist.batch_isend_irecv(ops) if ops else []


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo carries tensors of a device; a group's name may list several backends."""
    backends = dist.get_backend_config(group)
    for part in backends.split(","):
        kind, _, name = part.rpartition(":")
        if kind in ("", device.type):
            return bool(name == dist.Backend.GLOO)
    return False
