"""Routes: which ranks a rank exchanges rows with, and what the launcher says of nodes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from qsdp.exchange import (
    Pending,
    Route,
    Stages,
    launched_ranks_per_node,
    own_row,
    route,
    rows_of_all,
)
from qsdp.stats import CommMeter

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("ranks", "local_size", "per_node"),
    [
        ([0, 1, 2, 3], "2", 2),
        ([0, 1, 2, 3, 4, 5], "2", 2),
        ([0, 1, 2, 3], "4", 4),  # one node: flat, see `route`
        ([0, 1, 2, 3], "1", 1),
        ([4, 5, 8, 9], "4", 2),  # half of each of two nodes
        ([0, 4, 8], "4", 1),  # replicas
        ([0, 1, 4], "4", 1),  # nodes of two and of one
        ([0, 2, 1, 3], "2", 1),  # not one node after another
        ([0, 1, 2, 3], None, 1),
    ],
)
def test_nodes_are_what_the_launcher_says(
    monkeypatch: pytest.MonkeyPatch, ranks: list[int], local_size: str | None, per_node: int
) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: ranks)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local_size is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_size)
    assert launched_ranks_per_node(SimpleNamespace()) == per_node  # type: ignore[arg-type]


def test_a_group_inside_one_node_takes_one_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(size=lambda: 4, rank=lambda: 1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [4, 5, 6, 7])
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    inside = route(group, CPU, 4)  # type: ignore[arg-type]
    assert not inside.two_level and inside.on_gloo and inside.global_ranks == (4, 5, 6, 7)
    two_nodes = route(group, torch.device("cuda"), 2)  # type: ignore[arg-type]
    assert two_nodes.two_level and not two_nodes.on_gloo
    with pytest.raises(ValueError, match="ranks_per_node=3 does not divide the 4 ranks"):
        route(group, CPU, 3)  # type: ignore[arg-type]


def test_rows_of_two_hops_lie_by_places() -> None:
    """By ranks from outside; in memory the rows of a place in all nodes are neighbours."""
    for rank in range(6):
        way = Route(None, 6, rank, tuple(range(6)), 2, True)  # type: ignore[arg-type]
        assert list(way.neighbours) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert list(way.counterparts) == [rank % 2, rank % 2 + 2, rank % 2 + 4]
        wire = torch.zeros(6 * 4, dtype=torch.uint8)
        rows = rows_of_all(wire, 4, way)
        assert rows.shape == (3, 2, 4)
        own_row(rows, way).fill_(rank + 1)
        assert rows.reshape(6, 4)[rank].eq(rank + 1).all() and rows.ne(0).sum() == 4
        assert wire.view(6, 4)[way.place * 3 + way.node].eq(rank + 1).all()


def test_a_ring_crosses_every_node_once() -> None:
    """Two nodes of two ranks: a node passes on to the other what one rank sends."""
    for ranks_per_node, between in ((1, 300), (2, 150), (4, 0), (8, 0)):
        meter = CommMeter(ranks_per_node)
        meter.count_ring(300, 4)
        assert (meter.sent, meter.stock, meter.inter_node) == (300, 300, between)


def test_what_was_raised_once_is_raised_again() -> None:
    """A row that arrived damaged: whoever waits a second time is not told that all is well."""

    def stages() -> Stages:
        yield []
        raise RuntimeError("a damaged row")

    pending = Pending(stages(), CommMeter(), torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a damaged row"):
            pending.wait()
        assert not pending.is_completed()
