"""What ranks run for test_qat.py: fake quantization under FSDP2, one function a case."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_cases import batch, equal, loss_of, shards, train, unsharded
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import qsdp
from qsdp import FakeQuantizer, QSDPConfig, Quantizer
from qsdp.agreement import all_gather_json
from qsdp.qat import FakeQuantization
from qsdp.qat.grid import codes_and_steps, groups_of

DIM = 64
BLOCKS = FakeQuantizer(4, per="block", step="largest", block_size=32)
ROWS = FakeQuantizer(5, per="channel", step="largest")


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, DIM)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))
        self.head = nn.Linear(DIM, 101, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain(hidden: int = 97, seed: int = 0) -> Net:
    """With 97 rows in a layer: ranks have shards of different sizes."""
    torch.manual_seed(seed)
    return Net(hidden)


def build(
    quantizer: FakeQuantizer, hidden: int = 97, seed: int = 0
) -> tuple[Net, FakeQuantization]:
    model = plain(hidden, seed)
    handle = qsdp.fake_quantize(model, quantizer, keep=("head",))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, handle


def steps_of(model: nn.Module, handle: FakeQuantization, rank: int, optimizer: Any, *, first: int,
             count: int) -> list[float]:  # fmt: skip
    losses = []
    for step in range(first, first + count):
        losses += train(model, rank, 1, first=step, optimizer=optimizer)
        handle.step()
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)


def case_off_is_bitwise_the_plain_model(rank: int) -> None:
    """Before the switch, for both kinds of steps: losses and masters of stock FSDP2."""
    stock = plain()
    for block in stock.blocks:
        fully_shard(block)
    fully_shard(stock)
    expected = train(stock, rank, 4)
    for step in ("learned", "largest"):
        model, handle = build(FakeQuantizer(4, step=step, start_step=9))
        assert steps_of(model, handle, rank, None, first=0, count=4) != []
        model, handle = build(FakeQuantizer(4, step=step, start_step=9))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        assert steps_of(model, handle, rank, optimizer, first=0, count=4) == expected
        masters = {handle.plain_name(name): p for name, p in model.named_parameters()}
        for name, parameter in stock.named_parameters():
            assert torch.equal(masters[name].to_local(), parameter.to_local()), name


def case_follows_one_process(rank: int) -> None:
    """Two ranks and one process on the batches of both, before and after the switch."""
    for quantizer in (FakeQuantizer(5, start_step=2), FakeQuantizer(5, "tensor"), ROWS):
        hidden = 96 if quantizer is ROWS else 97
        model, handle = build(quantizer, hidden)
        losses = steps_of(model, handle, rank, adam(model), first=0, count=5)
        alone = plain(hidden)
        own = qsdp.fake_quantize(alone, quantizer, keep=("head",))
        optimizer = adam(alone)
        for step in range(5):
            both = [loss_of(alone, batch(r, step)) for r in range(2)]
            assert losses[step] == pytest.approx(both[rank].item(), rel=2e-4), (quantizer, step)
            (sum(both) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            own.step()
        for mine, theirs in zip(handle.parameters(), own.parameters(), strict=True):
            assert torch.allclose(mine.full_tensor(), theirs, atol=2e-3)


def case_everything_moves_after_the_switch(rank: int) -> None:
    """Every quantized weight and every step, with the optimizer's state of before."""
    model, handle = build(FakeQuantizer(4, start_step=2))
    optimizer = adam(model)
    steps_of(model, handle, rank, optimizer, first=0, count=2)
    assert handle.active
    parameters = {n: p for n, p in model.named_parameters() if "parametrizations" in n}
    assert len(parameters) == 8
    before = {name: p.full_tensor().clone() for name, p in parameters.items()}
    counted = [int(optimizer.state[p]["step"]) for p in parameters.values()]
    steps_of(model, handle, rank, optimizer, first=2, count=1)
    for (name, parameter), count in zip(parameters.items(), counted, strict=True):
        assert count == 2 and int(optimizer.state[parameter]["step"]) == 3
        moved = parameter.full_tensor() != before[name]
        # What was clipped gets no gradient of its own, and still moves by Adam's momentum.
        assert moved.float().mean() > 0.99, name


