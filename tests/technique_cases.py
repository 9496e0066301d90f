"""What ranks run for test_techniques.py: learned levels, overrides, differences, error feedback."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_cases import batch, build, equal, loss_of, raises_everywhere, shards, train, unsharded
from torch import nn
from torch.distributed.fsdp import fully_shard

import qsdp
from qsdp import (
    Differences,
    Feedback,
    Learned,
    LevelSchedule,
    QSDPConfig,
    Quantizer,
    Warmup,
    Ways,
)
from qsdp.agreement import all_gather_json
from qsdp.state import FORMAT

UNIFORM = Quantizer(3, 64, "nearest")
LEARNED = Learned(UNIFORM, LevelSchedule(first_step=1, every=2))
LEARNING = QSDPConfig(LEARNED, LEARNED)
FOUR_BITS = Quantizer(4, 64, "nearest")
DIFFERENCE = QSDPConfig(Differences(FOUR_BITS, kept=None), Quantizer(8), seed=3)
LIGHT = replace(DIFFERENCE, weights=Differences(FOUR_BITS, kept=Quantizer(8, 64, "nearest")))
FED_BACK = QSDPConfig(None, Feedback(Quantizer(3, 64, "nearest")))
BYTES = Quantizer(8, 64, "nearest", scaling="symmetric")
SIGNS = Quantizer(1, 64, "nearest", scaling="mean", scale_dtype="bfloat16")
ONE_BIT = QSDPConfig(None, Feedback(SIGNS, decay=0.75, memory=BYTES))


def require_equal_on_ranks(values: list[torch.Tensor]) -> None:
    sums = [float(v.double().sum()) for v in values] + [float(v.double().norm()) for v in values]
    answers = all_gather_json(sums)
    assert all(answer == answers[0] for answer in answers)


def error_of(model: nn.Module) -> float:
    """Relative error of the weights that the model computes with, over all quantized ones."""
    masters = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    with unsharded(model) as weights:
        require_equal_on_ranks(list(weights.values()))
        lost = [(weights[n].detach() - m).square().sum() for n, m in masters.items() if m.ndim > 1]
    return float((sum(lost) / sum(m.square().sum() for m in masters.values() if m.ndim > 1)) ** 0.5)


def errors_while_training(model: nn.Module) -> list[float]:
    """Of four gathers, between which the masters change by next to nothing."""
    errors = []
    for _ in range(4):
        errors.append(error_of(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2.0**-22)
    return errors


def case_levels_are_learned_and_help(rank: int) -> None:
    """For every parameter and direction, alike on all ranks, with less error than the grid."""
    # The masters are near their initial values, uniform in linear layers: there is little to learn.
    for method, share in (("kmeans", 0.95), ("gradient", 1.0)):
        way = replace(LEARNED, schedule=replace(LEARNED.schedule, method=method))
        model = qsdp.apply_qsdp(build(), QSDPConfig(way, way))
        losses = train(model, rank, 4)
        assert losses[-1] < losses[0]
        state = qsdp.comm_state_dict(model)
        answers = all_gather_json({name: value.tolist() for name, value in state.items()})
        assert all(answer == answers[0] for answer in answers)
        assert [int(v[0]) for n, v in state.items() if n.startswith("progress.")] == [4, 4, 4]
        tables = learned_tables(model)
        assert len(tables) == 2 * 5, "embedding and two matrices a block, in both directions"
        for name, table in tables.items():
            assert "norm" not in name and "bias" not in name
            assert int(state[f"learned_at.{name}"]) == 3
            assert len(table) == 8 and table == sorted(table)
            assert 0 <= table[0] < table[-1] <= 1
        learned = error_of(model)
        qsdp.apply_qsdp(model, QSDPConfig(UNIFORM, UNIFORM))
        assert learned < share * error_of(model), method


def learned_tables(model: nn.Module) -> dict[str, list[float]]:
    """The levels that have been learned so far, by direction and name."""
    state = qsdp.comm_state_dict(model)
    names = [n.removeprefix("learned_at.") for n, v in state.items() if "learned_at" in n and v > 0]
    return {name: state[f"levels.{name}"].tolist() for name in names}


def case_tables_wait_for_their_step(rank: int) -> None:
    way = Learned(UNIFORM, LevelSchedule(first_step=2, every=100))
    model = qsdp.apply_qsdp(build(), QSDPConfig(way, way))
    train(model, rank, 1)
    assert not learned_tables(model)
    train(model, rank, 2, first=1)
    tables = learned_tables(model)
    assert {name.partition(".")[0] for name in tables} == {"weights", "gradients"}


def case_learned_weights_alone(rank: int) -> None:
    """Gradients in full precision: reductions are counted all the same."""
    model = qsdp.apply_qsdp(build(), replace(LEARNING, gradients=None))
    train(model, rank, 3)
    tables = learned_tables(model)
    assert {name.partition(".")[0] for name in tables} == {"weights"}


def case_every_parameter_learns_by_its_own_schedule(rank: int) -> None:
    """Learned levels as an exception, beside differences and beside another schedule."""
    early, late = (Learned(UNIFORM, LevelSchedule(first, every=100)) for first in (1, 3))
    exceptions = {"blocks.0.*": Ways(early, early), "blocks.1.up.*": Ways(late, Quantizer(8))}
    model = qsdp.apply_qsdp(build(), replace(DIFFERENCE, exceptions=exceptions))
    train(model, rank, 3)
    assert set(learned_tables(model)) == {
        f"{direction}.blocks.0.{name}.weight"
        for direction in ("weights", "gradients")
        for name in ("up", "down")
    }
    train(model, rank, 2, first=3)
    assert "weights.blocks.1.up.weight" in learned_tables(model)
    assert len(learned_tables(model)) == 5


def resumed_equals_uninterrupted(config: QSDPConfig, rank: int) -> None:
    whole = qsdp.apply_qsdp(build(), config)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    train(whole, rank, 3, optimizer=optimizer)
    with unsharded(whole):
        pass  # as a validation does before the checkpoint
    saved, state = [s.clone() for s in shards(whole)], qsdp.comm_state_dict(whole)
    before = {name: value.clone() for name, value in state.items()}
    losses = train(whole, rank, 3, first=3, optimizer=optimizer)
    assert all(torch.equal(state[name], value) for name, value in before.items()), "copies"

    again = qsdp.apply_qsdp(build(seed=9), config)
    for param, value in zip(again.parameters(), saved, strict=True):
        param.to_local().data.copy_(value)
    fresh = qsdp.comm_state_dict(again)
    assert {n: v.shape for n, v in fresh.items()} == {n: v.shape for n, v in state.items()}
    qsdp.load_comm_state_dict(again, state)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    assert train(again, rank, 3, first=3, optimizer=optimizer) == losses
    assert equal(shards(again), shards(whole))


MIXED = replace(
    LIGHT,
    gradients=Feedback(LEARNED),
    exceptions={
        "blocks.0.up.*": Ways(LEARNED, Quantizer(4)),
        "blocks.0.down.*": Ways(Quantizer(4), Feedback(Quantizer(2, 64, "nearest"))),
        "blocks.1.*": "w4g4",
        "embed.*": Ways(Differences(FOUR_BITS, kept=None), None),
    },
)


def case_resumed_run_equals_uninterrupted(rank: int) -> None:
    """Bit for bit, in the middle of a schedule, of differences and of error feedback."""
    for config in (LEARNING, DIFFERENCE, LIGHT, FED_BACK, MIXED, ONE_BIT):
        resumed_equals_uninterrupted(config, rank)


def case_resumes_in_at_the_end_of_and_after_the_warm_up(rank: int) -> None:
    """The state is saved after three steps."""
    for warmup in (Warmup(5), Warmup(3, Quantizer(8, 64, "nearest")), Warmup(2)):
        resumed_equals_uninterrupted(replace(ONE_BIT, warmup=warmup), rank)


def case_warm_up_is_the_other_way_for_its_steps(rank: int) -> None:
    """Bit for bit, and then the configuration's own with nothing to feed back yet."""
    other = Quantizer(8, 64, "nearest")
    for warm in (None, other):
        first = qsdp.apply_qsdp(build(), QSDPConfig(None, warm)) if warm else build()
        model = qsdp.apply_qsdp(build(), replace(ONE_BIT, warmup=Warmup(2, warm)))
        assert train(first, rank, 2) == train(model, rank, 2)
        assert equal(shards(first), shards(model))
        state = qsdp.comm_state_dict(model)
        assert not any(v.any() for name, v in state.items() if name.startswith("residual."))
        qsdp.apply_qsdp(first, ONE_BIT)
        assert train(first, rank, 2, first=2) == train(model, rank, 2, first=2)
        assert equal(shards(first), shards(model))


