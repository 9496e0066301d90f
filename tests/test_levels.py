"""Learned levels: exact k-means, the paper's online steps, and what both are good for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import qsdp
from qsdp import LevelSchedule, Quantizer
from qsdp.kernels.compare import with_bits
from qsdp.kernels.transform import hadamard
from qsdp.levels import (
    BINS,
    MIN_GAP,
    Learnable,
    LevelLearner,
    _histogram,
    best_levels,
    learn_levels,
    spread_out,
    uniform_levels,
)
from qsdp.quantizer import every_format, format_name

# What levels can be learned for.
UNIFORM = {
    format_name(form): form
    for form in every_format()
    if form.rounding == "nearest" and form.levels is None and form.scaling not in ("l2", "mean")
}
# Both scalings with everything; for the other formats, values and methods take turns.
LEARNING = [
    (name, kind, method)
    for place, name in enumerate(UNIFORM)
    for turn, (kind, method) in enumerate(product(("normal", "laplace"), ("kmeans", "gradient")))
    if name in ("nearest", "nearest symmetric") or place % 4 == turn
]


@pytest.fixture
def lone_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cost(histogram: torch.Tensor, levels: torch.Tensor) -> float:
    centre = (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS
    return float((histogram * (centre[:, None] - levels[None, :]).square().amin(1)).sum())


def test_kmeans_is_optimal() -> None:
    """Against every way to cut nine heaps into four clusters."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        places = torch.randperm(BINS // 16, generator=generator)[:9].sort().values * 16
        histogram = torch.zeros(BINS, dtype=torch.float64)
        histogram[places] = torch.rand(9, generator=generator, dtype=torch.float64) + 0.1
        centre = (places.double() + 0.5) / BINS
        best = float("inf")
        for cuts in combinations(range(1, 9), 3):
            total = 0.0
            for begin, end in zip((0, *cuts), (*cuts, 9), strict=True):
                weight, at = histogram[places[begin:end]], centre[begin:end]
                total += float((weight * (at - (weight * at).sum() / weight.sum()) ** 2).sum())
            best = min(best, total)
        assert cost(histogram, best_levels(histogram, 2)) <= best * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("bits", range(2, 9))
def test_levels_are_what_kernels_take(bits: int) -> None:
    """Increasing and within [0, 1], also for histograms with fewer places than levels."""
    generator = torch.Generator().manual_seed(bits)
    few, empty = torch.zeros(BINS), torch.zeros(BINS)
    few[[0, 1, BINS - 1]] = 1.0
    for histogram in (torch.rand(BINS, generator=generator), few, empty):
        levels = spread_out(best_levels(histogram, bits))
        Quantizer(bits, rounding="nearest", levels=levels)
        gaps = torch.tensor(levels, dtype=torch.float64).diff()
        assert (gaps >= MIN_GAP * (1 - 1e-9)).all()


@pytest.mark.parametrize(("form", "kind", "method"), LEARNING, ids=str)
def test_learned_levels_beat_the_grid(lone_rank: None, form: str, kind: str, method: str) -> None:
    """By the ratios of papers' tables: a lot at 2 bits, something at 4, nothing lost at 6."""
    torch.manual_seed(1)
    x = torch.randn(1 << 17)
    if kind == "laplace":
        x = torch.distributions.Laplace(0.0, 1.0).sample((1 << 17,))
    for bits, share in ((2, 0.65), (3, 0.8), (4, 0.92), (6, 1.01)):
        grid = with_bits(UNIFORM[form], bits)
        (table,) = learn_levels([x[None]], [grid], method, None)
        learned = replace(grid, levels=table)
        error, old = (
            (qsdp.decode(qsdp.encode(x, q), x.numel(), q) - x).norm() for q in (learned, grid)
        )
        assert error <= share * old, (bits, float(error / old))


