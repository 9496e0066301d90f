"""What the runs say, as rows: means over targets and seeds, and paired differences from ERM."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from qsdp.columns import format_columns
from qsdp.domains.train import ERM, accuracy

# Of one target and seed: by bits, the fields of an Outcome.
Runs = Mapping[tuple[str, int], Mapping[int, Mapping[str, Any]]]
CHOSEN = "chosen"


class Row(NamedTuple):
    """Accuracies in percent; differences from ERM are in points, paired by target and seed."""

    name: str
    valid: float
    target: float
    difference: float
    error: float | None
    """Standard error of the difference; None with a single pair."""
    ensemble: float
    """Of all seeds' models together, mean over the targets."""
    flatness: float | None
    """Mean rise of the loss on the sphere."""
    flatness_error: float | None
    """Standard error of its difference from ERM's."""


def summarise(runs: Runs, labels: Mapping[str, torch.Tensor], bits: Sequence[int]) -> list[Row]:
    """A row for ERM, for each width, and for the width that the sources choose run by run."""
    choices: dict[str, dict[tuple[str, int], int]] = {"ERM": dict.fromkeys(runs, ERM)}
    choices |= {f"{width} bits": dict.fromkeys(runs, width) for width in bits}
    if len(bits) > 1:
        # The best in validation; of equal ones the widest.
        best = {
            pair: max(sorted(bits, reverse=True), key=lambda width: of[width]["valid"])
            for pair, of in runs.items()
        }
        choices[CHOSEN] = best
    return [_row(name, choice, runs, labels) for name, choice in choices.items()]


def _row(
    name: str,
    choice: Mapping[tuple[str, int], int],
    runs: Runs,
    labels: Mapping[str, torch.Tensor],
) -> Row:
    mine = {pair: runs[pair][width] for pair, width in choice.items()}
    pairs = [100 * (run["target"] - runs[pair][ERM]["target"]) for pair, run in mine.items()]
    together = []
    for target in dict.fromkeys(target for target, _ in mine):
        members = [run["logits"] for (t, _), run in mine.items() if t == target]
        together.append(accuracy(torch.stack(members).mean(0), labels[target]))
    flat = [run["flatness"] for run in mine.values()]
    flatter = [runs[pair][ERM]["flatness"] for pair in mine]
    measured = None not in (*flat, *flatter)
    return Row(
        name,
        100 * statistics.fmean(run["valid"] for run in mine.values()),
        100 * statistics.fmean(run["target"] for run in mine.values()),
        statistics.fmean(pairs),
        _error(pairs, mine),
        100 * statistics.fmean(together),
        statistics.fmean(flat) if measured else None,
        _error([a - b for a, b in zip(flat, flatter, strict=True)], mine) if measured else None,
    )


def _error(values: Sequence[float], pairs: Iterable[tuple[str, int]]) -> float | None:
    """Standard error of the mean. Of one seed, targets share most of their data: a seed's mean over
    them is one observation. None for one seed."""
    by_seed: dict[int, list[float]] = {}
    for value, (_, seed) in zip(values, pairs, strict=True):
        by_seed.setdefault(seed, []).append(value)
    means = [statistics.fmean(of_seed) for of_seed in by_seed.values()]
    return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None


def text_of(rows: Sequence[Row], runs: Runs) -> str:
    """The table, and the target accuracies of every domain below it."""
    targets = list(dict.fromkeys(target for target, _ in runs))
    seeds = len({seed for _, seed in runs})
    head = ["weights", "sources", "target", "less ERM", "SE", "ensemble", "flatness", "SE"]
    lines = [
        [
            row.name,
            f"{row.valid:.2f}",
            f"{row.target:.2f}",
            "-" if row.name == "ERM" else f"{row.difference:+.2f}",
            "-" if row.name == "ERM" or row.error is None else f"{row.error:.2f}",
            f"{row.ensemble:.2f}",
            "-" if row.flatness is None else f"{row.flatness:.4f}",
            "-" if row.name == "ERM" or row.flatness_error is None else f"{row.flatness_error:.4f}",
        ]
        for row in rows
    ]
    widths = list(next(iter(runs.values())))
    each = [
        ["ERM" if width == ERM else f"{width} bits", *(_mean(runs, t, width) for t in targets)]
        for width in widths
    ]
    return (
        f"{len(targets)} left out, one at a time, {seeds} seeds each; accuracy in percent\n"
        "sources: held out of the domains trained on; ensemble: mean logits of all seeds;\n"
        "SE: of the difference from ERM\n\n"
        f"{format_columns(head, lines)}\n\n"
        f"by target\n{format_columns(['weights', *targets], each)}\n"
    )


def _mean(runs: Runs, target: str, width: int) -> str:
    of_target = [run[width]["target"] for (t, _), run in runs.items() if t == target]
    return f"{100 * statistics.fmean(of_target):.2f}"
