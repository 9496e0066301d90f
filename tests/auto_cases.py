"""What ranks run for test_auto.py: one function a case, each asserting on its own rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import Net, build, equal, shards, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import qsdp
from qsdp.agreement import all_gather_json
from qsdp.auto.parts import find_parts
from qsdp.param_group import find_param_groups
from qsdp.plan.measured import Coding, Curve
from qsdp.plan.transfers import Times


def line(latency_s: float, seconds_per_byte: float) -> Curve:
    """A transfer that takes as long whatever else happens."""
    return Curve(tuple((size, latency_s + seconds_per_byte * size) for size in (1, 1 << 22)))


@contextmanager
def network(seconds_per_byte: float, coding_s: float = 1e-9, hops: float = 0.5) -> Iterator[Any]:
    """Every rank measures such a network, each a little worse than the rank before.

    Args:
        coding_s: of a value that is quantized or copied.
        hops: what two hops take of one.
    """
    worse = 1 + dist.get_rank() / 10

    def measure_times(group: Any, device: Any, dtypes: Any, per_node: int, *rest: Any) -> Times:
        one, two = line(1e-5, worse * seconds_per_byte), line(1e-5, hops * seconds_per_byte)
        none = [None] * 3 if per_node in (1, group.size()) else [two, two, line(0.0, 1e-15)]
        return Times(one, one, one, one, *none)

    with (
        mock.patch("qsdp.auto.choose.measure_times", measure_times) as patched,
        mock.patch("qsdp.auto.choose.measure_coding", lambda *_: Coding(*[coding_s] * 4)),
    ):
        yield patched


@contextmanager
def nodes_of(ranks: int) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(ranks)}):
        yield


@contextmanager
def logged() -> Iterator[list[str]]:
    """Lines that this rank logs, at the level that is shown by default."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("qsdp")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def same_everywhere(decision: qsdp.Decision) -> None:
    everyone = all_gather_json(decision.to_json())
    assert all(each == everyone[0] for each in everyone)


def case_slow_links_get_few_bits(rank: int) -> None:
    """Decided alike by ranks that measured differently; said once; applied."""
    model = build()
    with network(1e-6), logged() as lines:
        decision = qsdp.decide(model)
        assert not qsdp.is_quantized(model)
        assert qsdp.apply_qsdp(model, "auto") is model
    same_everywhere(decision)
    assert decision.name == "w4g4" and decision.config == qsdp.QSDPConfig.preset("w4g4")
    assert [*decision.predicted_s] == ["stock", "unquantized", "w8g8", "w4g4"]
    assert qsdp.QSDPConfig.from_json(decision.to_json()["config"]) == decision.config
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert matrices < decision.kept_bytes < 1.2 * matrices
    assert len(lines) == (2 if rank == 0 else 0)
    for said in lines:
        assert said.startswith("qsdp: auto chose w4g4: measured ") and "\n" not in said
        assert all(f"{name} " in said for name in decision.predicted_s) and " keeps " in said
    assert qsdp.is_quantized(model)
    assert len(set(all_gather_json(train(model, rank, 1)[0] > 0))) == 1


def case_fast_links_get_full_precision(rank: int) -> None:
    """Where the codec takes longer than the bytes that it saves. It is stock, and counted."""
    model, stock = build(), build()
    with network(1e-13, coding_s=1e-6), logged() as lines:
        qsdp.apply_qsdp(model, "auto")
    assert not qsdp.is_quantized(model)
    assert train(model, rank, 2) == train(stock, rank, 2) and equal(shards(model), shards(stock))
    assert qsdp.comm_stats(model).ratio == 1.0 and qsdp.comm_stats(model).sent > 0
    assert qsdp.comm_state_dict(model) == {}
    assert len(lines) == (rank == 0)
    assert all("auto chose full precision" in said for said in lines)


def case_two_levels_where_nodes_have_several_ranks(rank: int) -> None:
    """Or flat ones, where those are faster; written down as ranks of a node."""
    model = build()
    with nodes_of(2), network(1e-6), logged() as lines:
        decision = qsdp.decide(model)
        assert (decision.name, decision.config.ranks_per_node) == ("w4g4", 2)
        assert decision.link is not None and decision.link.between_nodes
        qsdp.apply_qsdp(model, "auto")
        assert len(lines) == 2 * (rank == 0)  # and none more about nodes
    with nodes_of(2), network(1e-6, hops=4.0):
        flat = qsdp.decide(model)
        assert (flat.name, flat.config.ranks_per_node) == ("w4g4-flat", 1)
        assert qsdp.decide(model, ranks_per_node=1).name == "w4g4"
    with nodes_of(4), network(1e-6):
        assert qsdp.decide(model).config.ranks_per_node is None
    same_everywhere(decision)


