"""Pareto front of memory, bytes and loss, and the gap to full precision step by step.

    python benchmarks/quality/compare.py SWEEP.json RUNS --name NAME [--curve CASE ...]

SWEEP.json is what `qsdp sweep SWEEP.json --out RUNS` has run, whole or in part. Writes NAME.txt,
NAME.json, NAME-front.png and NAME-curve.png beside the other results. Everything is paired by seed:
the mean of the differences at the same seed, and the standard error of this mean.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from qsdp import Differences, QSDPConfig
from qsdp.sweep.spec import Case, read_sweep
from qsdp.sweep.table import summarise
from qsdp.wire import Segment, wire_layout

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
WINDOW, POINTS = (
    100,
    20,
)  # steps that are averaged into one point of a curve, and its points at most
FEW = 3  # with fewer seeds nothing is said to be shown
BLOCKS = 64  # enough for what a row has beside its blocks not to count

Runs = dict[str, dict[int, Path]]
Results = dict[str, dict[int, dict[str, Any]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("sweep", type=Path)
    add("runs", type=Path)
    add("--name", required=True, help="of the files that are written")
    add("--out", type=Path, default=Path("benchmarks/quality/results"), help="their folder")
    add("--curve", nargs="+", default=[], metavar="CASE", help="cases to draw; default: all")
    options = parser.parse_args()
    sweep = read_sweep(options.sweep)
    runs = finished(options.runs, list(sweep.cases), sweep.seeds)
    results: Results = {
        name: {seed: json.loads((run / "result.json").read_text()) for seed, run in seeds.items()}
        for name, seeds in runs.items()
    }
    rows = summarise(sweep, results)
    first = sweep.cases[0].name
    if not results[first]:
        raise ValueError(f"{options.runs} has no finished run of {first}, to compare with")
    kept = {case.name: kept_bytes(case) for case in sweep.cases}
    for row in rows:
        row["kept_bytes"] = kept[row["case"]]
    for row in rows:
        row["front"] = not any(beats(other, row, results) for other in rows)
    curves = {name: curve(seeds, runs[first]) for name, seeds in runs.items() if name != first}
    text = table(rows, results[first])
    print(text)
    write(options.out / options.name, text, rows, curves)
    front(rows, options.out / f"{options.name}-front.png")
    shown = {n: c for n, c in curves.items() if c and (not options.curve or n in options.curve)}
    draw_curves(shown, first, options.out / f"{options.name}-curve.png")
    return 0


def finished(folder: Path, cases: list[Case], seeds: tuple[int, ...]) -> Runs:
    """Folders of the runs that ended, by case and seed."""
    return {
        case.name: {
            seed: run
            for seed in case.seeds or seeds
            if ((run := folder / case.name / f"seed-{seed}") / "result.json").is_file()
        }
        for case in cases
    }


def kept_bytes(case: Case) -> float:
    """Bytes in which every rank keeps one value of a weight matrix, scales included; 0 for none."""
    comm = case.comm
    config = QSDPConfig.preset(comm) if isinstance(comm, str) else QSDPConfig.from_json(comm)
    way = config.weights
    if not isinstance(way, Differences):
        return 0.0
    if way.kept is None:
        return 4.0
    values = BLOCKS * way.kept.block_size
    return wire_layout((Segment(values, way.kept),), torch.float32).row_bytes / values


def losses(row: dict[str, Any], results: Results) -> dict[int, float]:
    return {seed: r[f"valid_loss_{row['better']}"] for seed, r in results[row["case"]].items()}


def paired(mine: dict[int, float], theirs: dict[int, float]) -> tuple[float, float | None, int]:
    """Mean change in perplexity in percent, its standard error, and how many seeds both have."""
    both = sorted(mine.keys() & theirs.keys())
    changes = [100 * math.expm1(mine[seed] - theirs[seed]) for seed in both]
    if not changes:
        return math.nan, None, 0
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else None
    return statistics.mean(changes), error, len(changes)


def beats(other: dict[str, Any], row: dict[str, Any], results: Results) -> bool:
    """Whether another case is cheaper, and not shown to be worse.

    Cheaper: no more memory, no more bits on the wire, and less of one of them. Shown to be worse:
    by more than twice the standard error of the paired difference. Of few seeds nothing follows.
    """
    mine, theirs = (row["kept_bytes"], row["bits"]), (other["kept_bytes"], other["bits"])
    # Rows of one format differ by a few bytes of the first steps.
    close = all(math.isclose(a, b, rel_tol=0.002) for a, b in zip(mine, theirs, strict=True))
    if close or not all(b <= 1.002 * a for a, b in zip(mine, theirs, strict=True)):
        return False
    change, error, seeds = paired(losses(other, results), losses(row, results))
    return seeds >= FEW and error is not None and change <= 2 * error


def table(rows: list[dict[str, Any]], base: dict[int, dict[str, Any]]) -> str:
    """Columns as in NAME.txt; what they say stands below."""
    any_result = next(iter(base.values()))
    lines = [
        f"{any_result['parameters']:,} parameters, {any_result['tokens']:,} tokens, "
        f"{any_result['num_ranks']} ranks; perplexity and its change against {rows[0]['case']}",
        "",
        f"{'case':24}{'seeds':>6}{'kept':>7}{'bits':>7}{'perplexity':>12}{'change':>18}"
        f"{'shown':>7}{'against its pair':>19}{'front':>7}",
    ]
    for row in rows:
        change, error = row["change_percent"], row["change_error"]
        pair = percent(row["against_percent"], row["against_error"])
        pairs, shown = len(base.keys() & set(row["seeds"])), ""
        if row is not rows[0]:
            few = error is None or pairs < FEW
            shown = "few" if few else "yes" if abs(change) > 2 * error else "no"
        lines.append(
            f"{row['case']:24}{pairs:6}{row['kept_bytes']:7.3f}{row['bits']:7.2f}"
            f"{row['perplexity']:12.3f}{percent(change, error):>18}{shown:>7}{pair:>19}"
            f"{'*' if row['front'] else '':>7}"
        )
    return "\n".join([*lines, "", *LEGEND])


LEGEND = (
    "seeds: that both the case and the first have",
    "kept: bytes in which every rank keeps a value of a matrix, scales included",
    "bits: a value on the wire, over all collectives, full precision included",
    "perplexity: of the better of decoded and masters, geometric mean over seeds",
    "change: paired by seed, mean and standard error; shown: more than twice its error,",
    "        which noise alone reaches in 18 of 100 cases with three seeds; few: of fewer seeds",
    "against its pair: the same against the case that the sweep names as `against`",
    "front: no other case takes as little memory and bits, and less of one of them,",
    "       without a paired loss that is shown to be worse; of few seeds nothing follows",
)


def percent(value: float | None, error: float | None = None) -> str:
    if value is None:
        return ""
    return f"{value:+.2f} %" + ("" if error is None else f" ± {error:.2f}")


def curve(seeds: dict[int, Path], base: dict[int, Path]) -> list[dict[str, float | None]]:
    """Gap of training losses to full precision in percent of perplexity, by windows of steps."""
    gaps = []
    for seed in sorted(seeds.keys() & base.keys()):
        mine, theirs = training_losses(seeds[seed]), training_losses(base[seed])
        gaps.append([a - b for a, b in zip(mine, theirs, strict=True)])
    points: list[dict[str, float | None]] = []
    if not gaps:
        return points
    steps = len(gaps[0])
    window = WINDOW * max(1, math.ceil(steps / (WINDOW * POINTS)))
    for end in range(window, steps + 1, window):
        values = [100 * math.expm1(statistics.mean(gap[end - window : end])) for gap in gaps]
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        points.append({"step": end, "gap_percent": statistics.mean(values), "gap_error": error})
    return points


def training_losses(run: Path) -> list[float]:
    """One a step. Raises ValueError for a step that is missing: curves are paired by step."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "loss" in entry:
            found[entry["step"]] = entry["loss"]
    if sorted(found) != list(range(1, len(found) + 1)):
        raise ValueError(f"{run / 'metrics.jsonl'} does not have every step; run it again")
    return [found[step] for step in sorted(found)]


