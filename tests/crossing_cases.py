"""Every recipe in every sequence that users go through: what two ranks run for test_crossing.py.

A recipe is a configuration; its parts are made small enough for the little model here. What must
hold is the same for all of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from fsdp_cases import (
    Net,
    batch,
    build,
    equal,
    loss_of,
    same_on_all_ranks,
    shards,
    train,
    unsharded,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

import qsdp
from qsdp import Differences, Feedback, Learned, LevelSchedule, QSDPConfig, Quantizer, Warmup, Ways

SIGNS = Quantizer(1, 64, "nearest", scaling="mean", scale_dtype="bfloat16")
BYTES = Quantizer(8, 64, "nearest", scaling="symmetric")
RICE = Quantizer(4, 128, "stochastic", scaling="symmetric", coding="rice")
NORM = Quantizer(4, 128, "stochastic", scaling="l2", coding="elias")
CHANGES = Quantizer(4, 256, "nearest", scaling="symmetric", coding="rice")
LEARNED = Learned(Quantizer(3, 64, "nearest"), LevelSchedule(first_step=1, every=2))
RECIPES = {
    **{name: QSDPConfig.preset(name) for name in ("w8g8", "w4g4", "w2g2", "w1g1")},
    **{name: QSDPConfig.preset(name) for name in ("sdp4bit", "qsgd4")},
    "bitdp": replace(QSDPConfig.preset("bitdp"), warmup=Warmup(2, Quantizer(8))),
    "bitdp, 8 bit weights": replace(QSDPConfig.preset("bitdp"), weights=Quantizer(8)),
    "coded": QSDPConfig(Differences(CHANGES), RICE, min_numel=0),
    "coded, 2-norm": QSDPConfig(Quantizer(8), NORM, min_numel=0),
    "coded, fed back": QSDPConfig(None, Feedback(RICE, memory=BYTES), warmup=Warmup(3, RICE)),
    "signs, decaying": QSDPConfig(Quantizer(8), Feedback(SIGNS, decay=0.75, memory=BYTES)),
    "learned, fed back": QSDPConfig(LEARNED, Feedback(LEARNED)),
    "mixed": QSDPConfig(
        Differences(CHANGES),
        Feedback(SIGNS, memory=BYTES),
        {"embed*": Ways(Quantizer(8), RICE), "blocks.0.down.*": "w8g8", "blocks.0.up.*": None},
        warmup=Warmup(2, Quantizer(8)),
    ),
}  # fmt: skip


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def resumes(config: QSDPConfig, rank: int) -> None:
    """Bit for bit after two, three and four steps, with an evaluation in between."""
    for stop in (2, 3, 4):
        whole = qsdp.apply_qsdp(build(), config)
        optimizer = adamw(whole)
        train(whole, rank, stop, optimizer=optimizer)
        with torch.no_grad():
            loss_of(whole, batch(rank, 50))
        states = whole.state_dict(), optimizer.state_dict(), qsdp.comm_state_dict(whole)
        saved = copy.deepcopy(states)
        rest = train(whole, rank, 3, first=stop, optimizer=optimizer)
        again = qsdp.apply_qsdp(build(seed=5), config)
        other = adamw(again)
        train(again, rank, 1, optimizer=other)
        again.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        qsdp.load_comm_state_dict(again, saved[2])
        assert train(again, rank, 3, first=stop, optimizer=other) == rest, stop
        assert equal(shards(whole), shards(again)), stop


def evaluation_changes_nothing(config: QSDPConfig, rank: int) -> None:
    """One model is evaluated between all steps, and read out, the other is not."""
    runs = []
    for evaluate in (False, True):
        model = qsdp.apply_qsdp(build(), config)
        optimizer = adamw(model)
        losses = []
        for step in range(5):
            losses += train(model, rank, 1, first=step, optimizer=optimizer)
            if evaluate:
                model.eval()
                with torch.no_grad():
                    loss_of(model, batch(rank, 90))
                qsdp.decoded_state_dict(model)
                model.train()
        runs.append((losses, shards(model)))
    assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])


def micro_batches(config: QSDPConfig, rank: int) -> None:
    """Without synchronisation but in the last one: one reduction a step; ranks agree."""
    model = qsdp.apply_qsdp(build(), config)
    optimizer = adamw(model)
    for step in range(4):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            loss = loss_of(model, batch(rank, 3 * step + part))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert math.isfinite(loss.item())
    with unsharded(model) as weights:
        assert same_on_all_ranks(weights)


def a_bad_step_is_skipped(config: QSDPConfig, rank: int) -> None:
    """Infinity on one rank: every rank sees it, skips the step, and goes on as if it was none."""
    model = qsdp.apply_qsdp(build(), config)
    optimizer = adamw(model)
    train(model, rank, 3, optimizer=optimizer)
    before = shards(model)
    (loss_of(model, batch(rank, 3)) * (math.inf if rank == 0 else 1.0)).backward()
    grads = [p.grad.to_local() for p in model.parameters()]
    good = torch.tensor(all(bool(g.isfinite().all()) for g in grads), dtype=torch.int32)
    torch.distributed.all_reduce(good, torch.distributed.ReduceOp.MIN)
    assert not good
    optimizer.zero_grad()
    assert equal(before, shards(model))
    assert all(math.isfinite(loss) for loss in train(model, rank, 4, 4, optimizer))
    state = qsdp.comm_state_dict(model)
    assert all(v.isfinite().all() for v in state.values() if v.is_floating_point())


def other_weights_arrive(config: QSDPConfig, rank: int) -> None:
    """A state dict is loaded after training: decoded weights are as near to it as at a start."""
    fresh = qsdp.apply_qsdp(build(seed=9), config)
    model = qsdp.apply_qsdp(build(), config)
    train(model, rank, 3)
    model.load_state_dict(copy.deepcopy(fresh.state_dict()))
    errors = []
    for each in (fresh, model):
        masters = {name: p.full_tensor().detach() for name, p in each.named_parameters()}
        with unsharded(each) as weights:
            assert same_on_all_ranks(weights)
            lost = [float((weights[n] - m).norm() / m.norm()) for n, m in masters.items()]
        errors.append(max(lost))
    assert errors[1] <= errors[0] * 1.05 + 1e-7, errors


def taken_off_and_put_on(config: QSDPConfig, rank: int) -> None:
    """Without qsdp it is stock again; on again, it starts afresh; both train on."""
    model, plain = qsdp.apply_qsdp(build(), config), build()
    train(model, rank, 2)
    qsdp.remove_qsdp(model)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    assert train(model, rank, 2) == train(plain, rank, 2)
    qsdp.apply_qsdp(model, config)
    assert all(math.isfinite(loss) for loss in train(model, rank, 3))
    with unsharded(model) as weights:
        assert same_on_all_ranks(weights)


def checksums_change_no_bit(config: QSDPConfig, rank: int) -> None:
    runs = []
    for verify in (False, True):
        model = qsdp.apply_qsdp(build(), replace(config, verify=verify))
        runs.append((train(model, rank, 4), shards(model)))
    assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])


def kept_unsharded(config: QSDPConfig, rank: int) -> None:
    """ZeRO-2, with weights that backward does not gather again: the same losses."""
    runs = []
    for reshard in (True, False):
        model = qsdp.apply_qsdp(build(reshard_after_forward=reshard), config)
        runs.append((train(model, rank, 4), shards(model)))
    assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])


def bfloat16(config: QSDPConfig, rank: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = qsdp.apply_qsdp(build(mp_policy=policy), config)
    losses = train(model, rank, 6)
    assert losses[-1] < losses[0] * 1.02 and all(map(math.isfinite, losses))
    with unsharded(model) as weights:
        assert same_on_all_ranks(weights)


def parts_are_frozen(config: QSDPConfig, rank: int) -> None:
    """Fine-tuning: nothing but one block trains, then all does."""
    model = qsdp.apply_qsdp(build(), config)
    assert isinstance(model, Net)
    model.requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    before = shards(model)
    train(model, rank, 2)
    moved = {
        name
        for (name, _), a, b in zip(model.named_parameters(), before, shards(model), strict=True)
        if not torch.equal(a, b)
    }
    assert moved and all(name.startswith("blocks.1.") for name in moved), moved
    model.requires_grad_(True)
    assert all(math.isfinite(loss) for loss in train(model, rank, 2))
    with unsharded(model) as weights:
        assert same_on_all_ranks(weights)


SEQUENCES: dict[str, Callable[[QSDPConfig, int], None]] = {
    sequence.__name__: sequence
    for sequence in (
        resumes, evaluation_changes_nothing, micro_batches, a_bad_step_is_skipped,
        other_weights_arrive, taken_off_and_put_on, checksums_change_no_bit, kept_unsharded,
        bfloat16, parts_are_frozen,
    )
}  # fmt: skip


class Crossing:
    """One sequence with one recipe, as a case that ranks run."""

    def __init__(self, sequence: str, recipe: str) -> None:
        self.sequence, self.recipe = sequence, recipe

    def __call__(self, rank: int) -> None:
        SEQUENCES[self.sequence](RECIPES[self.recipe], rank)


CROSSINGS = {
    f"{sequence}: {recipe}": Crossing(sequence, recipe)
    for sequence in SEQUENCES
    for recipe in RECIPES
}
