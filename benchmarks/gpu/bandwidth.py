"""Part 2: how close the presets' kernels come to a copy.

    python -m benchmarks.gpu.bandwidth [--device cpu] [--mib N]

GB/s counts bytes read and written; the copy is of the same values in the same rounds, several
times larger than the caches. Medians of interleaved runs.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.gpu.cases import PROCESSES, layout_of, preset_formats
from benchmarks.gpu.options import parser_of
from qsdp.bench.timing import median_seconds
from qsdp.columns import format_columns
from qsdp.kernels import backend_for
from qsdp.kernels.compare import KEY, dtype_name

BITS = (8, 4, 3)
SUM_ROWS = 8  # as of 8 ranks
REPETITIONS = 11


class Run(NamedTuple):
    """One operation to time, and the bytes that it reads and writes."""

    op: str
    call: Callable[[], object]
    moved: int


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=float, help="of values (1024; on CPU 2)")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    dtypes = (torch.float32, torch.bfloat16) if on_gpu else (torch.float32,)
    jobs = [(name, dtype) for dtype in dtypes for name in preset_formats(BITS)]
    if on_gpu:
        # Compiled here, side by side; the measuring process finds the kernels on disk.
        with multiprocessing.get_context("spawn").Pool(min(PROCESSES, len(jobs))) as pool:
            pool.starmap(_compile, jobs)
    if not on_gpu:
        torch.set_num_threads(1)  # more would wait for each other on a machine that is in use
    mib = options.mib or (1024.0 if on_gpu else 2.0)
    header = ("dtype", "format", "bits", "block", "op", "GB/s", "copy GB/s", "ratio")
    rows = []
    for name, dtype in jobs:
        new = list(_measure(name, dtype, device, mib))
        print("  ".join(new[0][:2]), *(f"{row[4]} {row[7]}" for row in new), flush=True)
        rows += new
    print("\n" + format_columns(header, rows), flush=True)
    return 0


def _compile(name: str, dtype: torch.dtype) -> None:
    for run in _runs(name, dtype, torch.device("cuda"), 1 << 20):
        run.call()


def _measure(
    name: str, dtype: torch.dtype, device: torch.device, mib: float
) -> Iterator[tuple[str, ...]]:
    form = preset_formats(BITS)[name]
    numel = int(mib * 2**20) // dtype.itemsize
    runs = {run.op: run for run in _runs(name, dtype, device, numel)}
    source = torch.randn(numel, device=device).to(dtype)
    target = torch.empty_like(source)
    calls = {op: run.call for op, run in runs.items()}
    calls["copy"] = lambda: target.copy_(source)
    seconds = median_seconds(calls, device, repetitions=REPETITIONS, budget=0.2)
    copy = 2 * source.nbytes / seconds["copy"] / 1e9
    for op, run in runs.items():
        gbps = run.moved / seconds[op] / 1e9
        yield (
            *(dtype_name(dtype), name, str(form.bits), str(form.block_size), op),
            *(f"{gbps:.0f}", f"{copy:.0f}", f"{gbps / copy:.2f}"),
        )


def _runs(name: str, dtype: torch.dtype, device: torch.device, numel: int) -> list[Run]:
    """Encode and decode of one row, decode and sum of several, each of ``numel`` values in all."""
    backend, form = backend_for(device), preset_formats(BITS)[name]
    values = torch.randn(1, numel, device=device).to(dtype)
    out, rows = torch.empty_like(values), values.view(SUM_ROWS, -1)
    one, several = (layout_of(name, form, (v.shape[1],), dtype) for v in (values, rows))
    wire = torch.empty(1, one.row_bytes, dtype=torch.uint8, device=device)
    wires = torch.empty(SUM_ROWS, several.row_bytes, dtype=torch.uint8, device=device)
    backend.encode(values, one, wire, key=KEY)
    backend.encode(rows, several, wires, key=KEY)
    total, divide = torch.empty(rows.shape[1], dtype=dtype, device=device), float(SUM_ROWS)
    runs = [
        Run("encode", lambda: backend.encode(values, one, wire, key=KEY), _bytes(values, wire)),
        Run("decode", lambda: backend.decode(wire, one, out), _bytes(wire, out)),
        Run(
            "decode_sum",
            lambda: backend.decode_sum(wires, several, total, divide=divide),
            _bytes(wires, total),
        ),
    ]
    if name != "kept":
        return runs
    travel = layout_of("changes", replace(form, bits=4), (numel,), dtype)
    changes = torch.empty(1, travel.row_bytes, dtype=torch.uint8, device=device)
    stats = torch.empty(1, 4, dtype=torch.float64, device=device)
    backend.encode(torch.zeros_like(values), travel, changes, key=KEY)
    return [
        *runs,
        Run(
            "encode_changes",
            lambda: backend.encode_changes(
                *(values[0], travel, changes[0], wire[0], one, stats), key=KEY
            ),
            _bytes(values, wire, changes),
        ),
        Run(
            "add_changes",
            lambda: backend.add_changes(changes, travel, wire, one, out),
            _bytes(changes, wire, wire, out),
        ),
    ]


def _bytes(*tensors: torch.Tensor) -> int:
    """Of all; what is read and written is given twice."""
    return sum(tensor.nbytes for tensor in tensors)


if __name__ == "__main__":
    sys.exit(main())