def case_one_bit_trains(rank: int) -> None:
    """Signs with feedback, in a byte an element or a float32; one bit with dither and without."""
    dithered = Quantizer(1, 64, "dither", scale_dtype="bfloat16", transform="hadamard")
    for way in (Feedback(SIGNS), Feedback(SIGNS, memory=BYTES), dithered):
        model = qsdp.apply_qsdp(build(), QSDPConfig(None, way))
        losses = train(model, rank, 6)
        assert losses[-1] < losses[0], way
        stats = qsdp.comm_stats(model)
        assert stats.stock_reduce_scatter > 10 * stats.reduce_scatter_sent


def case_second_moment_freezes_on_shards(rank: int) -> None:
    """At one floor for all shards of a parameter, and the optimizer's state says so."""
    model = qsdp.apply_qsdp(build(), ONE_BIT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.8))
    qsdp.freeze_second_moment(optimizer, 21, floor=0.5, config=ONE_BIT)
    train(model, rank, 21, optimizer=optimizer)
    weight = model.blocks[0].up.weight
    learned = optimizer.state[weight]["exp_avg_sq"].full_tensor() / (1 - 0.8**21)
    for steps in (1, 3):
        losses = train(model, rank, steps, first=21, optimizer=optimizer)
        assert all(math.isfinite(loss) for loss in losses)
        found = optimizer.state[weight]["exp_avg_sq"].full_tensor()
        assert torch.allclose(found, learned.clamp(min=0.5 * float(learned.mean())))