def case_weights_are_on_the_grid(rank: int) -> None:
    """What layers compute with has at most 2^b values a channel, and export gives its codes."""
    model, handle = build(FakeQuantizer(3))
    steps_of(model, handle, rank, adam(model), first=0, count=3)
    coded = handle.export()
    folded = handle.quantized_state_dict()
    assert set(coded) == {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")}
    with unsharded(model):
        for name, (codes, steps) in coded.items():
            weight = model.get_submodule(name.removesuffix(".weight")).weight
            assert max(len(row.unique()) for row in weight.detach()) <= 8
            assert codes.dtype == torch.int8 and codes.min() >= -4 and codes.max() <= 3
            assert torch.equal(codes * steps, weight) and torch.equal(folded[name], weight)
    other = plain(seed=5)
    other.load_state_dict(folded)
    ids = batch(rank, 50)
    assert torch.equal(other(ids), model(ids))


def checkpointed(model: nn.Module, optimizer: Any, handle: FakeQuantization) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "fake": handle.state_dict(),
    }


def resume(path: str, quantizer: FakeQuantizer) -> tuple[Net, FakeQuantization, Any]:
    model, handle = build(quantizer, seed=3)
    optimizer = adam(model)
    state = checkpointed(model, optimizer, handle)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    handle.load_state_dict(state["fake"])
    return model, handle, optimizer


def case_resume_is_bitwise(rank: int) -> None:
    """Saved before the switch, at it and after it; with an evaluation in between."""
    quantizer = FakeQuantizer(4, start_step=2)
    whole, handle = build(quantizer)
    expected = steps_of(whole, handle, rank, adam(whole), first=0, count=5)
    for cut in (1, 2, 3):
        model, handle = build(quantizer)
        optimizer = adam(model)
        losses = steps_of(model, handle, rank, optimizer, first=0, count=cut)
        with torch.no_grad():
            loss_of(model, batch(rank, 50))
        path = all_gather_json(tempfile.mkdtemp() if rank == 0 else None)[0]
        dcp.save(checkpointed(model, optimizer, handle), checkpoint_id=path)
        again, handle, optimizer = resume(path, quantizer)
        losses += steps_of(again, handle, rank, optimizer, first=cut, count=5 - cut)
        assert losses == expected and equal(shards(again), shards(whole)), cut


def case_the_switch_after_an_evaluation(rank: int) -> None:
    """The root is still gathered then: steps must reach the shards, not what was gathered."""
    found = []
    for evaluate in (False, True):
        model, handle = build(FakeQuantizer(4, start_step=1))
        optimizer = adam(model)
        train(model, rank, 1, optimizer=optimizer)
        if evaluate:
            with torch.no_grad():
                loss_of(model, batch(rank, 50))
        handle.step()
        found.append([p.full_tensor() for p in handle.parameters()])
    assert equal(*found) and all((p != 0).all() for p in found[0])


def expected_weights(handle: FakeQuantization, model: nn.Module) -> dict[str, torch.Tensor]:
    """Fake-quantized whole masters, on this rank."""
    parameters = dict(model.named_parameters())
    found = {}
    for name in handle.names:
        whole = parameters[f"{name}.parametrizations.weight.original"].full_tensor().detach()
        codes, steps = codes_and_steps(groups_of(whole, handle.quantizer), handle.quantizer, None)
        found[name] = (codes * steps).reshape(whole.shape)
    return found


def case_the_wire_is_exact(rank: int) -> None:
    """What all ranks decode is the fake-quantized weight, bit for bit, and layers use just that."""
    for bits in range(2, 8):
        for quantizer in (
            FakeQuantizer(bits, per="block", step="largest", block_size=32),
            FakeQuantizer(bits, per="channel", step="largest"),
        ):
            model, handle = build(quantizer, hidden=96)
            config = handle.on_the_wire(QSDPConfig(Quantizer(8), Quantizer(8)))
            qsdp.apply_qsdp(model, config)
            optimizer = adam(model)
            for step in range(2):
                expected = expected_weights(handle, model)
                with unsharded(model) as decoded:
                    for name, weight in expected.items():
                        sent = decoded[f"{name}.parametrizations.weight.original"]
                        assert torch.equal(sent, weight), (bits, name, step)
                        used = model.get_submodule(name).weight
                        assert torch.equal(used, weight), (bits, name, step)
                steps_of(model, handle, rank, optimizer, first=step, count=1)
    # The same weights in 8 bits of another grid are not what is used: the test can fail.
    other = qsdp.apply_qsdp(model, QSDPConfig(Quantizer(8, rounding="nearest"), None))
    expected = expected_weights(handle, model)
    with unsharded(other) as decoded:
        for name, weight in expected.items():
            sent = decoded[f"{name}.parametrizations.weight.original"]
            assert not torch.equal(sent, weight)


