"""Where quantizing stops paying: 8 to 4096 ranks, 1B to 70B parameters, 1 to 400 Gbit/s."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from qsdp.columns import format_columns
from qsdp.plan.cluster import Cluster
from qsdp.plan.clusters import cloud
from qsdp.plan.model import Work, predict
from qsdp.plan.sizes import Model, from_counts
from qsdp.plan.variant import parse_variant

MODELS = ((1e9, 24), (7e9, 32), (13e9, 40), (30e9, 60), (70e9, 80))
RANKS = (8, 64, 512, 4096)
BANDWIDTHS = (1.0, 3.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
RANKS_PER_NODE = (1, 8)
PAYS = 1.05
BASELINE, OURS = "stock-bf16", "w8g8"


@dataclass(frozen=True)
class Finding:
    """A model on a number of ranks: speed-ups of W8G8 over stock bfloat16 by bandwidth."""

    parameters: float
    ranks: int
    ranks_per_node: int
    speedups: dict[float, float]
    pays_up_to_gbps: float | None
    """Highest bandwidth of the survey with a speed-up of at least 5 %; None if there is none."""
    limit_there: str
    """What takes most of the quantized step at 400 Gbit/s."""


def survey() -> list[Finding]:
    """All models, ranks and node sizes; 8192 tokens a rank and step, H100-class ranks."""
    case = cloud()
    work = replace(case.work, tokens=8192.0, recompute=True)
    found = []
    for parameters, layers in MODELS:
        model = from_counts(parameters, layers, sequence=4096)
        for per_node in RANKS_PER_NODE:
            for ranks in RANKS:
                nodes = ranks // per_node
                if nodes < 2:
                    continue
                cluster = replace(case.cluster, nodes=nodes, ranks_per_node=per_node)
                found.append(_finding(parameters, model, cluster, work))
    return found


def _finding(parameters: float, model: Model, cluster: Cluster, work: Work) -> Finding:
    baseline, ours = parse_variant(BASELINE), parse_variant(OURS)
    speedups, limit = {}, ""
    for gbps in BANDWIDTHS:
        here = replace(cluster, bandwidth_gbps=gbps)
        quantized = predict(model, here, work, ours)
        speedups[gbps] = predict(model, here, work, baseline).step_s / quantized.step_s
        limit = quantized.limit
    paying = [gbps for gbps, speedup in speedups.items() if speedup >= PAYS]
    return Finding(parameters, cluster.num_ranks, cluster.ranks_per_node, speedups,
                   max(paying, default=None), limit)  # fmt: skip


def run(*, as_json: bool, plot: Path | None) -> int:
    """Print the survey, and draw it to ``plot``; returns the exit status."""
    found = survey()
    if as_json:
        print(json.dumps([vars(finding) for finding in found], indent=1))
    else:
        print(format_survey(found))
    if plot is not None:
        _plot(found, plot)
    return 0


def format_survey(found: list[Finding]) -> str:
    """What was taken, and a table."""
    header = ("model", "ranks a node", "ranks", *(f"{gbps:g}" for gbps in BANDWIDTHS),
              "pays up to", "then limited by")  # fmt: skip
    rows = [
        (f"{x.parameters / 1e9:g}B", str(x.ranks_per_node), str(x.ranks),
         *(f"{speedup:.2f}" for speedup in x.speedups.values()),
         "-" if x.pays_up_to_gbps is None else f"{x.pays_up_to_gbps:g}", x.limit_there)
        for x in found
    ]  # fmt: skip
    title = "speed-up of W8G8 over stock bfloat16 by Gbit/s of a node's link; 8192 tokens a rank,"
    return (
        f"{title}\n400 TFLOP/s a rank, activation checkpointing\n\n{format_columns(header, rows)}"
    )


def _plot(found: list[Finding], path: Path) -> None:
    from qsdp.plan.plots import figure

    plt, made, axes = figure(len(RANKS_PER_NODE))
    for axis, per_node in zip(axes, RANKS_PER_NODE, strict=True):
        for finding in found:
            if finding.ranks_per_node == per_node and finding.ranks in (64, 4096):
                style = "-" if finding.ranks == 64 else "--"
                colour = f"C{[p for p, _ in MODELS].index(finding.parameters)}"
                label = f"{finding.parameters / 1e9:g}B, {finding.ranks} ranks"
                axis.plot(*zip(*finding.speedups.items(), strict=True), style, color=colour,
                          label=label)  # fmt: skip
        axis.axhline(1.0, color="gray", lw=0.8)
        axis.set(xscale="log", xlabel="link of a node, Gbit/s", ylabel="W8G8 over stock bfloat16")
        axis.set_title(f"{per_node} rank{'s' * (per_node > 1)} a node", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    made.savefig(path, dpi=110)
    plt.close(made)
