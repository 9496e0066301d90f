"""The CUDA and ROCm backend: Triton kernels, bit-identical to the reference.

One launch covers all rows and all segments of one *format* (all fields of a segment but its length
and the level table); full-precision segments and the padding ride in the first. A table of *runs*
says what each program does: a run is some whole blocks of one segment, or a piece of a
full-precision segment. A block has a warp for every 1024 values, so common blocks need no barrier,
and up to ``MAX_TILE`` values it stays in registers and is read once. Imported at the first CUDA
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from qsdp.kernels.blocks import level_thresholds
from qsdp.kernels.reference import accumulate_by
from qsdp.kernels.triton_decode import decode_kernel, decode_sum_kernel
from qsdp.kernels.triton_encode import encode_kernel
from qsdp.kernels.zeros import map_zeros as map_zeros
from qsdp.quantizer import Quantizer
from qsdp.wire import Span, WireLayout, code_bytes

NAME = "triton"

WARP_VALUES = 1024  # 32 a thread
MAX_TILE = 4096  # larger blocks are read twice
MAX_ALIGNMENT = 16
# Others would be taken for nearest.
KNOWN_ROUNDINGS = ("nearest", "stochastic", "shift", "dither")


@dataclass(frozen=True)
class Format:
    """What a kernel is specialised for, a compile-time argument of its own.

    The quantizer without its table of levels, which is data, and what follows from it. Device code
    reads fields only, no properties: Triton keeps compiled kernels on disk by the values of the
    fields and the source of the device code, and would not notice that a property had changed.
    """

    quantizer: Quantizer
    tile: int  # lanes for one block, or for a piece of it
    blocks: int  # whole blocks of a program
    levels: bool
    steps: int  # from a block's lowest point to its highest
    symmetric: bool
    meta_bytes: int  # of a scale or an offset


@dataclass(frozen=True)
class Launch:
    """One format's programs: the first ``num_raw`` runs of ``table`` are full precision."""

    format: Format
    decode_format: Format  # without the rounding, where decoding does not depend on it
    table: torch.Tensor  # (num_programs, COLUMNS) int64
    num_raw: int
    thresholds: torch.Tensor  # int32, of all level tables of the format, one after another
    levels: torch.Tensor  # float32, likewise
    value_alignment: int  # the largest power of two, up to 16, that divides all offsets
    code_alignment: int


def encode(
    values: torch.Tensor,
    layout: WireLayout,
    wire: torch.Tensor,
    *,
    key: int,
    first_row: int = 0,
    sender: int = 0,
) -> None:
    """See :func:`qsdp.kernels.reference.encode`."""
    key_halves = _signed(key), _signed(key >> 32)
    with torch.cuda.device_of(wire):
        for index, launch in enumerate(launches(layout, wire.device)):
            encode_kernel[(len(launch.table), len(values))](
                _words(values),
                *(wire, launch.table, launch.thresholds),
                *(launch.num_raw, layout.numel, layout.row_bytes),
                layout.payload_bytes if index == 0 else layout.row_bytes,
                *(*key_halves, first_row, sender),
                BF16=values.dtype == torch.bfloat16,
                **_alignments(launch, layout, value_rows=len(values), wire_rows=len(values)),
                **_options(launch.format),
            )


def decode(
    wire: torch.Tensor,
    layout: WireLayout,
    values: torch.Tensor,
    *,
    first_sender: int = 0,
    sender_step: int = 1,
) -> None:
    """See :func:`qsdp.kernels.reference.decode`."""
    with torch.cuda.device_of(wire):
        for launch in launches(layout, wire.device):
            decode_kernel[_decode_grid(launch, len(values))](
                _words(values),
                *(wire, launch.table, launch.levels),
                *(launch.num_raw, layout.numel, layout.row_bytes, first_sender, sender_step),
                EXACT=values.dtype == layout.dtype,
                **_dtypes(layout, values),
                **_alignments(launch, layout, value_rows=len(values), wire_rows=len(values)),
                **_options(launch.decode_format),
            )


def decode_sum(
    wire: torch.Tensor,
    layout: WireLayout,
    out: torch.Tensor,
    *,
    multiply: float = 1.0,
    divide: float = 1.0,
) -> None:
    """See :func:`qsdp.kernels.reference.decode_sum`."""
    power_of_two = abs(math.frexp(divide)[0]) == 0.5 and abs(math.log2(abs(divide))) <= 126
    with torch.cuda.device_of(wire):
        for launch in launches(layout, wire.device):
            decode_sum_kernel[_decode_grid(launch, 1)](
                _words(out),
                *(wire, launch.table, launch.levels),
                *(launch.num_raw, len(wire), layout.row_bytes),
                *(float(multiply), 1 / divide if power_of_two else float(divide)),
                DIVIDE=not power_of_two,
                **_dtypes(layout, out),
                **_alignments(launch, layout, value_rows=1, wire_rows=len(wire)),
                **_options(launch.decode_format),
            )


accumulate = accumulate_by(encode, decode)


def _options(format_: Format) -> dict[str, Any]:
    """Compile-time arguments that all kernels share."""
    num_warps = format_.blocks * format_.tile // WARP_VALUES
    return {"FORMAT": format_, "num_warps": num_warps, "enable_fp_fusion": False}


