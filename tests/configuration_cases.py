"""Every FSDP2 configuration, run by ranks for test_configurations.py; one function a case.

`compare` is the common check. With all parameters kept in full precision, qsdp's own collectives
carry everything and training must be bitwise stock; with 8 bits it must follow stock, and all ranks
must compute with the same weights.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_cases import (
    DIM,
    Block,
    Net,
    batch,
    build,
    equal,
    loss_of,
    raises_everywhere,
    same_on_all_ranks,
    shards,
    train,
    unsharded,
)
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import qsdp
from qsdp import QSDPConfig

RAW = QSDPConfig(exceptions={"*": None})
W8G8 = QSDPConfig.preset("w8g8")
Run = Callable[[nn.Module], list[float]]


def compare(rank: int, make: Callable[[], nn.Module], run: Run | None = None, band=0.03) -> None:
    """Raw is bitwise stock (within roundings beyond two ranks), 8 bits follow within ``band``."""
    run = run or (lambda model: train(model, rank, 3))
    stock, raw, quantized = make(), make(), make()
    qsdp.apply_qsdp(raw, RAW)
    qsdp.apply_qsdp(quantized, W8G8)
    expected, of_raw, of_quantized = run(stock), run(raw), run(quantized)
    for model in (stock, raw, quantized):
        model.reshard()  # after a forward alone, FSDP2 leaves the root unsharded
    if dist.get_world_size() == 2:
        assert expected == of_raw, (expected, of_raw)
        assert equal(shards(stock), shards(raw))
    else:  # gloo's ring sums in another order
        torch.testing.assert_close(torch.tensor(expected), torch.tensor(of_raw), rtol=2e-4, atol=0)
    assert all(math.isfinite(value) for value in expected)
    for a, b in zip(expected, of_quantized, strict=True):
        assert abs(a - b) <= band * abs(a), (expected, of_quantized)
    with unsharded(quantized) as weights:
        assert same_on_all_ranks(weights)


class Mlp(nn.Module):
    """A module for odd shapes: takes (n, 24)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train_mlp(model: nn.Module, rank: int, steps: int = 3, width: int = 24, **kwargs: Any) -> list:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kwargs)
    losses = []
    for step in range(steps):
        x = torch.randn(6, width, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


# Two ranks --------------------------------------------------------------------------------------


def case_mixed_precision_policies(rank: int) -> None:
    """Every param_dtype with every reduce_dtype, cast_forward_inputs, output_dtype."""
    dtypes = (None, torch.float32, torch.bfloat16, torch.float16)
    for param_dtype, reduce_dtype in itertools.product(dtypes, dtypes):
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        compare(rank, lambda p=policy: build(mp_policy=p), lambda m: train(m, rank, 1))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, output_dtype=torch.bfloat16, cast_forward_inputs=False
    )
    compare(rank, lambda: build(mp_policy=policy), lambda m: train(m, rank, 1))


def case_reshard_after_forward(rank: int) -> None:
    for reshard in (True, False):
        compare(rank, lambda r=reshard: build(reshard_after_forward=r))


def case_gradient_accumulation(rank: int) -> None:
    """Without sync, with sync every time, without resharding in between."""

    def run(model: nn.Module, style: str) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for step in range(2):
            for micro in range(3):
                last = micro == 2
                if style == "no sync":
                    model.set_requires_gradient_sync(last)
                if style == "last backward":
                    model.set_is_last_backward(last)
                if style == "keep unsharded":
                    model.set_requires_gradient_sync(last)
                    model.set_reshard_after_backward(last)
                loss = loss_of(model, batch(rank, 3 * step + micro)) / 3
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    for style in ("no sync", "sync", "last backward", "keep unsharded"):
        compare(rank, build, lambda m, s=style: run(m, s))


