"""What docs/theory.md derives, as functions: settings, bounds and exact levels.

h is the curvature of a separable quadratic, ``rate = eta / beta``, ``a = rate * h``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from qsdp.quantizer import Quantizer
from research.theory.problems import Problem

EPSILON32 = 2.0**-24
"""Largest relative error of one float32 operation."""

POSITION_ERROR = 2.0**-17
"""Positions on a grid are rounded to 65,536ths of a step, by at most half of one."""


class Setting(NamedTuple):
    """What QSDP's theorem prescribes: eta, delta and T."""

    eta: float
    step: float
    steps: int


def theorem_setting(
    problem: Problem,
    *,
    epsilon: float,
    coarse_step: float,
    start_gap: float,
    gradient_noise: float = 0.0,
) -> Setting:
    """eta, delta and T for an accuracy.

    Args:
        epsilon: what the last iterate may exceed the benchmark by.
        coarse_step: delta_star, the step of the lattice whose best point is the benchmark.
        start_gap: loss of the start minus the benchmark.
        gradient_noise: sigma_g^2, what quantizing gradients adds (the corollary).

    Raises:
        ValueError: the start is within epsilon already, so that there is nothing to do.
    """
    if start_gap <= epsilon:
        raise ValueError(
            f"the start must exceed the benchmark by more than epsilon={epsilon:g}, "
            f"it does by {start_gap:g}: start farther away"
        )
    noise, condition = problem.noise + gradient_noise, problem.condition
    eta = min(0.3 * epsilon * problem.pl / noise, 1.0) if noise else 1.0
    step = eta / math.ceil(16 * condition**2) * coarse_step
    return Setting(eta, step, math.ceil(10 / eta * condition * math.log(start_gap / epsilon)))


def best_point_excess(curvature: torch.Tensor, step: float) -> float:
    """``E f(x*_r) - min f`` over shifts, for a separable quadratic: ``delta^2 / 24 * sum h``."""
    return step**2 / 24 * float(curvature.sum())


def best_point_excess_at_least(problem: Problem, step: float) -> float:
    """A lower bound of the same for a unique minimiser: ``alpha n delta^2 / 24``."""
    return problem.pl * problem.dim * step**2 / 24


def coin_flip_noise(dim: int, step: float) -> float:
    """sigma_g^2 of rounding gradients stochastically: ``n delta^2 / 4``, whatever they are."""
    return dim * step**2 / 4


def shift_floor(curvature: torch.Tensor, rate: float, step: float) -> float:
    """Stationary excess of random shift overwriting the iterate, without gradient noise."""
    a = rate * curvature
    return float((curvature * step**2 / 24 / (1 - (1 - a) ** 2)).sum())


def stochastic_floor(curvature: torch.Tensor, minimiser: torch.Tensor, step: float) -> float:
    """The same for stochastic rounding: that of rounding the minimiser itself, at every rate."""
    part = minimiser / step - torch.floor(minimiser / step)
    return float((curvature * step**2 / 2 * part * (1 - part)).sum())


def masters_floor(curvature: torch.Tensor, rate: float, step: float) -> float:
    """Stationary excess of the shifted weights that full-precision masters send."""
    return float((curvature * step**2 / 12 / (2 - rate * curvature)).sum())


def block_contraction(quantizer: Quantizer, dim: int) -> float:
    """c with ``E|decoded - v|^2 <= c |v|^2`` for blocks with float32 scales and no transform.

    Rounding to nearest or by shift errs by half a step at most, and the variance of stochastic
    rounding is a quarter of a step's square at most. A step is ``(max - min) / L``, with
    ``max - min <= sqrt(2) |v|``; symmetric, ``2 max / L`` with ``max <= |v|``. So for blocks of n
    values c is ``n / (2 L^2)``, symmetric ``n / L^2``, beside float32 roundings.
    """
    steps = quantizer.steps
    half_step = 0.5 + POSITION_ERROR + 7 * steps * EPSILON32
    spread = 2.0 if quantizer.scaling == "symmetric" else math.sqrt(2)
    each = spread / steps * half_step + 4 * EPSILON32
    return min(dim, quantizer.block_size) * each**2


def masters_bound(
    problem: Problem, *, start_excess: float, rate: float, steps: int, square_error: float
) -> float:
    """Bound on the mean excess of the masters 0 to ``steps - 1``, for any rounding of weights.

    Args:
        rate: at most 1 / beta.
        square_error: mean of ``E|model - master|^2`` over the same steps.
    """
    start = start_excess / (rate * problem.pl * steps)
    rounding = problem.condition * problem.smoothness / 2 * square_error
    return start + rounding + problem.smoothness * rate * problem.noise / (2 * problem.pl)


class Compression(NamedTuple):
    """What the theorem on differences knows of a run.

    Attributes:
        contraction: c = 1 - delta of the difference quantizer.
        gradient_variance: kappa of the gradient quantizer, ``E|U(v) - v|^2 <= kappa |v|^2``.
    """

    contraction: float
    gradient_variance: float = 0.0

    def growth(self, problem: Problem) -> float:
        """M: how the noise of a quantized gradient grows with the gradient's square."""
        rho, kappa = problem.noise_growth, self.gradient_variance
        return rho + kappa + rho * kappa

    def factor(self, problem: Problem) -> float:
        """K = 2 / delta + M."""
        return 2 / (1 - self.contraction) + self.growth(problem)

    def largest_rate(self, problem: Problem) -> float:
        """The theorem's condition on the step size: 1 / (10 L K)."""
        return 1 / (10 * problem.smoothness * self.factor(problem))

    def noise(self, problem: Problem) -> float:
        """S^2 = (1 + kappa) sigma^2."""
        return (1 + self.gradient_variance) * problem.noise


def differences_bound(
    problem: Problem, compression: Compression, *, start_excess: float, rate: float, steps: int
) -> float:
    """Bound on the mean of ``E|grad f|^2`` over the models 0 to ``steps``, as derived."""
    delta = 1 - compression.contraction
    noise = problem.smoothness * rate * compression.noise(problem) * (11 - delta) / 20
    return 2 / (0.89 * rate) * (start_excess / (steps + 1) + rate * noise)


def published_rate(
    problem: Problem, compression: Compression, *, start_excess: float, steps: int
) -> float:
    """The step size under which the bound as published follows from the derived one."""
    largest = compression.largest_rate(problem)
    if not problem.noise:
        return largest
    spread = (11 - (1 - compression.contraction)) * problem.smoothness
    best = 20 * start_excess / (spread * compression.noise(problem) * (steps + 1))
    return min(largest, math.sqrt(best))


def published_bound(
    problem: Problem, compression: Compression, *, start_excess: float, steps: int
) -> float:
    """SDP4Bit's theorem: the same mean, in its constants."""
    delta = 1 - compression.contraction
    per_step = problem.smoothness * start_excess / (steps + 1)
    first = 80 * compression.factor(problem) * per_step
    return first + 4 * math.sqrt((11 - delta) * compression.noise(problem) * per_step)


def qsgd_variance(dim: int, levels: float) -> float:
    """QSGD's factor: ``E|Q(v) - v|^2 <= min(n / s^2, sqrt(n) / s) |v|^2``."""
    return min(dim / levels**2, math.sqrt(dim) / levels)


def qsgd_nonzeros(dim: int, levels: int) -> float:
    """``E|Q(v)|_0 <= s (s + sqrt n)``."""
    return levels * (levels + math.sqrt(dim))
