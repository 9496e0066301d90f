"""Compile the Triton kernels for an architecture, without a GPU, and look at what comes out.

    python -m tests.compile_triton 90             sm_90; also 80, 100; minutes
    python -m tests.compile_triton 90 --quick     two formats, as the tests do
    python -m tests.compile_triton gfx942         ROCm, down to assembly

The backend's own calls run on CPU tensors, up to the launch: Triton is told that the active device
is of the architecture, and to warm up. Fails where a kernel does not compile, holds an operation
that would round differently from the reference, spills registers, moves full runs with narrow loads
and stores, is compiled anew for another key or number of rows, or was not compiled by `warm_up`.
Prints how many machine instructions the presets' formats take.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from qsdp.kernels import (
    triton_changes,
    triton_decode,
    triton_encode,
    triton_gpu,
    triton_maps,
    triton_update,
)
from qsdp.quantizer import Quantizer, uneven_levels
from qsdp.wire import Segment, WireLayout, wire_layout

# Fused, approximate or flushing instructions: none has the reference's bits.
FORBIDDEN = r"\bfma\.\S+|\bmad\.rn\S*|\S+\.ftz\S*|\S+\.approx\S*|div\.full\S*|rcp\.\S+"
WIDE = r"(?:ld|st)\.global(?:\.\w+)*\.v[48]\."
KERNELS = (
    triton_encode.encode_kernel,
    triton_decode.decode_kernel,
    triton_decode.decode_sum_kernel,
    triton_maps.write_maps_kernel,
    triton_maps.write_zeros_kernel,
    triton_update.accumulate_kernel,
    triton_update.difference_kernel,
    triton_update.total_kernel,
    triton_changes.encode_changes_kernel,
    triton_changes.add_changes_kernel,
)
# Whose loads and stores of full runs are to be wide.
ON_RUNS = ("encode_kernel", "decode_kernel", "decode_sum_kernel", "accumulate_kernel")
ON_RUNS += ("encode_changes_kernel", "add_changes_kernel")
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)(.*)", re.M)
MAX_SPILLS = 2  # ptxas may move a single number
LEVELS = uneven_levels(4)
SMALLEST = Quantizer(8, 1024, "dither", None, "symmetric", "bfloat16", "hadamard")


class Case(NamedTuple):
    """A segment's format and what else is sent; how many wide loads and stores kernels must have.

    ``kept`` is the format of what changes in the first one are added to, without maps of zeros; in
    ``steps``, or else in one pass.
    """

    numel: int
    quantizer: Quantizer
    raw: int
    dtype: torch.dtype
    wide: int
    kept: Quantizer | None = None
    steps: bool = False

    def layouts(self) -> tuple[WireLayout, WireLayout | None]:
        raw = Segment(self.raw)
        segments = (Segment(self.numel, self.quantizer), raw)
        if self.kept is None:
            return wire_layout(segments, self.dtype, zeros=True), None
        kept = (Segment(self.numel, self.kept), raw)
        layout, kept_layout = (
            wire_layout(each, self.dtype, mark=True) for each in (segments, kept)
        )
        return layout, kept_layout


NEAREST = Quantizer(8, 1024, "nearest")
HALF_SCALES = Quantizer(8, 1024, "nearest", scale_dtype="bfloat16")
CASES = (
    Case(5000, Quantizer(4, 1024, "nearest"), 64, torch.bfloat16, 4, kept=NEAREST),
    Case(5000, SMALLEST, 0, torch.float32, 8),
    Case(4096, Quantizer(4, 1024, "nearest", LEVELS), 40, torch.float16, 4),
    Case(2000, Quantizer(5, 96, "shift"), 0, torch.bfloat16, 4),
    Case(5000, Quantizer(8, 1024, "stochastic"), 64, torch.float32, 8, kept=NEAREST),
    Case(2000, Quantizer(5, 96, "shift"), 0, torch.bfloat16, 4, kept=Quantizer(5, 96, "nearest")),
    Case(5000, SMALLEST, 0, torch.bfloat16, 4, kept=HALF_SCALES),
    Case(5000, SMALLEST, 0, torch.float32, 8, kept=SMALLEST),
    Case(5000, Quantizer(4, 128), 0, torch.bfloat16, 4, kept=NEAREST),
    Case(5000, Quantizer(3, 128), 0, torch.float32, 8, kept=Quantizer(6, 128, "nearest")),
    Case(9000, Quantizer(2, 4096), 0, torch.bfloat16, 4, kept=Quantizer(6, 4096, "nearest")),
    Case(9000, Quantizer(4, 2048), 0, torch.float32, 8, kept=HALF_SCALES, steps=True),
    Case(2000, Quantizer(5, 2048), 0, torch.bfloat16, 4, Quantizer(5, 96, "shift"), steps=True),
    Case(9000, Quantizer(2, 8192, "dither"), 0, torch.float32, 8),
)
# What the presets send, by their names: weights in bfloat16, gradients in float32.
PRESETS = {
    "w8": (Quantizer(8), torch.bfloat16),
    "g8": (Quantizer(8, rounding="stochastic", scaling="symmetric"), torch.float32),
    "g4": (
        Quantizer(4, 128, "dither", scale_dtype="bfloat16", transform="hadamard"),
        torch.float32,
    ),
}
# Changes, of weights in bfloat16, and what they are added to; blocks of one warp.
CHANGES = {
    "4 bits to 8": (Quantizer(4, rounding="nearest"), NEAREST),
    "4 bits to 8, blocks of 128": (Quantizer(4, 128, "nearest"), Quantizer(8, 128, "nearest")),
    "4 bits to 6, blocks of 128": (Quantizer(4, 128, "nearest"), Quantizer(6, 128, "nearest")),
}


class Device:
    """What Triton asks of a device before it launches something."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@triton.jit
