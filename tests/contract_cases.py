"""What some versions of torch have, run by ranks for test_contract.py; one function a case.

A case returns at once on a torch that lacks what it is about: features are asked for, not versions.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from configuration_cases import RAW, W8G8
from fsdp_cases import equal, raises_everywhere, same_on_all_ranks, shards, unsharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import Shard, distribute_tensor

import qsdp
from qsdp import QSDPConfig, Quantizer
from qsdp.param_group import find_param_groups


def steps(model: nn.Module, width: int, seed: int, count: int = 3) -> list[float]:
    """Losses of a few optimizer steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(count):
        generator = torch.Generator().manual_seed(10 * step + seed)
        loss = model(torch.randn(6, width, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Two ranks --------------------------------------------------------------------------------------


class TwoDtypes(nn.Module):
    """Weights whose gradients are of two dtypes in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        for layer in self.layers[::2]:
            layer.weight.grad_dtype = torch.bfloat16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def case_gradients_of_two_dtypes_in_their_order(rank: int) -> None:
    """torch 2.15 reduces them together, in the order of their dtypes."""
    if not hasattr(FSDPParam, "unsharded_grad_dtype"):
        return

    def gradients(config: QSDPConfig | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = fully_shard(TwoDtypes())
        if config is not None:
            qsdp.apply_qsdp(model, config)
        generator = torch.Generator().manual_seed(rank)
        model(torch.randn(6, 48, generator=generator)).square().mean().backward()
        return {name: p.grad.to_local() for name, p in model.named_parameters()}

    exceptions = {"layers.0.*": None, "layers.3.weight": None}
    some = QSDPConfig(None, Quantizer(8, rounding="stochastic"), exceptions=exceptions)
    stock, raw, model = gradients(None), gradients(RAW), gradients(some)
    assert {g.dtype for g in stock.values()} == {torch.float32, torch.bfloat16}
    for name, exact in stock.items():
        assert torch.equal(exact, raw[name]), name
        error = (model[name].float() - exact.float()).norm() / exact.float().norm()
        if name in ("layers.1.weight", "layers.2.weight"):
            assert 0 < error < 0.02, name
        else:
            assert error == 0, f"{name} travels in full precision"


class Halves(nn.Module):
    """Each rank uses one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.last = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.branches[dist.get_rank() % 2](x))


def case_unused_parameters_reduced_as_zeros(rank: int) -> None:
    """torch 2.13 and newer, on request: ranks that use other parameters reduce the same buffer."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = fully_shard(Halves())
        model.set_reduce_scatter_unused_params(True)
        return model

    stock, raw, model = make(), qsdp.apply_qsdp(make(), RAW), qsdp.apply_qsdp(make(), W8G8)
    expected = steps(stock, 48, rank)
    assert steps(raw, 48, rank) == expected and equal(shards(stock), shards(raw))
    for a, b in zip(expected, steps(model, 48, rank), strict=True):
        assert abs(a - b) <= 0.03 * abs(a)
    assert qsdp.comm_stats(model).stock_reduce_scatter > 3.5 * (
        qsdp.comm_stats(model).reduce_scatter_sent
    )


def case_reductions_in_a_group_of_their_own(rank: int) -> None:
    """torch 2.13 and newer, on request."""
    if not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
        return

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = fully_shard(Halves())
        model.set_separate_reduce_scatter_group()
        return model

    model = make()
    (handle,) = find_param_groups(model)
    ranks = dist.get_process_group_ranks(handle.group)
    assert handle.reduce_group is not handle.group
    assert dist.get_process_group_ranks(handle.reduce_group) == ranks
    del model
    stock, raw = make(), qsdp.apply_qsdp(make(), RAW)
    for copy in (stock, raw):
        copy.set_reduce_scatter_unused_params(True)
    assert steps(stock, 48, rank) == steps(raw, 48, rank) and equal(shards(stock), shards(raw))
    # Asked for after apply_qsdp, in the middle of training, gradients are still quantized.
    early, late = qsdp.apply_qsdp(make(), W8G8), qsdp.apply_qsdp(fully_shard_again(), W8G8)
    assert steps(early, 48, rank) == steps(late, 48, rank)
    late.set_separate_reduce_scatter_group()
    qsdp.comm_stats(late, reset=True)
    assert steps(early, 48, rank) == steps(late, 48, rank)
    stats = qsdp.comm_stats(late)
    assert stats.stock_reduce_scatter > 3 * stats.reduce_scatter_sent


def fully_shard_again() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(Halves())


# Four ranks -------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Routed weights of two experts, of which each rank computes one on its own tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.dense = nn.Linear(width, width)
        self.up = nn.Parameter(torch.randn(2, 2 * width, width) / 8)
        self.down = nn.Parameter(torch.randn(2, width, 2 * width) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.router(x).softmax(-1)[:, dist.get_rank() % 2, None]
        up, down = self.up.to_local()[0], self.down.to_local()[0]
        return x + self.dense(x) + weight * (torch.relu(x @ up.t()) @ down.t())


def build_experts() -> nn.Module:
    """Two blocks: router and dense weights on all ranks, each expert on two of the four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    everywhere = _fsdp_common.FSDPMeshInfo(init_device_mesh("cpu", (4,)), shard_mesh_dim=0)
    beside = _fsdp_common.FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
    torch.manual_seed(0)
    model = nn.Sequential(Experts(32), Experts(32))
    for block in model:
        for name in ("up", "down"):
            whole = distribute_tensor(getattr(block, name).detach(), mesh["expert"], [Shard(0)])
            setattr(block, name, nn.Parameter(whole))

        def place(parameter: nn.Parameter, block: nn.Module = block) -> object:
            expert = parameter is block.up or parameter is block.down
            place = Shard(1) if expert else Shard(0)
            return _fsdp_common.ShardPlacementResult(place, beside if expert else everywhere)

        fully_shard(block, mesh=everywhere.mesh, shard_placement_fn=place)
    return fully_shard(model, mesh=everywhere.mesh)


def four_case_experts_on_their_own_mesh(rank: int) -> None:
    """torch 2.12 and newer: two parameter groups in one module, each with comms of its own."""
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        return
    stock, off, raw, model = (build_experts() for _ in range(4))
    qsdp.apply_qsdp(off, "w32g32")
    qsdp.apply_qsdp(raw, RAW)
    qsdp.apply_qsdp(model, W8G8)
    assert [h.path for h in find_param_groups(model)] == ["0[0]", "0[1]", "1[0]", "1[1]"]
    expected = steps(stock, 32, rank)
    assert steps(off, 32, rank) == expected and equal(shards(stock), shards(off))
    for name, ours, band in (("raw", raw, 1e-5), ("w8g8", model, 0.03)):
        for a, b in zip(expected, steps(ours, 32, rank), strict=True):
            assert abs(a - b) <= band * abs(a), name
    with unsharded(model) as weights:
        dense = {name: w for name, w in weights.items() if name.endswith(("weight", "bias"))}
        assert len(dense) == 8 and same_on_all_ranks(dense)
        mine = torch.cat([w.to_local().flatten() for n, w in weights.items() if n not in dense])
    theirs = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(theirs, mine)
    assert torch.equal(mine, theirs[(rank + 2) % 4]), "ranks with the same expert differ"
    stats = qsdp.comm_stats(model)
    counted = {(m.module, m.collective): m for m in stats.modules}
    assert len(counted) == 8 and all(m.calls >= 3 for m in counted.values())
    assert all(m.parameters[1] > 0 and m.sent[0] < 0.5 * m.sent[1] for m in counted.values())
    # What is remembered has a name of its own for each group, and goes through a checkpoint.
    config = QSDPConfig.preset("w4g4")
    first, second = (qsdp.apply_qsdp(build_experts(), config) for _ in range(2))
    losses = steps(first, 32, rank)
    assert all(map(math.isfinite, losses))
    state = qsdp.comm_state_dict(first)
    assert sum(name.startswith("progress.") for name in state) == 4, [*state]
    second.load_state_dict(first.state_dict())
    qsdp.load_comm_state_dict(second, state)
    with unsharded(first) as ours, unsharded(second) as theirs:
        assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in dense)
    qsdp.remove_qsdp(model)
    assert not qsdp.is_quantized(model)
    raises_everywhere(lambda: qsdp.apply_qsdp(build_experts(), W8G8 if rank else RAW), "QSDPConfig")


TWO = {name: fn for name, fn in list(globals().items()) if name.startswith("case_")}
FOUR = {name: fn for name, fn in list(globals().items()) if name.startswith("four_case_")}
