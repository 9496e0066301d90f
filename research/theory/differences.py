"""SDP4Bit's theorem on quantized differences, and its counterexample to overwriting."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import NamedTuple

import torch

from qsdp.quantizer import Quantizer
from research.theory.claims import Claim, Estimate, Part, estimate
from research.theory.descent import (
    Pair,
    by_largest,
    in_blocks,
    last,
    models,
    overwritten,
    sent_by_masters,
    time_average,
    with_differences,
)
from research.theory.formulas import (
    Compression,
    block_contraction,
    differences_bound,
    published_bound,
    published_rate,
)
from research.theory.problems import (
    INSTALL_SKLEARN,
    Problem,
    coordinate_bowl,
    curvatures,
    generator,
    logistic,
    quadratic,
)

# Fewer bits for differences: at equal bits the difference is a quantized gradient again, on a grid
# of as many points, and comes through exactly.
DIFFERENCES = Quantizer(3, 32, "nearest")
GRADIENTS = Quantizer(4, 32, "stochastic")

TERNARY_CONTRACTION = 0.2
"""c of rounding two values to multiples of the larger: (1/4) / (1 + 1/4), at (1, 1/2)."""


class Run(NamedTuple):
    """A problem, where it starts (dim,), and how the library's blocks compress its vectors."""

    problem: Problem
    start: torch.Tensor
    compression: Compression

    @property
    def start_excess(self) -> float:
        return float(self.problem.excess(self.start[None])[0])

    def pairs(self, rate: float, *, trials: int, seed: int = 0) -> Iterator[Pair]:
        return with_differences(
            self.problem,
            self.start.expand(trials, -1),
            rate,
            weights=in_blocks(DIFFERENCES),
            gradients=in_blocks(GRADIENTS),
            seed=seed,
        )


def run_of(problem: Problem, start: torch.Tensor) -> Run:
    """With the contraction and the variance that blocks have at the problem's size."""
    contraction = block_contraction(DIFFERENCES, problem.dim)
    return Run(problem, start, Compression(contraction, block_contraction(GRADIENTS, problem.dim)))


def squared_gradient(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """``|grad f|^2`` of every row."""
    return (problem.gradient(x) ** 2).sum(-1)


def mean_square(problem: Problem, iterates: Iterator[torch.Tensor], steps: int) -> Estimate:
    """Mean of ``|grad f|^2`` over the first ``steps`` iterates."""
    return estimate(time_average(iterates, lambda x: squared_gradient(problem, x), steps=steps))


def quadratic_run(condition: float, *, noise: float) -> Run:
    """A quadratic from a random start one unit away in the mean, in every coordinate."""
    problem = quadratic(curvatures(condition, 32), noise=noise)
    away = torch.randn(problem.dim, generator=generator(8), dtype=torch.float64)
    return run_of(problem, problem.minimiser + away)


def theorem(*, trials: int = 100, steps: int = 600) -> Part:
    """Mean squared gradients with 3-bit differences and 4-bit gradients, under both bounds."""
    # Noise 400 is enough for the published bound's step to be smaller than the largest allowed.
    runs = [quadratic_run(2.0, noise=400.0), quadratic_run(10.0, noise=1.0)]
    skipped = None
    try:
        problem = logistic()
        runs.append(run_of(problem, torch.zeros(problem.dim, dtype=torch.float64)))
    except ModuleNotFoundError:
        skipped = f"logistic regression not run: it needs scikit-learn ({INSTALL_SKLEARN})"
    claims = [claim for run in runs for claim in _claims(run, trials, steps)]
    text = "mean |grad f|^2 of steps 0 to T; references: bounds as derived, as published"
    return Part("SDP4Bit's theorem: 3-bit differences, 4-bit gradients", text, claims, skipped)


def counterexample(*, trials: int = 64, steps: int = 2000) -> Part:
    """Overwriting never leaves the start; differences keep the bound; masters converge as well."""
    problem = coordinate_bowl()
    start = torch.tensor([[1.0, -1.0]], dtype=torch.float64).expand(trials, 2)
    compression = Compression(TERNARY_CONTRACTION)
    rate = compression.largest_rate(problem)
    bound = differences_bound(problem, compression, start_excess=2.0, rate=rate, steps=steps)
    text = f"step {rate:.3g}, T {steps}"

    def measured(iterates: Iterator[torch.Tensor]) -> Estimate:
        return mean_square(problem, iterates, steps + 1)

    overwrite = overwritten(problem, start, rate, weights=by_largest)
    stuck = last(overwritten(problem, start, rate, weights=by_largest), steps)
    differences = models(with_differences(problem, start, rate, weights=by_largest))
    masters = sent_by_masters(problem, start, rate, weights=by_largest)
    moved = Estimate(float((stuck - start).abs().max()))
    claims = [
        Claim("overwritten: moved at all", text, moved, "<=", 0.0),
        Claim("overwritten: above the bound", text, measured(overwrite), ">", bound),
        Claim("differences", text, measured(differences), "<=", bound),
        Claim("masters (observed)", text, measured(masters), "<=", bound),
    ]
    text = "mean |grad f|^2 with a ternary quantizer; reference: the derived bound"
    return Part("SDP4Bit's counterexample to overwriting the masters", text, claims)


def contraction_ratio(pairs: Iterator[Pair], steps: int) -> float:
    """Largest ``|C(v) - v|^2 / |v|^2`` of the differences v that a run quantized."""
    worst = 0.0
    for before, after in pairwise(islice(pairs, steps + 1)):
        wanted = ((after.master - before.model) ** 2).sum(-1)
        left = ((after.master - after.model) ** 2).sum(-1)
        worst = max(worst, float((left / wanted).max()))
    return worst


def _claims(run: Run, trials: int, steps: int) -> list[Claim]:
    problem, compression, excess = run.problem, run.compression, run.start_excess
    largest = compression.largest_rate(problem)
    tuned = published_rate(problem, compression, start_excess=excess, steps=steps)
    derived = differences_bound(
        problem, compression, start_excess=excess, rate=largest, steps=steps
    )
    published = published_bound(problem, compression, start_excess=excess, steps=steps)

    def measured(rate: float) -> Estimate:
        return mean_square(problem, models(run.pairs(rate, trials=trials)), steps + 1)

    ratio = Estimate(contraction_ratio(run.pairs(largest, trials=trials), 100))
    name = problem.name
    return [
        Claim(name, f"derived: step {largest:.2g}, T {steps}", measured(largest), "<=", derived),
        Claim(name, f"published: step {tuned:.2g}, T {steps}", measured(tuned), "<=", published),
        Claim(name, "worst |C(v) - v|^2 / |v|^2 met", ratio, "<=", compression.contraction),
    ]
