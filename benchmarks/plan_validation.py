"""How well `qsdp plan` predicts: the committed network benchmarks, and published speed-ups.

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
RESULTS = ROOT / "benchmarks" / "results"
Step = tuple[str, float, float]  # variant or case, measured, predicted


def published() -> list[Step]:
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


def measured(file: Path) -> dict[str, list[Step]]:
    """Seconds of steps on limited links, by layout."""
    found: dict[str, list[Step]] = {}
    for layout, cell, prediction in predict_benchmark(json.loads(file.read_text())):
        if cell["bandwidth_gbps"] is not None:
            step = (cell["variant"], cell["step_s"], prediction.step_s)
            found.setdefault(layout["layout"], []).append(step)
    return found


def line(name: str, steps: list[Step]) -> str:
    errors = [(step / seconds - 1, variant) for variant, seconds, step in steps]
    largest, variant = max(errors, key=lambda error: abs(error[0]))
    median = statistics.median(abs(error) for error, _ in errors)
    above = sum(abs(error) > 0.2 for error, _ in errors)
    return (
        f"{name}: {len(steps)} steps: median error {100 * median:.1f} %, "
        f"largest {100 * largest:+.1f} % ({variant}), {above} above 20 %"
    )


def main() -> int:
    few, many = (measured(RESULTS / name) for name in ("network.json", "network-ranks.json"))
    cells = [step for steps in few.values() for step in steps]
    print(line("2 and 4 ranks", cells))
    for layout, steps in many.items():
        print(line(f"{layout} hosts x ranks", steps))
    print(line("4 to 16 ranks", [step for steps in many.values() for step in steps]))
    clusters = published()
    for name, given, predicted in clusters:
        print(f"{name:<32} published {given:.2f}x, predicted {predicted:.2f}x")
    plot_validation(cells, clusters, ROOT / "docs/figures/plan_validation.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