def case_mistakes_are_one_line_on_every_rank(rank: int) -> None:
    model = build()
    with pytest.raises(ValueError, match="unknown preset 'atuo'"):
        qsdp.apply_qsdp(model, "atuo")
    with pytest.raises(ValueError, match="needs the same QSDPConfig on all ranks") as raised:
        qsdp.apply_qsdp(model, "auto" if rank else "w8g8")
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"'\*.wtf.\*' matches no parameter"):
        qsdp.decide(model, exceptions={"*.wtf.*": None} if rank else {})
    with pytest.raises(ValueError, match="ranks_per_node=3 does not divide"):
        qsdp.decide(model, ranks_per_node=3)
    with pytest.raises(ValueError, match="found no FSDP2 module"):
        qsdp.apply_qsdp(Net(), "auto")


def case_models_of_every_kind(rank: int) -> None:
    """HSDP; parameters on a mesh of their own; two precisions; frozen; nothing to quantize."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with network(1e-6):
        replicated = build(mesh=mesh)
        decision = qsdp.decide(replicated)
        same_everywhere(decision)
        whole = build()
        assert decision.predicted_s["stock"] > 0 and decision.name == "w4g4"

        mixed = Net()
        fully_shard(mixed.blocks[0], mesh=mesh["shard"])
        fully_shard(mixed)
        parts = find_parts(mixed, find_param_groups(mixed), None)
        assert [(part.size, len(part.model.units)) for part in parts] == [(4, 1), (2, 2)]
        same_everywhere(qsdp.decide(mixed))

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        (part,) = find_parts(whole, find_param_groups(whole), None)
        half = build(mp_policy=policy)
        (of_half,) = find_parts(half, find_param_groups(half), None)
        assert part.dtypes == (torch.float32, torch.float32)
        assert of_half.dtypes == (torch.bfloat16, torch.float32)
        stock = qsdp.decide(whole).predicted_s["stock"]
        assert qsdp.decide(half).predicted_s["stock"] < stock

        frozen = Net().requires_grad_(False)
        frozen.norm.requires_grad_(True)
        fully_shard(frozen)
        assert qsdp.decide(frozen).predicted_s["stock"] < stock

        vectors = nn.Sequential(nn.LayerNorm(8))
        fully_shard(vectors)
        assert "no parameter is large enough" in qsdp.decide(vectors).reason
        double = Net().double()
        fully_shard(double)
        assert qsdp.decide(double).reason == "torch.float64 cannot be quantized"


def case_exceptions_and_work_count(rank: int) -> None:
    model = build()
    with network(1e-6):
        plain = qsdp.decide(model)
        kept = qsdp.decide(model, exceptions={"blocks.*": None})
        several = qsdp.decide(model, micro_batches=3)
        reduced = qsdp.decide(model, micro_batches=3, sync_every=True)
    assert kept.config.exceptions and not plain.config.exceptions
    assert kept.predicted_s["w8g8"] > plain.predicted_s["w8g8"]
    assert kept.predicted_s["stock"] == plain.predicted_s["stock"]
    for more, less in ((several, plain), (reduced, several)):
        assert more.predicted_s["stock"] > less.predicted_s["stock"]


def case_measured_in_earnest(rank: int) -> None:
    """Every transfer and every codec, in one hop and two; whatever is chosen, it trains."""
    model = build()
    with nodes_of(2):
        decision = qsdp.decide(model)
        same_everywhere(decision)
        assert len(decision.predicted_s) == 7 and min(decision.predicted_s.values()) > 0
        assert decision.link is not None and decision.link.mbit_per_s > 0
        qsdp.apply_qsdp(model, decision.config)
    train(model, rank, 1)


CASES: dict[str, Callable[[int], None]] = {
    name.removeprefix("case_"): case for name, case in globals().items() if name.startswith("case_")
}


def alone(rank: int) -> tuple[str, list[str]]:
    """On a single rank."""
    model = build()
    with logged() as lines:
        qsdp.apply_qsdp(model, "auto")
    train(model, rank, 1)
    return qsdp.decide(model).name, lines