def case_shard_placement_and_list_groups(rank: int) -> None:
    """Shard(1), and several modules wrapped as one group."""

    def on_columns() -> nn.Module:
        model = Mlp(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 24))
        placement = lambda p: Shard(1) if p.ndim == 2 else Shard(0)  # noqa: E731
        return fully_shard(model, shard_placement_fn=placement)

    def grouped() -> nn.Module:
        model = Mlp(*(nn.Linear(24, 24) for _ in range(4)))
        fully_shard([model.layers[1], model.layers[2]])
        return fully_shard(model)

    for make in (on_columns, grouped):
        compare(rank, lambda m=make: seeded(m), lambda m: train_mlp(m, rank))


def case_uneven_and_empty_shards(rank: int) -> None:
    """Odd rows, one row (one rank holds nothing), a single element, ten million elements."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = nn.Linear(24, 47)
            self.row = nn.Parameter(torch.randn(1, 47) / 7)
            self.one = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.odd(x) * self.row * self.one

    config = QSDPConfig(min_numel=1)
    compare(rank, lambda: seeded(lambda: fully_shard(Odd())), lambda m: train_mlp(m, rank))
    tiny = qsdp.apply_qsdp(seeded(lambda: fully_shard(Odd())), config)
    assert all(math.isfinite(loss) for loss in train_mlp(tiny, rank))
    with unsharded(tiny) as weights:
        assert same_on_all_ranks(weights)

    large = seeded(lambda: fully_shard(nn.Linear(2500, 4000, bias=False)))
    qsdp.apply_qsdp(large, W8G8)
    loss = (large(torch.ones(1, 2500)) ** 2).mean()
    loss.backward()
    assert large.weight.grad.to_local().isfinite().all()
    assert qsdp.comm_stats(large).ratio > 3.9


def case_frozen_tied_shared_and_lora(rank: int) -> None:
    class Lora(nn.Module):
        """A frozen base with a trainable adapter, and a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(24, 24)
            self.down, self.up = nn.Linear(24, 4, bias=False), nn.Linear(4, 24, bias=False)
            self.norm = nn.BatchNorm1d(24)
            self.base.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.base(x) + self.up(self.down(x)))

    class Shared(nn.Module):
        """One block used by two parents, forwarded twice."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(24, 24), nn.GELU())
            self.second = nn.Sequential(self.first[0], nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(self.first(x)))

    compare(rank, lambda: seeded(lambda: fully_shard(Lora())), lambda m: train_mlp(m, rank))
    compare(rank, lambda: seeded(lambda: fully_shard(Shared())), lambda m: train_mlp(m, rank))
    frozen = seeded(lambda: fully_shard(nn.Linear(40, 40)))
    frozen.requires_grad_(False)
    qsdp.apply_qsdp(frozen, W8G8)
    x = torch.randn(2, 40, requires_grad=True)
    frozen(x).sum().backward()  # no reduce-scatter is called for it
    assert qsdp.comm_stats(frozen).reduce_scatter_sent == 0


def case_forwards_of_every_kind(rank: int) -> None:
    """no_grad and inference_mode in between, two forwards before one backward, nested wrapping."""

    def run(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for step in range(2):
            with torch.no_grad():
                losses.append(loss_of(model, batch(rank, 70)).item())
            loss = loss_of(model, batch(rank, step)) + loss_of(model, batch(rank, step + 9))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.inference_mode():
            losses.append(loss_of(model, batch(rank, 71)).item())
        return losses

    def nested() -> nn.Module:
        torch.manual_seed(0)
        model = Net()
        for block in model.blocks:
            fully_shard(block.up)
            fully_shard(block)
        return fully_shard(model)

    compare(rank, build, run)
    compare(rank, nested)


def case_activation_checkpointing_and_compile(rank: int) -> None:
    """Both kinds of checkpointing, the wrapper, compiled blocks; names stay without wrappers."""

    class Checkpointed(Block):
        reentrant = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)

    def made(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        model = Net()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = fully_shard(wrap(block))
        return fully_shard(model)

    def as_checkpointed(block: nn.Module, reentrant: bool) -> nn.Module:
        block.__class__ = type("C", (Checkpointed,), {"reentrant": reentrant})
        return block

    compare(rank, lambda: made(lambda b: as_checkpointed(b, False)))
    compare(rank, lambda: made(lambda b: as_checkpointed(b, True)))
    compare(rank, lambda: made(checkpoint_wrapper))
    compare(rank, lambda: made(lambda b: torch.compile(b, backend="aot_eager")))
    model = made(checkpoint_wrapper)
    qsdp.apply_qsdp(model, QSDPConfig(exceptions={"blocks.0.up.weight": None}))


def case_meta_initialisation(rank: int) -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            model = Net()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        model.to_empty(device="cpu")
        torch.manual_seed(rank)
        for p in model.parameters():
            nn.init.normal_(p.to_local(), std=0.05)
        return model

    compare(rank, make)


def case_cpu_offload(rank: int) -> None:
    compare(rank, lambda: build(offload_policy=CPUOffloadPolicy(pin_memory=False)))


def case_clipping_scaling_and_optimizers(rank: int) -> None:
    """The norm is that of the decoded gradients; every form of optimizer step is seen."""

    def clipped(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for step in range(3):
            loss_of(model, batch(rank, step)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
            squares = torch.stack([p.grad.to_local().square().sum() for p in model.parameters()])
            total = squares.sum()
            dist.all_reduce(total)
            assert abs(total.sqrt().item() - 0.5) < 1e-4 or norm < 0.5
            optimizer.step()
            optimizer.zero_grad()
            values.append(norm.item())
        return values

    compare(rank, build, clipped, band=0.1)
    for kwargs in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        compare(
            rank,
            lambda: seeded(lambda: fully_shard(Mlp(nn.Linear(24, 64), nn.Linear(64, 24)))),
            lambda m, k=kwargs: train_mlp(m, rank, **k),
        )


def case_optimizer_in_backward(rank: int) -> None:
    def run(model: nn.Module) -> list[float]:
        losses = []
        optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def step(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in optimizers:
            p.register_post_accumulate_grad_hook(step)
        for index in range(3):
            loss = loss_of(model, batch(rank, index))
            loss.backward()
            losses.append(loss.item())
        return losses

    compare(rank, build, run)


def case_gradient_scaler_overflow(rank: int) -> None:
    """An overflow on one rank is seen on all: the step is skipped, the scale halved."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = qsdp.apply_qsdp(build(mp_policy=policy), W8G8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = shards(model)
    loss = loss_of(model, batch(rank, 0)) * (1e6 if rank == 0 else 1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert equal(before, shards(model)), "the step was not skipped"
    assert scaler.get_scale() == 2.0**7
    optimizer.zero_grad()
    scaler.scale(loss_of(model, batch(rank, 0))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not equal(before, shards(model))


def case_saving_and_loading(rank: int) -> None:
    """Full, sharded and distributed checkpoints, with qsdp on either side, also in mid-run."""
    source = qsdp.apply_qsdp(build(), QSDPConfig.preset("w5g5"))
    train(source, rank, 2)
    expected = shards(source)
    full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(source), checkpoint_id=folder[0])
    for config in (None, W8G8):
        for kind in ("full", "sharded", "distributed"):
            target = build(seed=9)
            if config is not None:
                qsdp.apply_qsdp(target, config)
            loss_of(target, batch(rank, 0))  # gathered once: what was gathered must not stay
            target.reshard()
            if kind == "full":
                options = StateDictOptions(full_state_dict=True)
                set_model_state_dict(target, full, options=options)
            elif kind == "sharded":
                set_model_state_dict(target, get_model_state_dict(source))
            else:
                state = get_model_state_dict(target)
                dcp.load(state, checkpoint_id=folder[0])
                set_model_state_dict(target, state)
            assert equal(expected, shards(target)), kind
            if config is not None:
                qsdp.apply_qsdp(target, QSDPConfig.preset("w5g5"))
                with torch.no_grad():
                    assert torch.equal(
                        loss_of(source, batch(rank, 5)), loss_of(target, batch(rank, 5))
                    )


def case_copies_behave_as_stock(rank: int) -> None:
    """What FSDP2 refuses to copy or pickle, qsdp does not pretend to."""
    for copier in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        outcomes = []
        for model in (build(), qsdp.apply_qsdp(build(), W8G8)):
            try:
                copier(model)
                outcomes.append("copied")
            except Exception as error:
                outcomes.append(type(error).__name__)
        assert outcomes[0] == outcomes[1] or "copied" not in outcomes, outcomes


def case_prefetch_and_explicit_unshard(rank: int) -> None:
    def make() -> nn.Module:
        model = build()
        first, second = model.blocks
        model.set_modules_to_forward_prefetch([first])
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
        return model

    compare(rank, make)

    def asynchronous() -> nn.Module:
        model = build()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module._set_unshard_async_op(True)
        return model

    compare(rank, asynchronous)


def case_replicate_is_refused(rank: int) -> None:
    if "mesh" not in inspect.signature(inspect.unwrap(replicate)).parameters:
        return  # up to torch 2.9 it is HSDP, with shards of one rank
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
    model = nn.Linear(64, 64)
    replicate(model, mesh=mesh)
    raises_everywhere(
        lambda: qsdp.apply_qsdp(model, W8G8), "is replicated, not sharded", "fully_shard"
    )


# Four ranks -------------------------------------------------------------------------------------


def four_case_reshard_to_a_smaller_group(rank: int) -> None:
    """reshard_after_forward=2: the backward gather is raw and sees the forward's weights."""
    compare(rank, lambda: build(reshard_after_forward=2))
    model = qsdp.apply_qsdp(build(reshard_after_forward=2), QSDPConfig.preset("w3g8"))
    seen: list[torch.Tensor] = []
    block = model.blocks[0]

    def record(*_: object) -> None:
        seen.append(block.up.weight.detach().clone())

    block.norm.register_forward_pre_hook(record)
    block.norm.register_full_backward_hook(record)
    loss_of(model, batch(rank, 0)).backward()
    assert len(seen) == 2 and torch.equal(*seen)


def four_case_hybrid_sharding(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    compare(rank, lambda: build(mesh=mesh))


def four_case_tensor_parallel(rank: int) -> None:
    """Two-dimensional ("dp", "tp") mesh: each tensor-parallel rank's shard is its own group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 24))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        return model

    def run(model: nn.Module) -> list[float]:
        return train_mlp(model, rank // 2)  # ranks of one tensor-parallel group see the same text

    stock, raw, quantized = make(), qsdp.apply_qsdp(make(), RAW), qsdp.apply_qsdp(make(), W8G8)
    expected = run(stock)
    assert run(raw) == expected, "two ranks a group: bitwise"
    for a, b in zip(expected, run(quantized), strict=True):
        assert abs(a - b) <= 0.05 * abs(a)
    assert qsdp.comm_stats(quantized).ratio > 2


def four_case_uneven_shards(rank: int) -> None:
    """Fewer rows than ranks: shards of one, one, one and no rows."""

    def make() -> nn.Module:
        return fully_shard(Mlp(nn.Linear(24, 3), nn.Linear(3, 600), nn.Linear(600, 5)))

    compare(rank, lambda: seeded(make), lambda m: train_mlp(m, rank))
    assert DIM % 4 == 0
    compare(rank, build)


# One rank ---------------------------------------------------------------------------------------


def one_case_world_of_one(rank: int) -> None:
    """FSDP2 calls no collective: applying changes nothing, and nothing is sent."""
    stock, model = build(), qsdp.apply_qsdp(build(), QSDPConfig.preset("w2g2"))
    assert train(stock, rank, 3) == train(model, rank, 3)
    assert qsdp.comm_stats(model) == qsdp.CommStats() and qsdp.comm_stats(model).ratio == 1.0


ALL = dict(globals())
TWO = {name: fn for name, fn in ALL.items() if name.startswith("case_")}
FOUR = {name: fn for name, fn in ALL.items() if name.startswith("four_case_")}
ONE = {name: fn for name, fn in ALL.items() if name.startswith("one_case_")}
