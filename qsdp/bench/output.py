"""How results are shown: a table, and the facts that a number means nothing without."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from qsdp.bench.measure import BLOCK_SIZE, SUM_ROWS, Row, Settings
from qsdp.columns import format_columns
from qsdp.kernels import Backend
from qsdp.kernels.compare import describe

COLUMNS = ("op", "bits", "format", "dtype", "threads", "what", "GB/s", "copy", "ratio")


def header(settings: Settings, backend: Backend, memory: str, load: str) -> str:
    """Date, machine, versions, command and how to read the numbers."""
    on_gpu = settings.device.type == "cuda"
    counted = "bytes read and written" if on_gpu else "bytes of values"
    facts = {
        "date": date(),
        "commit": commit(),
        "machine": _gpu(settings.device) if on_gpu else f"{machine()}, {platform.system()}",
        "load": load,
        "torch": f"{torch.__version__}, Python {platform.python_version()}",
        "backend": describe(backend),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "values": f"{settings.mib:g} MiB, normal, block {BLOCK_SIZE}; "
        f"decode_sum: {SUM_ROWS} rows that decode to this together",
        "GB/s": f"{counted} by 1e9; medians of {settings.repetitions} interleaved runs at most",
        "copy": "copy_ of the same tensor into existing memory, in the same rounds",
        "memory": memory,
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


def format_rows(rows: Sequence[Row]) -> str:
    """The table of a benchmark of kernels."""
    cells = [
        (
            row.op,
            str(row.bits),
            row.format,
            row.dtype,
            "-" if row.threads is None else str(row.threads),
            row.peer or "qsdp",
            f"{row.gbps:.2f}",
            f"{row.copy_gbps:.2f}",
            f"{row.ratio:.2f}",
        )
        for row in rows
    ]
    return format_columns(COLUMNS, cells)


def date() -> str:
    """Now, for a report."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def machine() -> str:
    """The processor's model and the number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = names[0] if names else platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit of the checkout that this file lies in, or ``unknown``."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _gpu(device: torch.device) -> str:
    triton = importlib.import_module("triton")
    versions = f"CUDA {torch.version.cuda}, Triton {triton.__version__}"
    return f"{torch.cuda.get_device_name(device)}, {versions}"
