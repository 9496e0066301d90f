"""What the network benchmark measured, as cells, tables, verdicts and a plot.

A cell is one variant at one bandwidth: a JSON object with the medians of its steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.network import auto
from qsdp.bench import output
from qsdp.bench.steps import TIMES, Sample, medians
from qsdp.columns import format_columns

BASELINES = ("stock-fp32", "stock-bf16")
PLOT_STYLE = {
    "stock-fp32": ("black", "o"),
    "stock-bf16": ("dimgray", "s"),
    "qsdp-fp32": ("tab:orange", "v"),
    "qsdp-fp32-flat": ("sandybrown", "1"),
    "qsdp-bf16": ("goldenrod", "2"),
    "w8g8": ("tab:blue", "D"),
    "w8g8-flat": ("tab:cyan", "^"),
    "w4g4": ("tab:green", "P"),
    "w4g4-flat": ("limegreen", "3"),
    "w8g8-bf16": ("tab:purple", "d"),
    "w4g4-bf16": ("tab:olive", "p"),
    "sdp4bit": ("tab:pink", "<"),
    "bitdp": ("tab:red", "*"),
    "w4g4-rice": ("tab:brown", "h"),
}
# Each beside the stock run that computes in the same precision.
SPEEDUP_BARS = (
    ("w8g8", "fp32", 2.25),
    ("w4g4", "fp32", 3.0),
    ("w8g8-bf16", "bf16", 1.5),
    ("w4g4-bf16", "bf16", 2.0),
)

APART = 1.25
"""From one tick of the plot to the next, at least."""


def facts() -> dict[str, Any]:
    """Where and when; other work on the machine shows in every number."""
    return {
        "date": output.date(),
        "machine": output.machine(),
        "load": output.load(),
        "commit": output.commit(),
    }


def cells(
    gbps: float | None, measured: Mapping[str, Sequence[Sequence[Any]]]
) -> list[dict[str, Any]]:
    """The medians of each variant's samples at one bandwidth."""
    return [
        {"variant": name, "bandwidth_gbps": gbps, **medians([Sample(*row) for row in rows])}
        for name, rows in measured.items()
    ]


