"""QSDP's theorem and its corollary, in the theorem's own setting, and where they stop."""

from __future__ import annotations

import math
from itertools import islice
from typing import NamedTuple

import torch

from qsdp.quantizer import Quantizer, Rounding
from research.theory.claims import Claim, Part, estimate
from research.theory.descent import exact, in_blocks, last, on_lattice, overwritten, with_masters
from research.theory.formulas import (
    Setting,
    best_point_excess,
    best_point_excess_at_least,
    coin_flip_noise,
    masters_bound,
    theorem_setting,
)
from research.theory.problems import (
    INSTALL_SKLEARN,
    Problem,
    curvatures,
    logistic,
    quadratic,
    valley,
)

ROUNDINGS: tuple[Rounding, ...] = ("shift", "stochastic", "nearest")
CONDITIONS = (2.0, 4.0, 10.0)
DIM = 32
COARSE_STEP = 1.0
LOGISTIC_COARSE_STEP = 0.25
LOGISTIC_EPSILON = 0.1


class Case(NamedTuple):
    """A problem in the theorem's setting.

    Attributes:
        benchmark: ``E f(x*_r) - min f``, or a lower bound of it.
        start: (dim,).
    """

    problem: Problem
    benchmark: float
    epsilon: float
    coarse_step: float
    start: torch.Tensor

    def setting(self, gradient_step: float | None = None) -> Setting:
        """The theorem's, or the corollary's where gradients are rounded to ``gradient_step``."""
        noise = coin_flip_noise(self.problem.dim, gradient_step) if gradient_step else 0.0
        gap = float(self.problem.excess(self.start[None])[0]) - self.benchmark
        return theorem_setting(
            self.problem,
            epsilon=self.epsilon,
            coarse_step=self.coarse_step,
            start_gap=gap,
            gradient_noise=noise,
        )

    @property
    def bound(self) -> float:
        return self.benchmark + self.epsilon


def quadratic_case(condition: float, *, noisy: bool = True) -> Case:
    """A quadratic that starts 20 epsilon above the benchmark; noise such that eta = 0.5."""
    curvature = curvatures(condition, DIM)
    benchmark = best_point_excess(curvature, COARSE_STEP)
    epsilon = 0.1 * benchmark
    problem = quadratic(curvature, noise=0.6 * epsilon if noisy else 0.0)
    away = (2 * (benchmark + 20 * epsilon) / float(curvature.sum())) ** 0.5
    return Case(problem, benchmark, epsilon, COARSE_STEP, problem.minimiser + away)


def logistic_case() -> Case:
    """Logistic regression from zero weights, half of the examples a step.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    problem = logistic()
    return Case(
        problem,
        best_point_excess_at_least(problem, LOGISTIC_COARSE_STEP),
        LOGISTIC_EPSILON,
        LOGISTIC_COARSE_STEP,
        torch.zeros(problem.dim, dtype=torch.float64),
    )


def small_logistic_case(*, shifts: int = 500) -> Case:
    """Logistic regression on two features: small enough to search the coarse lattice.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    problem, step = logistic(columns=2), 0.5
    best = estimate(best_coarse_excess(problem, step, shifts=shifts))
    start = torch.zeros(problem.dim, dtype=torch.float64)
    return Case(problem, best.mean - best.error, 0.01, step, start)


def best_coarse_excess(problem: Problem, step: float, *, shifts: int) -> torch.Tensor:
    """``f(x*_r) - min f`` for evenly spaced shifts r, by search: (shifts,).

    The best point's excess is at most the rounded minimiser's, and by quadratic growth that bounds
    its distance from the minimiser: all lattice points of a cube that holds the ball are tried.
    """
    r = (torch.arange(shifts, dtype=torch.float64) + 0.5) / shifts - 0.5
    nearest = torch.round(problem.minimiser / step - r[:, None])  # (shifts, dim)
    rounded = problem.excess(step * (nearest + r[:, None]))
    farthest = float((2 * rounded / problem.pl).sqrt().max())
    reach = torch.arange(-math.ceil(farthest / step), math.ceil(farthest / step) + 1)
    cube = torch.cartesian_prod(*[reach] * problem.dim).double()
    best = rounded
    for offset in cube:
        best = torch.minimum(best, problem.excess(step * (nearest + offset + r[:, None])))
    return best


def rounded_minimiser_excess(case: Case, trials: int) -> torch.Tensor:
    """Excess of the minimiser rounded to shifted coarse lattices: no less than the best point's."""
    rows = case.problem.minimiser.expand(trials, -1)
    return case.problem.excess(on_lattice(case.coarse_step, "shift")(rows, 1))


def run(
    case: Case,
    rounding: Rounding,
    *,
    trials: int,
    gradient_step: float | None = None,
    seed: int = 1,
) -> torch.Tensor:
    """Excess of the theorem's last iterate, one a trial."""
    setting = case.setting(gradient_step)
    iterates = overwritten(
        case.problem,
        case.start.expand(trials, -1),
        setting.eta / case.problem.smoothness,
        weights=on_lattice(setting.step, rounding),
        gradients=on_lattice(gradient_step, "stochastic") if gradient_step else exact,
        seed=seed,
    )
    return case.problem.excess(last(iterates, setting.steps))