def case_exact_on_the_wire_trains_like_full_precision_on_it(rank: int) -> None:
    """Weights in 4 bits on the wire: losses and masters of FSDP2's own all-gather, bit for bit."""
    runs = []
    for wire in (False, True):
        model, handle = build(BLOCKS, hidden=96)
        if wire:
            # The embedding, which is in full precision, travels so.
            qsdp.apply_qsdp(model, handle.on_the_wire(QSDPConfig(None, None)))
            qsdp.observe_comms(model)
        losses = steps_of(model, handle, rank, adam(model), first=0, count=4)
        runs.append((losses, shards(model)))
        if wire:
            stats = qsdp.comm_stats(model)
            assert stats.all_gather_sent < 0.5 * stats.stock_all_gather
    assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])


def case_bfloat16_exports_what_it_computes_with(rank: int) -> None:
    """By the decoded state; the masters' own steps are finer than bfloat16."""
    model = plain()
    handle = qsdp.fake_quantize(model, FakeQuantizer(4), keep=("head",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    steps_of(model, handle, rank, adam(model), first=0, count=2)
    decoded = qsdp.decoded_state_dict(model, full=True)
    if rank == 0:
        folded = handle.quantized_state_dict(decoded)
    with unsharded(model):
        for name in handle.names:
            used = model.get_submodule(name).weight
            assert used.dtype == torch.bfloat16
            if rank == 0:
                assert torch.equal(folded[f"{name}.weight"], used), name


def case_accumulates(rank: int) -> None:
    """Two micro-batches without a reduction between them: the gradient is their sum."""
    for quantizer in (FakeQuantizer(4), BLOCKS):
        model, _ = build(quantizer, hidden=96)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss_of(model, batch(rank, micro)).backward()
        both = [p.grad.to_local().clone() for p in model.parameters()]
        alone, _ = build(quantizer, hidden=96)
        for micro in range(2):
            loss_of(alone, batch(rank, micro)).backward()
        for mine, theirs in zip(both, alone.parameters(), strict=True):
            assert torch.allclose(mine, theirs.grad.to_local(), atol=1e-6)


def case_errors(rank: int) -> None:
    model, handle = build(FakeQuantizer(4))
    with pytest.raises(ValueError, match="learned steps are on no grid of the wire"):
        handle.on_the_wire(QSDPConfig())
    with pytest.raises(ValueError, match="remove.. takes a model that is not sharded"):
        handle.remove()
    with pytest.raises(ValueError, match="flatness takes a whole model"):
        qsdp.flatness(model, lambda m: 0.0, 1.0)
    _, handle = build(FakeQuantizer(8, step="largest"), hidden=96)
    with pytest.raises(ValueError, match="8 bits do not travel exactly, those of 2 to 7"):
        handle.on_the_wire(QSDPConfig())
    _, handle = build(FakeQuantizer(4, step="largest"), hidden=97)
    with pytest.raises(ValueError, match="down.weight has a step for 97 values"):
        handle.on_the_wire(QSDPConfig())
    _, handle = build(FakeQuantizer(4, step="largest", start_step=3), hidden=96)
    with pytest.raises(ValueError, match="in full precision until step 3"):
        handle.on_the_wire(QSDPConfig())
    sharded = plain()
    fully_shard(sharded)
    with pytest.raises(ValueError, match="is sharded: call fake_quantize before fully_shard"):
        qsdp.fake_quantize(sharded, keep=("head",))


CASES = {name: fn for name, fn in list(globals().items()) if name.startswith("case_")}


def on_other_ranks(rank: int, path: str, write: bool) -> list[float]:
    """Train, save on some ranks; read on others: the weights that a model computes with."""
    quantizer = FakeQuantizer(4)
    if write:
        model, handle = build(quantizer)
        optimizer = adam(model)
        steps_of(model, handle, 0, optimizer, first=0, count=2)  # equal batches on all ranks
        dcp.save(checkpointed(model, optimizer, handle), checkpoint_id=path)
    else:
        model, handle, optimizer = resume(path, quantizer)
    logits = model(batch(0, 50)).detach()
    steps_of(model, handle, 0, optimizer, first=2, count=1)
    return [float(logits.double().sum()), float(model(batch(0, 50)).detach().double().sum())]


def run_on_other_ranks(folder: Path) -> None:
    two = run_ranks(on_other_ranks, 2, str(folder), True)
    one = run_ranks(on_other_ranks, 1, str(folder), False)
    assert two[0] == two[1]
    assert one[0][0] == two[0][0]
    assert one[0][1] == pytest.approx(two[0][1], rel=1e-3)
