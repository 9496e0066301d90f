"""How the Triton backend launches its kernels: once for each launch of a plan.

Grids, strides and compile-time arguments of :mod:`qsdp.kernels.triton_gpu`'s operations; which
programs there are :mod:`qsdp.kernels.triton_plan` says.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton.language as tl

from qsdp.kernels.triton_changes import add_changes_kernel, encode_changes_kernel
from qsdp.kernels.triton_decode import decode_kernel, decode_sum_kernel
from qsdp.kernels.triton_encode import encode_kernel
from qsdp.kernels.triton_maps import write_maps_kernel, write_zeros_kernel
from qsdp.kernels.triton_plan import MAP_RUN, WARP_VALUES, PairPlan, Plan
from qsdp.kernels.triton_update import (
    COUNTS,
    TOTAL_WARPS,
    accumulate_kernel,
    difference_kernel,
    total_kernel,
)

_RAW = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.int16}
_MAP_OPTIONS = {"num_warps": MAP_RUN // WARP_VALUES}


def encode_rows(
    plan: Plan, values: torch.Tensor, wire: torch.Tensor, key: int, first_row: int, sender: int
) -> None:
    words, bfloat16 = _words(values)
    inner, outer, value_outer, value_inner = _rows(values)
    _, _, wire_outer, wire_inner = _rows(wire)
    key_halves = _signed(key), _signed(key >> 32)
    tail, row_bytes = plan.layout.payload_bytes, plan.layout.row_bytes
    for launch in plan.launches:
        encode_kernel[(launch.num_programs, inner, outer)](
            words,
            *(wire, launch.programs, launch.spans, launch.thresholds, launch.num_raw),
            *(value_outer, value_inner, wire_outer, wire_inner, tail, row_bytes),
            *(*key_halves, first_row, sender),
            BF16=bfloat16,
            VALUE_ALIGNMENT=math.gcd(launch.value_alignment, value_outer, value_inner),
            CODE_ALIGNMENT=math.gcd(launch.code_alignment, wire_outer, wire_inner),
            **launch.encode_options,
        )
        tail = row_bytes  # the first launch has cleared it
    if not plan.launches:
        wire[..., tail:] = 0
    if plan.maps:
        write_maps_kernel[(plan.maps.num_programs, inner, outer)](
            words,
            *(wire, plan.maps.programs, plan.maps.spans),
            *(value_outer, value_inner, wire_outer, wire_inner),
            BF16=bfloat16,
            **_MAP_OPTIONS,
        )


def decode_rows(
    plan: Plan, wire: torch.Tensor, values: torch.Tensor, first_sender: int, sender_step: int
) -> None:
    words, bfloat16 = _words(values)
    inner, outer, value_outer, value_inner = _rows(values)
    _, _, wire_outer, wire_inner = _rows(wire)
    dtype = plan.layout.dtype
    for launch in plan.launches:
        decode_kernel[(launch.num_programs * launch.tiles, inner, outer)](
            words,
            *(wire, launch.programs, launch.spans, launch.levels, launch.num_raw),
            *(value_outer, value_inner, wire_outer, wire_inner, first_sender, sender_step),
            RAW=_RAW[dtype],
            BF16=bfloat16,
            EXACT=values.dtype == dtype,
            VALUE_ALIGNMENT=math.gcd(launch.value_alignment, value_outer, value_inner),
            CODE_ALIGNMENT=math.gcd(launch.code_alignment, wire_outer, wire_inner),
            **launch.decode_options,
        )
    if plan.maps:
        write_zeros_kernel[(plan.maps.num_programs, inner, outer)](
            words,
            *(wire, plan.maps.programs, plan.maps.spans, 1, 0),
            *(value_outer, value_inner, wire_outer, wire_inner),
            **_MAP_OPTIONS,
        )


def sum_rows(
    plan: Plan, wire: torch.Tensor, out: torch.Tensor, multiply: float, divide: float
) -> None:
    words, bfloat16 = _words(out)
    num_rows, _, _, stride = _rows(wire)
    power_of_two = abs(math.frexp(divide)[0]) == 0.5 and abs(math.log2(abs(divide))) <= 126
    for launch in plan.launches:
        decode_sum_kernel[(launch.num_programs * launch.tiles,)](
            words,
            *(wire, launch.programs, launch.spans, launch.levels, launch.num_raw),
            *(num_rows, stride),
            *(float(multiply), 1 / divide if power_of_two else float(divide)),
            DIVIDE=not power_of_two,
            RAW=_RAW[plan.layout.dtype],
            BF16=bfloat16,
            VALUE_ALIGNMENT=launch.value_alignment,
            CODE_ALIGNMENT=math.gcd(launch.code_alignment, stride),
            **launch.decode_options,
        )
    if plan.maps:
        write_zeros_kernel[(plan.maps.num_programs,)](
            words,
            *(wire, plan.maps.programs, plan.maps.spans, num_rows, stride),
            *(0, 0, 0, 0),
            **_MAP_OPTIONS,
        )


def accumulate_rows(plan: Plan, values: torch.Tensor, kept: torch.Tensor) -> None:
    words, bfloat16 = _words(values)
    num_rows, _, _, value_stride = _rows(values)
    kept_stride = _rows(kept)[3]
    for launch in plan.launches:
        accumulate_kernel[(launch.num_programs, num_rows)](
            *(words, kept, launch.programs, launch.spans, launch.thresholds, launch.levels),
            *(launch.num_raw, value_stride, kept_stride),
            BF16=bfloat16,
            VALUE_ALIGNMENT=math.gcd(launch.value_alignment, value_stride),
            CODE_ALIGNMENT=math.gcd(launch.code_alignment, kept_stride),
            **launch.update_options,
        )


def subtract_row(
    plan: Plan,
    values: torch.Tensor,
    kept: torch.Tensor,
    change: torch.Tensor,
    stats: torch.Tensor,
    partials: torch.Tensor,
) -> None:
    (words, bfloat16), (change, _) = _words(values), _words(change)
    for launch in plan.launches:
        difference_kernel[(launch.num_programs * launch.tiles,)](
            *(words, kept, change, partials),
            *(launch.programs, launch.spans, launch.levels, launch.num_raw),
            *(launch.first_partial, plan.num_partials),
            BF16=bfloat16,
            VALUE_ALIGNMENT=launch.value_alignment,
            CODE_ALIGNMENT=launch.code_alignment,
            **launch.difference_options,
        )
    total_kernel[(plan.num_spans, COUNTS)](
        stats, partials, plan.partials, plan.num_partials, num_warps=TOTAL_WARPS
    )


def encode_row_changes(
    plan: PairPlan,
    values: torch.Tensor,
    wire: torch.Tensor,
    kept: torch.Tensor,
    stats: torch.Tensor,
    partials: torch.Tensor,
    key: int,
    first_row: int,
    sender: int,
) -> None:
    words, bfloat16 = _words(values)
    key_halves = _signed(key), _signed(key >> 32)
    tail, row_bytes = plan.layouts[0].payload_bytes, plan.layouts[0].row_bytes
    for changes, known, options, _ in plan.pairs:
        encode_changes_kernel[(changes.num_programs,)](
            *(words, wire, kept, partials, changes.programs, changes.spans, known.spans),
            *(changes.thresholds, known.levels, changes.num_raw),
            *(changes.first_partial, plan.num_partials, tail, row_bytes),
            *(*key_halves, first_row, sender),
            BF16=bfloat16,
            VALUE_ALIGNMENT=changes.value_alignment,
            WIRE_ALIGNMENT=changes.code_alignment,
            KEPT_ALIGNMENT=known.code_alignment,
            **options,
        )
        tail = row_bytes  # the first launch has cleared it
    if not plan.pairs:
        wire[..., tail:] = 0
    total_kernel[(plan.num_spans, COUNTS)](
        stats, partials, plan.partials, plan.num_partials, num_warps=TOTAL_WARPS
    )


def add_row_changes(
    plan: PairPlan,
    wire: torch.Tensor,
    kept: torch.Tensor,
    values: torch.Tensor,
    first_sender: int,
    sender_step: int,
) -> None:
    words, bfloat16 = _words(values)
    num_rows, _, _, value_stride = _rows(values)
    wire_stride, kept_stride = _rows(wire)[3], _rows(kept)[3]
    for changes, known, _, options in plan.pairs:
        add_changes_kernel[(changes.num_programs, num_rows)](
            *(words, wire, kept, changes.programs, changes.spans, known.spans),
            *(changes.levels, known.thresholds, known.levels, changes.num_raw),
            *(value_stride, wire_stride, kept_stride, first_sender, sender_step),
            BF16=bfloat16,
            VALUE_ALIGNMENT=math.gcd(changes.value_alignment, value_stride),
            WIRE_ALIGNMENT=math.gcd(changes.code_alignment, wire_stride),
            KEPT_ALIGNMENT=math.gcd(known.code_alignment, kept_stride),
            **options,
        )


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launch there: Triton takes the current device. Free where it is that already."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def _rows(rows: torch.Tensor) -> tuple[int, int, int, int]:
    """Inner and outer rows of (..., size), and the outer and inner stride; zero for a single row,
    so that it says nothing about alignment.
    """
    assert rows.stride(-1) == 1 or rows.shape[-1] <= 1, rows.stride()
    if rows.ndim == 2:
        num_rows = rows.shape[0]
        return num_rows, 1, 0, rows.stride(0) if num_rows > 1 else 0
    outer, inner, _ = rows.shape
    outer_stride, inner_stride, _ = rows.stride()
    return inner, outer, outer_stride if outer > 1 else 0, inner_stride if inner > 1 else 0


def _signed(word: int) -> int:
    """The low 32 bits as a signed number: always the same type, so the same compiled kernel."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _words(values: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """bfloat16 as its bits, and whether it is: Triton's interpreter has no bfloat16 of its own."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16), True
    return values, False