def _decode_grid(launch: Launch, num_rows: int) -> tuple[int, int, int]:
    return len(launch.table), num_rows, triton.cdiv(launch.format.quantizer.block_size, MAX_TILE)


def _signed(word: int) -> int:
    """The low 32 bits as a signed number: always the same type, so the same compiled kernel."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _words(values: torch.Tensor) -> torch.Tensor:
    """bfloat16 as its bits: Triton's interpreter has no bfloat16 of its own."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


def _dtypes(layout: WireLayout, values: torch.Tensor) -> dict[str, Any]:
    raw = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.int16}
    return {"RAW": raw[layout.dtype], "BF16": values.dtype == torch.bfloat16}


def _alignments(
    launch: Launch, layout: WireLayout, *, value_rows: int, wire_rows: int
) -> dict[str, int]:
    """What the compiler may assume of offsets: it decides how wide loads and stores are."""
    row_numel = layout.numel if value_rows > 1 else 0
    row_bytes = layout.row_bytes if wire_rows > 1 else 0
    return {
        "VALUE_ALIGNMENT": math.gcd(launch.value_alignment, row_numel),
        "CODE_ALIGNMENT": math.gcd(launch.code_alignment, row_bytes),
    }


@lru_cache(maxsize=1024)
def launches(layout: WireLayout, device: torch.device) -> tuple[Launch, ...]:
    """What to launch for a layout, one a format; the tables are copied to ``device`` once."""
    formats: dict[Format, list[tuple[int, Span]]] = {}
    raw = []
    for index, span in enumerate(layout.spans):
        if span.segment.numel and span.segment.quantizer is None:
            raw.append(span)
        elif span.segment.numel:
            formats.setdefault(_format(span.segment.format), []).append((index, span))
    if raw and not formats:
        formats[_format(Quantizer())] = []
    parts = []
    for format_, spans in formats.items():
        pieces = [
            run
            for span in raw
            for run in _raw_runs(span, layout.dtype.itemsize, format_.blocks * format_.tile)
        ]
        parts.append(_launch(format_, spans, pieces, device))
        raw = []
    return tuple(parts)


def _format(quantizer: Quantizer) -> Format:
    if quantizer.rounding not in KNOWN_ROUNDINGS:
        raise NotImplementedError(
            f"the Triton kernels know rounding {', '.join(KNOWN_ROUNDINGS)}, not "
            f"{quantizer.rounding!r}: extend qsdp/kernels/triton_encode.py and _decode"
        )
    tile = min(int(triton.next_power_of_2(quantizer.block_size)), MAX_TILE)
    return Format(
        replace(quantizer, levels=None),
        tile=tile,
        blocks=max(WARP_VALUES // tile, 1),
        levels=quantizer.levels is not None,
        steps=quantizer.steps,
        symmetric=quantizer.symmetric,
        meta_bytes=2 if quantizer.scale_dtype == "bfloat16" else 4,
    )


def _launch(
    format_: Format, spans: list[tuple[int, Span]], raw: list[list[int]], device: torch.device
) -> Launch:
    tables: dict[tuple[float, ...], int] = {}  # and where each begins
    runs = []
    for index, span in spans:
        levels = span.segment.format.levels
        at = len(tables) << format_.quantizer.bits
        levels_at = tables.setdefault(levels, at) if levels else 0
        runs += list(_block_runs(span, index, levels_at, format_.blocks))
    thresholds = [[*level_thresholds(table).tolist(), 0] for table in tables]
    return Launch(
        format_,
        _decode_format(format_),
        torch.tensor(raw + runs, dtype=torch.int64).to(device),
        len(raw),
        torch.tensor(thresholds, dtype=torch.int32).to(device),
        torch.tensor(list(tables), dtype=torch.float32).to(device),
        math.gcd(MAX_ALIGNMENT, *(run[0] for run in runs)),
        math.gcd(MAX_ALIGNMENT, *(run[3] for run in runs)),
    )


def _decode_format(format_: Format) -> Format:
    """The same for all roundings that the decoder does not have to know."""
    if format_.quantizer.rounding == "dither":
        return format_
    return replace(format_, quantizer=replace(format_.quantizer, rounding="nearest"))


def _raw_runs(span: Span, itemsize: int, run: int) -> list[list[int]]:
    """Runs of a full-precision segment; the code offset counts in elements."""
    bounds = [*range(0, span.segment.numel, run), span.segment.numel]
    return [
        [span.value_offset + at, end - at, 0, span.data_offset // itemsize + at, 0, 0, 0, 0]
        for at, end in pairwise(bounds)
    ]


def _block_runs(span: Span, segment_index: int, levels_at: int, blocks: int) -> Iterator[list[int]]:
    """Runs of a quantized segment; the meta offset counts in numbers.

    The last column is how many numbers of padding follow the segment's last scale.
    """
    segment, size = span.segment, span.segment.format.block_size
    bytes_a_block = code_bytes(size, segment.format.bits)
    number = segment.meta_dtype.itemsize
    padding = segment.meta_bytes // number - segment.num_blocks * segment.meta_numbers
    for block in range(0, segment.num_blocks, blocks):
        at = block * size
        yield [
            span.value_offset + at,
            min(segment.numel - at, blocks * size),
            span.meta_offset // number + block * segment.meta_numbers,
            span.data_offset + block * bytes_a_block,
            block,
            segment_index,
            levels_at,
            padding if block + blocks >= segment.num_blocks else 0,
        ]
