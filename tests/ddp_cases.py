"""What ranks run for test_ddp.py: one function a case, each asserting on its own rank."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_cases import Net, batch, build, loss_of, raises_everywhere, same_on_all_ranks, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsdp
from qsdp import (
    Feedback,
    Learned,
    QSDPConfig,
    QuantizedDDPState,
    Quantizer,
    Warmup,
    quantized_ddp_hook,
)

OFF = QSDPConfig.preset("w32g32")
G8 = QSDPConfig.preset("w32g8")
FED_BACK = replace(G8, gradients=Feedback(Quantizer(8, rounding="stochastic")))
SMALL_BUCKETS = 0.02  # MiB: several buckets, and DDP rebuilds them after the first step


def wrapped(model: nn.Module | None = None, **kwargs: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(model or Net(), bucket_cap_mb=SMALL_BUCKETS, **kwargs)


def hooked(
    config: QSDPConfig, model: nn.Module | None = None, ddp: dict[str, Any] | None = None, **kwargs
) -> tuple[DistributedDataParallel, QuantizedDDPState]:
    model = wrapped(model, **(ddp or {}))
    state = QuantizedDDPState(model, config, **kwargs)
    model.register_comm_hook(state, quantized_ddp_hook)
    return model, state


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def case_off_and_warmup_are_bitwise_ddp(rank: int) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}):
        stock, (off, _) = wrapped(**options), hooked(OFF, ddp=options)
        warm, state = hooked(G8, ddp=options, warmup_steps=4)
        expected = train(stock, rank, 4)
        assert expected == train(off, rank, 4) == train(warm, rank, 4)
        assert all_equal(parameters(stock), parameters(off))
        assert all_equal(parameters(stock), parameters(warm))
        assert state.step == 4 and state.stats().ratio == 1.0
        train(stock, rank, 1, first=4), train(warm, rank, 1, first=4)
        assert not all_equal(parameters(stock), parameters(warm)), "the warm-up has an end"
        assert state.stats().ratio > 1.0


def case_gradients_are_identical_and_within_the_bound(rank: int) -> None:
    """Every width and rounding; a contribution and the average each lose under one step."""
    stock = wrapped()
    loss_of(stock, batch(rank, 0)).backward()
    exact, widest = gradients(stock), spreads(stock, rank)
    levels = tuple(i / 15 for i in range(16))
    quantizers = [Quantizer(bits, 64, r) for bits in (2, 5, 8) for r in ("nearest", "stochastic")]
    for quantizer in (*quantizers, Quantizer(4, rounding="nearest", levels=levels)):
        model, _ = hooked(QSDPConfig(weights=None, gradients=quantizer))
        loss_of(model, batch(rank, 0)).backward()
        found = gradients(model)
        assert same_on_all_ranks(found), quantizer
        for name, value in found.items():
            error = (value - exact[name]).abs().max()
            if value.ndim == 1:
                assert error <= 1e-6 * exact[name].abs().max(), "in full precision"
                continue
            bound = 2 * widest[name] / ((1 << quantizer.bits) - 1)
            assert 0 < error <= bound, (quantizer, name)


def spreads(stock: DistributedDataParallel, rank: int) -> dict[str, torch.Tensor]:
    """The widest range of any rank's own gradient, zero included, which pads a piece."""
    lone = Net()
    lone.load_state_dict(stock.module.state_dict())
    loss_of(lone, batch(rank, 0)).backward()
    widest = {}
    for name, param in lone.named_parameters():
        own = torch.clamp(param.grad.max(), min=0) - torch.clamp(param.grad.min(), max=0)
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        widest[f"module.{name}"] = own
    return widest


def case_rules_hold_inside_a_bucket(rank: int) -> None:
    config = replace(G8, min_numel=0, exceptions={"*.up.weight": None, "head.*": "w32g32"})
    stock, (model, _) = wrapped(), hooked(config)
    for m in (stock, model):
        loss_of(m, batch(rank, 0)).backward()
    exact, found = gradients(stock), gradients(model)
    for name, value in found.items():
        kept = value.ndim == 1 or name.endswith(("up.weight", "embed.weight"))  # tied to the head
        close = torch.allclose(value, exact[name], rtol=1e-5, atol=1e-9)
        assert close == kept, name


def case_loss_follows(rank: int) -> None:
    """8 bits, and the preset's 4, end within 2 % of DDP; all that DDP allows around it works."""
    stock = wrapped()
    expected = train(stock, rank, 20)
    for options, kwargs in (
        ({}, {}),
        ({}, {"config": QSDPConfig.preset("w32g4")}),
        ({"gradient_as_bucket_view": True, "find_unused_parameters": True}, {"warmup_steps": 5}),
        ({"static_graph": True}, {"config": FED_BACK}),
    ):
        model, state = hooked(**{"config": G8, "ddp": options, **kwargs})
        losses = train(model, rank, 20)
        assert abs(sum(losses[-5:]) / sum(expected[-5:]) - 1) < 0.02, (options, losses, expected)
        assert same_on_all_ranks(dict(model.named_parameters()))
        assert state.step == 20


