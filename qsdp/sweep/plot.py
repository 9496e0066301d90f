"""Change in perplexity against bits on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

MEASURED, PUBLISHED = "#0072B2", "#D55E00"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """One row a case, the first at zero; with error bars where there are several seeds."""
    rows = [row for row in rows if row["change_percent"] is not None]
    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(8, 1.2 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
    places = range(len(rows))
    axes.axvline(0, color="#999999", linewidth=0.8)
    axes.errorbar(
        [row["change_percent"] for row in rows],
        places,
        xerr=[row["change_error"] or 0 for row in rows],
        fmt="o",
        color=MEASURED,
        label="measured, with standard error",
    )
    published = [(row["reference_percent"], i) for i, row in enumerate(rows)
                 if row["reference_percent"] is not None]  # fmt: skip
    if published:
        axes.plot(*zip(*published, strict=True), "D", color=PUBLISHED, fillstyle="none",
                  label="published, another model")  # fmt: skip
    axes.set_yticks(places, [f"{row['case']}  ({row['bits']:.2f} bits)" for row in rows])
    axes.invert_yaxis()
    if max((abs(row["change_percent"]) for row in rows), default=0) > 10:
        axes.set_xscale("symlog", linthresh=2)
        ticks = [-2, 0, 1, 2, 5, 10, 20, 50, 100]
        low, high = axes.get_xlim()
        axes.set_xticks([t for t in ticks if low <= t <= high])
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"change in validation perplexity against {rows[0]['case']} (%)")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, dpi=150)
