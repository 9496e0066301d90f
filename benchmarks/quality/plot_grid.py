"""Perplexity against bits, and the paper's beside it, both as changes against full precision.

    python benchmarks/quality/plot_grid.py SWEEP.json [--out FILE]

SWEEP.json is what `qsdp sweep benchmarks/quality/paper-grid.json` writes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PUBLISHED = {"linestyle": ":", "fillstyle": "none"}
STYLES = {
    ("uniform", "measured"): {"color": "#0072B2", "marker": "o"},
    ("learned", "measured"): {"color": "#009E73", "marker": "s"},
    ("uniform", "paper"): {
        "color": "#0072B2",
        "marker": "o",
        "linestyle": ":",
        "fillstyle": "none",
    },
    ("learned", "paper"): {
        "color": "#009E73",
        "marker": "s",
        "linestyle": ":",
        "fillstyle": "none",
    },
}
# Title, which of the case's two widths is on the axis, and the cases.
PANELS = (
    ("weights, gradients at 4 bits", 0, ("w6g4", "w5g4", "w4g4")),
    ("weights, gradients in full precision", 0, ("w4g32", "w3g32", "w2g32")),
    ("gradients, weights at 8 bits", 1, ("w8g8", "w8g3", "w8g2")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path)
    default = Path("benchmarks/quality/results/paper-grid.png")
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    rows = {row["case"]: row for row in json.loads(options.sweep.read_text())}
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (title, axis, cases) in zip(panels, PANELS, strict=True):
        draw(axes, rows, axis, cases)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("bits")
    panels[0].set_ylabel("change in perplexity against full precision (%)")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(options.out, dpi=130)
    return 0


def draw(axes: Axes, rows: dict[str, dict[str, Any]], axis: int, cases: tuple[str, ...]) -> None:
    for (levels, source), style in STYLES.items():
        field = "change_percent" if source == "measured" else "reference_percent"
        points = []
        for case in cases:
            row = rows.get(f"{case}-{levels}")
            if row is not None and row[field] is not None:
                bits = int(re.findall(r"\d+", case)[axis])
                points.append((bits, row[field], row["change_error"] if field[0] == "c" else None))
        if points:
            bits, values, errors = zip(*points, strict=True)
            name = "this model" if source == "measured" else "paper, GPT-125M"
            axes.errorbar(
                bits,
                values,
                yerr=[error or 0 for error in errors],
                label=f"{levels}, {name}",
                linewidth=1,
                **style,
            )
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=2)
    axes.set_yticks([-1, 0, 1, 2, 5, 10, 20, 50, 100])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xticks(sorted({int(re.findall(r"\d+", case)[axis]) for case in cases}))
    axes.invert_xaxis()
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