def write(
    path: Path, text: str, rows: list[dict[str, Any]], curves: dict[str, list[dict[str, Any]]]
) -> None:
    parts = [text]
    names = [name for name, points in curves.items() if points]
    if names:
        steps = [point["step"] for point in curves[names[0]]]
        parts.append(f"\ngap of training loss, % of perplexity, mean of {steps[0]} steps up to:\n")
        parts.append(" " * 24 + "".join(f"{step:>15}" for step in steps))
        for name in names:
            cells = [percent(p["gap_percent"], p["gap_error"]) for p in curves[name]]
            parts.append(f"{name:24}" + "".join(f"{c.replace(' %', ''):>15}" for c in cells))
    path.with_suffix(".txt").write_text("\n".join(parts) + "\n")
    content = {"rows": rows, "curves": curves}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


def front(rows: list[dict[str, Any]], path: Path) -> None:
    """Change in perplexity against memory, with the bits on the wire beside each point; against
    these bits where no case keeps anything.
    """
    first, *rows = (row for row in rows if row["change_percent"] is not None)
    memory = any(row["kept_bytes"] for row in rows)
    figure, axes = new_figure()
    for row in rows:
        error = row["change_error"] or 0
        full = {} if row["front"] else {"fillstyle": "none"}
        colour = COLOURS[0] if row["front"] else "#777777"
        x = row["kept_bytes"] if memory else row["bits"]
        axes.errorbar(x, row["change_percent"], yerr=error, fmt="o", capsize=3, color=colour,
                      **full)  # fmt: skip
        label = f" {row['case']}, {row['bits']:.1f} bits" if memory else f" {row['case']}"
        axes.annotate(label, fontsize=8, rotation=25, xy=(x, row["change_percent"]),
                      xytext=(4, 4), textcoords="offset points")  # fmt: skip
    axes.set_ylabel(f"perplexity against {first['case']} (%)")
    if memory:
        axes.set_xlabel("kept on every rank (bytes a parameter); filled: on the front")
        axes.set_xlim(-0.05, max(row["kept_bytes"] for row in rows) + 0.35)
    else:
        axes.set_xlabel("bits a value on the wire, all collectives of a step; filled: on the front")
        axes.set_xscale("log")
        axes.set_xlim(right=2 * max(row["bits"] for row in rows))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda bits, _: f"{bits:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    figure.savefig(path, dpi=110)


def draw_curves(curves: dict[str, list[dict[str, Any]]], first: str, path: Path) -> None:
    if not curves:
        return
    figure, axes = new_figure()
    for index, (name, points) in enumerate(curves.items()):
        steps = [point["step"] for point in points]
        gaps = [point["gap_percent"] for point in points]
        errors = [point["gap_error"] or 0 for point in points]
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(steps, gaps, color=colour, marker=".", linewidth=1, label=name)
        low = [gap - error for gap, error in zip(gaps, errors, strict=True)]
        high = [gap + error for gap, error in zip(gaps, errors, strict=True)]
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("step (mean of the steps since the point before)")
    axes.set_ylabel(f"training loss against {first} (% of perplexity)")
    figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=110)


def new_figure() -> tuple[Figure, Axes]:
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


if __name__ == "__main__":
    sys.exit(main())
