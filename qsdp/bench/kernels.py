"""`qsdp bench kernels`: speed of the kernels beside a copy of the same tensor.

It compares them with the reference first, and stops on any difference. What others offer is
measured beside them by `python -m benchmarks.kernel_peers`, in a checkout of qsdp's repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence

import torch

from qsdp.arguments import require_writable
from qsdp.bench import output
from qsdp.bench.measure import Peers, Row, Settings, measure, no_peers
from qsdp.bench.parsers import kernels_parser
from qsdp.bench.parsers import new_parser as new_parser  # for benchmarks.kernel_peers
from qsdp.kernels import Backend, backend_for
from qsdp.kernels.compare import compare, dtype_name, example_values, mismatches
from qsdp.quantizer import Quantizer
from qsdp.wire import VALUE_DTYPES, tensor_layout

_DTYPES = {dtype_name(dtype): dtype for dtype in VALUE_DTYPES}
REPETITIONS, QUICK_REPETITIONS = 15, 5
LARGE = 1 << 20  # values of the comparison that uses all threads


def main(argv: list[str]) -> int:
    """Measure and print; 1 if a kernel differs from the reference, and then no speed."""
    options = kernels_parser().parse_args(argv)
    return report(options, settings_of(options), memory="outputs are reused")


def settings_of(options: argparse.Namespace) -> Settings:
    """What the options of :func:`new_parser` ask for."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    bits = options.bits or ([8, 4] if options.quick else range(8, 1, -1))
    dtypes = options.dtypes or (["float32"] if options.quick else _DTYPES)
    return Settings(
        device,
        options.mib or (1024.0 if device.type == "cuda" else 64.0),
        tuple(options.threads),
        tuple(bits),
        tuple(_DTYPES[name] for name in dtypes),
        QUICK_REPETITIONS if options.quick else REPETITIONS,
    )


def report(
    options: argparse.Namespace,
    settings: Settings,
    *,
    memory: str,
    peers: Peers = no_peers,
    judge: Callable[[Sequence[Row]], str] | None = None,
) -> int:
    """Compare, measure, print, and write what was asked for; returns the exit status.

    Args:
        memory: what the report says about the memory that candidates write to.
        judge: makes the report's last part from its rows.
    """
    if options.out is not None:
        require_writable("--out", options.out)
    load, backend = output.load(), backend_for(settings.device)
    differences = _differences(backend, settings)
    if differences:
        print(f"the {backend.NAME} kernels differ from the reference; no speed:", file=sys.stderr)
        print("\n".join(f"  {difference}" for difference in differences[:10]), file=sys.stderr)
        return 1
    rows = list(measure(settings, backend, peers))
    parts = [
        output.header(settings, backend, memory, load),
        "kernels equal the reference: yes, checked before measuring",
        output.format_rows(rows),
        *([judge(rows)] if judge else []),
    ]
    text = "\n\n".join(parts) + "\n"
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        print(text, end="")
    if options.out is not None:
        options.out.write_text(text)
    return 0


def _differences(backend: Backend, settings: Settings) -> list[str]:
    """All formats on small inputs, and one input that every thread count has to share."""
    found = compare(backend, settings.device).differences
    layout = tensor_layout(LARGE + 7, Quantizer(8, rounding="stochastic"))
    values = example_values(1, layout.numel, layout.dtype)
    before = torch.get_num_threads()
    for threads in settings.threads if settings.device.type == "cpu" else (before,):
        torch.set_num_threads(threads)
        for name in mismatches(backend, layout, values, settings.device):
            found.append(f"{name}: {layout.numel} values, {threads} threads")
    torch.set_num_threads(before)
    return found
