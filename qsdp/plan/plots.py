"""Plots of the planner: step time against bandwidth, and predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qsdp.plan.clusters import Case
from qsdp.plan.model import predict

POINTS = 60


def figure(columns: int) -> tuple[Any, Any, Any]:
    """pyplot, a figure and its axes, without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made, axes = plt.subplots(
        1, columns, figsize=(5.4 * columns, 4.0), layout="constrained", squeeze=False
    )
    return plt, made, axes[0]


def plot_steps(chosen: Case, path: Path) -> None:
    """Step time of every config between the least and the largest bandwidth."""
    plt, made, (axis,) = figure(1)
    low, high = min(chosen.bandwidths), max(chosen.bandwidths)
    low, high = (low / 3, high * 3) if low == high else (low, high)
    line = [low * (high / low) ** (i / (POINTS - 1)) for i in range(POINTS)]
    clusters = [replace(chosen.cluster, bandwidth_gbps=gbps) for gbps in line]
    for variant in chosen.variants:
        found = [predict(chosen.model, cluster, chosen.work, variant) for cluster in clusters]
        axis.plot(line, [step.step_s for step in found], label=variant.name)
    compute = found[0].compute_s
    axis.axhline(compute, color="gray", lw=0.8, ls=":", label="computation alone")
    axis.set(xscale="log", yscale="log", xlabel="link of a node, Gbit/s", ylabel="seconds a step")
    axis.set_title(f"{chosen.model.name}, {chosen.cluster.nodes} nodes of "
                   f"{chosen.cluster.ranks_per_node} ranks", fontsize=10)  # fmt: skip
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=110)
    plt.close(made)


def plot_validation(
    benchmark: Sequence[tuple[str, float, float]],
    published: Sequence[tuple[str, float, float]],
    path: Path,
) -> None:
    """Predicted against measured: (label, measured, predicted) of step times and of speed-ups."""
    plt, made, (left, right) = figure(2)
    for name in dict.fromkeys(label for label, _, _ in benchmark):
        points = [(m, p) for label, m, p in benchmark if label == name]
        left.plot(*zip(*points, strict=True), "o", ms=5, label=name)
    left.set(xscale="log", yscale="log", xlabel="measured, seconds a step", ylabel="predicted")
    left.set_title("qsdp bench network", fontsize=10)
    left.legend(fontsize=7)
    for label, measured, predicted in published:
        right.plot(measured, predicted, "s", ms=6, label=label)
    right.set(xlabel="published speed-up", ylabel="predicted")
    right.set_title("published clusters", fontsize=10)
    right.legend(fontsize=7)
    for axis, values in ((left, benchmark), (right, published)):
        both = [value for _, *pair in values for value in pair]
        ends = [min(both), max(both)]
        axis.plot(ends, ends, color="black", lw=0.8)
        axis.fill_between(ends, [e * 0.85 for e in ends], [e * 1.15 for e in ends],
                          color="gray", alpha=0.15)  # fmt: skip
        axis.grid(alpha=0.3)
    made.savefig(path, dpi=110)
    plt.close(made)
