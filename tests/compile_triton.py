"""Compile the Triton kernels for an architecture, without a GPU, and look at what comes out.

    python -m tests.compile_triton 90

Fails where a kernel does not compile, spills, holds an operation that would round differently from
the reference, or moves full runs with narrow loads and stores.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qsdp.kernels.triton_decode import decode_kernel, decode_sum_kernel
from qsdp.kernels.triton_encode import encode_kernel
from qsdp.kernels.triton_gpu import Format

# Fused, approximate or flushing instructions: none has the reference's bits.
FORBIDDEN = r"\bfma\.|\bmad\.rn|\.ftz|\.approx|div\.full|rcp\."
POINTERS = {"wire": "*u8", "table": "*i64", "thresholds": "*i32", "levels": "*fp32"}
CASES = (
    ("encode, 8 bits stochastic, float32", encode_kernel, Format(8, 1024, 1, False), "*fp32", 8),
    ("encode, 5 bits shift, bfloat16", encode_kernel, Format(5, 96, 2, False), "*i16", 2),
    ("decode, 4 bits, bfloat16", decode_kernel, Format(4, 1024, 0, False), "*i16", 2),
    ("decode_sum, 8 bits, float32", decode_sum_kernel, Format(8, 1024, 0, False), "*fp32", 4),
    ("decode, 4 bits with levels", decode_kernel, Format(4, 8192, 0, True), "*fp32", 2),
)


def compile_kernel(kernel: Any, format_: Format, values: str, architecture: int) -> Any:
    bfloat16 = values == "*i16"
    options = format_.options()
    launch = {name: options.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    constants = options | {"VALUE_ALIGNMENT": 16, "CODE_ALIGNMENT": 4, "BF16": bfloat16}
    constants |= {"ROUNDING": format_.rounding, "DIVIDE": True}
    constants |= {"RAW": tl.int16 if bfloat16 else tl.float32}
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    if format_.block_size % 1024 == 0:
        constants["CODE_ALIGNMENT"] = 16
    pointers = POINTERS | {"values": values, "out": values}
    scalars = {"multiply": "fp32", "divide": "fp32"}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in pointers:
            attributes[(index,)] = [["tt.divisibility", 16]]
        kind = "constexpr" if name in constants else scalars.get(name, "i32")
        signature[name] = pointers.get(name, kind)
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch)


def faults(compiled: Any, wide_accesses: int) -> list[str]:
    ptx = compiled.asm["ptx"]
    found = sorted(set(re.findall(FORBIDDEN, ptx)))
    wide = len(re.findall(r"(?:ld|st)\.global(?:\.\w+)*\.v[48]\.", ptx))
    if wide < wide_accesses:
        found.append(f"{wide} 16-byte loads and stores, wanted {wide_accesses}")
    if not compiled.asm["cubin"]:
        found.append("no machine code")
    return found


def main() -> int:
    architecture, bad = int(sys.argv[1]), 0
    for name, kernel, format_, values, wide in CASES:
        found = faults(compile_kernel(kernel, format_, values, architecture), wide)
        print(f"sm_{architecture} {name}: {', '.join(found) or 'good'}")
        bad += bool(found)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