def case_memory_takes_a_byte_an_element(rank: int) -> None:
    """Beside the scales; float32 takes four."""
    sizes = {}
    for memory in (None, BYTES):
        model = qsdp.apply_qsdp(build(), QSDPConfig(None, Feedback(SIGNS, memory=memory)))
        train(model, rank, 2)
        state = qsdp.comm_state_dict(model)
        parts = [v for name, v in state.items() if name.startswith("residual.")]
        assert all(part.any() for part in parts)
        sizes[memory] = sum(part.nbytes for part in parts)
    assert 1 / 4 < sizes[BYTES] / sizes[None] < 1.07 / 4


def case_state_goes_through_the_checkpoint_library(rank: int) -> None:
    """By torch.distributed.checkpoint, into a fresh model, every rank's own row comes back."""
    folder = all_gather_json(tempfile.mkdtemp() if rank == 0 else None)[0]
    model = qsdp.apply_qsdp(build(), MIXED)
    train(model, rank, 3)
    state = qsdp.comm_state_dict(model)
    dcp.save(state, checkpoint_id=folder)
    other = qsdp.apply_qsdp(build(), MIXED)
    loaded = qsdp.comm_state_dict(other)
    dcp.load(loaded, checkpoint_id=folder)
    qsdp.load_comm_state_dict(other, loaded)
    again = qsdp.comm_state_dict(other)
    assert state.keys() == again.keys()
    assert all(torch.equal(state[name], again[name]) for name in state)


