"""benchmarks/optimizers: what it trains with, and what it makes of the results."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.optimizers.__main__ import chosen_rate, main, next_rate
from benchmarks.optimizers.table import change, format_found
from benchmarks.optimizers.tasks import sizes
from benchmarks.optimizers.train import Optimizers, damaged
from qsdp import QSDPConfig


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1), nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )  # fmt: skip


def backward(model: nn.Module) -> None:
    images = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    model(images).square().mean().backward()


def test_learning_rates_are_tried_until_the_best_lies_between_worse_ones() -> None:
    tried: dict[str, float] = {}
    while (lr := next_rate(tried, 0.1)) is not None:
        tried[repr(lr)] = (math.log2(lr / 0.4) - 0.1) ** 2
    assert sorted(map(float, tried)) == [0.05, 0.1, 0.2, 0.4, 0.8]
    assert chosen_rate({"0.1": 2.5, "0.2": 2.009, "0.4": 2.0, "0.8": 2.2}) == 0.2
    assert chosen_rate({"0.1": 2.5, "0.2": 2.02, "0.4": 2.0, "0.8": 2.2}) == 0.4


def test_muon_steps_on_convolutions_as_matrices_of_their_channels() -> None:
    model = network()
    stepper = Optimizers(model, "muon", 0.1, ("0.weight", "3.weight"))
    matrix = nn.Parameter(model[1].weight.detach().flatten(1).clone())
    options = {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    alone = torch.optim.Muon([matrix], lr=0.05, **options)
    for _ in range(3):
        stepper.zero_grad()
        backward(model)
        matrix.grad = model[1].weight.grad.flatten(1)
        alone.step()
        stepper.step(0.5)
        assert torch.equal(model[1].weight.flatten(1), matrix)
    owned = {id(p) for group in stepper.optimizers[0].param_groups for p in group["params"]}
    assert owned == {id(p) for p in model.parameters() if p is not model[1].weight}


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_damaged_fills_every_gradient_and_is_gone_afterwards(value: float) -> None:
    model = network()
    with damaged(model, value):
        backward(model)
    wanted = torch.tensor(value)
    for param in model.parameters():
        filled = wanted.expand_as(param)
        assert torch.allclose(param.grad, filled, equal_nan=True)
    model.zero_grad()
    backward(model)
    assert all(param.grad.isfinite().all() for param in model.parameters())


def test_bytes_of_what_travels_otherwise() -> None:
    """The first convolution and vectors, exact; an embedding, where bitdp has 4 bits."""
    config = replace(QSDPConfig.preset("bitdp"), warmup=None)
    found = sizes(network(), config, 2, 2)
    assert found.own == 2 * 4 * (16 * 32 * 9 + 32 * 16 * 10) // 2
    assert found.others == 2 * 4 * (144 + 16 + 32 + 10) // 2
    embedding = nn.ModuleDict({"embed": nn.Embedding(64, 64)})
    found = sizes(embedding, config, 2, 1)
    assert found.own == 0 and found.others == 2048 * 4 // 8 + 2048 // 128 * 2


def test_changes_are_paired_by_seed() -> None:
    base = {"1": {"loss": 2.0}, "2": {"loss": 4.0}}
    others = {"1": {"loss": 2.02}, "2": {"loss": 4.12}, "3": {"loss": 9.0}}
    assert change(base, others, "loss", True) == "+2.00 % ± 1.00"
    result = {"loss": 2.0, "sent": 1e3, "fewer": 4.0, "fewer_own": 5.0, "parameters": 7}
    cases = {"float32": {"1": result}, "bitdp": {"1": result | {"loss": 2.1}}}
    found = {"a task": {"steps": 9, "tuning": {"sgd": {"0.1": 2.0}}, "runs": {"sgd": cases}}}
    text = format_found(found)
    assert "a task: 7 parameters, 9 steps" in text and "+5.00 %" in text


@pytest.mark.ranks
def test_an_overflow_on_one_rank_is_left_out_and_forgotten(tmp_path: Path) -> None:
    """Two steps of twenty, in one bit with feedback; also what both commands print and keep."""
    out = tmp_path / "overflow.json"
    arguments = ["--overflow", "--tasks", "cnn", "--seeds", "1", "--steps", "20", "--out", str(out)]
    assert main(arguments) == 0
    (cases,) = json.loads(out.read_text()).values()
    assert cases["undisturbed"]["1"]["skipped"] == []
    hurt = cases["one rank overflows"]["1"]
    assert hurt["skipped"] == [7, 13] and hurt["finite"] and math.isfinite(hurt["loss"])
    assert "7, 13" in out.with_suffix(".txt").read_text()
