"""What quantization leaves over in the long run, beside the exact levels.

A separable quadratic with full gradients: where the levels are derived exactly, and where only
quantization is left to see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from qsdp.quantizer import Quantizer, Rounding
from research.theory.claims import Claim, Estimate, Part, estimate
from research.theory.descent import (
    Rounder,
    Scheme,
    in_blocks,
    on_lattice,
    overwritten,
    sent_by_masters,
    time_average,
)
from research.theory.formulas import masters_floor, shift_floor, stochastic_floor
from research.theory.problems import Problem, curvatures, quadratic

CONDITION = 4.0
CURVATURE = curvatures(CONDITION, 8)
START_AWAY = 2.0
STEP = 0.25


class Settled(NamedTuple):
    """Runs after their transient."""

    eta: float
    levels: torch.Tensor  # (trials,): time averages of the excess


def problem() -> Problem:
    """The quadratic of this file."""
    return quadratic(CURVATURE, seed=3)


def settle(
    scheme: Scheme,
    weights: Rounder,
    etas: Sequence[float],
    *,
    trials: int,
    steps: int,
    decay: float = 10.0,
    seed: int = 2,
) -> list[Settled]:
    """Run every eta side by side, as groups of rows, and average over ``steps``.

    What is skipped before shrinks the flattest coordinate's loss at the smallest eta by e^decay.
    """
    target = problem()
    rate = torch.tensor(etas, dtype=torch.float64).repeat_interleave(trials)[:, None]
    start = (target.minimiser + START_AWAY).expand(len(etas) * trials, -1)
    iterates = scheme(target, start, rate / target.smoothness, weights=weights, seed=seed)
    skip = round(decay / 2 * target.condition / min(etas))
    average = time_average(iterates, target.excess, skip=skip, steps=steps)
    return [Settled(eta, rows) for eta, rows in zip(etas, average.split(trials), strict=True)]


def stationary(*, trials: int = 1600, steps: int = 1000) -> Part:
    """Random shift over the iterate: the exact level, over a grid of eta and delta."""
    target = problem()
    claims = []
    for step in (1.0, 0.25, 1 / 16):
        rounder = on_lattice(step, "shift")
        for eta, levels in settle(
            overwritten, rounder, (1.0, 0.3, 0.1), trials=trials, steps=steps
        ):
            level = shift_floor(CURVATURE, eta / target.smoothness, step)
            text = f"eta {eta:g}, delta {step:g}"
            claims.append(Claim("random shift", text, estimate(levels), "=", level, within=0.02))
    text = "E f - min f in the long run; reference: the formula, which must be met within 2 %"
    return Part("The exact stationary level (quadratic, kappa 4)", text, claims)


def contrast(*, trials: int = 400, steps: int = 400) -> Part:
    """Fixed delta, falling eta: shift grows, stochastic stays, nearest stalls, masters cure."""
    target = problem()
    etas = (1.0, 0.2, 0.04)

    def runs(scheme: Scheme, rounding: Rounding) -> list[Settled]:
        return settle(scheme, on_lattice(STEP, rounding), etas, trials=trials, steps=steps)

    def level(about: str, run: Settled, reference: float) -> Claim:
        setting = f"eta {run.eta:g}"
        return Claim(about, setting, estimate(run.levels), "=", reference, within=0.1)

    claims = []
    for run in runs(overwritten, "shift"):
        floor = shift_floor(CURVATURE, run.eta / target.smoothness, STEP)
        claims.append(level("shift: grows as 1/eta", run, floor))
    for run in runs(overwritten, "stochastic"):
        floor = stochastic_floor(CURVATURE, target.minimiser, STEP)
        claims.append(level("stochastic: no eta in it", run, floor))
    for run in runs(sent_by_masters, "shift"):
        floor = masters_floor(CURVATURE, run.eta / target.smoothness, STEP)
        claims.append(level("masters, shift: falls", run, floor))
    for eta in etas:
        claims += _stalls(eta)
    text = "E f - min f in the long run; references: formulas; for nearest, the level of shift"
    return Part(f"The contrast: falling eta at delta {STEP:g} (kappa 4)", text, claims)


def data_dependent(*, trials: int = 128, steps: int = 500) -> Part:
    """A min-max block's step follows the weights, not eta: overwriting fails, masters do not."""
    rounder = in_blocks(Quantizer(4, 32, "shift"))
    etas = (0.2, 0.04)
    overwrite, masters = (
        [estimate(run.levels) for run in settle(scheme, rounder, etas, trials=trials, steps=steps)]
        for scheme in (overwritten, sent_by_masters)
    )
    claims = [
        Claim("above masters", f"eta {eta:g}", lost, ">", kept.mean + kept.error)
        for eta, lost, kept in zip(etas, overwrite, masters, strict=True)
    ]
    larger = overwrite[0].mean + overwrite[0].error
    claims.append(Claim("above eta 0.2", "eta 0.04", overwrite[1], ">", larger))
    text = "E f - min f of overwriting with 4-bit min-max blocks; references: as named"
    return Part("Where it stops: steps that follow the data", text, claims)


def _stalls(eta: float) -> list[Claim]:
    """Nearest rounding: in the end nothing moves any more, far from the minimum."""
    target = problem()
    start = (target.minimiser + START_AWAY)[None]
    rate = eta / target.smoothness
    level = shift_floor(CURVATURE, rate, STEP)
    iterates = overwritten(target, start, rate, weights=on_lattice(STEP, "nearest"))
    points = [point for _, point in zip(range(400), iterates, strict=False)]
    excess = Estimate(float(target.excess(points[-1])[0]))
    moved = Estimate(float((points[-1] - points[-200]).abs().max()))
    return [
        Claim("nearest: above shift", f"eta {eta:g}", excess, ">", level),
        Claim("nearest: moved in 200 steps", f"eta {eta:g}", moved, "<=", 0.0),
    ]