def with_speedups(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each cell beside the baselines at its bandwidth, and beside itself without a limit."""
    by_key = {(cell["variant"], cell["bandwidth_gbps"]): cell for cell in found}
    for cell in found:
        for baseline in BASELINES:
            other = by_key.get((baseline, cell["bandwidth_gbps"]))
            key = f"speedup_over_{baseline.removeprefix('stock-')}"
            cell[key] = other["step_s"] / cell["step_s"] if other else None
        unlimited = by_key.get((cell["variant"], None))
        cell["times_unlimited"] = cell["step_s"] / unlimited["step_s"] if unlimited else None
        counted, seen = cell["between_nodes"], cell["on_interface"]
        cell["interface_over_counted"] = seen / counted if counted and seen else None
    return found


def gbps_of_network_share(found: Sequence[Mapping[str, Any]], share: float) -> float | None:
    """The bandwidth at which stock float32 spends ``share`` of its step in the network.

    Its network time is taken as a fixed part plus bytes / bandwidth, fitted to the slowest two
    limits that were measured, and the rest of its step as the median. None without two limits.
    """
    stock = [c for c in found if c["variant"] == BASELINES[0] and c["bandwidth_gbps"] is not None]
    if len(stock) < 2:
        return None
    slow, faster = sorted(stock, key=lambda cell: cell["bandwidth_gbps"])[:2]
    inverse = [1 / cell["bandwidth_gbps"] for cell in (slow, faster)]
    slope = (slow["network_s"] - faster["network_s"]) / (inverse[0] - inverse[1])
    fixed = slow["network_s"] - slope * inverse[0]
    rest = statistics.median(cell["step_s"] - cell["network_s"] for cell in stock)
    wanted = rest * share / (1 - share) - fixed
    return round(slope / wanted, 4) if wanted > 0 and slope > 0 else None


def speed(gbps: float | None) -> str:
    """A limit in words."""
    if gbps is None:
        return "no limit"
    return f"{gbps:g} Gbit/s" if gbps >= 1 else f"{gbps * 1e3:g} Mbit/s"


def format_report(found: Mapping[str, Any]) -> str:
    """Facts, one table a layout, and verdicts."""
    model, lines = found["model"], [f"{name:<9}{fact}" for name, fact in found["facts"].items()]
    lines.append(
        f"{'model':<9}GPT-2 of {found['parameters']:,} parameters ({model['layers']} layers, width "
        f"{model['width']}), {model['batch_size']} x {model['sequence_length']} tokens a step"
    )
    lines.append(f"{'steps':<9}medians of {found['steps']}, variants in turn, seconds")
    for layout in found["layouts"]:
        lines += ["", title(layout), ""]
        lines.append(_table(layout["cells"]))
        lines += ["", *verdicts(layout)]
        if layout.get("auto"):
            lines += ["", auto.format_rows(layout["auto"], speed)]
    return "\n".join(lines)


def title(layout: Mapping[str, Any]) -> str:
    """A layout in words."""
    hosts, ranks = layout["hosts"], layout["ranks_per_host"]
    return f"{hosts} hosts with {ranks} rank{'s' * (ranks > 1)} each"


def _table(found: Sequence[Mapping[str, Any]]) -> str:
    header = ("bandwidth", "variant", "step", "compute", "encode", "network", "decode", "MB out",
              "nic/qsdp", "vs fp32", "vs bf16", "vs no limit")  # fmt: skip
    rows = [
        (
            speed(cell["bandwidth_gbps"]),
            cell["variant"],
            *(f"{cell[name]:.3f}" for name in TIMES),
            f"{cell['between_nodes'] / 1e6:.1f}",
            _number(cell["interface_over_counted"], ".3f"),
            _number(cell["speedup_over_fp32"], ".2f"),
            _number(cell["speedup_over_bf16"], ".2f"),
            _number(cell["times_unlimited"], ".2f"),
        )
        for cell in sorted(found, key=lambda c: -(c["bandwidth_gbps"] or float("inf")))
    ]
    return format_columns(header, rows)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def verdicts(layout: Mapping[str, Any]) -> list[str]:
    """One line a bar that this layout's variants and bandwidths can answer."""
    found = []
    by_key = {(c["variant"], c["bandwidth_gbps"]): c for c in layout["cells"]}
    for text, measured, at_least, at_most in _bars(layout, by_key):
        holds = (at_least is None or measured >= at_least) and (
            at_most is None or measured <= at_most
        )
        wanted = f">= {at_least:g}" if at_most is None else f"<= {at_most:g}"
        if at_least is not None and at_most is not None:
            wanted = f"{at_least:g} to {at_most:g}"
        found.append(f"{'pass' if holds else 'FAIL'}  {measured:7.3f}  {wanted:<14} {text}")
    return found


Bar = tuple[str, float, float | None, float | None]


def _bars(layout: Mapping[str, Any], by_key: Mapping[Any, Mapping[str, Any]]) -> list[Bar]:
    found: list[Bar] = []
    at = layout["gbps_of_network_share"]
    where = f"{speed(at)}, where stock float32 spends 3/4 of its step in the network"
    for name, baseline, at_least in SPEEDUP_BARS:
        cell = by_key.get((name, at))
        if at is not None and cell is not None and cell[f"speedup_over_{baseline}"] is not None:
            text = f"{name} over stock {baseline} at {where}"
            found.append((text, cell[f"speedup_over_{baseline}"], at_least, None))
    for (name, gbps), cell in by_key.items():
        if name == "w8g8" and gbps is not None and gbps <= 0.5:
            ratio = cell["network_s"] / transfer_seconds(cell, layout["hosts"])
            if layout["ranks_per_host"] == 1:
                found.append((f"w8g8 network time / (bytes / {speed(gbps)})", ratio, 0.95, 1.05))
        fast, over = gbps is None or gbps >= 10, cell["speedup_over_fp32"]
        if name in ("w8g8", "w4g4") and fast and over is not None:
            found.append((f"{name} over stock fp32, {speed(gbps)}", over, 0.97, None))
    for (name, gbps), cell in by_key.items():
        seen = cell["interface_over_counted"]
        if seen is not None and gbps == min((g for _, g in by_key if g), default=None):
            text = f"{name}: bytes on the interface over bytes counted, {speed(gbps)}"
            found.append((text, seen, 0.98, 1.02))
        flat = by_key.get(("w8g8-flat", gbps))
        if name == "w8g8" and flat is not None:
            ratio = flat["between_nodes"] / cell["between_nodes"]
            text = f"bytes between hosts, flat over two-level, {speed(gbps)}"
            found.append((text, ratio, 1.9, None))
    return found


def transfer_seconds(cell: Mapping[str, Any], hosts: int) -> float:
    """Bytes that a host sends a step over the limit of its link."""
    return float(cell["between_nodes"] / hosts * 8e-9 / cell["bandwidth_gbps"])


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Step time against bandwidth, one panel a layout; unlimited at the right edge."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layouts = found["layouts"]
    figure, axes = plt.subplots(
        1, len(layouts), figsize=(5.6 * len(layouts), 4.2), squeeze=False, layout="constrained"
    )
    for axis, layout in zip(axes[0], layouts, strict=True):
        _panel(axis, layout)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis: Any, layout: Mapping[str, Any]) -> None:
    limits = [c["bandwidth_gbps"] for c in layout["cells"] if c["bandwidth_gbps"] is not None]
    edge = max(limits, default=1.0) * 4
    for name in dict.fromkeys(cell["variant"] for cell in layout["cells"]):
        points = sorted(
            (cell["bandwidth_gbps"] or edge, cell["step_s"])
            for cell in layout["cells"]
            if cell["variant"] == name
        )
        colour, marker = PLOT_STYLE.get(name, (None, "x"))
        axis.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, ms=5, lw=1.4)
    ticks = _ticks(limits)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks([*ticks, edge], [*(f"{tick:.3g}" for tick in ticks), "none"])
    axis.minorticks_off()
    axis.set_xlabel("limit of each host's link, Gbit/s")
    axis.set_ylabel("seconds a step")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    low, high = axis.get_ylim()
    axis.set_yticks([t for t in (0.2, 0.5, 1, 2, 5, 10, 20, 50) if low <= t <= high])
    axis.set_title(f"{layout['hosts']} hosts x {layout['ranks_per_host']} ranks", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _ticks(limits: Sequence[float]) -> list[float]:
    """The limits, without those whose numbers would stand on those of a rounder one."""
    found: list[float] = []
    for limit in sorted({*limits}, key=lambda limit: (len(f"{limit:g}"), limit)):
        if all(max(limit, other) / min(limit, other) > APART for other in found):
            found.append(limit)
    return sorted(found)
