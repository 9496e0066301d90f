"""How results are shown: a table, and the facts that a number means nothing without."""

from __future__ import annotations

import datetime
import importlib
import io
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from qsdp.bench.measure import SUM_ROWS, Row, Settings
from qsdp.check import describe
from qsdp.kernels import Backend

COLUMNS = ("op", "bits", "rounding", "dtype", "threads", "what", "GB/s", "copy", "ratio")
WIDTH = 116


def header(settings: Settings, backend: Backend, allocator: str, load: str) -> str:
    """Date, machine, versions, command and how to read the numbers."""
    on_gpu = settings.device.type == "cuda"
    counted = "bytes read and written" if on_gpu else "bytes of values"
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": _machine(settings.device),
        "load": load,
        "torch": f"{torch.__version__}, Python {platform.python_version()}",
        "backend": describe(backend),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "values": f"{settings.mib:g} MiB, normal, block 1024; "
        f"decode_sum: {SUM_ROWS} rows that decode to this together",
        "GB/s": f"{counted} by 1e9; medians of {settings.repetitions} interleaved runs at most",
        "copy": "copy_ of the same tensor into existing memory, in the same rounds",
        "memory": allocator,
    }
    return "\n".join(f"{name:<9}{fact}" for name, fact in facts.items())


def load() -> str:
    """Load of the minute before; call it before measuring. Other work shows in every number."""
    try:
        average = os.getloadavg()[0]
    except OSError:
        return "unknown"
    busy = ": busy, do not trust these numbers" if average > 1 else ""
    return f"{average:.1f} on {os.cpu_count()} cores in the minute before{busy}"


def format_table(rows: Sequence[Row]) -> str:
    """A rich table, or plain columns where rich is not installed."""
    cells = [_cells(row) for row in rows]
    try:
        console = importlib.import_module("rich.console")
        table_module = importlib.import_module("rich.table")
        box = importlib.import_module("rich.box")
    except ImportError:
        return _plain_table(cells)
    table = table_module.Table(box=box.SIMPLE_HEAD)
    for name in COLUMNS:
        numeric = name in ("bits", "threads", "GB/s", "copy", "ratio")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row, style="bold" if row[5] == "qsdp" else "dim")
    target = sys.stdout if sys.stdout.isatty() else io.StringIO()
    printer = console.Console(file=target, width=WIDTH)
    with printer.capture() as capture:
        printer.print(table)
    return str(capture.get())


def plain_report(*parts: str) -> str:
    """Parts one under the other, without trailing spaces or colours."""
    lines = "\n\n".join(part.strip("\n") for part in parts).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def write_report(path: Path, report: str) -> None:
    """Write a report, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report)


def _cells(row: Row) -> tuple[str, ...]:
    rounding = row.rounding or ("" if row.peer is None else "-")
    if row.levels is not None:
        rounding = f"{row.levels} levels"
    if row.format is not None:
        rounding = row.format if row.levels is None else f"{row.levels} {row.format}"
    return (
        row.op,
        str(row.bits),
        rounding,
        row.dtype,
        "" if row.threads is None else str(row.threads),
        row.peer or "qsdp",
        f"{row.gbps:.2f}",
        f"{row.copy_gbps:.2f}",
        f"{row.ratio:.2f}",
    )


def _plain_table(cells: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (COLUMNS, *cells)
    ]
    return "\n".join(line.rstrip() for line in lines)


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        triton = importlib.import_module("triton")
        versions = f"CUDA {torch.version.cuda}, Triton {triton.__version__}"
        return f"{torch.cuda.get_device_name(device)}, {versions}"
    return f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
