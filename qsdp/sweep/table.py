"""Rows of a sweep: means, spreads, and differences paired by seed."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rich.table import Table

from qsdp.sweep.spec import Sweep
from qsdp.trainer.tables import new_table

Results = dict[str, dict[int, dict[str, Any]]]


def summarise(sweep: Sweep, results: Results) -> list[dict[str, Any]]:
    """One row a case with finished runs, as JSON values.

    ``change_percent`` is the mean over seeds of the change in perplexity against the first case at
    the same seed, ``change_error`` its standard error (None with fewer than two seeds);
    ``against_percent`` and ``against_error`` are the same against the case's own `against`.
    Perplexities are geometric means, because losses are what varies evenly. ``perplexity`` is that
    of the better of decoded and master weights, whichever is better in the mean.
    """
    rows = []
    for case in sweep.cases:
        runs = results[case.name]
        if not runs:
            continue
        better, losses = _better_losses(runs)
        first = _change(losses, results[sweep.cases[0].name])
        against = _change(losses, results[case.against] if case.against else {})
        mean = statistics.mean(losses.values())
        spread = [100 * math.expm1(loss - mean) for loss in losses.values()]
        ratios = [run["ratio"] for run in runs.values()]
        rows.append(
            {
                "case": case.name,
                "seeds": sorted(runs),
                "steps": max(run["steps"] for run in runs.values()),
                "bits": 32 / statistics.mean(ratios),
                "perplexity_decoded": _perplexity(runs, "decoded"),
                "perplexity_master": _perplexity(runs, "master"),
                "perplexity": math.exp(mean),
                "better": better,
                "spread_percent": statistics.stdev(spread) if len(spread) > 1 else None,
                "change_percent": first[0],
                "change_error": first[1],
                "against": case.against,
                "against_percent": against[0],
                "against_error": against[1],
                "reference_percent": None if case.reference is None else 100 * (case.reference - 1),
            }
        )
    return rows


def _losses(runs: dict[int, dict[str, Any]], kind: str) -> dict[int, float]:
    return {seed: run[f"valid_loss_{kind}"] for seed, run in runs.items()}


def _perplexity(runs: dict[int, dict[str, Any]], kind: str) -> float:
    return math.exp(statistics.mean(_losses(runs, kind).values()))


def _better_losses(runs: dict[int, dict[str, Any]]) -> tuple[str, dict[int, float]]:
    better = min(("decoded", "master"), key=lambda kind: _perplexity(runs, kind))
    return better, _losses(runs, better)


def _change(
    losses: dict[int, float], base: dict[int, dict[str, Any]]
) -> tuple[float | None, float | None]:
    """Mean change in perplexity at the seeds that both have, in percent, and its standard error."""
    if not base:
        return None, None
    base_losses = _better_losses(base)[1]
    changes = [
        100 * math.expm1(loss - base_losses[seed])
        for seed, loss in losses.items()
        if seed in base_losses
    ]
    if not changes:
        return None, None
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else None
    return statistics.mean(changes), error


def table(rows: list[dict[str, Any]]) -> Table:
    paired = any(row["against_percent"] is not None for row in rows)
    published = any(row["reference_percent"] is not None for row in rows)
    header = ["case", "seeds", "bits", "decoded", "masters", "change", "spread"]
    shown = new_table(
        f"Validation perplexity, and its change against {rows[0]['case']} at the same seeds",
        "bits: a value on the wire, over all collectives, full precision included\n"
        "change: of the better of decoded and masters, mean and standard error over seeds\n"
        "spread: standard deviation between seeds; paired: change against the case's `against`\n"
        "published: change reported elsewhere",
        header + ["paired"] * paired + ["published"] * published,
    )
    for row in rows:
        cells = [_percent(row["against_percent"], row["against_error"])] * paired
        cells += [_percent(row["reference_percent"])] * published
        shown.add_row(
            row["case"],
            str(len(row["seeds"])),
            f"{row['bits']:.2f}",
            f"{row['perplexity_decoded']:.3f}",
            f"{row['perplexity_master']:.3f}",
            _percent(row["change_percent"], row["change_error"]),
            _percent(row["spread_percent"]).lstrip("+"),
            *cells,
        )
    return shown


def _percent(value: float | None, error: float | None = None) -> str:
    if value is None:
        return ""
    return f"{value:+.2f} %" + ("" if error is None else f" ±{error:.2f}")
