"""Local steps: schedules and configurations here, replicas that synchronise on four gloo ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from local_cases import CASES
from ranks import check_case, run_cases, run_ranks
from torch import nn

from qsdp import (
    Feedback,
    Learned,
    Meeting,
    OuterStep,
    QSDPConfig,
    Quantizer,
    ReplicaSync,
    SyncConfig,
    SyncSchedule,
)
from qsdp.local.parts import divide, trained_parameters
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.warmup import learning_rate

Results = list[dict[str, str | None]]


@pytest.fixture(scope="module")
def four_ranks() -> Results:
    return run_ranks(run_cases, 4, CASES, tuple(CASES))


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_on_four_ranks(four_ranks: Results, name: str) -> None:
    check_case(four_ranks, name)


def cosine(step: int, peak: float, end: float, warmup: int, total: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then a cosine."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))


@pytest.mark.parametrize(("base", "rounds", "last"), [(4, 9711, 8142), (8, 6461, 2339)])
def test_qsr_of_the_papers_vit(base: int, rounds: int, last: int) -> None:
    """300 epochs of 312 steps, warm-up 10,000, peak 0.008, end 1e-6, alpha 0.0175."""
    total, schedule = 93_600, SyncSchedule(base, 0.0175, warmup_steps=10_000)
    found = list(schedule.rounds(total, lambda s: cosine(s, 0.008, 1e-6, 10_000, total)))
    assert (len(found), found[-1][1]) == (rounds, last)
    assert sum(steps for _, steps in found) == total


def test_qsr_of_our_recipe() -> None:
    config = TrainConfig(steps=1400, warmup_steps=100, lr=0.002, final_lr_fraction=0.02)
    schedule = SyncSchedule(4, 0.004375, warmup_steps=100)
    found = [n for _, n in schedule.rounds(1400, lambda step: learning_rate(config, step + 1))]
    assert (len(found), found[-4:]) == (141, [46, 65, 111, 264])


def test_intervals() -> None:
    assert SyncSchedule(base=5).interval(17, 1e-3) == 5
    quadratic = SyncSchedule(base=4, alpha=0.01)
    assert quadratic.interval(0, 0.01) == 4
    assert quadratic.interval(0, 0.002) == 25
    assert SyncSchedule(base=4, alpha=0.01, power=1).interval(0, 0.001) == 10
    assert SyncSchedule(base=4, alpha=0.01, power=3).interval(0, 0.002) == 125
    assert quadratic.interval(90, 0.002, 100) == 10
    assert quadratic.interval(90, 0.0, 100) == 10
    assert SyncSchedule(base=4, alpha=0.01, longest=50).interval(0, 0.0) == 50
    with pytest.raises(ValueError, match="would not end"):
        quadratic.interval(90, 0.0)
    warming = SyncSchedule(base=4, alpha=0.01, warmup_steps=10, warmup_interval=2)
    assert [warming.interval(step, 1e-5, 1000) for step in (0, 9)] == [2, 2]
    assert warming.interval(10, 0.002, 1000) == 25
    assert SyncSchedule(base=7).interval(98, 1.0, 100) == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SyncSchedule(base=0), "SyncSchedule(base=...) must be an integer of at least 1"),
        (lambda: SyncSchedule(alpha=-1), "a finite number of at least 0, got -1"),
        (lambda: SyncSchedule(power=math.inf), "SyncSchedule(power=...) must be a finite"),
        (lambda: SyncSchedule(base=9, longest=8), "longest=...) must be an integer of at least"),
        (lambda: OuterStep(lr=0), "OuterStep(lr=...) must be a finite number above 0, got 0"),
        (lambda: OuterStep(momentum=1.0), "at least 0 and below 1, got 1.0"),
        (lambda: SyncConfig(fragments=0), "fragments=...) must be an integer from 1"),
        (lambda: SyncConfig(overlap_steps=1), "below the shortest round, 1 steps"),
        (
            lambda: SyncConfig(
                SyncSchedule(base=4),
                Feedback(Quantizer(4, rounding="nearest", scaling="symmetric", coding="rice")),
                overlap_steps=1,
            ),
            "hides no rows of coding='rice'",
        ),
        (lambda: SyncConfig(differences=Learned(Quantizer(4, rounding="nearest"))), "differences"),
        (
            lambda: SyncConfig(differences=Feedback(Learned(Quantizer(4, rounding="nearest")))),
            "does not learn levels",
        ),
        (
            lambda: SyncConfig(
                differences=Feedback(Quantizer(4), memory=Quantizer(8, rounding="nearest"))
            ),
            "is kept in float32",
        ),
        (lambda: SyncConfig(exact="*.head.*"), "must be a tuple of patterns"),
        (lambda: SyncConfig(verify=1), "must be True or False"),
        (lambda: QSDPConfig.preset("w32g0"), "presets are"),
        (lambda: Quantizer(0), "Quantizer(bits=...)"),
        (lambda: Meeting(None, 2), "takes a torch.distributed store"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(make: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        make()
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m, o: ReplicaSync(None, o, None, SyncConfig()), "takes the model first"),
        (lambda m, o: ReplicaSync(m, None, None, SyncConfig()), "takes the optimizer second"),
        (lambda m, o: ReplicaSync(m, o, None, "w4g4"), "takes a qsdp.SyncConfig"),
        (lambda m, o: ReplicaSync(m, o, None, SyncConfig(), total_steps=0), "total_steps=...)"),
        (lambda m, o: ReplicaSync(m, o, None, SyncConfig(), lr=0.1), "a function of the step"),
        (lambda m, o: ReplicaSync(m.double(), o, None, SyncConfig()), "is torch.float64"),
        (lambda m, o: ReplicaSync(m.requires_grad_(False), o, None, SyncConfig()), "is trained"),
    ],
)
def test_arguments_of_replica_sync(make: Any, words: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises((TypeError, ValueError)) as refused:
        make(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert words in str(refused.value)


def test_vectors_small_and_named_parameters_are_exact() -> None:
    config = SyncConfig(differences=Feedback(Quantizer(4)), exact=("head.*",))
    assert config.quantizer_of(["block.weight"], (64, 64)) == Quantizer(4)
    for name, shape in (("block.bias", (4096,)), ("small", (8, 8)), ("head.weight", (64, 64)),
                        ("moe.gate.weight", (64, 64))):  # fmt: skip
        assert config.quantizer_of([name], shape) is None


def test_fragments_are_consecutive_and_about_equal() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(7)))
    entries = trained_parameters(model)
    for count in (1, 2, 3, 7, 9):
        runs = divide(entries, count)
        assert [entry for run in runs for entry in run] == entries
        assert len(runs) == min(count, 7)
        assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_a_sync_config_is_json() -> None:
    import json

    for differences in (None, Quantizer(8), Feedback(Quantizer(4))):
        text = json.dumps(SyncConfig(differences=differences, outer=OuterStep()).to_json())
        assert '"base": 1' in text
