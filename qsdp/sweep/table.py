"""Rows of a sweep: means, spreads, and differences paired by seed."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rich import box
from rich.table import Table

from qsdp.sweep.spec import Sweep

Results = dict[str, dict[int, dict[str, Any]]]


def summarise(sweep: Sweep, results: Results) -> list[dict[str, Any]]:
    """One row a case with finished runs, as JSON values.

    ``change_percent`` is the mean over seeds of the change in perplexity against the first case at
    the same seed, ``change_error`` its standard error (None with fewer than two seeds).
    Perplexities are geometric means, because losses are what varies evenly. ``perplexity`` is that
    of the better of decoded and master weights, whichever is better in the mean.
    """
    baseline = results[sweep.cases[0].name]
    rows = []
    for case in sweep.cases:
        runs = results[case.name]
        if not runs:
            continue
        losses = {
            kind: {seed: run[f"valid_loss_{kind}"] for seed, run in runs.items()}
            for kind in ("decoded", "master")
        }
        better = min(losses, key=lambda kind: statistics.mean(losses[kind].values()))
        base = {seed: run["valid_loss_decoded"] for seed, run in baseline.items()}
        changes = [
            100 * math.expm1(loss - base[seed])
            for seed, loss in losses[better].items()
            if seed in base
        ]
        spread = [100 * math.expm1(v - statistics.mean(losses[better].values()))
                  for v in losses[better].values()]  # fmt: skip
        ratios = [run["ratio"] for run in runs.values()]
        rows.append(
            {
                "case": case.name,
                "seeds": sorted(runs),
                "steps": max(run["steps"] for run in runs.values()),
                "bits": 32 / statistics.mean(ratios),
                "perplexity_decoded": math.exp(statistics.mean(losses["decoded"].values())),
                "perplexity_master": math.exp(statistics.mean(losses["master"].values())),
                "perplexity": math.exp(statistics.mean(losses[better].values())),
                "better": better,
                "spread_percent": statistics.stdev(spread) if len(spread) > 1 else None,
                "change_percent": statistics.mean(changes) if changes else None,
                "change_error": (
                    statistics.stdev(changes) / math.sqrt(len(changes))
                    if len(changes) > 1
                    else None
                ),
                "reference_percent": None if case.reference is None else 100 * (case.reference - 1),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(
        title=f"Validation perplexity, and its change against {rows[0]['case']} at the same seeds",
        caption="bits: a value on the wire, over all collectives, full precision included\n"
        "change: of the better of decoded and masters, mean and standard error over seeds\n"
        "spread: standard deviation between seeds; published: change reported elsewhere",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    shown.add_column("case", overflow="fold")
    for header in ("seeds", "bits", "decoded", "masters", "change", "spread", "published"):
        shown.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        error = row["change_error"]
        change = _percent(row["change_percent"])
        shown.add_row(
            row["case"],
            str(len(row["seeds"])),
            f"{row['bits']:.2f}",
            f"{row['perplexity_decoded']:.3f}",
            f"{row['perplexity_master']:.3f}",
            change if error is None or not change else f"{change} ±{error:.2f}",
            _percent(row["spread_percent"]).lstrip("+"),
            _percent(row["reference_percent"]),
        )
    return shown


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f} %"
