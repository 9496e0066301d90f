"""Draw the figures of docs/theory.md.

    python -m research.theory_plots [--out docs/figures]

Runs the same experiments as ``qsdp check --theory``, with more of them along each axis (about two
minutes on one core). Needs matplotlib and scikit-learn: ``pip install -e '.[train,dev]'``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qsdp.quantizer import Quantizer, Rounding, Scaling
from research.theory import descent, differences, exhaustive, floors, formulas, guarantee
from research.theory.claims import estimate
from research.theory.problems import coordinate_bowl

# Okabe and Ito's colours, which colour-blind readers tell apart.
BLUE, RED, GREEN, PINK, ORANGE, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#777777"
)  # fmt: skip
COLOURS: dict[Rounding, str] = {"shift": BLUE, "stochastic": GREEN, "nearest": RED}


def main() -> None:
    """Write every figure, and say what each holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent.parent / "docs" / "figures"
    parser.add_argument("--out", type=Path, default=default, help="folder, default docs/figures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for draw in (theorem, coarse, contrast, exact_level, difference, moments):
        with matplotlib.rc_context({"font.size": 9}):
            figure = draw()
        path = out / f"theory_{draw.__name__}.png"
        figure.savefig(path, dpi=110)
        print(f"{path}: {draw.__doc__}", flush=True)


def theorem() -> Figure:
    """Excess loss over the steps in the theorem's own setting, against its bound."""
    figure, panels = new_figure(2, "step", "E f(x) - min f")
    cases = (guarantee.quadratic_case(4.0), guarantee.logistic_case())
    titles = ("Quadratic, kappa 4", "Logistic regression, breast cancer data")
    for axes, case, title in zip(panels, cases, titles, strict=True):
        steps = case.setting().steps
        theorem_curves(axes, case, 2 * steps)
        axes.set(xscale="log", yscale="log", title=title)
        top = axes.get_ylim()[1] * 2
        axes.set_ylim(top=top)
        axes.axhline(case.bound, color="black", linewidth=0.9)
        label = "best coarse point + epsilon"
        axes.text(2 * steps, case.bound * 1.15, label, fontsize=8, ha="right")
        axes.axvline(steps, color=GREY, linewidth=0.9, linestyle=":")
        axes.text(steps * 0.92, top * 0.5, "T", ha="right", color=GREY)
    panels[1].legend(frameon=False, loc="lower left")
    return figure


def theorem_curves(axes: Axes, case: guarantee.Case, steps: int) -> None:
    """The three roundings, which overlap (so the wider ones come first), and the corollary."""
    problem, setting = case.problem, case.setting()
    start = case.start.expand(200, -1)
    rate = setting.eta / problem.smoothness
    widths: dict[Rounding, float] = {"nearest": 5, "stochastic": 2.8, "shift": 1}
    for rounding, width in widths.items():
        weights = descent.on_lattice(setting.step, rounding)
        iterates = descent.overwritten(problem, start, rate, weights=weights)
        curve(axes, iterates, problem.excess, steps, rounding, "-", COLOURS[rounding], width)
    gradient_step = 2 * (problem.noise / problem.dim) ** 0.5
    setting = case.setting(gradient_step)
    iterates = descent.overwritten(
        problem,
        start,
        setting.eta / problem.smoothness,
        weights=descent.on_lattice(setting.step, "shift"),
        gradients=descent.on_lattice(gradient_step, "stochastic"),
    )
    label = "shift, gradients quantized"
    curve(axes, iterates, problem.excess, steps, label, "-.", PINK)


def coarse() -> Figure:
    """Long-run excess by the benchmark as delta grows towards delta_star."""
    figure, panels = new_figure(2, "delta / delta_star", "excess / best coarse point")
    ratios = [2.0**-k for k in range(10, -2, -1)]
    benchmark = formulas.best_point_excess(floors.CURVATURE, 1.0)
    target = floors.problem()
    for axes, eta in zip(panels, (1.0, 0.1), strict=True):
        rate = eta / target.smoothness
        for rounding, colour in COLOURS.items():
            levels = [
                estimate(
                    floors.settle(
                        descent.overwritten, descent.on_lattice(ratio, rounding), (eta,),
                        trials=100, steps=100, decay=24,
                    )[0].levels
                ).mean / benchmark
                for ratio in ratios
            ]  # fmt: skip
            axes.plot(ratios, levels, "o", color=colour, markersize=4, label=rounding)
        shift = [formulas.shift_floor(floors.CURVATURE, rate, r) / benchmark for r in ratios]
        axes.plot(ratios, shift, color=BLUE, linewidth=1, label="shift, formula")
        stochastic = [
            formulas.stochastic_floor(floors.CURVATURE, target.minimiser, r) / benchmark
            for r in ratios
        ]
        axes.plot(ratios, stochastic, color=GREEN, linewidth=1, label="stochastic, formula")
        axes.axhline(1, color="black", linewidth=0.9)
        axes.axvline(eta / 256, color=GREY, linewidth=0.9, linestyle=":")
        axes.text(eta / 256 * 1.15, 300, "theorem's delta", color=GREY, fontsize=8)
        axes.set(xscale="log", yscale="log", title=f"eta {eta:g} (kappa 4)", ylim=(1e-6, 1e3))
    panels[0].legend(frameon=False, loc="lower right")
    return figure


def contrast() -> Figure:
    """Long-run excess at fixed delta as eta falls: what overwriting costs and masters do not."""
    figure, (axes,) = new_figure(1, "eta", "excess / best point of the lattice")
    etas = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
    benchmark = formulas.best_point_excess(floors.CURVATURE, floors.STEP)
    target = floors.problem()
    rates = [eta / target.smoothness for eta in etas]

    def measured(scheme: descent.Scheme, rounding: Rounding, colour: str, marker: str) -> None:
        rounder = descent.on_lattice(floors.STEP, rounding)
        runs = floors.settle(scheme, rounder, etas, trials=200, steps=400)
        means, errors = zip(*(estimate(run.levels / benchmark) for run in runs), strict=True)
        label = rounding if scheme is descent.overwritten else f"masters, {rounding}"
        axes.errorbar(etas, means, errors, fmt=marker, color=colour, markersize=5, label=label)

    for rounding, colour in COLOURS.items():
        measured(descent.overwritten, rounding, colour, "o")
    measured(descent.sent_by_masters, "shift", ORANGE, "s")
    measured(descent.sent_by_masters, "nearest", PINK, "v")
    lines = {
        BLUE: [formulas.shift_floor(floors.CURVATURE, rate, floors.STEP) for rate in rates],
        GREEN: [formulas.stochastic_floor(floors.CURVATURE, target.minimiser, floors.STEP)]
        * len(etas),
        ORANGE: [formulas.masters_floor(floors.CURVATURE, rate, floors.STEP) for rate in rates],
    }
    for colour, levels in lines.items():
        axes.plot(etas, [level / benchmark for level in levels], color=colour, linewidth=1)
    axes.set(xscale="log", yscale="log", title="Lines: formulas. Markers: measured (kappa 4)")
    axes.legend(frameon=False)
    return figure


def exact_level() -> Figure:
    """Measured by derived stationary level of random shift, over eta and delta."""
    figure, (axes,) = new_figure(1, "eta", "measured / formula")
    etas = (1.0, 0.6, 0.3, 0.2, 0.1)
    smoothness = floors.problem().smoothness
    for index, (step, colour) in enumerate(((1.0, BLUE), (0.25, GREEN), (1 / 16, RED))):
        rounder = descent.on_lattice(step, "shift")
        runs = floors.settle(descent.overwritten, rounder, etas, trials=1600, steps=1000)
        ratios = [
            estimate(
                run.levels / formulas.shift_floor(floors.CURVATURE, run.eta / smoothness, step)
            )
            for run in runs
        ]
        places = [eta * (1 + 0.04 * (index - 1)) for eta in etas]
        means, errors = zip(*ratios, strict=True)
        axes.errorbar(places, means, errors, fmt="o", color=colour, markersize=4, capsize=2,
                      label=f"delta {step:g}")  # fmt: skip
    axes.axhspan(0.98, 1.02, color=GREY, alpha=0.15, linewidth=0)
    axes.axhline(1, color="black", linewidth=0.9)
    axes.set(xscale="log", ylim=(0.97, 1.03), title="Band: 2 %. Bars: 4 standard errors")
    axes.legend(frameon=False)
    return figure


def difference() -> Figure:
    """SDP4Bit: mean squared gradients under the bounds, and the counterexample."""
    figure, panels = new_figure(2, "step", "")
    axes = panels[0]
    run = differences.quadratic_run(2.0, noise=400.0)
    problem, compression, steps = run.problem, run.compression, 3000
    rate = compression.largest_rate(problem)
    at = log_spaced(steps)
    squares = sampled(
        running_mean(
            descent.models(run.pairs(rate, trials=50)),
            lambda x: differences.squared_gradient(problem, x),
        ),
        at,
    )
    axes.plot(at, [float(rows.mean()) for rows in squares], color=BLUE, label="measured")
    bounds: dict[str, tuple[Callable[[int], float], str]] = {
        "derived bound": (lambda t: formulas.differences_bound(
            problem, compression, start_excess=run.start_excess, rate=rate, steps=t), "--"),
        "published bound (its own step)": (lambda t: formulas.published_bound(
            problem, compression, start_excess=run.start_excess, steps=t), ":"),
    }  # fmt: skip
    for label, (bound, style) in bounds.items():
        axes.plot(at, [bound(t) for t in at], style, color="black", linewidth=1, label=label)
    axes.set(xscale="log", yscale="log", ylabel="mean |grad f|^2 of steps 0 to T", xlabel="T",
             title="3-bit differences, 4-bit gradients, kappa 2")  # fmt: skip
    axes.legend(frameon=False)

    axes, bowl = panels[1], coordinate_bowl()
    start = torch.tensor([[1.0, -1.0]], dtype=torch.float64).expand(64, 2)
    rate = formulas.Compression(differences.TERNARY_CONTRACTION).largest_rate(bowl)
    weights = descent.by_largest
    schemes = (
        ("overwritten", RED, descent.overwritten(bowl, start, rate, weights=weights)),
        ("masters", ORANGE, descent.sent_by_masters(bowl, start, rate, weights=weights)),
        ("differences", BLUE,
         descent.models(descent.with_differences(bowl, start, rate, weights=weights))),
    )  # fmt: skip
    for label, colour, iterates in schemes:
        curve(axes, iterates, bowl.loss, 500, label, "-", colour)
    axes.set(yscale="log", ylabel="E |w|^2", title="The counterexample: ternary weights",
             ylim=(1e-6, 10))  # fmt: skip
    axes.legend(frameon=False, loc="lower left")
    return figure


def moments() -> Figure:
    """Relative variance of gradient quantizers over all random bits, and QSGD's bound."""
    figure, (axes,) = new_figure(1, "s, steps from zero to the norm", "E|Q(v) - v|^2 / |v|^2")
    vector = exhaustive.gradient_like(64)["normal"]
    size = float((vector**2).sum())
    levels = (1, 2, 4, 8, 16, 32, 64, 127)
    for name, norm, colour in (
        ("2-norm", vector.norm(), BLUE),
        ("max-norm", vector.abs().max(), GREEN),
    ):
        ratios = [exhaustive.lattice_error(vector, float(norm) / s)[0] / size for s in levels]
        axes.plot(levels, ratios, "o-", color=colour, markersize=4, linewidth=1, label=name)
    looks: dict[Scaling, tuple[str, str]] = {"symmetric": (ORANGE, "s"), "minmax": (RED, "^")}
    for scaling, (colour, marker) in looks.items():
        places, ratios = [], []
        for bits in range(2, 9):
            quantizer = Quantizer(bits, 64, "stochastic", scaling=scaling)
            found, step = exhaustive.block_moments(vector.float(), quantizer)
            places.append(2 ** (bits - 1) - (1 if scaling == "symmetric" else 0.5))
            ratios.append(float(found.square.sum()) * step**2 / size)
        name = "symmetric" if scaling == "symmetric" else "min-max"
        label = f"{name} blocks of 2 to 8 bits"
        axes.plot(places, ratios, marker, color=colour, markersize=5, label=label)
    axes.plot(levels, [formulas.qsgd_variance(64, s) for s in levels], color="black", linewidth=1,
              label="min(n/s^2, sqrt(n)/s)")  # fmt: skip
    axes.set(xscale="log", yscale="log", title="64 normal values, exact")
    axes.legend(frameon=False)
    return figure


def new_figure(panels: int, xlabel: str, ylabel: str) -> tuple[Figure, list[Axes]]:
    """A row of panels without frames."""
    figure = Figure(figsize=(8.2 if panels == 2 else 5.6, 3.6), layout="constrained")
    row = figure.subplots(1, panels, squeeze=False)[0]
    for index, axes in enumerate(row):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e5e5", linewidth=0.5)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel if index == 0 else "")
    return figure, list(row)


def log_spaced(steps: int, points: int = 60) -> list[int]:
    """Different whole numbers from 1 to ``steps``, evenly on a logarithmic axis."""
    return sorted({round(steps ** (k / (points - 1))) for k in range(points)})


def sampled(values: Iterator[torch.Tensor], at: list[int]) -> list[torch.Tensor]:
    """The items with the (1-based) numbers ``at``."""
    wanted = set(at)
    return [v for n, v in enumerate(islice(values, at[-1]), 1) if n in wanted]


def running_mean(
    iterates: Iterator[torch.Tensor], measure: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Means over the items so far of a measure of rows."""
    total = torch.zeros(())
    for count, x in enumerate(iterates, 1):
        total = total + measure(x)
        yield total / count


def curve(
    axes: Axes,
    iterates: Iterator[torch.Tensor],
    measure: Callable[[torch.Tensor], torch.Tensor],
    steps: int,
    label: str,
    style: str,
    colour: str,
    width: float = 1.6,
) -> None:
    """Mean over trials at log-spaced steps, with its confidence interval."""
    at = log_spaced(steps)
    found = [estimate(measure(x)) for x in sampled(iterates, at)]
    low = [max(mean - error, 1e-300) for mean, error in found]
    high = [mean + error for mean, error in found]
    axes.plot(at, [mean for mean, _ in found], style, color=colour, linewidth=width, label=label)
    axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


if __name__ == "__main__":
    main()
