"""What ranks run for test_techniques.py: learned levels, overrides, differences, error feedback."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import batch, build, equal, loss_of, shards, train, unsharded
from torch import nn
from torch.distributed.fsdp import fully_shard

import qsdp
from qsdp import LevelSchedule, Override, QSDPConfig, Quantizer
from qsdp.agreement import all_gather_json

LEARNED = Quantizer(3, 64, "nearest", levels="learned")
LEARNING = QSDPConfig(LEARNED, LEARNED, level_schedule=LevelSchedule(first_step=1, every=2))
DIFFERENCE = QSDPConfig(Quantizer(4, 64, "nearest"), Quantizer(8), weight_mode="difference", seed=3)
LIGHT = replace(DIFFERENCE, weight_memory=Quantizer(8, 64, "nearest"))


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
        schedule = replace(LEARNING.level_schedule, method=method)
        model = qsdp.apply_qsdp(build(), replace(LEARNING, level_schedule=schedule))
        losses = train(model, rank, 4)
        assert losses[-1] < losses[0]
        state = qsdp.comm_state_dict(model)
        answers = all_gather_json(state)
        assert all(answer == answers[0] for answer in answers)
        units = state["units"]
        assert len(units) == 3
        for unit in units.values():
            assert unit["reductions"] == 4
            assert unit["learned_at"] == {"weights": 3, "gradients": 3}
            for direction in ("weights", "gradients"):
                for name, table in unit["levels"][direction].items():
                    assert "norm" not in name and "bias" not in name
                    assert len(table) == 8 and table == sorted(table)
                    assert 0 <= table[0] < table[-1] <= 1
        learned = error_of(model)
        uniform = replace(LEARNED, levels=None)
        qsdp.apply_qsdp(model, replace(LEARNING, weights=uniform, gradients=uniform))
        assert learned < share * error_of(model), method


def case_tables_wait_for_their_step(rank: int) -> None:
    schedule = LevelSchedule(first_step=2, every=100)
    model = qsdp.apply_qsdp(build(), replace(LEARNING, level_schedule=schedule))
    train(model, rank, 1)
    assert all(not u["levels"] for u in qsdp.comm_state_dict(model)["units"].values())
    train(model, rank, 2, first=1)
    units = qsdp.comm_state_dict(model)["units"].values()
    assert all(set(u["levels"]) == {"weights", "gradients"} for u in units)


def case_learned_weights_alone(rank: int) -> None:
    """Gradients in full precision: reductions are counted all the same."""
    model = qsdp.apply_qsdp(build(), replace(LEARNING, gradients=None))
    train(model, rank, 3)
    units = qsdp.comm_state_dict(model)["units"].values()
    assert all(set(u["levels"]) == {"weights"} for u in units)


def resumed_equals_uninterrupted(config: QSDPConfig, rank: int) -> None:
    whole = qsdp.apply_qsdp(build(), config)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    train(whole, rank, 3, optimizer=optimizer)
    with unsharded(whole):
        pass  # as a validation does before the checkpoint
    saved, state = [s.clone() for s in shards(whole)], qsdp.comm_state_dict(whole)
    tensors = {name: t.clone() for name, t in qsdp.comm_tensors(whole).items()}
    losses = train(whole, rank, 3, first=3, optimizer=optimizer)

    again = qsdp.apply_qsdp(build(seed=9), config)
    for param, value in zip(again.parameters(), saved, strict=True):
        param.to_local().data.copy_(value)
    qsdp.load_comm_state_dict(again, state)
    qsdp.load_comm_tensors(again, tensors)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    assert train(again, rank, 3, first=3, optimizer=optimizer) == losses
    assert equal(shards(again), shards(whole))


def case_resumed_run_equals_uninterrupted(rank: int) -> None:
    """Bit for bit, in the middle of a schedule, of differences and of error feedback."""
    resumed_equals_uninterrupted(LEARNING, rank)
    resumed_equals_uninterrupted(DIFFERENCE, rank)
    resumed_equals_uninterrupted(LIGHT, rank)
    feedback = QSDPConfig(None, Quantizer(3, 64, "nearest"), error_feedback=True)
    resumed_equals_uninterrupted(feedback, rank)


def case_foreign_state_is_refused(rank: int) -> None:
    model = qsdp.apply_qsdp(build(), LEARNING)
    train(model, rank, 2)
    state, other = qsdp.comm_state_dict(model), qsdp.apply_qsdp(build(), QSDPConfig())
    with pytest.raises(ValueError, match="apply the configuration that it was saved with"):
        qsdp.load_comm_state_dict(other, state)
    with pytest.raises(ValueError, match="reads format 1, got 7"):
        qsdp.load_comm_state_dict(model, state | {"format": 7})
    wider = replace(LEARNED, bits=4)
    qsdp.apply_qsdp(model, replace(LEARNING, weights=wider, gradients=wider))
    with pytest.raises(ValueError, match="8 levels for the .* of embed.weight, which"):
        qsdp.load_comm_state_dict(model, state)
    with pytest.raises(ValueError, match=r"no place for 'known.blocks.0'"):
        qsdp.load_comm_tensors(model, {"known.blocks.0": torch.zeros(3)})
    light = qsdp.apply_qsdp(build(), LIGHT)
    with pytest.raises(ValueError, match="was kept with another weight_memory"):
        qsdp.load_comm_tensors(light, {"known.blocks.0": torch.zeros(3)})


def case_overrides(rank: int) -> None:
    """Some parameters in full precision in one direction, others in other widths."""
    overrides = {
        "embed.*": Override(None, Quantizer(8)),
        "*.up.weight": "w2g4",
        "blocks.1.*": "w8g8",  # not up, which the pattern before has taken
    }
    model = qsdp.apply_qsdp(build(), QSDPConfig(Quantizer(4), Quantizer(4), overrides=overrides))
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
    with pytest.raises(ValueError, match=r"QSDPConfig\(overrides=...\): 'head.*' matches no"):
        qsdp.apply_qsdp(build(), replace(QSDPConfig(), overrides={"headless.*": "w4g4"}))


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
    value = qsdp.apply_qsdp(build(), replace(DIFFERENCE, weight_mode="value"))
    loss_of(value, batch(rank, 0)).backward()
    assert rows < 0.7 * qsdp.comm_stats(value).all_gather_sent
    assert stats.ratio > qsdp.comm_stats(value).ratio


def case_equal_masters_give_equal_weights(rank: int) -> None:
    """However often they are gathered; what changes on one rank changes no other's part."""
    bfloat16 = Quantizer(4, 64, "dither", scale_dtype="bfloat16", transform="hadamard")
    for config in (DIFFERENCE, LIGHT, replace(LIGHT, weights=bfloat16)):
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
    eight = qsdp.apply_qsdp(
        build(), replace(DIFFERENCE, weight_mode="value", weights=Quantizer(8, 64, "nearest"))
    )
    assert error_of(model) == error_of(eight) > 0
    train(model, rank, 3)
    train(eight, rank, 3)
    errors = errors_while_training(model)
    assert errors[-1] < 1.1 * error_of(eight)
    plain = qsdp.apply_qsdp(build(), DIFFERENCE)
    train(plain, rank, 1)
    light_rows, rows = (
        sum(row.nbytes for name, row in qsdp.comm_tensors(m).items() if name.startswith("known"))
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
    for mode in ("difference", "value"):
        config = QSDPConfig(Quantizer(4, 64, "nearest"), None, weight_mode=mode)
        runs[mode] = train(qsdp.apply_qsdp(build(), config), rank, 12)
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
    for feedback in (True, False):
        config = QSDPConfig(None, Quantizer(2, 64, "nearest"), error_feedback=feedback)
        qsdp.apply_qsdp(layer, config)
        total = torch.zeros_like(true)
        for _ in range(30):
            layer.zero_grad()
            layer(x).square().sum().backward()
            total += layer.weight.grad.to_local()
        far[feedback] = float((total / 30 - true).norm() / true.norm())
    assert far[True] < 0.05 < far[False]


def case_feedback_survives_infinity(rank: int) -> None:
    """A gradient that overflowed is seen by the owners once, and not fed back."""
    model = qsdp.apply_qsdp(
        build(), QSDPConfig(None, Quantizer(4, 64, "nearest"), error_feedback=True)
    )
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


def run_cases(rank: int, names: tuple[str, ...]) -> dict[str, str | None]:
    """Each case's traceback, or None."""
    import traceback

    results: dict[str, str | None] = {}
    for name in names:
        try:
            CASES[name](rank)
            results[name] = None
        except BaseException:
            results[name] = traceback.format_exc()
        dist.barrier()
    return results
