"""The CUDA and ROCm backend: Triton kernels, bit-identical to the reference.

One launch covers all rows and all segments of one format; full-precision segments and the end of
each row ride in the first. :mod:`qsdp.kernels.triton_plan` says what is launched. A block has a
warp for every 1024 values, so common blocks need no barrier, and up to ``MAX_TILE`` values it stays
in registers and is read once. Imported at the first CUDA tensor.

Contracts are those of :mod:`qsdp.kernels.reference`. Nothing here waits for the device.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from qsdp.kernels import reference
from qsdp.kernels.changes import add_changes_by, encode_changes_by
from qsdp.kernels.triton_decode import decode_kernel, decode_sum_kernel
from qsdp.kernels.triton_encode import encode_kernel
from qsdp.kernels.triton_maps import write_maps_kernel, write_zeros_kernel
from qsdp.kernels.triton_plan import MAP_RUN, WARP_VALUES, Plan, plan_for
from qsdp.kernels.triton_runs import INTERPRETED
from qsdp.kernels.triton_update import (
    COUNTS,
    TOTAL_WARPS,
    accumulate_kernel,
    difference_kernel,
    total_kernel,
)
from qsdp.quantizer import Quantizer
from qsdp.wire import WireLayout, tensor_layout

NAME = "triton"

_RAW = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.int16}
_MAP_OPTIONS = {"num_warps": MAP_RUN // WARP_VALUES}


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
    if _norms_by_reference(layout):
        draws = {"key": key, "first_row": first_row, "sender": sender}
        return reference.encode(values, layout, wire, **draws)
    with _on(wire.device):
        _encode(plan_for(layout, wire.device), values, wire, key, first_row, sender)


def _norms_by_reference(layout: WireLayout) -> bool:
    """Whether a format scales by its norm, which has no kernel here; warns once."""
    found = any(s.quantizer is not None and s.quantizer.scaling == "l2" for s in layout.segments)
    if found:
        _warn_of_norms()
    return found


@lru_cache(maxsize=1)
def _warn_of_norms() -> None:
    warnings.warn(
        'Quantizer(scaling="l2") has no Triton kernel: the slow reference encodes such rows on the '
        'GPU; take scaling="symmetric" for speed',
        stacklevel=4,
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
    with _on(wire.device):
        _decode(plan_for(layout, wire.device), wire, values, first_sender, sender_step)


def decode_sum(
    wire: torch.Tensor,
    layout: WireLayout,
    out: torch.Tensor,
    *,
    multiply: float = 1.0,
    divide: float = 1.0,
) -> None:
    """See :func:`qsdp.kernels.reference.decode_sum`."""
    with _on(wire.device):
        _decode_sum(plan_for(layout, wire.device), wire, out, multiply, divide)


def accumulate(values: torch.Tensor, kept_layout: WireLayout, kept: torch.Tensor) -> None:
    """See :func:`qsdp.kernels.changes.accumulate_by`; in one pass over memory."""
    assert not any(kept_layout.zero_maps)
    if _norms_by_reference(kept_layout):
        return reference.accumulate(values, kept_layout, kept)
    with _on(kept.device):
        _accumulate(plan_for(kept_layout, kept.device), values, kept)


def difference(
    values: torch.Tensor,
    kept_layout: WireLayout,
    kept: torch.Tensor,
    change: torch.Tensor,
    stats: torch.Tensor,
) -> None:
    """See :func:`qsdp.kernels.changes.difference_by`; in one pass over memory."""
    assert not any(kept_layout.zero_maps) and stats.is_contiguous()
    with _on(values.device):
        plan = plan_for(kept_layout, values.device)
        shape = COUNTS, plan.num_partials
        partials = torch.empty(shape, dtype=torch.float64, device=values.device)
        _difference(plan, values, kept, change, stats, partials)


encode_changes = encode_changes_by(encode, difference)
add_changes = add_changes_by(decode, accumulate)


def warm_up(
    layout: WireLayout,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    divide: float | None = None,
    kept: WireLayout | None = None,
) -> None:
    """Make the tables of a layout, and compile and load the kernels that it will use.

    So that it does not happen in the first step, where ranks would wait for each other. Nothing is
    computed or sent, and no memory is needed for rows.

    Args:
        num_rows: of decode and decode_sum. One row and so many are encoded and decoded.
        dtype: of values on both sides.
        divide: of decode_sum; None: ``num_rows``.
        kept: of what changes of ``layout`` are added to, for :func:`encode_changes` and
            :func:`add_changes`; it is encoded and decoded too.
    """
    plans = [plan_for(each, device) for each in (layout, kept) if each is not None]
    if INTERPRETED:
        return

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")  # launched without programs: unread

    with _on(device):
        for idle in (plan.without_programs() for plan in plans):
            for rows in {1, num_rows}:
                values = empty(rows, layout.numel)
                wire = empty(rows, idle.layout.row_bytes, of=torch.uint8)
                _encode(idle, values, wire, 0, 0, 0)
                _decode(idle, wire, values, 0, 1)
        if kept is not None:
            _accumulate(idle, values, wire)
            stats = empty(len(kept.spans), COUNTS, of=torch.float64)
            _difference(idle, values[0], wire[0], values[0], stats, stats)
        idle = plans[0].without_programs()
        wire = empty(num_rows, layout.row_bytes, of=torch.uint8)
        _decode_sum(idle, wire, values[0], 1.0, float(num_rows if divide is None else divide))


def try_out(device: torch.device) -> None:
    """Encode something small. Raises whatever keeps Triton from compiling or launching."""
    layout = tensor_layout(32, Quantizer())
    wire = torch.empty(1, layout.row_bytes, dtype=torch.uint8, device=device)
    encode(torch.zeros(1, 32, device=device), layout, wire, key=0)


def _encode(
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
    if plan.maps:
        write_maps_kernel[(plan.maps.num_programs, inner, outer)](
            words,
            *(wire, plan.maps.programs, plan.maps.spans),
            *(value_outer, value_inner, wire_outer, wire_inner),
            BF16=bfloat16,
            **_MAP_OPTIONS,
        )


def _decode(
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


def _decode_sum(
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


def _accumulate(plan: Plan, values: torch.Tensor, kept: torch.Tensor) -> None:
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


def _difference(
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


def _on(device: torch.device) -> AbstractContextManager[Any]:
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
