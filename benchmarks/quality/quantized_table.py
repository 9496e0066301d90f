"""Perplexity of models in few bits: quantized after training, and trained quantized.

    qsdp sweep benchmarks/quality/quantized-training.json --out RUNS
    python benchmarks/quality/quantized_table.py RUNS [--out FILE]

Full precision is what the run `after-B` of the same seed trained, before it quantized that: the
same initial weights and text. Changes are paired with it by seed; perplexities are geometric means.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from qsdp.columns import format_columns
from qsdp.sweep.command import run_folder
from qsdp.sweep.spec import read_sweep

FILE = Path(__file__).with_name("quantized-training.json")
HEAD = ["case", "seeds", "full precision", "quantized", "change %", "SE", "MB sent a step"]


class Run(NamedTuple):
    full: float
    """Loss in full precision of the same seed."""
    quantized: float
    sent: float


def main(argv: list[str] | None = None) -> int:
    """Exit status. Raises ValueError where no case has a run beside its full precision."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, help="--out of the sweep")
    parser.add_argument("--out", type=Path, help="write the table there, too")
    options = parser.parse_args(argv)
    rows = []
    for case, runs in read(options.runs).items():
        changes = [100 * math.expm1(run.quantized - run.full) for run in runs]
        error = statistics.stdev(changes) / math.sqrt(len(runs)) if len(runs) > 1 else None
        rows.append(
            [
                case,
                str(len(runs)),
                f"{math.exp(statistics.fmean(run.full for run in runs)):.2f}",
                f"{math.exp(statistics.fmean(run.quantized for run in runs)):.2f}",
                f"{statistics.fmean(changes):+.2f}",
                "-" if error is None else f"{error:.2f}",
                f"{statistics.fmean(run.sent for run in runs) / 1e6:.2f}",
            ]
        )
    if not rows:
        raise ValueError(f"{options.runs} holds no finished runs of {FILE.name}")
    text = format_columns(HEAD, rows)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


def read(folder: Path) -> dict[str, list[Run]]:
    """Finished runs of every case, in the sweep's order."""
    sweep = read_sweep(FILE)
    full: dict[int, dict[str, Any]] = {}
    found: dict[str, list[Run]] = {}
    for case in sweep.cases:
        for seed in case.seeds or sweep.seeds:
            path = run_folder(folder, case, seed) / "result.json"
            if not path.is_file():
                continue
            result = json.loads(path.read_text())
            if case.name.startswith("after-"):
                full.setdefault(seed, result)
            if seed in full:
                losses = full[seed]["valid_loss_master"], result["valid_loss_decoded"]
                # A run that only quantized what another one had trained took no step.
                step = result["median_step"] or full[seed]["median_step"]
                run = Run(*losses, step["sent"])
                found.setdefault(case.name, []).append(run)
    return found


if __name__ == "__main__":
    sys.exit(main())