def case_foreign_state_is_refused(rank: int) -> None:
    """On every rank, also where one rank alone has another state or none."""
    model = qsdp.apply_qsdp(build(), LEARNING)
    train(model, rank, 2)
    state, other = qsdp.comm_state_dict(model), qsdp.apply_qsdp(build(), QSDPConfig())
    hint = "apply the configuration that it was saved with"
    for load, parts in (
        (lambda: qsdp.load_comm_state_dict(other, state), ("remembers nothing", hint)),
        (
            lambda: qsdp.load_comm_state_dict(model, state | {"format": torch.tensor([7, 2])}),
            (f"reads format {FORMAT}, got 7",),
        ),
        (
            lambda: qsdp.load_comm_state_dict(model, state if rank == 0 else {}),
            ("the same communication state",),
        ),
    ):
        raises_everywhere(load, *parts)
    wider = replace(LEARNED, quantizer=replace(UNIFORM, bits=4))
    qsdp.apply_qsdp(model, QSDPConfig(wider, wider))
    raises_everywhere(lambda: qsdp.load_comm_state_dict(model, state), "has shape (8,)", hint)
    light, plain = (qsdp.apply_qsdp(build(), config) for config in (LIGHT, DIFFERENCE))
    kept = qsdp.comm_state_dict(plain)
    raises_everywhere(lambda: qsdp.load_comm_state_dict(light, kept), "'kept.", hint)
    broken = qsdp.comm_state_dict(light)
    if rank == 1:
        name = next(name for name in broken if name.startswith("digests."))
        broken[name] = broken[name][:-1]
    raises_everywhere(lambda: qsdp.load_comm_state_dict(light, broken), "'digests.")


def case_state_of_other_ranks_continues(rank: int) -> None:
    """Levels and their clock go on; what belonged to ranks starts afresh, which is said."""
    model = qsdp.apply_qsdp(build(), MIXED)
    train(model, rank, 2)
    state = qsdp.comm_state_dict(model)
    of_four = {name: value for name, value in state.items() if ".rank" not in name}
    of_four |= {f"kept.blocks.1.rank{r}": torch.zeros(9, dtype=torch.uint8) for r in range(4)}
    of_four["format"] = torch.tensor([FORMAT, 4])
    other = qsdp.apply_qsdp(build(), MIXED)
    with pytest.warns(UserWarning, match="saved by 4 ranks and here are 2"):
        qsdp.load_comm_state_dict(other, of_four)
    assert learned_tables(other) == learned_tables(model) != {}
    assert error_of(other) < 0.1
    train(other, rank, 1)


def case_exceptions(rank: int) -> None:
    """Some parameters in full precision in one direction, others in other widths."""
    exceptions = {
        "embed.*": Ways(None, Quantizer(8)),
        "*.up.weight": Ways(Quantizer(2), Quantizer(4)),
        "blocks.1.*": "w8g8",  # not up, which the pattern before has taken
    }
    model = qsdp.apply_qsdp(build(), QSDPConfig(Quantizer(4), Quantizer(4), exceptions))
    masters = {name: p.full_tensor() for name, p in model.named_parameters()}
    with unsharded(model) as weights:
        assert torch.equal(weights["embed.weight"], masters["embed.weight"])
        for name, bits in (
            ("blocks.0.up.weight", 2),
            ("blocks.1.up.weight", 2),
            ("blocks.0.down.weight", 4),
            ("blocks.1.down.weight", 8),
        ):
            block = weights[name].flatten()[:1024] if rank == 0 else weights[name].flatten()[-64:]
            assert len(block.unique()) <= 2**bits
            error = (weights[name] - masters[name]).abs().max()
            spread = masters[name].max() - masters[name].min()
            assert error <= 0.51 * spread / (2**bits - 1)
    train(model, rank, 2)
    with pytest.raises(ValueError, match=r"QSDPConfig\(exceptions=...\): 'head.*' matches no"):
        qsdp.apply_qsdp(build(), QSDPConfig(exceptions={"headless.*": "w4g4"}))


