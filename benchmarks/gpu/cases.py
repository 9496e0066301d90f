"""Parts 1 and 8: do the kernels give the reference's bytes? In many processes, for compiling.

    python -m benchmarks.gpu.cases [--device cpu] [--rest] [--processes 16] [--limit N]

First the presets' formats in their own block sizes, in every dtype; with ``--rest`` all that
`qsdp check` compares. With TRITON_INTERPRET=1 and ``--device cpu``, Triton's interpreter.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.gpu.options import parser_of
from qsdp import Differences, QSDPConfig, Quantizer
from qsdp.kernels import Backend, backend_for, compare, reference
from qsdp.kernels.compare import dtype_name, example_values, mismatches
from qsdp.quantizer import format_name
from qsdp.ways import row_layout
from qsdp.wire import VALUE_DTYPES, WireLayout

PROCESSES = 16
LARGE = (1 << 20) + 7  # more than a wave of programs, and a short last block


class Case(NamedTuple):
    """Rows of a layout to send through every operation."""

    name: str
    layout: WireLayout
    num_rows: int


def main(argv: list[str] | None = None) -> int:
    """Compare; 1 on any difference or error."""
    parser = parser_of(__doc__)
    parser.add_argument("--rest", action="store_true", help="all that `qsdp check` compares")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--limit", type=int, help="only so many cases")
    options = parser.parse_args(argv)
    cases = list(checked_cases()) if options.rest else list(preset_cases(options.device == "cuda"))
    return run_cases(cases[: options.limit], options.device, options.processes)


def preset_formats(bits: Iterable[int] = range(8, 1, -1)) -> dict[str, Quantizer]:
    """Every format that a preset uses, by who uses it first."""
    found: dict[str, Quantizer] = {}
    for width in bits:
        config = QSDPConfig.preset(f"w{width}g{width}")
        weights, gradients = config.weights, config.gradients
        if isinstance(weights, Differences):
            found["kept"] = weights.kept or Quantizer(8)
            weights = weights.quantizer
        found |= {f"w{width}": weights, f"g{width}": gradients}
    return found


def preset_cases(large: bool) -> Iterable[Case]:
    """The presets' formats among full precision, special values in every kind of block."""
    sizes = (2 * 1024 + 333, 77, 97, 0, 1250)
    for dtype in VALUE_DTYPES:
        for name, form in preset_formats().items():
            layout = layout_of(name, form, sizes, dtype, exact=1)
            num_rows = 4 if dtype == torch.float32 else 2  # as `qsdp check` does
            yield Case(f"{name}, {dtype_name(dtype)}", layout, num_rows)
    for name, form in preset_formats().items() if large else ():
        layout = layout_of(name, form, (LARGE,), torch.float32)
        yield Case(f"{name}, float32, {LARGE} values", layout, 2)


def layout_of(
    name: str, form: Quantizer, sizes: Sequence[int], dtype: torch.dtype, exact: int | None = None
) -> WireLayout:
    """A row as FSDP2 would send it: gradients with their maps of zeros.

    Args:
        name: one of :func:`preset_formats`.
        exact: the place of a parameter in full precision.
    """
    ways = [None if place == exact else form for place in range(len(sizes))]
    direction = "gradients" if name.startswith("g") else "weights"
    return row_layout(sizes, ways, direction, dtype, False)


def checked_cases() -> Iterable[Case]:
    """What `qsdp check` compares, whatever it is: its own loop gives the layouts."""
    found: list[Case] = []

    def keep(_: Any, layout: WireLayout, values: torch.Tensor, __: Any) -> list[str]:
        forms = [s.segment.quantizer for s in layout.spans if s.segment.quantizer is not None]
        name = f"{forms[0].bits} bits, {format_name(forms[0])}, {dtype_name(layout.dtype)}"
        found.append(Case(name, layout, len(values)))
        return []

    with mock.patch.object(compare, "mismatches", keep):
        compare.compare(reference, torch.device("cpu"))
    return found


def run_cases(cases: list[Case], device: str, processes: int) -> int:
    """Differences and errors as they are found, then the count."""
    start, failed, done, took = time.perf_counter(), 0, 0, []
    for case, found, seconds in _results(cases, device, processes):
        done += 1
        took.append((seconds, case.name))
        if found:
            failed += 1
            print(f"DIFFERS  {case.name}: {'; '.join(found)}", flush=True)
        if done % 50 == 0:
            print(f"{done} of {len(cases)} cases", flush=True)
    seconds, name = max(took)
    total = time.perf_counter() - start
    print(
        f"{done - failed} of {len(cases)} cases equal the reference; {total:.1f} s in "
        f"{min(processes, len(cases))} processes, the longest {seconds:.1f} s: {name}",
        flush=True,
    )
    return 1 if failed else 0


def _results(
    cases: list[Case], device: str, processes: int
) -> Iterator[tuple[Case, list[str], float]]:
    """In the order in which they end; in this process, if one is all."""
    jobs = zip(cases, itertools.repeat(device))
    if processes == 1:
        yield from map(_run_case, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes, len(cases)), _start_process) as pool:
        yield from pool.imap_unordered(_run_case, jobs)


def _start_process() -> None:
    torch.set_num_threads(1)


def _run_case(job: tuple[Case, str]) -> tuple[Case, list[str], float]:
    case, device = job[0], torch.device(job[1])
    start = time.perf_counter()
    try:
        found = differences(case, device)
    except Exception as error:
        found = [f"{type(error).__name__}: {error}".replace("\n", " | ")[:2000]]
    return case, found, time.perf_counter() - start


def backend_of(device: torch.device) -> Backend:
    """What runs there; Triton's interpreter if the environment asks for it."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        from qsdp.kernels import triton_gpu

        return triton_gpu
    return backend_for(device)


def differences(case: Case, device: torch.device) -> list[str]:
    """Names of operations whose result is not the reference's."""
    backend = backend_of(device)
    if device.type == "cuda" and backend is reference:
        return ["the Triton kernels do not run here: the reference does"]
    values = example_values(case.num_rows, case.layout.numel, case.layout.dtype)
    return mismatches(backend, case.layout, values, device)


if __name__ == "__main__":
    sys.exit(main())
