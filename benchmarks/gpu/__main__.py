"""The report of a machine with a GPU, part by part in order of value.

    OUT=folder bash benchmarks/gpu_report.sh [--parts 1,3] [--device cpu] [--seconds 570]

Each part is a process of its own with its own time limit; what it prints is in the folder's
report.txt as soon as it is printed, and summary.txt says how each part ended. So whatever ends
this, only the part that runs is lost.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.gpu.processes import OK, Ended, run_limited
from qsdp.columns import format_columns

ROOT = Path(__file__).parent.parent.parent
REPORT, SUMMARY = "report.txt", "summary.txt"
SECONDS = 570.0
SKIPPED = "skipped"
LEAST = 10.0  # seconds left that a part is worth starting in


class Part(NamedTuple):
    """A module to run.

    Attributes:
        options: of the module, on a GPU.
        small: its options on a CPU instead.
        limit: seconds; the last parts are expected to take what is left.
        skip: why a CPU does not run it, where it does not.
    """

    number: int
    title: str
    module: str
    limit: float
    options: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    skip: str = ""


PARTS = (
    Part(
        *(1, "presets' kernels against the reference", "cases", 130.0),
        small=("--processes", "1", "--limit", "15"),
    ),
    Part(2, "bandwidth of the presets' kernels", "bandwidth", 70.0, small=("--mib", "0.25")),
    Part(
        *(3, "steps of 1.3 billion parameters, one of 8 ranks", "steps", 100.0),
        *(("--out", "{out}"), ("--out", "{out}")),
    ),
    Part(4, "two and four ranks as threads", "threaded", 100.0),
    Part(5, "NCCL with one rank, CUDA graphs", "nccl", 45.0, skip="NCCL is for GPUs"),
    Part(
        *(6, "compute-sanitizer and Nsight Compute", "sanitizer", 150.0, ("--timeout", "45")),
        skip="these programs look into GPU kernels",
    ),
    Part(7, "loss of 125 million parameters", "loss", 120.0, small=("--steps", "20")),
    Part(
        *(8, "all that `qsdp check` compares", "cases", 400.0, ("--rest",)),
        small=("--rest", "--processes", "1", "--limit", "15"),
    ),
)


class Line(NamedTuple):
    """Of the summary."""

    part: Part
    status: str
    seconds: float


def main(argv: list[str] | None = None) -> int:
    """Run the parts; 0 if all ended well."""
    options = _parser().parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    end = time.monotonic() + options.seconds
    with (options.out / REPORT).open("w", encoding="utf-8") as report:
        if _run("machine", ("--device", options.device), 60.0, options, report).status != OK:
            return 1
        lines: list[Line] = []
        for part in PARTS:
            if part.number in options.parts:
                lines.append(_run_part(part, end - time.monotonic(), options, report))
                _say(lines, options.out)
    return 0 if all(line.status in (OK, SKIPPED) for line in lines) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bash benchmarks/gpu_report.sh",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        epilog="\n".join(f"{part.number}  {part.title}" for part in PARTS),
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to ($OUT)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: in small")
    parser.add_argument("--parts", type=_numbers, default={p.number for p in PARTS}, help="1,3")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all ({SECONDS:.0f})")
    return parser


def _numbers(text: str) -> set[int]:
    known = {part.number for part in PARTS}
    numbers = {int(word) if word.isdigit() else -1 for word in text.split(",")}
    if not numbers <= known:
        raise argparse.ArgumentTypeError(f"parts are numbers from 1 to {max(known)}: {text!r}")
    return numbers


def _run_part(part: Part, left: float, options: Any, report: IO[str]) -> Line:
    _write(report, f"\n=== {part.number}. {part.title}\n")
    if left < LEAST:
        _write(report, "not run: no time left\n")
        return Line(part, "not run: no time left", 0.0)
    if options.device == "cpu" and part.skip:
        _write(report, f"skipped: {part.skip}\n")
        return Line(part, SKIPPED, 0.0)
    own = part.small if options.device == "cpu" else part.options
    arguments = [word.replace("{out}", str(options.out.resolve())) for word in own]
    limit = min(part.limit, left)
    ended = _run(part.module, ("--device", options.device, *arguments), limit, options, report)
    return Line(part, ended.status, ended.seconds)


def _run(
    module: str, arguments: tuple[str, ...], limit: float, options: Any, report: IO[str]
) -> Ended:
    command = [sys.executable, "-u", "-m", f"benchmarks.gpu.{module}", *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONWARNINGS": "ignore",
        "PYTHONFAULTHANDLER": "1",  # so that a part that is stopped says where it was
    }
    if options.device == "cuda":
        environment.pop("TRITON_INTERPRET", None)
    return run_limited(command, limit, environment, lambda text: _write(report, text))


def _write(report: IO[str], text: str) -> None:
    """To the report and to the terminal, at once."""
    for file in (report, sys.stdout):
        file.write(text)
        file.flush()


def _say(lines: list[Line], folder: Path) -> None:
    """Print the summary so far, and keep it."""
    cells = [
        (str(line.part.number), line.part.title, line.status, f"{line.seconds:.0f}")
        for line in lines
    ]
    text = format_columns(("part", "what", "result", "seconds"), cells)
    (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}", flush=True)


def _stop(number: int, _: object) -> None:
    """Ends the part that runs, by way of what waits for it."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
