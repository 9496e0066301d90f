"""How well `qsdp plan` predicts: the committed network benchmark, and published speed-ups.

python benchmarks/plan_validation.py      prints the errors, draws docs/figures/plan_validation.png
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from qsdp.plan.clusters import bench_config, case, from_benchmark
from qsdp.plan.command import plan
from qsdp.plan.model import predict
from qsdp.plan.plots import plot_validation

ROOT = Path(__file__).parent.parent
PUBLISHED = (
    ("qsdp-paper", "w8g8", 10.0, 2.25),
    ("qsdp-paper", "w8g8", 100.0, 1.15),
    ("sdp4bit-a100-1.3b", "sdp4bit", 100.0, 2.39),
    ("sdp4bit-a100-2.7b", "sdp4bit", 100.0, 2.43),
    ("sdp4bit-h800-1.3b", "sdp4bit", 3200.0, 1.53),
    ("sdp4bit-h800-2.7b", "sdp4bit", 3200.0, 1.63),
)


def benchmark() -> list[tuple[str, float, float]]:
    """(variant, measured, predicted) seconds of every cell with a limit."""
    found = json.loads((ROOT / "benchmarks/results/network.json").read_text())
    cells = []
    for layout in found["layouts"]:
        for cell in layout["cells"]:
            if cell["bandwidth_gbps"] is None:
                continue
            model, cluster, work = from_benchmark(found, layout, cell["variant"])
            cluster = replace(cluster, bandwidth_gbps=cell["bandwidth_gbps"])
            step = predict(model, cluster, work, bench_config(cell["variant"])).step_s
            cells.append((cell["variant"], cell["step_s"], step))
    return cells


def published() -> list[tuple[str, float, float]]:
    """(case, published, predicted) speed-ups."""
    found = []
    for name, config, gbps, speedup in PUBLISHED:
        (answer,) = [a for a in plan(case(name)) if (a.config, a.bandwidth_gbps) == (config, gbps)]
        found.append((f"{name}, {gbps:g} Gbit/s", speedup, answer.speedup))
    return found


def main() -> int:
    cells = benchmark()
    errors = sorted((abs(step / measured - 1), name) for name, measured, step in cells)
    print(
        f"{len(cells)} steps: median error {100 * statistics.median(e for e, _ in errors):.1f} %, "
        f"largest {100 * errors[-1][0]:.1f} % ({errors[-1][1]}), "
        f"{sum(error > 0.2 for error, _ in errors)} above 20 %"
    )
    for name, given, predicted in published():
        print(f"{name:<32} published {given:.2f}x, predicted {predicted:.2f}x")
    plot_validation(cells, published(), ROOT / "docs/figures/plan_validation.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
