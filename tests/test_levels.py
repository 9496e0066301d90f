"""Learned levels: exact k-means, the paper's online steps, and what both are good for."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from qsdp import Quantizer
from qsdp.levels import BINS, MIN_GAP, LevelSchedule, best_levels, learn_levels, spread_out


@pytest.fixture
def lone_rank(tmp_path):
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


@pytest.mark.parametrize("method", ["kmeans", "gradient"])
@pytest.mark.parametrize("scaling", ["minmax", "symmetric"])
@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_learned_levels_beat_the_grid(lone_rank, kind: str, scaling: str, method: str) -> None:
    """By the ratios of papers' tables: a lot at 2 bits, something at 4, nothing lost at 6."""
    torch.manual_seed(1)
    x = torch.randn(1 << 17)
    if kind == "laplace":
        x = torch.distributions.Laplace(0.0, 1.0).sample((1 << 17,))
    for bits, share in ((2, 0.65), (3, 0.8), (4, 0.92), (6, 1.01)):
        grid = Quantizer(bits, 1024, "nearest", scaling=scaling)
        segment = grid.segment(x.numel())
        (table,) = learn_levels([x[None]], [segment], method, None)
        learned = Quantizer(bits, 1024, "nearest", table, scaling)
        error, old = ((q.decode(q.encode(x), x.numel()) - x).norm() for q in (learned, grid))
        assert error <= share * old, (bits, float(error / old))


def test_hard_values_are_left_out(lone_rank) -> None:
    """Blocks that are constant or not finite teach nothing, and an empty shard is no obstacle."""
    segment = Quantizer(3, 64, "nearest").segment(256)
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(2))
    spoilt = torch.cat((x, torch.full((1, 64), 3.0), torch.full((1, 64), torch.nan)), dim=1)
    assert learn_levels([x], [segment], "kmeans", None) == learn_levels(
        [spoilt], [segment], "kmeans", None
    )
    for method in ("kmeans", "gradient"):
        (table,) = learn_levels([x[:, :0]], [segment], method, None)
        assert torch.allclose(torch.tensor(table), torch.linspace(0, 1, 8), atol=1e-6)


def test_schedule() -> None:
    schedule = LevelSchedule(first_step=3, every=10)
    assert [s for s in range(30) if schedule.due(s, None)][0] == 3
    assert not schedule.due(12, 3) and schedule.due(13, 3)
    with pytest.raises(ValueError, match="must be an integer of at least 0, got -1"):
        LevelSchedule(first_step=-1)
