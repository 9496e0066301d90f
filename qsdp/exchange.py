"""Moving rows between ranks: who sends which row to whom, in one hop or two, and pending work.

Bytes in, bytes out: nothing here knows what a row holds. A collective is a generator that yields
the transfers it has started and goes on once they are done, so one piece of code serves synchronous
and asynchronous calls.

Two hops are calls of the same process group in which a rank exchanges rows with some of the others
only: groups of their own would have to be made by all ranks of the job, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from qsdp.stats import CommMeter
from qsdp.streams import Beside, beside

Transfers = Sequence[dist.Work]
Stages = Iterator[Transfers]

# Its name since torch 2.13; before, all_gather_into_tensor.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Route:
    """With whom a rank exchanges rows, and how: a process group and its nodes.

    Attributes:
        group: the ranks.
        size: how many there are.
        rank: this one's place in the group.
        global_ranks: of all of them, for messages.
        ranks_per_node: for two hops; 1 for one.
        on_gloo: whether gloo carries the tensors.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    global_ranks: tuple[int, ...]
    ranks_per_node: int
    on_gloo: bool

    @property
    def two_level(self) -> bool:
        """Whether rows take two hops."""
        return self.ranks_per_node > 1

    @property
    def num_nodes(self) -> int:
        """Nodes of the group, where rows take two hops."""
        return self.size // self.ranks_per_node

    @property
    def place(self) -> int:
        """Of this rank in its node."""
        return self.rank % self.ranks_per_node

    @property
    def node(self) -> int:
        """Of this rank."""
        return self.rank // self.ranks_per_node

    @property
    def neighbours(self) -> range:
        """Ranks of this rank's node, in order."""
        start = self.node * self.ranks_per_node
        return range(start, start + self.ranks_per_node)

    @property
    def counterparts(self) -> range:
        """Ranks with this rank's place in every node, in order of the nodes; all in one hop."""
        return range(self.place, self.size, self.ranks_per_node)

    def global_ranks_of(self, ranks: range) -> tuple[int, ...]:
        """Of some ranks of the group, for messages."""
        return self.global_ranks[ranks.start : ranks.stop : ranks.step]


def route(
    group: dist.ProcessGroup, device: torch.device, ranks_per_node: int | None = None
) -> Route:
    """The route of a group's rows.

    Args:
        device: of the rows.
        ranks_per_node: ranks of the group in each node, consecutive in it, for two hops.

    Raises:
        ValueError: the group's size is no multiple of ``ranks_per_node``.
    """
    ranks = dist.get_process_group_ranks(group)
    check_node_size(len(ranks), ranks_per_node or 1)
    # A node that holds all of the group leaves nothing for the hop between nodes.
    per_node = 1 if ranks_per_node in (None, len(ranks)) else ranks_per_node
    return Route(
        group, group.size(), group.rank(), tuple(ranks), per_node or 1, _is_gloo(group, device)
    )


def check_node_size(num_ranks: int, ranks_per_node: int) -> None:
    """Raises ValueError unless a group of ``num_ranks`` splits into nodes of ``ranks_per_node``."""
    if num_ranks % ranks_per_node:
        raise ValueError(
            f"ranks_per_node={ranks_per_node} does not divide the {num_ranks} ranks of an FSDP "
            "group: set QSDPConfig(ranks_per_node=...) to the ranks that a node holds of that group"
        )


