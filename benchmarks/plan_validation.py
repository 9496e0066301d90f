"""How well `qsdp plan` predicts: the committed network benchmark, and published speed-ups.

python benchmarks/plan_validation.py      prints the errors, draws docs/figures/plan_validation.png
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from qsdp.plan.benchmark import predict_benchmark
from qsdp.plan.clusters import PUBLISHED, case
from qsdp.plan.command import plan
from qsdp.plan.plots import plot_validation

ROOT = Path(__file__).parent.parent


def published() -> list[tuple[str, float, float]]:
    """(case, published, predicted) speed-ups."""
    found = []
    for name, variant, gbps, speedup in PUBLISHED:
        (answer,) = (
            answer
            for answer in plan(case(name))
            if (answer.variant.name, answer.bandwidth_gbps) == (variant, gbps)
        )
        found.append((f"{name}, {gbps:g} Gbit/s", speedup, answer.speedup))
    return found


def main() -> int:
    found = json.loads((ROOT / "benchmarks/results/network.json").read_text())
    cells = [
        (cell["variant"], cell["step_s"], prediction.step_s)
        for _, cell, prediction in predict_benchmark(found)
        if cell["bandwidth_gbps"] is not None
    ]
    errors = sorted((abs(step / measured - 1), name) for name, measured, step in cells)
    print(
        f"{len(cells)} steps: median error {100 * statistics.median(e for e, _ in errors):.1f} %, "
        f"largest {100 * errors[-1][0]:.1f} % ({errors[-1][1]}), "
        f"{sum(error > 0.2 for error, _ in errors)} above 20 %"
    )
    clusters = published()
    for name, given, predicted in clusters:
        print(f"{name:<32} published {given:.2f}x, predicted {predicted:.2f}x")
    plot_validation(cells, clusters, ROOT / "docs/figures/plan_validation.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