def case_accumulation_unused_and_bfloat16(rank: int) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    torch.manual_seed(0)
    model, state = hooked(FED_BACK, Half().bfloat16(), {"find_unused_parameters": True})
    lone = Half().bfloat16()
    lone.load_state_dict(model.module.state_dict())
    for micro in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * micro + rank)).bfloat16()
        (lone(x).float() ** 2).mean().backward()
        with model.no_sync() if micro < 2 else nullcontext():
            (model(x).float() ** 2).mean().backward()
    assert state.step == 1
    average = lone.used.weight.grad.float()
    dist.all_reduce(average)
    average /= dist.get_world_size()
    found = model.module.used.weight.grad.float()
    assert (found - average).abs().max() < 0.05 * average.abs().max()
    assert same_on_all_ranks(gradients(model))
    assert model.module.unused.weight.grad is None


def case_error_feedback_loses_nothing(rank: int) -> None:
    """With a constant gradient g, the applied ones sum to T * g within what one step loses."""
    steps = 40
    features = torch.randn(4, 512, generator=torch.Generator().manual_seed(rank))
    average = features.mean(0)
    dist.all_reduce(average)
    average /= dist.get_world_size()
    drift = {}
    for feedback in (False, True):
        quantizer = Quantizer(2, 64, "nearest")
        config = QSDPConfig(None, Feedback(quantizer) if feedback else quantizer)
        model, state = hooked(config, nn.Linear(512, 4, bias=False))
        total = torch.zeros(4, 512)
        for _ in range(steps):
            model.zero_grad()
            model(features).mean(0).sum().backward()
            total += model.module.weight.grad
        drift[feedback] = (total - steps * average).abs().max()
    # Both errors together: under half a step each, of ranges that the errors widen.
    assert drift[True] < 3 * features.abs().max() and drift[False] > 3 * drift[True], drift
    names = {f"{kind}.weight.rank{rank}" for kind in ("sent", "forwarded")}
    assert state.state_dict().keys() == {"progress", *names}


def case_saved_state_resumes(rank: int) -> None:
    """An uninterrupted run equals a resumed one bit for bit, with the errors; without, it differs.

    DDP starts with other buckets than it has after a step: nearest rounding does not see that.
    """
    raises_everywhere(
        lambda: hooked(QSDPConfig(None, Quantizer(8), warmup=Warmup(2)), warmup_steps=1),
        "are two clocks: give one of them",
    )
    memory = Quantizer(8, 64, "nearest", scaling="symmetric")
    config = QSDPConfig(None, Feedback(Quantizer(3, 64, "nearest"), memory=memory))
    config = replace(config, warmup=Warmup(3, Quantizer(8, 64, "nearest")))
    model, state = hooked(config)
    train(model, rank, 4)
    other, fresh = hooked(config)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(state.state_dict())
    assert train(model, rank, 3, 4) == train(other, rank, 3, 4)
    config = QSDPConfig(None, Feedback(Quantizer(3, 64, "nearest")))
    model, state = hooked(config, warmup_steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, rank, 4, optimizer=optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "qsdp": state.state_dict()}, file)
    expected = train(model, rank, 4, 4, optimizer)
    for with_errors in (True, False):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        other, fresh = hooked(config, warmup_steps=1)
        other.load_state_dict(saved["model"])
        if with_errors:
            fresh.load_state_dict(saved["qsdp"])
        losses = train(other, rank, 4, 4, torch.optim.SGD(other.parameters(), lr=0.1))
        assert (losses == expected) == with_errors
        assert all_equal(parameters(model), parameters(other)) == with_errors
    progress = {"progress": torch.tensor([3, 64])}
    raises_everywhere(
        lambda: fresh.load_state_dict(saved["qsdp"] | progress), "was saved by 64 ranks"
    )
    sent = {f"sent.embed.weight.rank{rank}": torch.zeros(3)}
    raises_everywhere(
        lambda: fresh.load_state_dict(saved["qsdp"] | sent), "errors of shape (3,) for 'sent.embed"
    )
    raises_everywhere(lambda: pickle.dumps(fresh), "save its state_dict()")


def case_bytes_counted_are_bytes_sent(rank: int) -> None:
    sent = {"p2p": 0, "a2a": 0}
    exchange, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single
    num_ranks = dist.get_world_size()

    def counted_exchange(ops: list[dist.P2POp]) -> object:
        sent["p2p"] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return exchange(ops)

    def counted_all_to_all(output: torch.Tensor, input: torch.Tensor, **kwargs: Any) -> object:
        sent["a2a"] += input.nbytes * (num_ranks - 1) // num_ranks
        return all_to_all(output, input, **kwargs)

    model, state = hooked(replace(G8, exceptions={"*.up.weight": None}))
    with (
        mock.patch.object(dist, "batch_isend_irecv", counted_exchange),
        mock.patch.object(dist, "all_to_all_single", counted_all_to_all),
    ):
        train(model, rank, 2)
    stats = state.stats(reset=True)
    assert stats.all_reduce_sent >= sent["p2p"] + sent["a2a"] > 0
    numel = sum(p.numel() for p in model.parameters())
    ring = 2 * 2 * (num_ranks - 1) * numel * 4 // num_ranks
    assert abs(stats.stock_sent / ring - 1) < 0.01
    assert state.stats() == qsdp.CommStats()


