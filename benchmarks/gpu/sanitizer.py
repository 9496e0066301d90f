"""Part 6: compute-sanitizer and Nsight Compute on the six kernels that presets run most.

    python -m benchmarks.gpu.sanitizer [--tools memcheck racecheck ncu]
    python -m benchmarks.gpu.sanitizer --kernels MIB      the kernels alone, each once

Memory errors and races of the kernels; then, of each, time, throughput and occupancy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.options import parser_of
from qsdp import Differences, QSDPConfig
from qsdp.kernels import backend_for
from qsdp.kernels.compare import KEY
from qsdp.wire import Segment, wire_layout

CHECKERS = ("memcheck", "racecheck")
PROFILER = "ncu"
SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats", "InstructionStats")
# Not to be installed on a path, where CUDA puts them.
FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/nsight-compute")
TIMEOUT_S = 60
KEPT_CHARACTERS = 20_000
SMALL_MIB, LARGE_MIB = 0.05, 256.0  # of a row of values: for checkers, and to be measured


def main(argv: list[str] | None = None) -> int:
    """Run what is there; 1 if a program reports an error or does not end."""
    parser = parser_of(__doc__)
    parser.add_argument("--kernels", type=float, metavar="MIB", help="only run the kernels")
    parser.add_argument("--tools", nargs="+", default=[*CHECKERS, PROFILER])
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for each")
    options = parser.parse_args(argv)
    if options.kernels is not None:
        run_kernels(options.kernels, torch.device(options.device))
        return 0
    if options.device == "cpu":
        print("skipped: these programs look into GPU kernels")
        return 0
    for mib in (SMALL_MIB, LARGE_MIB):
        run_kernels(mib, torch.device("cuda"))  # compiled before they are watched
    return max([_run_tool(tool, options.timeout) for tool in options.tools])


def run_kernels(mib: float, device: torch.device) -> None:
    """Encode w8 and g4, decode w8, decode and sum g8, encode and add the changes of w4: once each,
    rows with short last blocks.
    """
    backend = backend_for(device)
    eight, four = QSDPConfig.preset("w8g8"), QSDPConfig.preset("w4g4")
    numel = int(mib * 2**20) // 4 + 333
    values = torch.randn(4, numel, device=device)
    made = []
    for form in (eight.weights, four.gradients, eight.gradients):
        layout = wire_layout((Segment(numel - 77, form), Segment(77)), torch.float32)
        wire = torch.zeros(4, layout.row_bytes, dtype=torch.uint8, device=device)
        made.append((layout, wire))
    (w8, w8_wire), (g4, g4_wire), (g8, g8_wire) = made
    backend.encode(values, w8, w8_wire, key=KEY)
    backend.encode(values, g4, g4_wire, key=KEY)
    backend.decode(w8_wire, w8, values)
    backend.decode_sum(g8_wire, g8, values[0], divide=4.0)
    differences = four.weights
    assert isinstance(differences, Differences)
    changes, kept = (
        wire_layout((Segment(numel - 77, form), Segment(77)), torch.float32, mark=True)
        for form in (differences.quantizer, differences.kept)
    )
    wire, rows = (
        torch.zeros(4, layout.row_bytes, dtype=torch.uint8, device=device)
        for layout in (changes, kept)
    )
    stats = torch.zeros(2, 4, dtype=torch.float64, device=device)
    backend.encode_changes(values[1], changes, wire[0], rows[0], kept, stats, key=KEY)
    backend.add_changes(wire, changes, rows, kept, values)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _run_tool(tool: str, timeout: float) -> int:
    """0 if the program ended well, or is not there."""
    name = PROFILER if tool == PROFILER else "compute-sanitizer"
    program = _find(name)
    if program is None:
        print(f"{tool}: no program {name} on this machine", flush=True)
        return 0
    if tool == PROFILER:
        # Clocks stay as they are. Kernels of ours only, not those that make the inputs.
        command = [program, "--clock-control", "none", "-k", "regex:encode|decode|add_changes"]
        command += [part for section in SECTIONS for part in ("--section", section)]
        mib, environment = LARGE_MIB, {}
    else:
        command = [program, "--tool", tool, "--error-exitcode", "3"]
        # Each tensor in an allocation of its own, so that its end is known.
        mib, environment = SMALL_MIB, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command += [sys.executable, "-m", "benchmarks.gpu.sanitizer", "--kernels", str(mib)]
    return _run(tool, command, environment, timeout)


def _run(tool: str, command: list[str], environment: dict[str, str], timeout: float) -> int:
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        print(f"{tool}: not done after {timeout:.0f} s\n{text[-2000:]}", flush=True)
        return 1
    seconds = time.perf_counter() - start
    print(f"\n{tool}: status {done.returncode}, {seconds:.1f} s\n{done.stdout[:KEPT_CHARACTERS]}")
    sys.stdout.flush()
    return 1 if done.returncode else 0


def _find(name: str) -> str | None:
    found = shutil.which(name)
    if found:
        return found
    for folder in map(Path, FOLDERS):
        for path in sorted(folder.glob(f"**/{name}"), reverse=True) if folder.is_dir() else ():
            if path.is_file():
                return str(path)
    return None


if __name__ == "__main__":
    sys.exit(main())
