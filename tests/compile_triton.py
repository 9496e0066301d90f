"""Compile the Triton kernels for an architecture, without a GPU, and look at what comes out.

    python -m tests.compile_triton 90

The backend's own calls run on CPU tensors, up to the launch: Triton is told that the active device
is of the architecture, and to warm up. Fails where a kernel does not compile, holds an operation
that would round differently from the reference, moves full runs with narrow loads and stores, or is
compiled anew for another key or number of rows.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from qsdp.kernels import triton_gpu
from qsdp.quantizer import Quantizer, uneven_levels
from qsdp.wire import Segment, WireLayout, wire_layout

# Fused, approximate or flushing instructions: none has the reference's bits.
FORBIDDEN = r"\bfma\.\S+|\bmad\.rn\S*|\S+\.ftz\S*|\S+\.approx\S*|div\.full\S*|rcp\.\S+"
WIDE = r"(?:ld|st)\.global(?:\.\w+)*\.v[48]\."
KERNELS = (triton_gpu.encode_kernel, triton_gpu.decode_kernel, triton_gpu.decode_sum_kernel)
LEVELS = uneven_levels(4)
SMALLEST = Quantizer(8, 1024, "dither", None, "symmetric", "bfloat16", "hadamard")
CASES = (
    ((Segment(5000, Quantizer(8, 1024, "stochastic")), Segment(64)), torch.float32, 8),
    ((Segment(4096, Quantizer(4, 1024, "nearest", LEVELS)), Segment(40)), torch.float16, 4),
    ((Segment(2000, Quantizer(5, 96, "shift")),), torch.bfloat16, 4),
    ((Segment(5000, SMALLEST),), torch.float32, 8),
    ((Segment(5000, Quantizer(8, 1024, "nearest", scale_dtype="bfloat16")),), torch.bfloat16, 4),
)


class Device:
    """What Triton asks of a device before it launches something."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def collect_instead_of_launching(compiled: list[Any]) -> None:
    for kernel in KERNELS:

        def run(*args: Any, start: Any = kernel.run, **kwargs: Any) -> None:
            compiled.append(start(*args, **(kwargs | {"warmup": True})))

        kernel.run = run


def call_all(layout: WireLayout, num_rows: int, key: int) -> None:
    values = torch.zeros(num_rows, layout.numel, dtype=layout.dtype)
    wire = torch.zeros(num_rows, layout.row_bytes, dtype=torch.uint8)
    triton_gpu.encode(values, layout, wire, key=key, first_row=num_rows)
    triton_gpu.decode(wire, layout, values)
    triton_gpu.decode_sum(wire, layout, values[0], multiply=0.5, divide=3.0)


def faults(kernel: Any, wide_accesses: int) -> list[str]:
    ptx = kernel.asm["ptx"]
    found = sorted(set(re.findall(FORBIDDEN, ptx)))
    wide = len(re.findall(WIDE, ptx))
    if wide < wide_accesses:
        found.append(f"{wide} 16-byte loads and stores, wanted {wide_accesses}")
    if not kernel.asm["cubin"]:
        found.append("no machine code")
    return found


def main() -> int:
    architecture, bad = int(sys.argv[1]), 0
    driver.set_active(Device(architecture))
    compiled: list[Any] = []
    collect_instead_of_launching(compiled)
    for segments, dtype, wide in CASES:
        layout = wire_layout(segments, dtype)
        compiled.clear()
        call_all(layout, 2, key=7)
        first = list(compiled)
        call_all(layout, 4, key=2**64 - 1)
        for kernel in first:
            found = faults(kernel, wide)
            print(f"sm_{architecture} {dtype} {kernel.metadata.name}: {', '.join(found) or 'good'}")
            bad += bool(found)
        if {kernel.hash for kernel in compiled} != {kernel.hash for kernel in first}:
            print("compiled anew for another key or number of rows")
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