def case_convolutions_travel_as_matrices(rank: int) -> None:
    """In one bit: each block of 128 has one magnitude, and 28 times fewer bytes; of 1,024, 31."""
    small = 144  # of the first convolution, which is exact
    images = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(rank))
    bitdp, num_ranks = QSDPConfig.preset("bitdp"), dist.get_world_size()
    signs = bitdp.gradients
    assert isinstance(signs, Feedback)
    for block, fewer in ((128, 28), (1024, 31)):
        of_block = replace(signs, quantizer=replace(signs.quantizer, block_size=block))
        config = replace(bitdp, gradients=of_block, warmup=None)
        sizes = ((1, 16), (16, 128), (128, 256))
        convolutions = [nn.Conv2d(*size, 3, padding=1, bias=False) for size in sizes]
        model, state = hooked(config, nn.Sequential(*convolutions))
        lone = deepcopy(model.module)
        lone(images).square().mean().backward()
        exact = lone[0].weight.grad
        dist.all_reduce(exact)
        model(images).square().mean().backward()
        stats = state.stats()
        raw = 2 * (num_ranks - 1) * 4 * small // num_ranks
        assert stats.stock_sent - raw > fewer * (stats.sent - raw), (stats.stock_sent, stats.sent)
        first, *others = (convolution.weight.grad for convolution in model.module)
        assert torch.allclose(first, exact / num_ranks)
        for gradient in others:
            magnitudes = gradient.reshape(num_ranks, -1, block).abs()
            assert (magnitudes == magnitudes[..., :1]).all() and magnitudes.min() > 0


def case_not_a_number_reaches_every_rank_and_leaves(rank: int) -> None:
    model, state = hooked(FED_BACK)
    for step, poison in enumerate((False, True, False)):
        model.zero_grad()
        loss = loss_of(model, batch(rank, step))
        (loss * float("nan") if poison and rank == 0 else loss).backward()
        grads = gradients(model)
        assert all(bool(g.isfinite().all()) != poison for g in grads.values())
    errors = state.state_dict().values()
    assert all(bool(e.isfinite().all()) for e in errors)


def case_mistakes_are_named(rank: int) -> None:
    model = wrapped()
    raises_everywhere(lambda: QuantizedDDPState(model, QSDPConfig()), "QSDPConfig(weights=...)")
    raises_everywhere(lambda: QuantizedDDPState(model, "w8g8"), 'preset "w32g8"')
    raises_everywhere(lambda: QuantizedDDPState(model, 8), "QSDPConfig or the name of a preset")
    raises_everywhere(lambda: QuantizedDDPState(model, G8, warmup_steps=-1), "warmup_steps", "-1")
    learned = replace(G8, gradients=Learned(Quantizer(4, rounding="nearest")))
    raises_everywhere(lambda: QuantizedDDPState(model, learned), "does not learn levels")
    exception = replace(G8, exceptions={"*.up.weight": "w8g4"})
    raises_everywhere(lambda: QuantizedDDPState(model, exception), "the weights of exceptions")
    raises_everywhere(
        lambda: QuantizedDDPState(model, replace(G8, exceptions={"*.wte": None})), "'*.wte'"
    )
    raises_everywhere(lambda: QuantizedDDPState(build(), G8), "call qsdp.apply_qsdp instead")
    raises_everywhere(lambda: qsdp.apply_qsdp(model, G8), "quantized_ddp_hook")
    raises_everywhere(
        lambda: QuantizedDDPState(model, replace(G8, seed=rank)), "same QSDPConfig.seed"
    )
    bare = wrapped()
    bare.register_comm_hook(None, quantized_ddp_hook)
    raises_everywhere(lambda: loss_of(bare, batch(rank, 0)).backward(), "QuantizedDDPState(model")
    other = wrapped()
    other.register_comm_hook(QuantizedDDPState(model, G8), quantized_ddp_hook)
    raises_everywhere(lambda: loss_of(other, batch(rank, 0)).backward(), "does not know")
    twice, state = hooked(G8)
    try:
        twice.register_comm_hook(state, quantized_ddp_hook)
    except RuntimeError as error:
        assert "register" in str(error)
    else:
        raise AssertionError("torch takes one hook")


CASES: dict[str, Callable[[int], None]] = {
    name: fn for name, fn in list(globals().items()) if name.startswith("case_")
}
