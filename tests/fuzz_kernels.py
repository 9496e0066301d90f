"""Random comparison of the native kernels with the reference, under AddressSanitizer.

    python tests/fuzz_kernels.py [--cases 3000] [--coded 3000] [--seed 0]

Builds cpu.cpp with AddressSanitizer and UndefinedBehaviorSanitizer into a temporary folder and runs
itself again with that library. All memory that a kernel gets is allocated to the byte, so a read or
write beyond it ends the run. Prints the number of cases and of differences; fails on any.

test_kernels_cpu.py runs the same cases, without sanitizers, with guard bytes around the memory.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import torch
from coded_rows import check_row, random_row

from qsdp.kernels import build, cpu, reference
from qsdp.kernels.compare import same_bits, same_stats, with_bits
from qsdp.quantizer import MAX_BITS, MIN_BITS, Quantizer, every_format
from qsdp.wire import VALUE_DTYPES, Segment, WireLayout, wire_layout

BITS = range(MIN_BITS, MAX_BITS + 1)
FORMATS = every_format()
SIZES = (0, 1, 2, 31, 32, 33, 127, 128, 129, 255, 1000, 1023, 1024, 1025, 3000, 9000)
BLOCK_SIZES = (32, 64, 96, 128, 160, 256, 1024, 2048, 4096, 8192)
GUARD, GUARD_BYTES = 0xA5, 64

# What a stretch of values is made of. float32 bit patterns have 23 bits of mantissa.
KINDS = (
    *("normal", "any bits", "finite bits", "denormal", "tiny range", "huge", "constant"),
    *("zeros", "holes", "one special", "neighbours", "few values", "overflowing sum"),
)


@dataclass(frozen=True)
class Case:
    """One comparison: everything but the values, which ``seed`` and ``kinds`` determine."""

    segments: tuple[Segment, ...]
    dtype: torch.dtype
    out_dtype: torch.dtype
    num_rows: int
    first_row: int
    key: int
    kinds: tuple[str, ...]  # of each segment
    seed: int
    misalignments: tuple[int, int, int] = (0, 0, 0)  # of values, wire and output, in bytes
    isa: str = "baseline"
    num_threads: int = 1
    multiply: float = 1.0
    divide: float = 1.0
    random_wire: bool = False  # decode bytes that no encoder wrote
    zeros: bool = False  # maps of zeros
    scattered: bool = False  # rows in two leading dimensions, apart and not in order


def supported_isas() -> list[str]:
    """The instruction sets that this machine runs; leaves the best one in use."""
    found = []
    for name in ("avx512", "avx2", "baseline"):
        try:
            cpu.set_isa(name)
        except ValueError:
            continue
        found.append(name)
    cpu.set_isa(None)
    return found


def random_levels(random: Random, bits: int) -> tuple[float, ...]:
    """Increasing numbers from 0 to 1, some of them closer than the grid resolves."""
    scale = random.choice((1.0, 1e-3, 1e-6))
    top = random.choice((1.0, 0.5, 1 - 2**-24))
    inner = {random.random() * scale * top for _ in range((1 << bits) + 8)} - {0.0}
    return (0.0, *sorted(inner)[: (1 << bits) - 2], top)


def random_segment(random: Random) -> Segment:
    numel = random.choice(SIZES) if random.random() < 0.6 else random.randrange(3000)
    bits = random.choice((None, *BITS, *BITS))
    if bits is None:
        return Segment(numel)
    form = random.choice(FORMATS)
    chosen = with_bits(replace(form, levels=None), bits, random.choice(BLOCK_SIZES))
    levels = random_levels(random, chosen.bits) if form.levels else None
    return Segment(numel, replace(chosen, levels=levels))


def random_case(random: Random, isas: list[str]) -> Case:
    segments = tuple(random_segment(random) for _ in range(random.randint(1, 4)))
    return Case(
        segments=segments,
        dtype=random.choice(VALUE_DTYPES),
        out_dtype=random.choice(VALUE_DTYPES),
        num_rows=random.choice((1, 1, 2, 3, 5)),
        first_row=random.choice((0, 1, 70000)),
        key=random.getrandbits(64),
        kinds=tuple(random.choice(KINDS) for _ in segments),
        seed=random.getrandbits(32),
        misalignments=tuple(random.choice((0, 0, 1, 2, 4, 8, 32, 37)) for _ in range(3)),
        isa=random.choice(isas),
        num_threads=random.choice((1, 2, 3)),
        multiply=random.choice((1.0, 0.25, 1 / 3)),
        divide=random.choice((1.0, 4.0, 3.0)),
        random_wire=random.random() < 0.2,
        zeros=random.random() < 0.5,
        scattered=random.random() < 0.3,
    )


def make_values(kind: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """float32 values of one kind."""

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int64)

    def floats(bits: torch.Tensor) -> torch.Tensor:
        return bits.to(torch.int32).view(torch.float32)

    sign = integers(0, 2) << 31
    normal = torch.randn(shape, generator=generator)
    if kind == "normal":
        return normal * 2.0 ** int(integers(-30, 30).flatten()[:1].sum())
    if kind == "any bits":
        return floats(sign | integers(0, 1 << 31))
    if kind == "finite bits":
        return floats(sign | integers(0, 0x7F800000))
    if kind == "denormal":
        return floats(sign | integers(0, 1 << 24))
    if kind == "tiny range":
        return 2.0**-45 + normal * 2.0**-66
    if kind == "huge":
        return floats(sign | integers(0x7E000000, 0x7F800000))
    if kind == "constant":
        return floats(sign[:1, :1] | integers(0, 0x7F800000)[:1, :1]).expand(shape).clone()
    if kind == "zeros":
        return floats(sign)
    if kind == "holes":  # runs of zeros, as rows of an embedding that were not used
        at = torch.arange(shape[1]) // int(integers(1, 300).flatten()[:1].sum() or 1)
        return torch.where((integers(0, 2)[:, :1] + at) % 2 == 0, floats(sign), normal)
    if kind == "one special":
        specials = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, -1, 0x7F800001])
        at = integers(0, max(1, 2 * shape[1])) == 0
        return torch.where(at, floats(specials[integers(0, 5)]), normal)
    if kind == "neighbours":
        return floats(integers(0x3F800000, 0x3F800003))
    if kind == "few values":
        return integers(0, 256).float() / 255
    assert kind == "overflowing sum"
    return normal.abs() * 2.0**124


@dataclass
class Memory:
    """Tensors in memory of their exact size; without a sanitizer, with guard bytes around it."""

    guarded: bool
    gaps: list[torch.Tensor] = field(default_factory=list)
    blocks: list[tuple[int, int, int]] = field(default_factory=list)  # address, before, size

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, misalignment: int = 0
    ) -> torch.Tensor:
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        if not size:
            return torch.empty(shape, dtype=dtype)
        before = misalignment + (GUARD_BYTES if self.guarded else 0)
        total = before + size + (GUARD_BYTES if self.guarded else 0)
        address = _libc().malloc(total)
        ctypes.memset(address, GUARD, total)
        self.blocks.append((address, before, size))
        buffer = (ctypes.c_uint8 * size).from_address(address + before)
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def rows(
        self, values: torch.Tensor, misalignment: int, scattered: bool, fill: bool = True
    ) -> torch.Tensor:
        """A copy of a matrix, or memory for one; scattered, a view (outer, inner, size) of it."""
        num_rows, size = values.shape
        outer = max(1, num_rows // 2) if num_rows % 2 == 0 else 1
        shape = (num_rows, size) if not scattered else (num_rows // outer, outer, size + 24)
        view = self.tensor(shape, values.dtype, misalignment)
        if scattered:
            self.gaps.append(view[..., size:])
            view, values = view[..., :size].transpose(0, 1), values.unflatten(0, (outer, -1))
        if fill:
            view.copy_(values)
        return view

    def release(self) -> bool:
        """Free everything. Whether all guard bytes are untouched, and what is between rows."""
        intact = all(bool((gap.contiguous().view(torch.uint8) == GUARD).all()) for gap in self.gaps)
        self.gaps.clear()
        for address, before, size in self.blocks:
            after = GUARD_BYTES if self.guarded else 0
            guards = ctypes.string_at(address, before)
            guards += ctypes.string_at(address + before + size, after)
            intact &= guards == bytes([GUARD]) * len(guards)
            _libc().free(ctypes.c_void_p(address))
        self.blocks.clear()
        return intact


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    return libc


def differences(case: Case, *, guarded: bool = True) -> list[str]:
    """What the native kernels do differently from the reference: nothing, it is hoped."""
    layout = wire_layout(case.segments, case.dtype, zeros=case.zeros)
    memory = Memory(guarded)
    threads = torch.get_num_threads()
    cpu.set_isa(case.isa)
    torch.set_num_threads(case.num_threads)
    try:
        found = _differences(case, layout, memory)
    finally:
        torch.set_num_threads(threads)
        cpu.set_isa(None)
        intact = memory.release()
    return found if intact else [*found, "bytes outside"]


def _differences(case: Case, layout: WireLayout, memory: Memory) -> list[str]:
    found = []
    of_values, of_wire, of_out = case.misalignments
    wire_shape = (case.num_rows, layout.row_bytes)
    generator = torch.Generator().manual_seed(case.seed)
    values = torch.empty((case.num_rows, layout.numel), dtype=case.dtype)
    for span, kind in zip(layout.spans, case.kinds, strict=True):
        part = make_values(kind, (case.num_rows, span.segment.numel), generator)
        values[:, span.values] = part.to(case.dtype)

    own_values = memory.rows(values, of_values, case.scattered)
    wire = torch.empty(wire_shape, dtype=torch.uint8)
    own_wire = memory.rows(wire, of_wire, case.scattered, fill=False)
    rows = {"key": case.key, "first_row": case.first_row}
    reference.encode(values, layout, wire, **rows)
    cpu.encode(own_values, layout, own_wire, **rows)
    if not torch.equal(wire, own_wire.reshape(wire_shape)):
        found.append("encode")

    if case.random_wire:
        wire = torch.randint(0, 256, wire_shape, generator=generator, dtype=torch.uint8)
    own_wire = memory.rows(wire, of_wire, case.scattered)
    out = torch.empty_like(values, dtype=case.out_dtype)
    own_out = memory.rows(out, of_out, case.scattered, fill=False)
    reference.decode(wire, layout, out)
    cpu.decode(own_wire, layout, own_out)
    if not same_bits(out, own_out.reshape(out.shape)):
        found.append("decode")

    # Of three dimensions a matrix of rows that are not neighbours; the same ones of both.
    summed = wire if not case.scattered else wire.unflatten(0, (own_wire.shape[0], -1))[:, 0]
    own_summed = own_wire if not case.scattered else own_wire[:, 0]
    out = torch.empty(layout.numel, dtype=case.out_dtype)
    own_out = memory.tensor((layout.numel,), case.out_dtype, of_out)
    factors = {"multiply": case.multiply, "divide": case.divide}
    reference.decode_sum(summed, layout, out, **factors)
    cpu.decode_sum(own_summed, layout, own_out, **factors)
    if not same_bits(out, own_out):
        found.append("decode_sum")
    return found + _kept_differences(case, values, wire, memory)


def _kept_differences(
    case: Case, values: torch.Tensor, wire: torch.Tensor, memory: Memory
) -> list[str]:
    """The same for changes of weights that are kept, in layouts without maps.

    The case's formats are those of changes, or those in which weights are kept.
    """
    found, random = [], Random(case.seed)
    of_values, of_wire, of_out = case.misalignments
    other = Quantizer(random.randint(2, 8), random.choice((32, 96, 128, 1024, 4096)), "dither")
    others = tuple(s if s.quantizer is None else replace(s, quantizer=other) for s in case.segments)
    pair = [wire_layout(segments, case.dtype) for segments in (case.segments, others)]
    layout, kept_layout = pair if random.random() < 0.5 else reversed(pair)

    def encoded(rows: torch.Tensor, of: WireLayout) -> torch.Tensor:
        damaged = wire[:, : of.row_bytes].contiguous()
        if case.random_wire and damaged.shape[1] == of.row_bytes:
            return damaged
        into = torch.empty((len(rows), of.row_bytes), dtype=torch.uint8)
        reference.encode(rows, of, into, key=case.key)
        return into

    kept, changes = encoded(values.flip(0), kept_layout), encoded(values, layout)
    own_kept = memory.rows(kept, of_wire, False)
    own_changes = memory.rows(changes, of_out, False)

    sent, own_sent = (torch.empty(1, layout.row_bytes, dtype=torch.uint8) for _ in range(2))
    own_sent = memory.rows(own_sent, of_out, False, fill=False)
    stats, own_stats = (torch.empty(len(layout.spans), 4, dtype=torch.float64) for _ in range(2))
    own = memory.rows(values[:1], of_values, False)
    draws = {"key": case.key, "first_row": case.first_row}
    reference.encode_changes(values[0], layout, sent[0], kept[0], kept_layout, stats, **draws)
    cpu.encode_changes(own[0], layout, own_sent[0], own_kept[0], kept_layout, own_stats, **draws)
    if not torch.equal(sent, own_sent):
        found.append("encode_changes")
    if not same_stats(own_stats, stats):
        found.append("what encode_changes counts")

    sums, own_sums = torch.empty_like(values), memory.rows(values, of_values, False, fill=False)
    senders = {"first_sender": case.first_row, "sender_step": 3}
    reference.add_changes(changes, layout, kept, kept_layout, sums, **senders)
    cpu.add_changes(own_changes, layout, own_kept, kept_layout, own_sums, **senders)
    if not same_bits(sums, own_sums):
        found.append("add_changes")
    if not torch.equal(kept, own_kept):
        found.append("what add_changes keeps")
    return found


def fuzz(library: Path, num_cases: int, seed: int) -> int:
    """Run cases with this library; the number of those that differ."""
    cpu.LIBRARY = library
    assert cpu.available(), cpu.why_unavailable()
    isas = supported_isas()
    random = Random(seed)
    num_different = 0
    for _ in range(num_cases):
        case = random_case(random, isas)
        found = differences(case, guarded=False)
        if found:
            num_different += 1
            print(f"{', '.join(found)}: {case}", flush=True)
    print(f"{num_cases} cases on {', '.join(isas)}: {num_different} differences")
    return num_different


def fuzz_coded(num_cases: int, seed: int) -> int:
    """Coded rows, sound and damaged, with the library of :func:`fuzz`; the number that differ."""
    random, isas, num_different = Random(seed), supported_isas(), 0
    for number in range(num_cases):
        cpu.set_isa(random.choice(isas))
        layout, row = random_row(random)
        try:
            check_row(layout, row, random)
        except AssertionError:
            num_different += 1
            print(f"coded row {number} of seed {seed}: {layout}", flush=True)
    cpu.set_isa(None)
    print(f"{num_cases} coded rows on {', '.join(isas)}: {num_different} differences")
    return num_different


def run_sanitized(num_cases: int, num_coded: int, seed: int) -> int:
    """Build the library with sanitizers and run this file again with it; its exit status."""
    sanitize = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "_cpu.so"
        build.compile_library(library, sanitize)
        # The sanitizer's runtime must come first; libstdc++ beside it, for torch's exceptions.
        runtimes = [
            subprocess.check_output([*build.compiler(), f"-print-file-name={name}"], text=True)
            for name in ("libasan.so", "libstdc++.so.6")
        ]
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(runtime.strip() for runtime in runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's and torch's own
        }
        command = [sys.executable, __file__, "--library", str(library)]
        command += ["--cases", str(num_cases), "--coded", str(num_coded), "--seed", str(seed)]
        return subprocess.run(command, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--coded", type=int, default=3000, help="cases of coded rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", type=Path, help="a sanitized library; default: build one")
    args = parser.parse_args()
    if args.library is None:
        return run_sanitized(args.cases, args.coded, args.seed)
    different = fuzz(args.library, args.cases, args.seed) + fuzz_coded(args.coded, args.seed)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