def theorem(*, trials: int = 200) -> Part:
    """The last iterate is no worse than the best point of the coarse lattice plus epsilon."""
    cases = [quadratic_case(condition) for condition in CONDITIONS]
    cases.append(quadratic_case(30.0, noisy=False))
    skipped = add_logistic(cases)
    claims = [
        _theorem_claim(case, rounding, trials=trials) for case in cases for rounding in ROUNDINGS
    ]
    if skipped is None:
        claims.append(_theorem_claim(small_logistic_case(), "shift", trials=trials))
    text = (
        "E f(x_T) - min f of quadratics and logistic regression; reference: the best point of the "
        "coarse\nlattice plus epsilon (30 features: a lower bound of it; 2 features: by search)"
    )
    return Part("QSDP's theorem, in its own setting", text, claims, skipped)


def corollary(*, trials: int = 200) -> Part:
    """The same with stochastically rounded gradients, whose noise shrinks eta."""
    cases = [quadratic_case(4.0)]
    skipped = add_logistic(cases)
    claims = []
    for case in cases:
        # As much noise from rounding gradients as they carry themselves.
        gradient_step = 2 * (case.problem.noise / case.problem.dim) ** 0.5
        claims.append(_theorem_claim(case, "shift", trials=trials, gradient_step=gradient_step))
    text = "as above with shift; gradients rounded stochastically to multiples of delta_g"
    return Part("Its corollary: gradients quantized as well", text, claims, skipped)


def masters(*, trials: int = 50, steps: int = 400) -> Part:
    """What training does: full-precision masters, blocks of 3 bits, the largest step size."""
    cases = [quadratic_case(10.0)]
    skipped = add_logistic(cases)
    cases.append(_valley_case())
    claims = [
        _masters_claim(case, rounding, trials=trials, steps=steps)
        for case in cases
        for rounding in ROUNDINGS
    ]
    text = "mean of E f(master) - min f over steps; reference: the bound, from the errors measured"
    return Part("What training does: masters, and 3-bit min-max blocks", text, claims, skipped)


def degenerate(*, trials: int = 1000) -> Part:
    """A PL function whose minimisers form a plane: the statement fails, and how.

    With the shift along (1, 1, 1) every coarse lattice holds minima: the benchmark is zero, and
    delta does not depend on epsilon.
    """
    case = _valley_case()
    setting = case.setting()
    level = setting.step**2 / 24
    text = f"delta {setting.step:.3g}, T {setting.steps}"
    shared, own = (estimate(run(case, name, trials=trials)) for name in ("shift", "dither"))
    claims = [
        Claim("one shift a point", text, shared, ">", case.bound),
        Claim("one shift a value", text, own, "=", level, within=0.25),
    ]
    text = "E f(x_T) - min f; references: 0 + epsilon, which fails; delta^2 / 24"
    return Part("Where it stops: a valley of minimisers (kappa 1)", text, claims)


def add_logistic(cases: list[Case]) -> str | None:
    """Append the case that needs scikit-learn, or say what to do."""
    try:
        cases.append(logistic_case())
    except ModuleNotFoundError:
        return f"logistic regression not run: it needs scikit-learn ({INSTALL_SKLEARN})"
    return None


def _theorem_claim(
    case: Case, rounding: Rounding, *, trials: int, gradient_step: float | None = None
) -> Claim:
    setting = case.setting(gradient_step)
    text = f"eta {setting.eta:.2g}, delta {setting.step:.2g}, T {setting.steps}"
    text = f"{text}, delta_g {gradient_step:.2g}" if gradient_step else f"{rounding}, {text}"
    measured = estimate(run(case, rounding, trials=trials, gradient_step=gradient_step))
    return Claim(case.problem.name, text, measured, "<=", case.bound)


def _valley_case() -> Case:
    start = torch.tensor([3.0, -1.3, 0.57], dtype=torch.float64)
    return Case(valley(), 0.0, 1e-5, COARSE_STEP, start)


def _masters_claim(case: Case, rounding: Rounding, *, trials: int, steps: int) -> Claim:
    problem = case.problem
    start = case.start.expand(trials, -1)
    rate = 1 / problem.smoothness
    weights = in_blocks(Quantizer(3, 32, rounding))
    excess, error = torch.zeros(trials).double(), torch.zeros(trials).double()
    for master, model in islice(with_masters(problem, start, rate, weights=weights), steps):
        excess += problem.excess(master) / steps
        error += ((model - master) ** 2).sum(-1) / steps
    square = estimate(error)
    bound = masters_bound(
        problem,
        start_excess=float(problem.excess(start)[0]),
        rate=rate,
        steps=steps,
        square_error=square.mean - square.error,
    )
    return Claim(problem.name, f"{rounding}, eta 1, {steps} steps", estimate(excess), "<=", bound)
