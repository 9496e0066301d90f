"""Measure the kernels' operations beside a copy of the same tensor, and beside other candidates.

The formats are those of :func:`qsdp.quantizer.every_format` in which something differs that costs
time; who has other candidates, as ``benchmarks/kernel_peers`` has, passes a function that makes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from qsdp.bench.timing import median_seconds
from qsdp.kernels import Backend, coder
from qsdp.kernels.compare import KEY, PLAIN, dtype_name, with_bits
from qsdp.quantizer import CODINGS, Quantizer, every_format, format_name
from qsdp.rows import compact_rows, expand_rows
from qsdp.wire import WireLayout, tensor_layout

BLOCK_SIZE, SMALL_BLOCK = 1024, 128
SUM_ROWS = 4
OPS = ("encode", "decode", "decode_sum", "encode_changes", "add_changes")
CHANGES = ("encode_changes", "add_changes")  # of what is kept in KEPT
KEPT = Quantizer(8, BLOCK_SIZE, "nearest")
# Measured beside all plain formats and all that differ from nearest rounding in one field.
COMBINED = ("nearest levels bfloat16", "dither bfloat16 hadamard")
# With each coding, in float32: QSGD's format, encoded and coded, read and decoded.
CODED_BLOCK = 512
COPY = "copy"


@dataclass(frozen=True)
class Row:
    """One result; the fields are the keys of ``--json``.

    ``gbps`` counts bytes of values on CPU; on a GPU, bytes read and written. ``copy_gbps`` counts
    the same way. ``threads`` is None on a GPU, ``peer`` for our own kernels.
    """

    op: str
    bits: int
    format: str
    dtype: str
    threads: int | None
    gbps: float
    copy_gbps: float
    ratio: float
    peer: str | None
    device: str


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    device: torch.device
    mib: float
    threads: tuple[int, ...]
    bits: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    repetitions: int


class Case(NamedTuple):
    """What candidates that are timed in turn do.

    Attributes:
        values: (numel,) normal numbers, a multiple of ``SUM_ROWS * BLOCK_SIZE``.
        target: as large, to write to.
    """

    op: str
    bits: int
    values: torch.Tensor
    target: torch.Tensor


class Candidate(NamedTuple):
    """Something to time: what it is, and the bytes that one run reads and writes."""

    format: str
    bits: int
    run: Callable[[], object]
    moved_bytes: int
    peer: str | None = None


Peers = Callable[[Case], Iterable[Candidate]]


def no_peers(case: Case) -> Iterable[Candidate]:
    """Nothing beside our own kernels."""
    return ()


def measure(settings: Settings, backend: Backend, peers: Peers = no_peers) -> Iterator[Row]:
    """Rows case by case: one operation, bit width, dtype and thread count at a time."""
    for threads in settings.threads if settings.device.type == "cpu" else (None,):
        if threads is not None:
            torch.set_num_threads(threads)
        for dtype in settings.dtypes:
            values, target = _values(settings, dtype)
            for bits in settings.bits:
                for op in OPS:
                    case = Case(op, bits, values, target)
                    candidates = [*_ours(backend, case), *peers(case)]
                    yield from _time(case, candidates, threads, settings.repetitions)


def measured_formats(op: str, bits: int, dtype: torch.dtype) -> Iterator[Quantizer]:
    """Every rounding and levels; of float32 also each other field alone, and two combinations.

    Scales in bfloat16 come with the small blocks that they are for. What decodes alike is decoded
    once, as nearest; changes are rounded to nearest.
    """
    for form in every_format():
        name = format_name(form)
        alone = form.rounding == "nearest" and len(name.split()) == 2
        if form not in PLAIN and (dtype != torch.float32 or not (alone or name in COMBINED)):
            continue
        if op in CHANGES and name != "nearest":
            continue
        if op.startswith("decode") and form.rounding in ("stochastic", "shift"):
            continue
        size = SMALL_BLOCK if form.scale_dtype == "bfloat16" else BLOCK_SIZE
        measured = with_bits(form, bits, size)
        if measured.bits == bits:  # a format may not have this width
            yield measured


def coded_formats(op: str, bits: int, dtype: torch.dtype) -> Iterator[Quantizer]:
    """Formats whose rows are coded; the time of coding counts with that of the kernel."""
    for coding in CODINGS[1:]:
        if op in ("encode", "decode") and dtype == torch.float32:
            form = Quantizer(bits, CODED_BLOCK, "stochastic", scaling="symmetric")
            yield replace(form, coding=coding)  # type: ignore[arg-type]


def _values(settings: Settings, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal numbers, and memory of the same size that has been touched."""
    step = SUM_ROWS * BLOCK_SIZE
    numel = max(int(settings.mib * 2**20) // dtype.itemsize // step, 1) * step
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(numel, generator=generator).to(dtype).to(settings.device)
    return values, torch.zeros_like(values)


def _ours(backend: Backend, case: Case) -> Iterator[Candidate]:
    rows = case.values.view(SUM_ROWS if case.op == "decode_sum" else 1, -1)
    forms = [*measured_formats(case.op, case.bits, rows.dtype)]
    if rows.is_cpu:
        forms += coded_formats(case.op, case.bits, rows.dtype)
    for form in forms:
        layout = tensor_layout(rows.shape[1], form, rows.dtype)
        wire = torch.zeros(len(rows), layout.row_bytes, dtype=torch.uint8, device=rows.device)
        backend.encode(rows, layout, wire, key=KEY)
        moved = rows.nbytes // len(rows) + wire.nbytes  # a sum is written once
        if case.op in CHANGES:  # what is kept is read, and written where changes are added
            moved += tensor_layout(rows.numel(), KEPT).row_bytes * (1 + (case.op == "add_changes"))
        block = "" if form.block_size == BLOCK_SIZE else f" block {form.block_size}"
        run = _run(backend, case, rows, layout, wire)
        yield Candidate(format_name(form) + block, case.bits, run, moved)


def _run(
    backend: Backend, case: Case, rows: torch.Tensor, layout: WireLayout, wire: torch.Tensor
) -> Callable[[], object]:
    out = case.target.view_as(rows)
    if layout.coded_spans:
        return _run_coded(backend, case.op, rows, layout, wire, out)
    if case.op == "encode":
        return lambda: backend.encode(rows, layout, wire, key=KEY)
    if case.op == "decode":
        return lambda: backend.decode(wire, layout, out)
    if case.op == "decode_sum":
        return lambda: backend.decode_sum(wire, layout, out[0], divide=float(len(rows)))
    kept_layout = tensor_layout(rows.numel(), KEPT, rows.dtype)
    kept = torch.zeros(1, kept_layout.row_bytes, dtype=torch.uint8, device=rows.device)
    backend.encode(rows, kept_layout, kept, key=KEY)
    if case.op == "add_changes":
        return lambda: backend.add_changes(wire, layout, kept, kept_layout, out)
    stats = torch.zeros(1, 4, dtype=torch.float64, device=rows.device)
    own, row = rows[0] * 1.01, wire[0]
    return lambda: backend.encode_changes(own, layout, row, kept[0], kept_layout, stats, key=KEY)


def _run_coded(
    backend: Backend,
    op: str,
    rows: torch.Tensor,
    layout: WireLayout,
    wire: torch.Tensor,
    out: torch.Tensor,
) -> Callable[[], object]:
    """The kernel and the coder, one after the other; memory is reused."""
    (coded,), room = compact_rows(wire, layout), torch.empty(layout.capacity, dtype=torch.uint8)

    def encode() -> None:
        backend.encode(rows, layout, wire, key=KEY)
        coder().compact(wire[0], layout, room)

    def decode() -> None:
        expand_rows([coded], layout, [wire[0]], (0,))
        backend.decode(wire, layout, out)

    return encode if op == "encode" else decode


def _time(
    case: Case, candidates: list[Candidate], threads: int | None, repetitions: int
) -> Iterator[Row]:
    values, device = case.values, case.values.device
    runs: dict[str, Callable[[], object]] = {COPY: lambda: case.target.copy_(values)}
    runs |= {str(index): candidate.run for index, candidate in enumerate(candidates)}
    seconds = median_seconds(runs, device, repetitions=repetitions)
    on_gpu = device.type == "cuda"
    copy_gbps = values.nbytes * (2 if on_gpu else 1) / seconds[COPY] / 1e9
    for index, candidate in enumerate(candidates):
        counted = candidate.moved_bytes if on_gpu else values.nbytes
        gbps = counted / seconds[str(index)] / 1e9
        yield Row(
            case.op, candidate.bits, candidate.format, dtype_name(values.dtype), threads,
            round(gbps, 3), round(copy_gbps, 3), round(gbps / copy_gbps, 3), candidate.peer,
            device.type,
        )  # fmt: skip
