"""The tables of docs/networks.md, made from benchmarks/results/network.json.

    python -m benchmarks.network.tables      in a checkout, after python -m benchmarks.network

Rewrites what stands there between ``<!-- NAME -->`` and ``<!-- /NAME -->``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.network import auto, report
from benchmarks.readme_tables import markdown, replaced

ROOT = Path(__file__).parents[2]
WAYS = {
    "stock-fp32": "stock fp32", "stock-bf16": "stock bf16", "w8g8": "W8G8", "w4g4": "W4G4",
    "sdp4bit": "SDP4Bit", "bitdp": "BitDP", "w4g4-rice": "W4G4, coded",
    "w8g8-bf16": "W8G8, bf16", "w4g4-bf16": "W4G4, bf16",
}  # fmt: skip
RATIOS = (
    ("w8g8", "stock-fp32", "W8G8 over fp32"),
    ("w4g4", "stock-fp32", "W4G4 over fp32"),
    ("w4g4-bf16", "stock-bf16", "W4G4 over bf16"),
    ("w8g8", "qsdp-fp32", "W8G8 over unquantized"),
    ("w4g4", "qsdp-fp32", "W4G4 over unquantized"),
)
TWO_LEVEL = {
    "stock-fp32": "stock fp32", "qsdp-fp32": "unquantized, two-level",
    "w8g8-flat": "W8G8, flat", "w8g8": "W8G8, two-level", "w4g4-flat": "W4G4, flat",
    "w4g4": "W4G4, two-level", "sdp4bit": "SDP4Bit", "bitdp": "BitDP",
}  # fmt: skip
Cells = Mapping[tuple[str, float | None], Mapping[str, Any]]


def steps_table(found: Mapping[str, Any]) -> str:
    """Seconds a step with one rank a host, and ratios."""
    cells, limits = _by_limit(found["layouts"][0])
    names = [name for name in WAYS if (name, limits[0]) in cells]
    ratios = [r for r in RATIOS if all((name, limits[0]) in cells for name in r[:2])]
    rows = []
    for gbps in limits:
        steps = {name: cells[name, gbps]["step_s"] for name, at in cells if at == gbps}
        over = (f"{steps[slow] / steps[fast]:.2f}x" for fast, slow, _ in ratios)
        rows.append((report.speed(gbps), *(f"{steps[name]:.2f}" for name in names), *over))
    return markdown(("link", *(WAYS[name] for name in names), *(text for *_, text in ratios)), rows)


def two_level_table(found: Mapping[str, Any]) -> str:
    """Seconds a step and bytes between the hosts, with several ranks a host."""
    cells, limits = _by_limit(found["layouts"][1])
    names = [name for name in TWO_LEVEL if (name, limits[0]) in cells]
    rows = [(report.speed(gbps), *(_both(cells[name, gbps]) for name in names)) for gbps in limits]
    return markdown(("link", *(TWO_LEVEL[name] for name in names)), rows)


def verdicts(found: Mapping[str, Any]) -> str:
    """What the benchmark judges, but for bytes on interfaces."""
    lines = [line for layout in found["layouts"] for line in report.verdicts(layout)]
    return _block(line for line in lines if "on the interface" not in line)


def auto_cells(found: Mapping[str, Any]) -> str:
    """What auto chose in every cell."""
    parts = []
    for layout in found["layouts"]:
        rows = auto.format_rows(layout["auto"], report.speed)
        parts.append(f"{report.title(layout)}\n\n{rows}")
    return _block(["\n\n".join(parts)])


TABLES = {
    "steps": steps_table,
    "two-level": two_level_table,
    "verdicts": verdicts,
    "auto-cells": auto_cells,
}


def _by_limit(layout: Mapping[str, Any]) -> tuple[Cells, Sequence[float | None]]:
    """Cells by variant and bandwidth, and the bandwidths, the fastest first."""
    cells = {(cell["variant"], cell["bandwidth_gbps"]): cell for cell in layout["cells"]}
    limits = sorted({at for _, at in cells}, key=lambda at: -(at or float("inf")))
    return cells, limits


def _both(cell: Mapping[str, Any]) -> str:
    return f"{cell['step_s']:.2f} s, {cell['between_nodes'] / 1e6:.1f} MB"


def _block(lines: Iterable[str]) -> str:
    return "\n".join(["```", *lines, "```"])


def main(root: Path = ROOT) -> int:
    """Read the results below ``root`` and write docs/networks.md there."""
    found = json.loads((root / "benchmarks" / "results" / "network.json").read_text())
    page = root / "docs" / "networks.md"
    text = page.read_text()
    for name, table in TABLES.items():
        text = replaced(text, name, table(found), "docs/networks.md")
    page.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
