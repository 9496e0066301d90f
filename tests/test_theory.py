"""The convergence guarantees, as claims with confidence intervals, and that the checks can fail.

Every claim compares four standard errors of independent trials, or an exact number, with a formula
of docs/theory.md; nothing here is tuned to pass. ``qsdp check --theory`` runs more of the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

import qsdp
from qsdp import check, cli
from research.theory import (
    command,
    descent,
    differences,
    exhaustive,
    feedback,
    floors,
    formulas,
    guarantee,
    lattice,
)
from research.theory.claims import Claim, Estimate, Part, estimate
from research.theory.lattice import round_to_lattice
from research.theory.problems import coordinate_bowl, curvatures, generator, logistic, quadratic

TRIALS = 100


def check_part(part: Part) -> None:
    assert part.claims
    assert part.skipped is None
    failed = [claim for claim in part.claims if not claim.holds]
    assert not failed, command.format_part(part)


@pytest.mark.parametrize(
    "make",
    (
        exhaustive.unbiasedness,
        exhaustive.second_moments,
        guarantee.degenerate,
        feedback.contraction,
        feedback.descent,
        floors.stationary,
        floors.contrast,
        floors.data_dependent,
        guarantee.masters,
        differences.counterexample,
        lambda: guarantee.corollary(trials=40),
        lambda: differences.theorem(trials=40, steps=300),
    ),
    ids=lambda make: f"{make.__module__.split('.')[-1]}-{make.__name__}",
)
def test_claims_hold(make: Callable[[], Part]) -> None:
    pytest.importorskip("sklearn")
    check_part(make())


@pytest.mark.parametrize("rounding", guarantee.ROUNDINGS)
def test_the_last_iterate_is_no_worse_than_the_best_coarse_point(rounding: str) -> None:
    """The theorem in its own setting: the interval's upper end stays under the bound."""
    case = guarantee.quadratic_case(4.0)
    measured = estimate(guarantee.run(case, rounding, trials=TRIALS))
    assert measured.mean + measured.error <= case.bound


def test_the_theorem_holds_on_logistic_regression() -> None:
    """The benchmark is a lower bound of the best coarse point: rounding the minimiser is above."""
    pytest.importorskip("sklearn")
    case = guarantee.logistic_case()
    measured = estimate(guarantee.run(case, "shift", trials=TRIALS))
    assert measured.mean + measured.error <= case.bound
    rounded = estimate(guarantee.rounded_minimiser_excess(case, 500))
    assert rounded.mean - rounded.error > case.benchmark


def test_the_theorem_holds_against_the_best_point_found_by_search() -> None:
    """Two features: every lattice point that can be best is tried. Searching a quadratic gives the
    formula, as its best point is the rounded one."""
    pytest.importorskip("sklearn")
    case = guarantee.small_logistic_case()
    measured = estimate(guarantee.run(case, "shift", trials=TRIALS))
    assert measured.mean + measured.error <= case.bound
    rounded = estimate(guarantee.rounded_minimiser_excess(case, 500))
    lower = formulas.best_point_excess_at_least(case.problem, case.coarse_step)
    assert lower < case.benchmark < rounded.mean + rounded.error

    found = guarantee.best_coarse_excess(quadratic(curvatures(2.0, 2)), 0.5, shifts=500)
    exact = formulas.best_point_excess(curvatures(2.0, 2), 0.5)
    assert float(found.mean()) == pytest.approx(exact, rel=1e-4)


def test_the_theorem_setting_is_the_papers() -> None:
    """eta = min(0.3 eps alpha / sigma^2, 1); delta = eta / ceil(16 kappa^2); T = 10/eta kappa ln.

    By hand for beta 3, alpha 1, sigma^2 0.4, eps 0.5: eta 0.375, 16 * 9 = 144.
    """
    problem = quadratic(curvatures(3.0, 4), noise=0.4)
    eta, step, steps = formulas.theorem_setting(
        problem, epsilon=0.5, coarse_step=2.0, start_gap=5.0
    )
    assert eta == pytest.approx(0.375)
    assert step == pytest.approx(2 * 0.375 / 144)
    assert steps == math.ceil(80 * math.log(10))
    noisier = formulas.theorem_setting(
        problem, epsilon=0.5, coarse_step=2.0, start_gap=5.0, gradient_noise=0.2
    )
    assert noisier.eta == pytest.approx(0.25)
    with pytest.raises(ValueError, match="start farther away"):
        formulas.theorem_setting(problem, epsilon=0.5, coarse_step=2.0, start_gap=0.5)