def launched_ranks_per_node(group: dist.ProcessGroup) -> int:
    """How many ranks of ``group`` each node holds, by what the launcher says; 1 if they differ.

    The launcher (torchrun) says in ``LOCAL_WORLD_SIZE`` how many ranks a node has, numbered node
    after node; without it, every rank counts as a node.
    """
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = [rank // local_size for rank in dist.get_process_group_ranks(group)]
    size = nodes.count(nodes[0])
    same = all(len({*nodes[at : at + size]}) == 1 for at in range(0, len(nodes), size))
    return size if same and len(nodes) == size * len({*nodes}) else 1


class Pending(dist.Work):
    """A collective under way on CPUs. Whoever waits for it does what is left, decoding among it.

    Args:
        stages: the collective; its first transfers are started here.
        meter: takes the time of waiting for transfers as ``network``.
    """

    def __init__(self, stages: Stages, meter: CommMeter, device: torch.device) -> None:
        super().__init__()
        self._stages, self._meter, self._device = stages, meter, device
        self._error: BaseException | None = None
        self._transfers = next(stages, None)

    def advance(self) -> bool:
        """Wait for the transfers under way and take the next stage; whether all is done.

        What is raised once is raised again: the output was never written.
        """
        if self._error is not None:
            raise self._error
        if self._transfers is not None:
            try:
                _wait(self._transfers, self._meter, self._device)
                self._transfers = next(self._stages, None)
            except BaseException as error:
                self._error = error
                raise
        return self._transfers is None

    def wait(self, timeout: object = None) -> bool:
        """Finish; may be called repeatedly."""
        while not self.advance():
            pass
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited for all of it."""
        return self._transfers is None


def run(
    stages: Stages,
    async_op: bool,
    meter: CommMeter,
    device: torch.device,
    tensors: tuple[torch.Tensor, ...],
) -> dist.Work | None:
    """Carry out a collective now, or start it and return what finishes it.

    On an accelerator everything is launched now, in the current stream, or in one of its own if the
    call is asynchronous; the host waits for nothing.

    Args:
        tensors: that the collective reads and writes.
    """
    if async_op and device.type == "cuda":
        with torch.cuda.stream(beside(device)):
            _carry_out(stages, meter, device)
            return Beside(tensors)
    if async_op:
        return Pending(stages, meter, device)
    _carry_out(stages, meter, device)
    return None


def _carry_out(stages: Stages, meter: CommMeter, device: torch.device) -> None:
    for transfers in stages:
        _wait(transfers, meter, device)


def _wait(transfers: Transfers, meter: CommMeter, device: torch.device) -> None:
    if transfers:
        with meter.phase("network", device):
            for work in transfers:
                work.wait()


def gather_rows(rows: torch.Tensor, way: Route) -> Transfers:
    """Start an all-gather of rows in place; ``rows[way.rank]`` is this rank's own.

    Args:
        rows: (num_ranks, row_bytes) uint8, contiguous; complete once the transfers are waited for.
    """
    if way.size == 1 or rows.numel() == 0:
        return ()
    if not way.on_gloo:
        return _started(all_gather_single, rows.view(-1), rows[way.rank], way)
    # gloo's all-gather moves a third of what its point-to-point transfers of the same bytes do
    # (docs/design.md, "Transport").
    own = rows[way.rank]
    return _swap_with([*rows], [own] * way.size, range(way.size), way, tag=0)


def gather_in_hops(rows: torch.Tensor, way: Route, meter: CommMeter, stock: int) -> Stages:
    """All-gather rows in place, in one hop, or between nodes and then inside.

    Args:
        rows: uint8, as :func:`own_row` describes them; this rank's own row is filled in.
        meter: counts it, beside the ``stock`` bytes that FSDP2 would have sent.
    """
    row_bytes = rows.shape[-1]
    count_gather(row_bytes, row_bytes, way, meter, stock)
    if not way.two_level:
        yield gather_between(rows, way)
        return
    columns = rows.transpose(0, 1)  # contiguous: the rows of one place after another
    own = columns[way.place]
    yield gather_between(own, way)
    yield gather_inside(columns, own, way)


def count_gather(between: int, inside: int, way: Route, meter: CommMeter, stock: int) -> None:
    """Count one all-gather of rows.

    Args:
        between: bytes of a row where it crosses between nodes, and in one hop everywhere.
        inside: the same inside a node, where rows take two hops.
    """
    if not way.two_level:
        meter.count_rows(between, way.size, stock=stock)
        return
    others = way.ranks_per_node - 1
    meter.count_hops((way.num_nodes - 1) * between, others * way.num_nodes * inside, stock=stock)


def gather_between(rows: torch.Tensor, way: Route) -> Transfers:
    """All-gather rows in place among the counterparts: the first of two hops, or all of one.

    Args:
        rows: (len(way.counterparts), row_bytes) uint8, contiguous; this rank's own is filled in.
    """
    if not way.two_level:
        return gather_rows(rows, way)
    if rows.numel() == 0:
        return ()
    own = rows[way.node]
    return swap_parts([*rows], [own] * len(rows), way.counterparts, way, tag=0)


def gather_inside(columns: torch.Tensor, own: torch.Tensor, way: Route) -> Transfers:
    """The second of two hops: what each place of this node has, to all of them.

    Args:
        columns: (ranks_per_node, ...) uint8, contiguous; gets what the other places have. This
            rank's own part is not written.
        own: this rank's, of the shape of a part, contiguous.
    """
    if own.numel() == 0:
        return ()
    parts, own = [*columns.flatten(1)], own.flatten()
    return swap_parts(parts, [own] * len(parts), way.neighbours, way, tag=2)


def rows_of_all(wire: torch.Tensor, row_bytes: int, way: Route) -> torch.Tensor:
    """What :func:`gather_in_hops` takes, in a flat buffer for the rows of all ranks.

    (num_ranks, row_bytes), or for two hops (num_nodes, ranks_per_node, row_bytes), by ranks in both
    cases. For two hops the rows of one place lie together: each hop moves what is contiguous.
    """
    if not way.two_level:
        return wire.view(way.size, row_bytes)
    return wire.view(way.ranks_per_node, way.num_nodes, row_bytes).transpose(0, 1)


def own_row(rows: torch.Tensor, way: Route) -> torch.Tensor:
    """(1, row_bytes): this rank's own among what :func:`rows_of_all` gave."""
    if way.two_level:
        return rows[way.node, way.place : way.place + 1]
    return rows[way.rank : way.rank + 1]


def swap_rows(into: torch.Tensor, out: torch.Tensor, peers: range, way: Route) -> Transfers:
    """Start an all-to-all among some ranks: part i of ``out`` goes to ``peers[i]``.

    Args:
        into: (num_peers, ...) uint8, contiguous; gets one part of each peer, this rank's own among
            them; complete once the transfers are waited for.
        out: of the same shape; must not change before.
        peers: ranks of the group, this one among them.
    """
    if out.numel() == 0:
        return ()
    if way.on_gloo:
        into[peers.index(way.rank)].copy_(out[peers.index(way.rank)])
        return _swap_with([*into], [*out], peers, way, tag=1)
    if len(peers) == way.size:
        return _started(dist.all_to_all_single, into.view(-1), out.view(-1), way)
    part = out[0].numel()
    sizes = [part if rank in peers else 0 for rank in range(way.size)]
    return _started(dist.all_to_all_single, into.view(-1), out.view(-1), way, sizes, sizes)


def swap_parts(
    into: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    peers: range,
    way: Route,
    *,
    tag: int = 1,
) -> Transfers:
    """Start an all-to-all of parts of any sizes among some ranks: ``out[i]`` goes to ``peers[i]``.

    Args:
        into: uint8, contiguous, of the sizes that the peers send; gets what each of them has for
            this rank. This rank's own part is not written.
        out: uint8, contiguous; must not change before the transfers are waited for.
        peers: ranks of the group, this one among them.
        tag: keeps calls apart that may be under way together.
    """
    if way.on_gloo:
        return _swap_with(into, out, peers, way, tag=tag)
    nothing = out[0].new_empty(0)
    received, sent = [nothing] * way.size, [nothing] * way.size
    for part, own, rank in zip(into, out, peers, strict=True):
        if rank != way.rank:  # this rank's own is in its place
            received[rank], sent[rank] = part, own
    return _started(dist.all_to_all, received, sent, way)


def _started(
    collective: Callable[..., dist.Work | None], into: Any, out: Any, way: Route, *sizes: list[int]
) -> Transfers:
    """Call one of torch's collectives, in the current stream, so that it has its priority.

    An asynchronous call would run in a stream of the group's own, of default priority.
    """
    collective(into, out, *sizes, group=way.group)
    return ()


def _swap_with(
    into: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    peers: range,
    way: Route,
    *,
    tag: int,
) -> Transfers:
    """Point to point on gloo: ``out[i]`` to rank ``peers[i]``, its part to ``into[i]``.

    All at once. Parts may be of different sizes, as long as sender and receiver agree. Each rank
    starts with its right neighbour to spread the load. Receives are posted before sends: gloo
    announces a receive over the connection that carries the data, and behind a send that fills it
    the announcement waits until the send is through, so that the two directions take turns.
    """
    me = peers.index(way.rank)
    others = [(me + step) % len(peers) for step in range(1, len(peers))]
    ops = [
        dist.P2POp(op, parts[i], group=way.group, group_peer=peers[i], tag=tag)
        for op, parts in ((dist.irecv, into), (dist.isend, out))
        for i in others
    ]
    return dist.batch_isend_irecv(ops) if ops else ()


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo carries tensors of a device; a group's name may list several backends."""
    backends = dist.get_backend_config(group)
    for part in backends.split(","):
        kind, _, name = part.rpartition(":")
        if kind in ("", device.type):
            return bool(name == dist.Backend.GLOO)
    return False
