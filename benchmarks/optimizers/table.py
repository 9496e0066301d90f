"""Tables of what was found."""

from __future__ import annotations

import math
import statistics
from typing import Any

from qsdp.columns import format_columns

Found = dict[str, Any]


def change(base: dict[str, Found], of: dict[str, Found], field: str, relative: bool) -> str:
    """Mean and standard error of the change, paired by seed; in percent, or of percent."""
    changes = []
    for seed, result in of.items():
        if seed in base:
            difference = result[field] - base[seed][field]
            changes.append(100 * difference / (base[seed][field] if relative else 1.0))
    mean = statistics.mean(changes)
    error = f" ± {statistics.stdev(changes) / len(changes) ** 0.5:.2f}" if changes[1:] else ""
    return f"{mean:+.2f}{' %' if relative else ''}{error}"


def format_found(found: dict[str, Found]) -> str:
    lines = [
        "Two ranks; gradients in each way, weights in full precision. Validation loss and its",
        "change against float32 with the same optimizer, by seed: mean and standard error.",
    ]
    for task, results in found.items():
        some = next(iter(next(iter(results["runs"].values())).values()))
        parameters = next(iter(some.values()))["parameters"]
        lines += ["", f"{task}: {parameters:,} parameters, {results['steps']} steps", ""]
        rows = []
        for optimizer, cases in results["runs"].items():
            base = cases["float32"]
            rows += [_row(optimizer, case, seeds, base) for case, seeds in cases.items()]
        header = ("optimizer", "gradients", "seeds", "loss", "change", "accuracy", "points",
                  "kB a step", "fewer", "own")  # fmt: skip
        lines.append(format_columns(header, rows))
        lines.append("")
        for optimizer, losses in results["tuning"].items():
            tried = ", ".join(
                f"{float(lr):g}: {losses[lr]:.4f}" for lr in sorted(losses, key=float)
            )
            lines.append(f"learning rates of {optimizer}, loss in full precision: {tried}")
    lines += [
        "",
        "taken: the smallest rate within half a percent of the best loss",
        "points: of accuracy, in percent. kB a step: gradients that a rank sends, mean of all",
        "steps, the warm-up in 8 bits included; fewer: than float32, by that. own: the same after",
        "the warm-up, of the parameters that travel in the way of the row: without vectors, small",
        "parameters and the 4-bit embeddings of bitdp.",
    ]
    return "\n".join(lines)


def _row(optimizer: str, case: str, seeds: dict[str, Found], base: dict[str, Found]) -> tuple:
    results = list(seeds.values())
    mean = {
        field: statistics.mean(result.get(field, math.nan) for result in results)
        for field in ("loss", "accuracy", "sent", "fewer", "fewer_own")
    }
    accurate = "accuracy" in results[0]
    return (
        *(optimizer, case, str(len(results)), f"{mean['loss']:.4f}"),
        change(base, seeds, "loss", True),
        f"{100 * mean['accuracy']:.2f} %" if accurate else "-",
        change(base, seeds, "accuracy", False) if accurate else "-",
        *(f"{mean['sent'] / 1e3:.1f}", f"{mean['fewer']:.2f}", f"{mean['fewer_own']:.2f}"),
    )


def format_overflow(found: dict[str, Found]) -> str:
    lines = [
        'AdamW with "bitdp" on two ranks; all gradients of one rank are inf at one step and NaN at',
        "another, and steps whose gradients are not finite are left out.",
    ]
    for task, cases in found.items():
        base, rows = cases["undisturbed"], []
        for case, seeds in cases.items():
            for seed, result in seeds.items():
                skipped = ", ".join(map(str, result["skipped"])) or "none"
                largest = f"{result['largest_loss_of_second_half']:.3f}"
                finite = "yes" if result["finite"] else "no"
                rows.append((case, seed, str(result["steps"]), skipped, finite, largest,
                             f"{result['loss']:.4f}"))  # fmt: skip
        header = ("case", "seed", "steps", "left out", "losses finite", "largest later", "loss")
        lines += ["", f"{task}: change of validation loss "
                  f"{change(base, cases['one rank overflows'], 'loss', True)}", ""]  # fmt: skip
        lines.append(format_columns(header, rows))
    lines += ["", "largest later: loss of a batch of rank 0 in the second half of the steps"]
    return "\n".join(lines)
