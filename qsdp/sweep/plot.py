"""Change in perplexity against bits on the wire."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

MEASURED, PUBLISHED = "#0072B2", "#D55E00"
_LINEAR_UP_TO = 10.0  # percent; larger changes are shown on a logarithmic axis
_LINEAR_THERE = 2.0  # percent; smaller changes on a linear part of that one


def draw(rows: list[dict[str, Any]], path: Path) -> bool:
    """One row a case that can be compared, the first at zero; whether there was any.

    With error bars where there are several seeds; a case of one seed is hollow.
    """
    rows = [row for row in rows if row["change_percent"] is not None]
    if not rows:
        return False
    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(8, 1.6 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
    shown = [row[name] for row in rows for name in ("change_percent", "reference_percent")]
    largest = max(abs(value) for value in shown if value is not None)
    if largest > _LINEAR_UP_TO:
        axes.set_xscale("symlog", linthresh=_LINEAR_THERE)
    axes.axvline(0, color="#999999", linewidth=0.8)
    _measured(axes, rows)
    published = [(row["reference_percent"], i) for i, row in enumerate(rows)
                 if row["reference_percent"] is not None]  # fmt: skip
    if published:
        axes.plot(*zip(*published, strict=True), "D", color=PUBLISHED, fillstyle="none",
                  label="published, another model")  # fmt: skip
    axes.set_yticks(range(len(rows)), [f"{row['case']}  ({row['bits']:.2f} bits)" for row in rows])
    axes.invert_yaxis()
    if largest > _LINEAR_UP_TO:
        low, high = axes.get_xlim()
        axes.set_xticks([tick for tick in _ticks(largest) if low <= tick <= high])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    axes.set_xlabel(f"change in validation perplexity against {rows[0]['case']} (%)")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
    return True


def _measured(axes: Any, rows: list[dict[str, Any]]) -> None:
    several = [(i, row) for i, row in enumerate(rows) if row["change_error"] is not None]
    once = [(i, row) for i, row in enumerate(rows) if row["change_error"] is None]
    if several:
        axes.errorbar(
            [row["change_percent"] for _, row in several],
            [i for i, _ in several],
            xerr=[row["change_error"] for _, row in several],
            fmt="o", capsize=3, color=MEASURED, label="several seeds, with standard error",
        )  # fmt: skip
    if once:
        axes.plot(
            [row["change_percent"] for _, row in once], [i for i, _ in once],
            "o", color=MEASURED, fillstyle="none", label="one seed",
        )  # fmt: skip


def _ticks(largest: float) -> list[float]:
    """0, 1, 2, 5, 10, ... and their negatives, far enough for the largest value."""
    decades = range(math.ceil(math.log10(largest)) + 1)
    ticks = [float(digit * 10**decade) for decade in decades for digit in (1, 2, 5)]
    # On the linear part there is room for whole steps, and below zero for few.
    return [*(-tick for tick in ticks if tick > 1), 0.0, *ticks]
