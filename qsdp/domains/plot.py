"""Target accuracy against bits, with the standard errors of the differences from ERM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qsdp.domains.table import Row


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of the rows that have a width of their own; ERM is a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    erm, widths = rows[0], [row for row in rows[1:] if row.name.endswith("bits")]
    at = [int(row.name.split()[0]) for row in widths]
    left.axhline(erm.target, color="black", lw=0.8, label="ERM")
    left.errorbar(at, [row.target for row in widths], [row.error or 0.0 for row in widths],
                  marker="o", capsize=3, label="QT-DoG, with SE of the difference")  # fmt: skip
    left.axhline(erm.ensemble, color="gray", lw=0.8, ls="--", label="ensemble of ERM")
    left.plot(at, [row.ensemble for row in widths], "s--", label="ensemble (EoQ)")
    left.set(xlabel="bits", ylabel="accuracy on the target, percent")
    left.legend(fontsize=8)
    for row in (erm, *widths):
        if row.flatness is not None:
            right.plot(row.flatness, row.target, "o")
            right.annotate(row.name, (row.flatness, row.target), fontsize=8)
    right.set(xlabel="rise of the loss around the weights", ylabel="accuracy on the target")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    made.savefig(path, dpi=110)
    plt.close(made)