def case_differences_lose_nothing_over_time(rank: int) -> None:
    """The first gather is exact, backward moves nothing, and what was lost is made up for."""
    model = qsdp.apply_qsdp(build(), DIFFERENCE)
    assert error_of(model) == 0.0
    qsdp.comm_stats(model, reset=True)
    loss_of(model, batch(rank, 0)).backward()
    stats = qsdp.comm_stats(model, reset=True)
    rows = stats.all_gather_sent
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.step()
    errors = errors_while_training(model)
    assert 0 < errors[0] < 0.02
    assert errors[1] < 0.2 * errors[0] and errors[3] < 1e-5
    # Forward and backward of the two blocks: one quantized gather each, not two.
    value = qsdp.apply_qsdp(build(), replace(DIFFERENCE, weights=FOUR_BITS))
    loss_of(value, batch(rank, 0)).backward()
    assert rows < 0.7 * qsdp.comm_stats(value).all_gather_sent
    assert stats.ratio > qsdp.comm_stats(value).ratio


def case_equal_masters_give_equal_weights(rank: int) -> None:
    """However often they are gathered; what changes on one rank changes no other's part."""
    bfloat16 = Quantizer(4, 64, "dither", scale_dtype="bfloat16", transform="hadamard")
    for config in (DIFFERENCE, LIGHT, replace(LIGHT, weights=Differences(bfloat16))):
        model = qsdp.apply_qsdp(build(), config)
        gathered = []
        for _ in range(3):  # the first is raw
            with unsharded(model) as weights:
                gathered.append([weight.detach().clone() for weight in weights.values()])
        assert equal(gathered[0], gathered[1]) and equal(gathered[0], gathered[2])
        train(model, rank, 2)
        with unsharded(model) as weights:
            before = {name: weight.detach().clone() for name, weight in weights.items()}
        with unsharded(model) as weights:
            assert equal(list(weights.values()), list(before.values()))
        parameters = dict(model.named_parameters())
        if rank == 1:
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.to_local().add_(0.25)
        exact = {name: p.full_tensor() for name, p in parameters.items() if p.ndim == 1}
        with unsharded(model) as weights:
            for name, weight in weights.items():
                rows = -(-len(weight) // 2)  # of rank 0
                assert not torch.equal(weight[rows:], before[name][rows:]), name
                assert torch.equal(weight[:rows], before[name][:rows]), name
                assert name not in exact or torch.equal(weight, exact[name]), name


def masters(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().data for p in model.parameters()]


def change_by_loading(model: nn.Module, rank: int) -> None:
    other = build(seed=7)
    model.load_state_dict(other.state_dict())


def change_by_copying(model: nn.Module, rank: int) -> None:
    for mine, theirs in zip(masters(model), masters(build(seed=8)), strict=True):
        mine.copy_(theirs)


def change_by_averaging(model: nn.Module, rank: int) -> None:
    for mine, theirs in zip(masters(model), masters(build(seed=9)), strict=True):
        mine.lerp_(theirs, 0.5)


def change_by_initialising(model: nn.Module, rank: int) -> None:
    torch.manual_seed(rank)
    for mine in masters(model):
        mine.normal_(std=0.02)


def change_by_scaling(model: nn.Module, rank: int) -> None:
    for mine in masters(model):
        mine.mul_(3.0)


def change_by_signs(model: nn.Module, rank: int) -> None:
    for mine in masters(model):
        mine.neg_()


def change_one_parameter(model: nn.Module, rank: int) -> None:
    model.blocks[1].down.weight.to_local().data.add_(0.5)


def change_some_rows(model: nn.Module, rank: int) -> None:
    model.blocks[0].up.weight.to_local().data[:3] = 1.0


def change_one_rank(model: nn.Module, rank: int) -> None:
    if rank == 1:
        change_by_scaling(model, rank)


def change_by_noise(model: nn.Module, rank: int) -> None:
    torch.manual_seed(rank)
    for mine in masters(model):
        mine.mul_(1 + 0.05 * torch.randn(mine.shape))


CHANGES = [fn for name, fn in list(globals().items()) if name.startswith("change_")]


def case_any_change_is_seen_as_by_a_fresh_start(rank: int) -> None:
    """Ten kinds, in evaluation and after a step: the next gather errs as a fresh start's does."""
    assert len(CHANGES) == 10
    for preset in ("w4g4", "w3g3", "w2g2"):
        model = qsdp.apply_qsdp(build(), preset)
        train(model, rank, 2)
        for change in CHANGES:
            for trained in (False, True):
                if trained:  # by little, for what a step's differences lose is not at stake here
                    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
                    train(model, rank, 1, optimizer=optimizer)
                with torch.no_grad():
                    change(model, rank)
                error, again = error_of(model), error_of(model)
                fresh = build()
                for mine, theirs in zip(masters(fresh), masters(model), strict=True):
                    mine.copy_(theirs)
                limit = 1.05 * error_of(qsdp.apply_qsdp(fresh, preset))
                assert error == again <= limit, (preset, change.__name__, trained, error, limit)


def case_training_takes_no_whole_rows(rank: int) -> None:
    """Optimizer steps, a validation between them, accumulation: differences alone are sent."""
    model = qsdp.apply_qsdp(build(), "w4g4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, rank, 1, optimizer=optimizer)
    sent = []
    for step in range(1, 6):
        qsdp.comm_stats(model, reset=True)
        train(model, rank, 1, first=step, optimizer=optimizer)
        sent.append(qsdp.comm_stats(model, reset=True).all_gather_sent)
        with torch.no_grad():
            loss_of(model, batch(rank, 50))
    # The root stays gathered after a validation, so that the steps behind one send less.
    assert len(set(sent[1:])) == 1 and sent[1] < sent[0], sent


def case_inference_first(rank: int) -> None:
    """An evaluation in inference mode before qsdp's first training step, and between steps.

    FSDP2 itself cannot begin with one: what it allocates then, it cannot write in training.
    """
    model = build()
    train(model, rank, 1)
    qsdp.apply_qsdp(model, MIXED)
    for step in range(3):
        with torch.inference_mode():
            loss_of(model, batch(rank, 50))
        train(model, rank, 1, first=step)


def case_validations_change_nothing(rank: int) -> None:
    """Nor do micro-batches: a forward more, and training goes on bit for bit as without it."""
    for config in (DIFFERENCE, LIGHT, QSDPConfig.preset("w4g4")):
        runs = []
        for validations in (0, 2):
            model = qsdp.apply_qsdp(build(), config)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for step in range(4):
                for _ in range(validations):
                    with torch.no_grad():
                        loss_of(model, batch(rank, 50))
                losses += train(model, rank, 1, first=step, optimizer=optimizer)
            runs.append((losses, shards(model)))
        assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])