@pytest.mark.parametrize("rounding", ("shift", "dither", "stochastic"))
def test_round_to_lattice_is_unbiased_over_all_random_bits(
    rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row j draws the bits j: the mean over 65,536 rows is the position, to the last bit.

    So what goes through ``exhaustive`` is what ``round_to_lattice`` does.
    """
    every = torch.arange(65536)
    monkeypatch.setattr(lattice, "random16_per_block", lambda *_: every)
    monkeypatch.setattr(
        lattice, "random16_per_value", lambda numel, *_: every[:, None].expand(-1, numel)
    )
    positions = torch.tensor([-3.0, -0.75, 0.0, 2.0**-16, 0.5, 0.3, 100.123], dtype=torch.float64)
    step = 0.25
    rows = (positions * step).expand(65536, -1)
    rounded = descent.on_lattice(step, rounding)(rows, 1) / step
    exact = torch.round(positions * 65536) / 65536
    assert torch.equal(rounded.mean(0), exact)
    square = ((rounded - exact) ** 2).mean(0)
    assert torch.equal(square, exhaustive.lattice_moments(positions, rounding).square)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "shift", "dither"])
def test_lattice_of_an_absolute_step(rounding: str) -> None:
    """Unbiased but for nearest, on the lattice but for shifts, within a step or half of one."""
    x = torch.tensor([-3.21, 0.0, 0.4, 77.7], dtype=torch.float64).expand(50_000, 4)
    y = round_to_lattice(x, 0.5, rounding, key=3)
    error = y - x
    assert error.abs().max() <= (0.5 if rounding == "stochastic" else 0.25) * (1 + 1e-4)
    if rounding != "nearest":
        assert (error.mean(0).abs() < 5 * 0.5 / 2 / 50_000**0.5).all()
    if rounding in ("nearest", "stochastic"):
        assert torch.equal((y / 0.5).round() * 0.5, y)
    places = (y / 0.5) % 1.0
    one_a_row = torch.allclose(places[:, 1], places[:, 2], atol=1e-9)
    assert one_a_row == (rounding != "dither")
    with pytest.raises(ValueError, match="knows no rounding 'up'"):
        round_to_lattice(x, 0.5, "up", key=3)


def test_constants_of_the_problems_are_true() -> None:
    """Unbiased stochastic gradients, noise under its bound, minima where they are said to be."""
    pytest.importorskip("sklearn")
    for problem in (quadratic(curvatures(4.0, 6), noise=2.0), logistic(), coordinate_bowl()):
        assert problem.gradient(problem.minimiser[None]).norm() < 1e-12
        assert float(problem.excess(problem.minimiser[None])[0]) == 0.0
        x = problem.minimiser + 0.7
        rows = x.expand(4000, -1)
        gradient = problem.gradient(x[None])[0]
        noise = problem.sample(rows, generator(1)) - gradient
        for mean in (estimate(column) for column in noise.unbind(-1)):
            assert abs(mean.mean) <= mean.error
        square = estimate((noise**2).sum(-1))
        bound = problem.noise + problem.noise_growth * float((gradient**2).sum())
        assert square.mean - square.error <= bound * (1 + 1e-12)
        hessian = torch.autograd.functional.hessian(lambda v, p=problem: p.loss(v[None])[0], x)
        curvature = torch.linalg.eigvalsh(hessian)
        assert curvature[0] >= problem.pl - 1e-12
        assert curvature[-1] <= problem.smoothness + 1e-12


def test_schemes_agree_without_quantization_and_replay_with_it() -> None:
    problem = quadratic(curvatures(4.0, 6), noise=1.0)
    start = torch.ones(3, 6, dtype=torch.float64)

    def run(scheme: descent.Scheme, weights: descent.Rounder, seed: int = 0) -> torch.Tensor:
        return descent.last(scheme(problem, start, 0.1, weights=weights, seed=seed), 6)

    plain = run(descent.overwritten, descent.exact)
    masters = islice(descent.with_masters(problem, start, 0.1, weights=descent.exact), 6, 7)
    pairs = descent.with_differences(problem, start, 0.1, weights=descent.exact)
    assert torch.equal(next(masters).model, plain)
    assert torch.allclose(next(islice(pairs, 6, 7)).model, plain, rtol=0, atol=1e-15)
    shift = descent.on_lattice(0.1, "shift")
    assert torch.equal(run(descent.overwritten, shift), run(descent.overwritten, shift))
    assert not torch.equal(run(descent.overwritten, shift), run(descent.overwritten, shift, seed=1))


@pytest.mark.parametrize(
    "claim, holds",
    (
        (Claim("", "", Estimate(1.0, 0.5), "<=", 1.5), True),
        (Claim("", "", Estimate(1.0, 0.6), "<=", 1.5), False),
        (Claim("", "", Estimate(1.0, 0.5), ">", 0.4), True),
        (Claim("", "", Estimate(1.0, 0.6), ">", 0.4), False),
        (Claim("", "", Estimate(1.0, 0.125), "=", 1.125), True),
        (Claim("", "", Estimate(1.0, 0.1), "=", 1.2), False),
        (Claim("", "", Estimate(1.0, 0.1), "=", 1.0, within=0.05), False),
        (Claim("", "", Estimate(float("nan"), 0.1), "<=", 1.0), False),
        (Claim("", "", Estimate(float("inf"), float("nan")), ">", 1.0), False),
    ),
)
def test_claims_ask_it_of_the_whole_interval(claim: Claim, holds: bool) -> None:
    assert claim.holds is holds


def test_checks_fail_on_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of check, given something that breaks its assumption."""
    coarse = guarantee.quadratic_case(4.0)
    problem, start = coarse.problem, coarse.start.expand(20, -1)
    rate = coarse.setting().eta / problem.smoothness / 5
    stalled = descent.overwritten(
        problem, start, rate, weights=descent.on_lattice(4 * coarse.coarse_step, "nearest")
    )
    excess = estimate(problem.excess(descent.last(stalled, 200)))
    assert not Claim("nearest, too coarse", "", excess, "<=", coarse.bound).holds

    run = differences.quadratic_run(10.0, noise=1.0)
    rate = 60 * run.compression.largest_rate(run.problem)
    pairs = descent.models(run.pairs(rate, trials=20))
    bound = formulas.differences_bound(
        run.problem, run.compression, start_excess=run.start_excess, rate=rate, steps=100
    )
    too_fast = differences.mean_square(run.problem, pairs, 101)
    assert not Claim("step too large", "", too_fast, "<=", bound).holds

    monkeypatch.setattr(floors, "on_lattice", lambda step, _: descent.on_lattice(step, "dither"))
    dithered = floors.stationary(trials=50, steps=20)
    assert not all(claim.holds for claim in dithered.claims), "50 trials are not within 2 %"
    monkeypatch.setattr(
        floors, "on_lattice", lambda step, _: descent.on_lattice(1.1 * step, "shift")
    )
    wider = floors.stationary(trials=400, steps=100)
    assert not any(claim.holds for claim in wider.claims), "a step 10 % wider shows"

    monkeypatch.setattr(exhaustive, "BLOCK_QUANTIZERS", ())
    monkeypatch.setattr(exhaustive, "round_positions", lambda q, r: (q + r + 1) >> 16)
    biased = [
        claim for claim in exhaustive.unbiasedness().claims if claim.setting == "|bias|, steps"
    ]
    assert not any(
        claim.holds for claim in biased if claim.about in ("shift, dither", "stochastic")
    )


def test_the_table_shows_failures_and_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = (Claim("a", "b", Estimate(m), "<=", 1.0) for m in (0.5, 2.0))
    assert command.main((lambda: Part("title", "text", [good]),)) == 0
    assert "all 1 claims hold" in capsys.readouterr().out
    assert command.main((lambda: Part("title", "text", [good, bad]),)) == 1
    out = capsys.readouterr().out
    assert "1 of 2 claims FAIL" in out and "FAILS" in out
    assert max(map(len, out.splitlines())) <= 100

    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    part = guarantee.corollary(trials=5)
    assert len(part.claims) == 1
    assert "pip install scikit-learn" in command.format_part(part)


def test_check_dispatches_to_the_theory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "main", lambda: 7)
    assert check.main(["--theory"]) == 7


def test_check_says_where_the_theory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As installed from a wheel: no folder research/ beside the package."""
    monkeypatch.setattr(qsdp, "__file__", str(tmp_path / "qsdp" / "__init__.py"))
    assert cli.main(["check", "--theory"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "folder research/" in line and "git clone" in line
