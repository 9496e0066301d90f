"""`qsdp bench kernels`: speed of the kernels, beside a copy and beside what else there is.

Steps: compare with the reference, and stop on any difference; measure; print. On CPU the process
starts itself again with an allocator that keeps freed memory: several peers allocate their output
in every call, and page faults would cost them four fifths of their speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from qsdp import check
from qsdp.bench import bars, output
from qsdp.bench.measure import Settings, measure
from qsdp.kernels import Backend, backend_for
from qsdp.wire import Segment, wire_layout

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
DTYPES = {check.name_of(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
REPETITIONS, QUICK_REPETITIONS = 15, 5
LARGE = 1 << 20  # values of the comparison that uses all threads


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 1 if a kernel differs from the reference, and then no speed."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    settings = _settings(options)
    if settings.device.type == "cpu" and platform.system() == "Linux" and not _allocator_is_set():
        command = [sys.executable, "-m", "qsdp.bench.kernels", *argv]
        return subprocess.run(command, env=os.environ | ALLOCATOR).returncode
    load, backend = output.load(), backend_for(settings.device)
    differences = _differences(backend, settings)
    if differences:
        print(f"the {backend.NAME} kernels differ from the reference; no speed:", file=sys.stderr)
        print("\n".join(f"  {difference}" for difference in differences[:10]), file=sys.stderr)
        return 1
    rows = list(measure(settings, backend))
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    parts = [output.header(settings, backend, _allocator_note(settings), load)]
    parts.append("kernels equal the reference: yes, checked before measuring")
    parts.append(output.format_table(rows))
    if options.bars:
        parts.append(bars.format_verdicts(bars.verdicts(rows)))
    report = output.plain_report(*parts)
    if not options.json:
        print(report, end="")
    if options.out is not None:
        output.write_report(options.out, report)
    return 0


run = main


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qsdp bench kernels", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--json", action="store_true", help="print a list of objects in place of the table")
    add("--mib", type=float, help="size of the values; default: 64, on a GPU 1024")
    add("--threads", type=int, nargs="+", default=[1, 2], help="thread counts, on CPU; default 1 2")
    add("--bits", type=int, nargs="+", choices=range(2, 9), help="default: 2 to 8, quick 8 4")
    add("--dtypes", nargs="+", choices=list(DTYPES), help="default: all, quick float32")
    add("--device", choices=("cpu", "cuda"), default=default, help=f"default here: {default}")
    add("--quick", action="store_true", help="fewer settings and runs: seconds, not minutes")
    add("--compile", action="store_true", help="also torch.compile of the reference")
    add("--bars", action="store_true", help="show the promised speeds, pass or FAIL")
    add("--out", type=Path, metavar="FILE", help="also write the dated report to a file")
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    device = torch.device(options.device)
    bits = options.bits or ([8, 4] if options.quick else range(8, 1, -1))
    dtypes = options.dtypes or (["float32"] if options.quick else DTYPES)
    return Settings(
        device,
        options.mib or (1024.0 if device.type == "cuda" else 64.0),
        tuple(options.threads),
        tuple(bits),
        tuple(DTYPES[name] for name in dtypes),
        QUICK_REPETITIONS if options.quick else REPETITIONS,
        options.compile,
    )


def _allocator_is_set() -> bool:
    return all(os.environ.get(name) == value for name, value in ALLOCATOR.items())


def _allocator_note(settings: Settings) -> str:
    if settings.device.type == "cuda":
        return "torch's caching allocator; qsdp's outputs are reused"
    if not _allocator_is_set():
        return "the system's allocator as it is: peers that allocate pay page faults"
    return f"freed memory is kept ({', '.join(ALLOCATOR)}): all sides reuse it"


def _differences(backend: Backend, settings: Settings) -> list[str]:
    """All formats on small inputs, and one input that every thread count has to share."""
    found = check.compare(backend, settings.device).differences
    layout = wire_layout((Segment(LARGE + 7, 8, 1024, "stochastic"),), torch.float32)
    values = check.example_values(1, layout.numel, torch.float32)
    before = torch.get_num_threads()
    for threads in settings.threads if settings.device.type == "cpu" else (before,):
        torch.set_num_threads(threads)
        for name in check.mismatches(backend, layout, values, settings.device):
            found.append(f"{name}: {layout.numel} values, {threads} threads")
    torch.set_num_threads(before)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