@pytest.mark.parametrize("form", UNIFORM.values(), ids=format_name)
def test_a_histogram_is_of_what_the_quantizer_sees(form: Quantizer) -> None:
    """All of its weight is the squared range of every value's block."""
    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(3))
    x[0, :64], x[1, 70] = 2.0, torch.nan
    quantizer = with_bits(form, 3, 64)
    histogram = _histogram(x, quantizer)
    assert histogram.shape == (BINS,) and histogram.dtype == torch.float64
    seen = x.clone()
    if quantizer.transform:
        seen = hadamard(x)
    blocks = seen.unflatten(1, (-1, 64)).flatten(0, 1)
    lo, hi = blocks.amin(1), blocks.amax(1)
    ranges = 2 * torch.maximum(lo.abs(), hi.abs()) if quantizer.symmetric else hi - lo
    ranges = ranges[(ranges > 0) & ranges.isfinite()].double()
    assert histogram.sum().item() == pytest.approx(64 * float((ranges**2).sum()), rel=1e-6)


def test_hard_values_are_left_out(lone_rank) -> None:
    """Blocks that are constant or not finite teach nothing, and an empty shard is no obstacle."""
    quantizer = Quantizer(3, 64, "nearest")
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(2))
    spoilt = torch.cat((x, torch.full((1, 64), 3.0), torch.full((1, 64), torch.nan)), dim=1)
    clean = learn_levels([x], [quantizer], "kmeans", None)
    assert learn_levels([spoilt], [quantizer], "kmeans", None) == clean
    uneven = replace(quantizer, levels=clean[0])
    assert learn_levels([x], [uneven], "kmeans", None) == clean, "levels of before do not count"
    for method in ("kmeans", "gradient"):
        (table,) = learn_levels([x[:, :0]], [quantizer], method, None)
        assert torch.allclose(torch.tensor(table), torch.linspace(0, 1, 8), atol=1e-6)


def test_schedule() -> None:
    schedule = LevelSchedule(first_step=3, every=10)
    assert [s for s in range(30) if schedule.due(s, None)][0] == 3
    assert not schedule.due(12, 3) and schedule.due(13, 3)
    with pytest.raises(ValueError, match="must be an integer of at least 0, got -1"):
        LevelSchedule(first_step=-1)


def test_a_learner_learns_what_is_due(lone_rank: None) -> None:
    """Each parameter by its own schedule and method, from the values of this very call."""
    weights = Learnable("weights", "w", Quantizer(3, 64, "nearest"), LevelSchedule(2, 5))
    gradients = Learnable(
        "gradients", "w", Quantizer(2, 64, "nearest"), LevelSchedule(4, 100, "gradient")
    )
    learner, uniform = LevelLearner(), tuple(uniform_levels(3).tolist())
    learned_at: dict[int, list[str]] = {}
    for step in range(12):
        learner.reductions = step
        generator = torch.Generator().manual_seed(step)
        candidates = [
            (item, torch.randn(1, 512, generator=generator)) for item in (weights, gradients)
        ]
        before = dict(learner.tables)
        new = learner.learn_if_due(candidates, dist.group.WORLD)
        assert new == (learner.tables != before)
        for item, rows in candidates:
            if learner.learned_at.get(item[:2]) != step:
                continue
            learned_at.setdefault(step, []).append(item.direction)
            method = item.schedule.method
            (table,) = learn_levels([rows], [item.quantizer], method, None)
            assert learner.tables[item[:2]] == table != uniform
    assert learned_at == {2: ["weights"], 4: ["gradients"], 7: ["weights"]}
    assert not learner.learn_if_due([], dist.group.WORLD)


def test_a_learner_goes_on_where_another_stopped(lone_rank: None) -> None:
    """Its three fields are all that there is."""
    item = Learnable("weights", "w", Quantizer(3, 64, "nearest"), LevelSchedule(0, 10))
    x = torch.randn(1, 512)
    first = LevelLearner()
    assert first.learn_if_due([(item, x)], dist.group.WORLD)
    second = LevelLearner(first.reductions, dict(first.tables), dict(first.learned_at))
    for reductions, due in ((9, False), (10, True)):
        second.reductions = reductions
        assert second.learn_if_due([(item, x * 2)], dist.group.WORLD) == due
    assert first.learned_at == {("weights", "w"): 0}
    assert second.learned_at == {("weights", "w"): 10}
