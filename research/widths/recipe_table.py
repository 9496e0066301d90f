"""Tables and a plot of what :mod:`research.widths.recipe` found."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from qsdp.columns import format_columns

Found = list[dict[str, Any]]
_HEADER = ("model", "optimizer", "gradients", "seeds", "bits", "loss", "over full", "over fixed")


def paired(runs: Found, base: Found, relative: bool = False) -> list[float]:
    """Differences of loss at equal seeds; in percent where ``relative``."""
    losses = {run["seed"]: run["loss"] for run in base}
    return [
        100 * (run["loss"] / losses[run["seed"]] - 1) if relative else
        run["loss"] - losses[run["seed"]]
        for run in runs if run["seed"] in losses
    ]  # fmt: skip


def with_error(values: list[float], form: str) -> str:
    """Mean and its standard error."""
    if not values:
        return ""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return f"{statistics.mean(values):+{form}}" + ("" if error is None else f" ± {error:{form}}")


def groups(found: Found) -> dict[tuple[str, str, float], dict[str, Found]]:
    """By model, optimizer and learning rate, then by case, in the order of bits."""
    result: dict[tuple[str, str, float], dict[str, Found]] = {}
    for run in sorted(found, key=lambda run: (run["bits"] if run["bits"] < 32 else 0, run["case"])):
        key = (run["model"], run["optimizer"], run["lr"])
        result.setdefault(key, {}).setdefault(run["case"], []).append(run)
    return dict(sorted(result.items()))


def format_found(found: Found) -> str:
    lines = [
        "Validation loss by seed: mean and standard error of its difference to full precision, and",
        "to fixed widths at the same true bits. Bits: a value of a matrix, everything counted.",
        "",
    ]
    rows = []
    for (model, optimizer, lr), by_case in groups(found).items():
        for case, runs in by_case.items():
            rows.append((
                model, f"{optimizer} {lr:g}", case, str(len(runs)),
                f"{statistics.mean(run['bits'] for run in runs):.3f}",
                f"{statistics.mean(run['loss'] for run in runs):.4f}",
                with_error(paired(runs, by_case.get("full", [])), ".4f"),
                with_error(paired(runs, by_case.get(f"{case.split()[0]} fixed", [])), ".4f")
                if "chosen" in case else "",
            ))  # fmt: skip
    lines.append(format_columns(_HEADER, rows))
    return "\n".join(lines) + "\n"


def plot(found: Found, path: Path) -> None:
    """Loss over full precision by true bits: means and standard errors, a panel an optimizer."""
    import matplotlib.pyplot as plt

    shown = {key: value for key, value in groups(found).items() if len(value) > 2}
    if not shown:
        return
    figure, panels = plt.subplots(1, len(shown), figsize=(3.6 * len(shown), 3.4), squeeze=False)
    for panel, ((model, optimizer, _), by_case) in zip(panels[0], shown.items(), strict=True):
        for kind, marker in (
            ("fixed", "o"),
            ("chosen", "s"),
            ("chosen, from 0", "x"),
            ("grid", "^"),
        ):  # noqa: E501
            points = []
            for case, runs in by_case.items():
                values = paired(runs, by_case.get("full", []), relative=True)
                if values and (case.partition(" ")[2] == kind or case.endswith(kind)):
                    error = statistics.stdev(values) / len(values) ** 0.5 if values[1:] else 0.0
                    points.append((runs[0]["bits"], statistics.mean(values), error))
            if points:
                bits, means, errors = zip(*points, strict=True)
                label = "coded rows" if kind == "grid" else kind
                panel.errorbar(bits, means, errors, fmt=marker, ms=5, capsize=2, label=label)
        panel.axhline(0, color="gray", lw=0.8)
        panel.set_title(f"{optimizer}, {model}")
        panel.set_xlabel("true bits a value")
    panels[0][0].set_ylabel("loss over full precision (%)")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