def case_light_memory_keeps_bytes(rank: int) -> None:
    """A byte a weight is kept, all ranks compute with it, and it is as close as 8 bits are."""
    model = qsdp.apply_qsdp(build(), LIGHT)
    eight = qsdp.apply_qsdp(build(), replace(DIFFERENCE, weights=Quantizer(8, 64, "nearest")))
    assert error_of(model) == error_of(eight) > 0
    train(model, rank, 3)
    train(eight, rank, 3)
    errors = errors_while_training(model)
    assert errors[-1] < 1.1 * error_of(eight)
    plain = qsdp.apply_qsdp(build(), DIFFERENCE)
    train(plain, rank, 1)
    light_rows, rows = (
        sum(row.nbytes for name, row in qsdp.comm_state_dict(m).items() if name.startswith("kept"))
        for m in (model, plain)
    )
    assert light_rows < 0.45 * rows  # 8 bits and two scales a 64 values, of 32; vectors as they are


def case_differences_survive_infinity(rank: int) -> None:
    """Weights that were not finite are seen as such, and forgotten once they are mended."""
    for config in (DIFFERENCE, LIGHT):
        model = qsdp.apply_qsdp(build(), config)
        train(model, rank, 1)
        name, parameter = next((n, p) for n, p in model.named_parameters() if p.ndim > 1)
        local, saved = parameter.to_local(), parameter.to_local().clone()
        with torch.no_grad():
            local.view(-1)[0] = torch.inf if rank == 0 else torch.nan
            with unsharded(model) as weights:
                assert not weights[name].isfinite().all()
            local.copy_(saved)
        errors = errors_while_training(model)
        assert all(math.isfinite(error) for error in errors) and errors[-1] < 0.01