def division_kernel(a, b, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """``COUNT`` divisions, to learn what one costs."""
    for at in tl.static_range(COUNT):
        tl.store(a + at, tl.div_rn(tl.load(a + at), tl.load(b + at)))


def collect_instead_of_launching(compiled: list[Any]) -> None:
    for kernel in (*KERNELS, division_kernel):

        def run(*args: Any, start: Any = kernel.run, **kwargs: Any) -> None:
            compiled.append(start(*args, **(kwargs | {"warmup": True})))

        kernel.run = run


def call_all(layout: WireLayout, kept_layout: WireLayout | None, num_rows: int, key: int) -> None:
    values = torch.zeros(num_rows, layout.numel, dtype=layout.dtype)
    wire = torch.zeros(num_rows, layout.row_bytes, dtype=torch.uint8)
    triton_gpu.encode(values, layout, wire, key=key, first_row=num_rows)
    triton_gpu.decode(wire, layout, values)
    triton_gpu.decode_sum(wire, layout, values[0], divide=3.0)
    if kept_layout is not None:
        call_changes(layout, kept_layout, num_rows, key)


def call_changes(layout: WireLayout, kept_layout: WireLayout, num_rows: int, key: int) -> None:
    values = torch.zeros(num_rows, layout.numel, dtype=layout.dtype)
    wire = torch.zeros(num_rows, layout.row_bytes, dtype=torch.uint8)
    kept = torch.zeros(num_rows, kept_layout.row_bytes, dtype=torch.uint8)
    stats = torch.zeros(len(layout.spans), 4, dtype=torch.float64)
    change = (values[0], layout, wire[0], kept[0], kept_layout, stats)
    triton_gpu.encode_changes(*change, key=key, first_row=num_rows, sender=num_rows)
    triton_gpu.add_changes(wire, layout, kept, kept_layout, values, first_sender=num_rows)


def warm_up(layout: WireLayout, kept_layout: WireLayout | None, num_rows: int) -> None:
    triton_gpu.warm_up(
        *(layout, num_rows, layout.dtype, torch.device("cpu")), divide=3.0, kept=kept_layout
    )


def instructions(cubin: bytes) -> list[tuple[int, str, str, str]]:
    """Address, predicate, name and operands of every instruction of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(DISASSEMBLER), file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True)
    labels: dict[str, int] = {}
    found: list[tuple[int, str, str, str]] = []
    for line in text.stdout.splitlines():
        label = re.match(r"^(\.L\w+):", line.strip())
        if label:
            labels[label[1]] = found[-1][0] + 16 if found else 0
        match = INSTRUCTION.match(line)
        if match:
            found.append((int(match[1], 16), match[2] or "", match[3], match[4]))

    def resolved(operands: str) -> str:
        target = re.search(r"\.L\w+", operands)
        return str(labels.get(target[0], -1)) if target else operands

    return [
        (at, predicate, name, resolved(operands) if name.startswith("BRA") else operands)
        for at, predicate, name, operands in found
    ]


def full_path(code: list[tuple[int, str, str, str]]) -> int:
    """Instructions of a full run: on the shortest way to an exit with the most wide accesses.

    Loops count once; branches of rare cases are what the shortest way leaves out.
    """
    place = {at: index for index, (at, _, _, _) in enumerate(code)}
    best: list[tuple[int, int]] = [(-1, 0)] * (len(code) + 1)  # wide accesses, minus instructions
    for index in reversed(range(len(code))):
        _, predicate, name, operands = code[index]
        ways = []
        if name.startswith("BRA"):
            target = place.get(int(operands), -1) if operands.strip("-").isdigit() else -1
            if target > index:
                ways.append(best[target])
        if not (name.startswith(("BRA", "EXIT", "RET")) and not predicate):
            ways.append(best[index + 1])
        if name.startswith("EXIT"):
            ways.append((0, 0))
        wide, minus = max(ways, default=(-1, 0))
        best[index] = (
            wide + bool(re.search(r"^(?:LD|ST)G.*\.(?:128|256)", name)) if wide >= 0 else -1,
            minus - 1,
        )
    return -best[0][1]


def division_cost(compiled: list[Any]) -> tuple[int, int]:
    """Fused instructions of one division, and of the subroutine that divisions share."""
    numbers = torch.zeros(4)
    fused = []
    for count in (1, 2):
        compiled.clear()
        division_kernel[(1,)](numbers, numbers, COUNT=count, enable_fp_fusion=False)
        names = [name for _, _, name, _ in instructions(compiled[0].asm["cubin"])]
        fused.append(sum(name.startswith("FFMA") for name in names))
    return fused[1] - fused[0], max(2 * fused[0] - fused[1], 0)


def on_runs(kernel: Any) -> bool:
    return kernel.metadata.name in ON_RUNS


def faults(kernel: Any, wide_accesses: int, division: tuple[int, int]) -> list[str]:
    """``wide_accesses``: wanted of a thread."""
    ptx = kernel.asm["ptx"]
    found = sorted(set(re.findall(FORBIDDEN, ptx)))
    wide = len(re.findall(WIDE, ptx))
    if on_runs(kernel) and wide < wide_accesses:
        found.append(f"{wide} 16-byte loads and stores, wanted {wide_accesses}")
    names = [name for _, _, name, _ in instructions(kernel.asm["cubin"])]
    if not names:
        return [*found, "no machine code"]
    fused = sum(name.startswith(("FFMA", "DFMA")) for name in names)
    divisions = len(re.findall(r"div\.rn\.f32", ptx))
    allowed = divisions * division[0] + bool(divisions) * division[1]
    if fused > allowed:
        found.append(f"{fused} fused instructions, {divisions} divisions need {allowed}")
    spills = sum(name.startswith(("LDL", "STL")) for name in names)
    if spills > MAX_SPILLS:
        found.append(f"{spills} spills")
    return found


def rocm_faults(kernel: Any) -> list[str]:
    """Fused instructions outside of divisions, which are five each; spills; flushed denormals."""
    text = kernel.asm["amdgcn"]
    fused = len(re.findall(r"^\s+v_(?:pk_)?(?:fma|mad|mac|fmac)_f\w+", text, re.M))
    divisions = len(re.findall(r"^\s+v_div_fixup_f32", text, re.M))
    found = [f"{fused} fused instructions, {divisions} divisions"] * (fused != 5 * divisions)
    found += ["spills"] * (not re.search(r"vgpr_spill_count:? *0\b", text))
    return found + ["flushes denormals"] * ("denorm_mode_32 3" not in text)


def check(
    title: str, cases: Sequence[Case], compiled: list[Any], division: tuple[int, int] | None
) -> int:
    """``division`` None: not for NVIDIA. Returns how many kernels have faults."""
    bad = 0
    for case in cases:
        layouts = case.layouts()
        compiled.clear()
        warm_up(*layouts, 2)
        warm = {kernel.hash for kernel in compiled}
        compiled.clear()
        call_all(*layouts, 2, key=7)
        first = list(compiled)
        call_all(*layouts, 4, key=2**64 - 1)
        warps = min(kernel.metadata.num_warps for kernel in first if on_runs(kernel))
        for kernel in first:
            # With twice as many threads for a run each has half of the accesses.
            name, more = kernel.metadata.name, kernel.metadata.num_warps > warps
            twice = name == "accumulate_kernel" or (more and "changes" in name)
            wide = case.wide // 2 if twice else case.wide
            found = rocm_faults(kernel) if division is None else faults(kernel, wide, division)
            print(f"{title} {case.dtype} {name}: {', '.join(found) or 'good'}")
            bad += bool(found)
        if {kernel.hash for kernel in compiled} != {kernel.hash for kernel in first}:
            print("compiled anew for another key or number of rows")
            bad += 1
        names = {kernel.metadata.name for kernel in first}
        if case.kept and case.steps == ("add_changes_kernel" in names):
            print(f"not {'in steps' if case.steps else 'in one pass'}: {case}")
            bad += 1
        if {kernel.hash for kernel in compiled} - warm:
            print("not compiled by warm_up")
            bad += 1
    return bad


def print_costs(title: str, compiled: list[Any]) -> None:
    """Machine instructions for 1,024 values: of a run, times its warps."""

    def show(name: str, kinds: Sequence[str]) -> None:
        for kernel in compiled:
            kind = kernel.metadata.name
            if kind in kinds:
                cost = full_path(instructions(kernel.asm["cubin"])) * kernel.metadata.num_warps
                print(f"{title} {name} {kind}: {cost} instructions")

    for name, (quantizer, dtype) in PRESETS.items():
        zeros = name.startswith("g")
        layout = wire_layout((Segment(1 << 16, quantizer),), dtype, zeros=zeros)
        compiled.clear()
        call_all(layout, None, 2, key=7)
        show(name, ("encode_kernel", "decode_kernel"))
    for name, (quantizer, kept) in CHANGES.items():
        layout, kept_layout = (
            wire_layout((Segment(1 << 16, each),), torch.bfloat16, mark=True)
            for each in (quantizer, kept)
        )
        for steps in (False, True):
            compiled.clear()
            with mock.patch.object(
                *(triton_gpu, "pair_plan_for"),
                (lambda *_: None) if steps else triton_gpu.pair_plan_for,
            ):
                call_changes(layout, kept_layout, 2, key=7)
            show(f"{name}{', in steps' * steps}", [kernel.metadata.name for kernel in compiled])


def main() -> int:
    architecture, quick = sys.argv[1], "--quick" in sys.argv
    nvidia = architecture.isdigit()
    name = int(architecture) if nvidia else architecture
    driver.set_active(Device(GPUTarget("cuda", name, 32) if nvidia else GPUTarget("hip", name, 64)))
    compiled: list[Any] = []
    collect_instead_of_launching(compiled)
    title = f"sm_{architecture}" if nvidia else architecture
    division = division_cost(compiled) if nvidia else None
    bad = check(title, CASES[:2] if quick else CASES, compiled, division)
    if nvidia and not quick:
        print_costs(title, compiled)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
