"""README's tables, made from the files that runs wrote: ``make readme``.

python benchmarks/readme_tables.py      in a checkout

Rewrites what stands in README.md between ``<!-- NAME -->`` and ``<!-- /NAME -->``. A table whose
files are missing, or of an older form, stays as it is, and stderr says why.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from qsdp.bench.output import COLUMNS
from qsdp.trainer.report import comparison, read_runs

ROOT = Path(__file__).parent.parent
DEMO_RUNS = ("w32g32", "w8g8", "w4g4")  # as recipes/demo.sh names them
PRESETS = ("w8g8", "w4g4", "w3g3", "w2g2")
# What the columns of the table of losses are called, and the results that they are made of.
TEXTS = {
    "plays, lr 0.002": "memory",
    "plays, lr 0.006": "tuned-lr",
    "plays, 0.9M parameters, lr 0.004": "tuned-875k",
    "Wikipedia, lr 0.002": "memory-wikipedia",
}
LINKS = {"1 Gbit/s": 1.0, "100 Mbit/s": 0.1}


class Missing(Exception):
    """What a table is made of is not there; the message says what to run."""


class Line(NamedTuple):
    """A row of the table of kernels: the slowest of these, against a copy."""

    text: str
    op: str
    bits: tuple[int, ...]
    formats: tuple[str, ...]


LEVELS = ("nearest levels", "nearest levels bfloat16 block 128")
DITHER = ("dither", "dither bfloat16 hadamard block 128")
KERNELS = (
    Line("encode 8 bit, nearest and shift", "encode", (8,), ("nearest", "shift")),
    Line("encode 8 bit, stochastic", "encode", (8,), ("stochastic",)),
    Line("encode 4 bit, nearest and shift", "encode", (4,), ("nearest", "shift")),
    Line("encode 3, 5, 6, 7 bit, nearest", "encode", (3, 5, 6, 7), ("nearest",)),
    Line("decode 8 and 4 bit", "decode", (8, 4), ("nearest",)),
    Line("decode_sum of 4 rows, 8 bit", "decode_sum", (8,), ("nearest",)),
    Line("encode with 16 levels", "encode", (4,), LEVELS),
    Line(
        "encode 3 and 4 bit with dither, the slowest with transform and blocks of 128",
        "encode",
        (3, 4),
        DITHER,
    ),
    Line("decode of the same", "decode", (3, 4), DITHER),
)


def demo_table(root: Path) -> str:
    """What `make demo` prints at its end, from the run folders in runs/demo."""
    folders = tuple(root / "runs" / "demo" / name for name in DEMO_RUNS)
    if not all((folder / "result.json").is_file() for folder in folders):
        raise Missing("runs/demo does not hold the three finished runs of `make demo`")
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=False).print(comparison(list(read_runs(folders))))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join(["```", *lines, "```"])


def loss_table(root: Path) -> str:
    """What a preset costs in loss and memory, and what it gains on links of two speeds.

    Losses from the cases of benchmarks/quality/memory.json, on both texts, of tuned-lr.json and of
    tuned-875k.json; steps from the network benchmark.
    """
    results = root / "benchmarks" / "quality" / "results"
    columns = []
    for name in TEXTS.values():
        path = results / f"{name}.json"
        if not path.is_file():
            raise Missing(f"{path.relative_to(root)} is not there: see docs/quality.md")
        content = json.loads(path.read_text())
        rows = content.get("rows", []) if isinstance(content, dict) else []
        columns.append({row["case"]: row for row in rows})
    gains = gains_over_stock(root)
    cells = []
    for preset in PRESETS:
        found = [rows[preset] for rows in columns if preset in rows]
        if not found:
            raise Missing(f"no case in {results.relative_to(root)}/memory.json is {preset}")
        kept = f"{found[0]['kept_bytes']:.2f}" if found[0]["kept_bytes"] else "none"
        changes = (change_of(rows.get(preset)) for rows in columns)
        speeds = (gains.get((preset, gbps), "not run") for gbps in LINKS.values())
        cells.append((f"`{preset}`", f"{found[0]['bits']:.2f}", kept, *speeds, *changes))
    faster = (f"step at {link}" for link in LINKS)
    losses = (f"perplexity, {text}" for text in TEXTS)
    header = "preset", "bits a value", "bytes kept a parameter", *faster, *losses
    return markdown(header, cells)


def gains_over_stock(root: Path) -> dict[tuple[str, float | None], str]:
    """Stock FSDP2's step over a variant's in float32, two hosts with a rank each, by bandwidth."""
    path = root / "benchmarks" / "results" / "network.json"
    if not path.is_file():
        raise Missing(f"{path.relative_to(root)} is not there: see docs/networks.md")
    cells = json.loads(path.read_text())["layouts"][0]["cells"]
    return {
        (cell["variant"], cell["bandwidth_gbps"]): f"{cell['speedup_over_fp32']:.1f}x faster"
        for cell in cells
        if cell["speedup_over_fp32"] is not None
    }


def change_of(row: dict[str, Any] | None) -> str:
    """Of perplexity, with its standard error and the number of seeds."""
    if row is None:
        return "not run"
    change, error, seeds = row["change_percent"], row["change_error"], len(row["seeds"])
    spread = "" if error is None else f" ± {error:.2f} %"
    return f"{change:+.2f} %{spread} ({seeds} seed{'s' if seeds > 1 else ''})"


def kernels_table(root: Path) -> str:
    """Speeds against a copy, from benchmarks/results/kernels-cpu.txt, a report of `qsdp bench
    kernels --out` or `python -m benchmarks.kernel_peers --out`."""
    path = root / "benchmarks" / "results" / "kernels-cpu.txt"
    if not path.is_file():
        raise Missing(f"{path.relative_to(root)} is not there: see docs/kernels.md")
    text = path.read_text()
    values = re.search(r"^values +(\S+ MiB), normal, (block \d+)", text, re.MULTILINE)
    rows = [r for r in report_rows(text) if (r["dtype"], r["what"]) == ("float32", "qsdp")]
    if values is None or not rows:
        raise Missing(f"{path.relative_to(root)} is of an older form: measure again")
    every_threads = list(dict.fromkeys(row["threads"] for row in rows))
    ratios = {
        (row["threads"], row["op"], int(row["bits"]), row["format"]): float(row["ratio"])
        for row in rows
    }
    cells = []
    for line in KERNELS:
        found = []
        for threads in every_threads:
            keys = [(threads, line.op, bits, form) for bits in line.bits for form in line.formats]
            absent = [key for key in keys if key not in ratios]
            if absent:
                _, op, bits, form = absent[0]
                raise Missing(f"{path.relative_to(root)} has no {op} of {bits} bits, {form}")
            found.append(f"{min(ratios[key] for key in keys):.1f}x")
        cells.append((line.text, *found))
    first = f"{values[1]} of float32, {values[2]}, against a copy of the same tensor"
    counts = [f"{threads} thread{'s' if threads != '1' else ''}" for threads in every_threads]
    return markdown((first, *counts), cells)


def report_rows(text: str) -> list[dict[str, str]]:
    """The rows of the table in a report of `qsdp bench kernels`, by column; none if its columns are
    not today's. Formats have spaces, so the dashes under the header say where columns are."""
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if tuple(line.split()) == COLUMNS), None)
    if head is None or head + 1 >= len(lines):
        return []
    spans = [match.span() for match in re.finditer("-+", lines[head + 1])]
    rows = []
    for line in lines[head + 2 :]:
        if not line.strip():
            break
        cells = [line[start:end].strip() for start, end in spans]
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return rows


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    top, *below = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return "\n".join([top, "|---" * len(header) + "|", *below])


def replaced(text: str, name: str, table: str, page: str = "README.md") -> str:
    """``text``, that of ``page``, with ``table`` between the markers of ``name``.

    Raises:
        ValueError: the markers are not there exactly once.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    text, count = pattern.subn(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"{page} must have <!-- {name} --> and <!-- /{name} --> once")
    return text


TABLES: dict[str, Callable[[Path], str]] = {
    "demo": demo_table,
    "loss": loss_table,
    "kernels": kernels_table,
}


def main(root: Path = ROOT) -> int:
    """Read README.md and what its tables are made of below ``root``; write README.md."""
    readme = root / "README.md"
    text = readme.read_text()
    for name, table in TABLES.items():
        try:
            text = replaced(text, name, table(root))
        except Missing as missing:
            print(f"README's table {name} stays as it is: {missing}", file=sys.stderr)
    readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