def case_differences_train_like_stock(rank: int) -> None:
    """4 bits of differences follow full precision closer than 4 bits of values."""
    stock = train(build(), rank, 12)
    runs = {}
    for mode, way in (("difference", Differences(FOUR_BITS, kept=None)), ("value", FOUR_BITS)):
        runs[mode] = train(qsdp.apply_qsdp(build(), QSDPConfig(way, None)), rank, 12)
    far = {m: sum(abs(a - b) for a, b in zip(r, stock, strict=True)) for m, r in runs.items()}
    assert far["difference"] < 0.5 * far["value"]


def case_error_feedback_forgets_nothing(rank: int) -> None:
    """The mean of many received gradients approaches the true one; without feedback it does not."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    fully_shard(layer)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(rank))
    layer(x).square().sum().backward()
    true = layer.weight.grad.to_local().clone()
    far = {}
    quantizer = Quantizer(2, 64, "nearest")
    ways = {True: Feedback(quantizer), False: quantizer, "bytes": Feedback(quantizer, memory=BYTES)}
    ways["nothing"] = Feedback(quantizer, decay=0.0)
    for feedback, way in ways.items():
        qsdp.apply_qsdp(layer, QSDPConfig(None, way))
        total = torch.zeros_like(true)
        for _ in range(30):
            layer.zero_grad()
            layer(x).square().sum().backward()
            total += layer.weight.grad.to_local()
        far[feedback] = float((total / 30 - true).norm() / true.norm())
    assert far[True] < 0.05 < far[False] == far["nothing"]
    assert far["bytes"] < 0.05


def case_feedback_is_of_parameters(rank: int) -> None:
    """Two layers of one unit and size, used in turns or both: each gets its own error back."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
            return sum(self.layers[i](x * 10.0**i).square().sum() for i in used)

    torch.manual_seed(0)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(rank))
    stock, model = Two(), Two()
    model.load_state_dict(stock.state_dict())
    fully_shard(stock), fully_shard(model)
    qsdp.apply_qsdp(model, QSDPConfig(None, Feedback(Quantizer(2, 64, "nearest"))))
    far, steps = {}, 64
    totals = [torch.zeros_like(p.to_local()) for p in model.parameters()]
    for step in range(steps):
        for used in ((0,), (1,), (0, 1))[step % 3 :] if step < steps - 1 else ((0, 1),):
            for m in (stock, model):
                m.zero_grad()
                m(x, used).backward()
            for i in used:
                exact, found = (m.layers[i].weight.grad.to_local() for m in (stock, model))
                totals[i] += found - exact
                far.setdefault(i, float((found - exact).norm()))
    for i, total in enumerate(totals):
        assert float(total.norm()) < 4 * far[i], "what was lost of one layer came back in another"


def case_feedback_survives_infinity(rank: int) -> None:
    """A gradient that overflowed is seen by the owners once, and not fed back."""
    model = qsdp.apply_qsdp(build(), FED_BACK)
    train(model, rank, 1)
    (loss_of(model, batch(rank, 1)) * torch.inf).backward()
    assert not all(p.grad.to_local().isfinite().all() for p in model.parameters())
    model.zero_grad()
    loss_of(model, batch(rank, 2)).backward()
    assert all(p.grad.to_local().isfinite().all() for p in model.parameters())


def case_formats_train(rank: int) -> None:
    """Small blocks with bfloat16 scales, dither and the transform, end to end."""
    config = QSDPConfig(
        Quantizer(4, 128, "dither", scale_dtype="bfloat16"),
        Quantizer(4, 128, "dither", transform="hadamard", scale_dtype="bfloat16"),
        verify=True,
    )
    model = qsdp.apply_qsdp(build(), config)
    losses = train(model, rank, 6)
    stock = train(build(), rank, 6)
    assert losses == pytest.approx(stock, rel=0.03)
    error_of(model)


CASES = {name: case for name, case in list(globals().items()) if name.startswith("case_")}
