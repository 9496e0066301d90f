"""Neighbouring systems that qsdp holds: SDP4Bit's reduction, BitDP's feedback."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qsdp import QSDPConfig, Quantizer, freeze_second_moment
from qsdp.rows import decode_rows, encode_rows, sum_rows
from qsdp.trainer.checkpoint import Description
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.resume import _require_frozen
from qsdp.ways import quantizer_of
from qsdp.wire import tensor_layout

NODES = PLACES = 4
NUMEL = 1 << 16


def student_t3(*shape: int, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(*shape, generator=generator)
    square = torch.randn(3, *shape, generator=generator).square().mean(0)
    return normal / square.sqrt()


def encoded(rows: torch.Tensor, quantizer: Quantizer, key: int) -> torch.Tensor:
    layout = tensor_layout(rows.shape[1], quantizer)
    wire = torch.empty(len(rows), layout.row_bytes, dtype=torch.uint8)
    encode_rows(rows, layout, wire, key=key)
    return wire


def reduced(gradients: torch.Tensor, inside: Quantizer, between: Quantizer) -> torch.Tensor:
    """The mean of (nodes, places, numel) in two hops, as :mod:`qsdp.stages` takes them."""
    numel = gradients.shape[-1]
    sums = torch.empty(len(gradients), numel)
    for node, rows in enumerate(gradients):
        sum_rows(encoded(rows, inside, 1 + node), tensor_layout(numel, inside), sums[node])
    mean, ranks = torch.empty(numel), float(gradients.shape[0] * gradients.shape[1])
    sum_rows(encoded(sums, between, 99), tensor_layout(numel, between), mean, divide=ranks)
    return mean


def test_errors_of_one_reduction_are_those_of_sdp4bit() -> None:
    """On 4 x 4 ranks, a common signal and noise of each, heavy-tailed: 8 bits inside a node and
    the transform each help, by what another implementation of the paper measured.
    """
    generator = torch.Generator().manual_seed(0)
    signal = student_t3(NUMEL, generator=generator)
    gradients = signal + student_t3(NODES, PLACES, NUMEL, generator=generator)
    true, found = gradients.mean((0, 1)), {}
    config = QSDPConfig.preset("sdp4bit")
    four, eight = quantizer_of(config.gradients), config.inside_node
    assert four is not None and eight == replace(four, bits=8)
    for name, inside, transform in (
        ("ULq", four, None),
        ("TLq", eight, None),
        ("ULq-HS", four, "hadamard"),
        ("TLq-HS", eight, "hadamard"),
    ):
        hops = (replace(quantizer, transform=transform) for quantizer in (inside, four))
        found[name] = float((reduced(gradients, *hops) - true).norm() / true.norm())
    assert found["ULq"] > found["TLq"] > found["ULq-HS"] > found["TLq-HS"]
    known = {"ULq": 0.186, "TLq": 0.164, "ULq-HS": 0.110, "TLq-HS": 0.092}
    assert found == pytest.approx(known, rel=0.1)


@pytest.mark.parametrize("memory", [None, Quantizer(8, 256, "nearest", scaling="symmetric")])
def test_what_was_sent_and_what_is_left_are_what_went_in(memory: Quantizer | None) -> None:
    """Over 1,000 steps; a memory in 8 bits loses a little at every step, and is itself fed back."""
    signs = quantizer_of(QSDPConfig.preset("bitdp").gradients)
    assert signs is not None
    layout = tensor_layout(2048, signs)
    generator = torch.Generator().manual_seed(1)
    error, sent, went_in = (torch.zeros(1, 2048) for _ in range(3))
    decoded, worst = torch.empty(1, 2048), 0.0
    for step in range(1000):
        gradient = torch.randn(1, 2048, generator=generator)
        went_in += gradient
        error += gradient
        wire = encoded(error, signs, step)
        decode_rows(wire, layout, decoded, own=0)
        sent += decoded
        error -= decoded
        if memory is not None:
            kept = encoded(error, memory, 0)
            decode_rows(kept, tensor_layout(2048, memory), error, own=0)
        worst = max(worst, float(error.abs().max()))
    lost = float((sent + error - went_in).abs().max())
    # float32 sums; or half a step of 8 bits a time, which adds up like a random walk.
    assert lost < (1e-3 if memory is None else 1000**0.5 * worst / 254 * 4)
    assert worst < 60  # it does not grow with the steps


# Adam with a frozen second moment ----------------------------------------------------------------


def small_problem() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 8)
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.01, betas=(0.9, 0.9), weight_decay=0.1)


def steps_of(layer: torch.nn.Linear, optimizer: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()


def test_frozen_second_moment() -> None:
    """Until then the plain optimizer, bit for bit; then it stays, and gradients are left there."""
    plain, of_plain = small_problem()
    layer, optimizer = small_problem()
    freeze_second_moment(optimizer, 50, floor=0.25, config="bitdp")
    for model, its in ((plain, of_plain), (layer, optimizer)):
        steps_of(model, its, range(50))
    assert torch.equal(plain.weight, layer.weight)
    learned = of_plain.state[plain.weight]["exp_avg_sq"] / (1 - 0.9**50)
    before, first = layer.weight.detach().clone(), optimizer.state[layer.weight]["exp_avg"].clone()
    steps_of(layer, optimizer, range(50, 51))
    second = optimizer.state[layer.weight]["exp_avg_sq"]
    expected = learned.clamp(min=0.25 * float(learned.mean()))
    assert torch.allclose(second, expected) and layer.weight.grad is not None
    first = 0.9 * first + 0.1 * layer.weight.grad
    moved = 0.01 / (1 - 0.9**51) * first / (expected.sqrt() + 1e-8)
    assert torch.allclose(layer.weight, before * (1 - 0.01 * 0.1) - moved, atol=1e-7)
    frozen = second.clone()
    steps_of(layer, optimizer, range(51, 70))
    assert torch.equal(second, frozen) and int(optimizer.state[layer.weight]["step"]) == 70


@pytest.mark.parametrize("at", [45, 50, 55])
def test_frozen_second_moment_resumes(at: int) -> None:
    """Bit for bit, before it is frozen, when it is and after."""
    whole, optimizer = small_problem()
    freeze_second_moment(optimizer, 50)
    steps_of(whole, optimizer, range(at))
    weights, state = deepcopy(whole.state_dict()), deepcopy(optimizer.state_dict())
    steps_of(whole, optimizer, range(at, 60))
    again, other = small_problem()
    again.load_state_dict(weights)
    other.load_state_dict(state)
    freeze_second_moment(other, 50)
    steps_of(again, other, range(at, 60))
    assert torch.equal(whole.weight, again.weight)


def test_a_closure_is_called_once_a_step_and_its_gradients_are_taken() -> None:
    """As Lightning calls it: the same weights as without, bit for bit."""
    runs = []
    for by_closure in (False, True):
        layer, optimizer = small_problem()
        freeze_second_moment(optimizer, 50)
        calls = 0
        for step in range(60):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))

            def closure(
                x: torch.Tensor = x,
                layer: torch.nn.Linear = layer,
                optimizer: torch.optim.Optimizer = optimizer,
            ) -> torch.Tensor:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = layer(x).square().mean()
                loss.backward()
                return loss

            if by_closure:
                assert float(optimizer.step(closure=closure).detach()) > 0
            else:
                closure()
                optimizer.step()
        assert calls == 60 and int(optimizer.state[layer.weight]["step"]) == 60
        runs.append((layer.weight, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_switched_on_late_it_freezes_then() -> None:
    """With the floor, so that values which had no gradient make no leaps."""
    layer, optimizer = small_problem()

    def one_step(step: int, inputs: int) -> None:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        x[:, inputs:] = 0
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()

    for step in range(80):
        one_step(step, 8)  # half of the weights have no gradient
    freeze_second_moment(optimizer, 50)
    before = layer.weight.detach().clone()
    one_step(80, 16)
    second = optimizer.state[layer.weight]["exp_avg_sq"].clone()
    assert float(second.min()) > 0.01 * float(second.mean())
    assert float((layer.weight - before).detach().abs().max()) < 1  # 18,768 without
    one_step(81, 16)
    assert torch.equal(second, optimizer.state[layer.weight]["exp_avg_sq"])


def test_a_parameter_without_gradients_is_left_to_adam() -> None:
    layer, optimizer = small_problem()
    freeze_second_moment(optimizer, 50)
    unused = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [unused], "weight_decay": 0.0})
    for step in range(60):
        unused.grad = torch.full_like(unused, 1e-3 if step == 55 else 0.0)
        loss = layer(torch.ones(4, 16)).square().mean()
        layer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float((unused - 1).abs().max()) < 0.1


def test_a_step_that_a_scaler_skips_is_skipped() -> None:
    """A fused optimizer, whose gradients were unscaled to be clipped, and an overflow."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01, betas=(0.9, 0.9), fused=True)
    freeze_second_moment(optimizer, 50)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(60):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        before = layer.weight.detach().clone()
        scaler.scale(layer(x).square().mean() * (float("inf") if step == 55 else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, layer.weight) == (step == 55)
    assert layer.weight.isfinite().all()


def test_what_does_not_freeze_is_refused_in_one_line() -> None:
    def refused(message: str, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        with pytest.raises((TypeError, ValueError), match=message) as raised:
            freeze_second_moment(optimizer, *args, **kwargs)
        assert "\n" not in str(raised.value)

    layer, optimizer = small_problem()
    refused("takes a torch.optim.Adam or AdamW, got SGD", torch.optim.SGD(layer.parameters()), 9)
    refused("must be at least 1, got 0", optimizer, 0)
    refused("must be from 0 to 1, got 2", optimizer, 50, 2)
    refused(r"reached 0.61 of its size, 0.99 are needed: at_step=44", optimizer, 9)
    refused("travel with transform='hadamard'", optimizer, 50, config="w32g1")
    amsgrad = torch.optim.AdamW(layer.parameters(), betas=(0.9, 0.9), amsgrad=True)
    refused("does not go with the optimizer's amsgrad=True", amsgrad, 50)


@pytest.mark.parametrize("now", [None, 300])
def test_a_second_moment_that_was_frozen_stays_so(now: int | None) -> None:
    saved = Description(200, 1.0, {"freeze_second_moment": 140}, {}, "", [{}], 1)
    path = Path("run/checkpoints/step-200")
    with pytest.raises(ValueError, match="step-200, of step 200, .* give .* 140"):
        _require_frozen(path, saved, TrainConfig(freeze_second_moment=now))
    for kept in (140, 200):
        _require_frozen(path, saved, TrainConfig(freeze_second_moment=kept))
    _require_frozen(path, saved._replace(step=140), TrainConfig(freeze_second_moment=now))
