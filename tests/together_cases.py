"""qsdp beside other parts of PyTorch, run by ranks for test_together.py; one function a case."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from configuration_cases import RAW, W8G8, compare
from fsdp_cases import Net, batch, build, equal, loss_of, shards, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

import qsdp
from qsdp import QSDPConfig

Run = Callable[[nn.Module], list[float]]


# Two ranks --------------------------------------------------------------------------------------


def with_muon(model: nn.Module, rank: int, steps: int = 3) -> list[float]:
    """Muon for matrices of the blocks, AdamW for the rest, as its authors advise."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = (torch.optim.Muon(matrices, lr=3e-3), torch.optim.AdamW(others, lr=3e-3))
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def case_muon(rank: int) -> None:
    """torch's Muon takes DTensors: its matrix products gather momenta, in full precision."""
    compare(rank, build, lambda model: with_muon(model, rank))
    stock, few = build(), qsdp.apply_qsdp(build(), QSDPConfig.preset("w4g4"))
    expected, found = with_muon(stock, rank, 8), with_muon(few, rank, 8)
    assert abs(expected[-1] - found[-1]) < 0.1 * expected[-1], (expected, found)
    assert all(isinstance(p, DTensor) for p in few.parameters())


def case_autocast(rank: int) -> None:
    """float32 units under bfloat16 autocast: weights are gathered in float32, and cast after."""

    def run(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch(rank, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(rank, build, run)
    few = qsdp.apply_qsdp(build(), QSDPConfig.preset("w4g4"))
    assert all(math.isfinite(loss) for loss in run(few))


def compiled(after: bool, backend: str) -> nn.Module:
    """Regions: every block compiled before or after it is sharded, by itself."""
    torch.manual_seed(0)
    model = Net()
    for index, block in enumerate(model.blocks):
        if after:
            fully_shard(block)
            model.blocks[index] = torch.compile(block, backend=backend)
        else:
            model.blocks[index] = fully_shard(torch.compile(block, backend=backend))
    return fully_shard(model)


def case_compiled_regions(rank: int) -> None:
    """Before and after fully_shard, and in place; names have no _orig_mod in them."""

    def in_place() -> nn.Module:
        model = build()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    names = ["blocks.0.up.weight", "*.down.weight"]
    config = QSDPConfig(exceptions=dict.fromkeys(names))
    for make in (
        lambda: compiled(False, "aot_eager"),
        lambda: compiled(True, "aot_eager"),
        in_place,
    ):
        torch.compiler.reset()
        compare(rank, make)
        model = qsdp.apply_qsdp(make(), config)
        assert math.isfinite(train(model, rank, 1)[0])
        rows = {row.module for row in qsdp.comm_stats(model).modules}
        assert len(rows) == 3, rows
    state = qsdp.comm_state_dict(qsdp.apply_qsdp(in_place(), QSDPConfig.preset("w4g4")))
    other = qsdp.apply_qsdp(build(), QSDPConfig.preset("w4g4"))
    qsdp.load_comm_state_dict(other, state)


def case_whole_model_compiled(rank: int) -> None:
    """torch.compile of the sharded model: graphs break at FSDP2's hooks, losses are the same."""
    torch.compiler.reset()
    model = qsdp.apply_qsdp(build(), W8G8)
    found = train(torch.compile(model, backend="aot_eager"), rank, 3)
    expected = train(qsdp.apply_qsdp(build(), W8G8), rank, 3)
    assert found == expected, (found, expected)


# Four ranks -------------------------------------------------------------------------------------


class Part(nn.Module):
    """A stage of a model: the embedding in the first one, the head in the last."""

    def __init__(self, stage: int, dim: int = 48, vocab: int = 101) -> None:
        super().__init__()
        whole = Net(vocab, dim, depth=4)
        self.embed = nn.Embedding(vocab, dim) if stage == 0 else None
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in (2 * stage, 2 * stage + 1)})
        self.head = nn.Linear(dim, vocab) if stage == 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pipelined(rank: int, config: Any) -> tuple[list[float], nn.Module]:
    """Two stages of two ranks each; every stage applies qsdp to its own part alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage_index, place = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    part = Part(stage_index)
    for block in part.blocks.values():
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    if config is not None:
        qsdp.apply_qsdp(part, config)
    stage = PipelineStage(part, stage_index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(4):
        ids = torch.cat([batch(place, 10 * step + i) for i in range(2)])
        of_step: list[torch.Tensor] = []
        if stage_index == 0:
            schedule.step(ids[:, :-1])
        else:
            schedule.step(target=ids[:, 1:].contiguous(), losses=of_step)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item() for loss in of_step]
    return losses, part


def four_case_pipeline_parallel(rank: int) -> None:
    """1F1B with four micro-batches: raw is bitwise stock, few bits follow, nothing hangs."""
    expected, stock = pipelined(rank, None)
    for config, band in (("w32g32", 0.0), (RAW, 0.0), (W8G8, 0.02), ("w4g4", 0.1)):
        found, model = pipelined(rank, config)
        assert len(found) == len(expected) == (0 if rank < 2 else 16)
        assert all(map(math.isfinite, found))
        pairs = zip(expected, found, strict=True)
        assert all(abs(a - b) <= band * a for a, b in pairs), (expected, found)
        if not band:
            assert equal(shards(stock), shards(model))
    state = qsdp.comm_state_dict(model)
    assert any(name.endswith(f".rank{rank}") for name in state)
    qsdp.load_comm_state_dict(model, state)


def four_case_a_mistake_in_one_stage(rank: int) -> None:
    """Stages are asked by themselves: another configuration in the other stage is no mistake."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    part = fully_shard(Part(rank // 2), mesh=mesh["dp"])
    qsdp.apply_qsdp(part, "w8g8" if rank < 2 else "w4g4")
    if rank < 2:
        try:
            qsdp.apply_qsdp(part, "w8g8" if rank == 0 else "w4g8")
        except ValueError as error:
            assert "same QSDPConfig" in str(error)
        else:
            raise AssertionError("ranks of one stage disagreed, and nobody said so")


# With TORCH_DISTRIBUTED_DEBUG=DETAIL ------------------------------------------------------------


def debug_case_training(rank: int) -> None:
    """Process groups are wrapped: the unit's route is used all the same, and bytes are counted."""
    assert os.environ["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    compare(rank, build)
    for preset in ("w8g8", "w4g4"):
        model = qsdp.apply_qsdp(build(), preset)
        assert all(row.way != "stock" for row in qsdp.comm_stats(model).modules)
        assert all(math.isfinite(loss) for loss in train(model, rank, 3))
        assert qsdp.comm_stats(model).ratio > 2.5
        qsdp.load_comm_state_dict(model, qsdp.comm_state_dict(model))


def debug_case_gloo_is_seen(rank: int) -> None:
    from qsdp.fsdp import units_of

    model = qsdp.apply_qsdp(build(), W8G8)
    for unit in units_of(model):
        assert unit.gather_route.on_gloo and unit.gather_route.size == dist.get_world_size()
        assert unit.gather_route.group is unit.handle.group


ALL = dict(globals())
TWO = {name: fn for name, fn in ALL.items() if name.startswith("case_")}
FOUR = {name: fn for name, fn in ALL.items() if name.startswith("four_case_")}
DEBUG = {name: fn for name, fn in ALL.items() if name.startswith("debug_case_")}
