"""The CUDA and ROCm backend: Triton kernels, bit-identical to the reference.

One launch covers all rows and all segments of one format; full-precision segments and the end of
each row ride in the first. :mod:`qsdp.kernels.triton_plan` says what is launched,
:mod:`qsdp.kernels.triton_launch` launches it. A block has a warp for every 1024 values, so common
blocks need no barrier, and up to ``MAX_TILE`` values it stays in registers and is read once.
Imported at the first CUDA tensor.

Contracts are those of :mod:`qsdp.kernels.reference`. Nothing here waits for the device.
"""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch

from qsdp.kernels import reference
from qsdp.kernels.changes import add_changes_by, encode_changes_by
from qsdp.kernels.triton_launch import (
    accumulate_rows,
    add_row_changes,
    decode_rows,
    encode_row_changes,
    encode_rows,
    on,
    subtract_row,
    sum_rows,
)
from qsdp.kernels.triton_plan import pair_plan_for, plan_for
from qsdp.kernels.triton_runs import INTERPRETED
from qsdp.kernels.triton_update import COUNTS
from qsdp.quantizer import Quantizer
from qsdp.wire import WireLayout, tensor_layout

NAME = "triton"


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
    with on(wire.device):
        encode_rows(plan_for(layout, wire.device), values, wire, key, first_row, sender)


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
    with on(wire.device):
        decode_rows(plan_for(layout, wire.device), wire, values, first_sender, sender_step)


def decode_sum(
    wire: torch.Tensor,
    layout: WireLayout,
    out: torch.Tensor,
    *,
    multiply: float = 1.0,
    divide: float = 1.0,
) -> None:
    """See :func:`qsdp.kernels.reference.decode_sum`."""
    with on(wire.device):
        sum_rows(plan_for(layout, wire.device), wire, out, multiply, divide)


def accumulate(values: torch.Tensor, kept_layout: WireLayout, kept: torch.Tensor) -> None:
    """See :func:`qsdp.kernels.changes.accumulate_by`; in one pass over memory."""
    assert not any(kept_layout.zero_maps)
    if _norms_by_reference(kept_layout):
        return reference.accumulate(values, kept_layout, kept)
    with on(kept.device):
        accumulate_rows(plan_for(kept_layout, kept.device), values, kept)


def difference(
    values: torch.Tensor,
    kept_layout: WireLayout,
    kept: torch.Tensor,
    change: torch.Tensor,
    stats: torch.Tensor,
) -> None:
    """See :func:`qsdp.kernels.changes.difference_by`; in one pass over memory."""
    assert not any(kept_layout.zero_maps) and stats.is_contiguous()
    with on(values.device):
        plan = plan_for(kept_layout, values.device)
        shape = COUNTS, plan.num_partials
        partials = torch.empty(shape, dtype=torch.float64, device=values.device)
        subtract_row(plan, values, kept, change, stats, partials)


_encode_changes_in_steps = encode_changes_by(encode, difference)
_add_changes_in_steps = add_changes_by(decode, accumulate)


def encode_changes(
    values: torch.Tensor,
    layout: WireLayout,
    wire: torch.Tensor,
    kept: torch.Tensor,
    kept_layout: WireLayout,
    stats: torch.Tensor,
    *,
    key: int,
    first_row: int = 0,
    sender: int = 0,
) -> None:
    """See :func:`qsdp.kernels.changes.encode_changes_by`; in one pass where layouts allow it."""
    plan = pair_plan_for(layout, kept_layout, values.device)
    if plan is None:
        draws = {"key": key, "first_row": first_row, "sender": sender}
        return _encode_changes_in_steps(values, layout, wire, kept, kept_layout, stats, **draws)
    assert stats.is_contiguous()
    with on(values.device):
        shape = COUNTS, plan.num_partials
        partials = torch.empty(shape, dtype=torch.float64, device=values.device)
        encode_row_changes(plan, values, wire, kept, stats, partials, key, first_row, sender)


def add_changes(
    wire: torch.Tensor,
    layout: WireLayout,
    kept: torch.Tensor,
    kept_layout: WireLayout,
    values: torch.Tensor,
    *,
    first_sender: int = 0,
    sender_step: int = 1,
) -> None:
    """See :func:`qsdp.kernels.changes.add_changes_by`; in one pass where layouts allow it."""
    plan = pair_plan_for(layout, kept_layout, values.device)
    if plan is None:
        senders = {"first_sender": first_sender, "sender_step": sender_step}
        return _add_changes_in_steps(wire, layout, kept, kept_layout, values, **senders)
    with on(values.device):
        add_row_changes(plan, wire, kept, values, first_sender, sender_step)


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

    with on(device):
        for idle in (plan.without_programs() for plan in plans):
            for rows in {1, num_rows}:
                values = empty(rows, layout.numel)
                wire = empty(rows, idle.layout.row_bytes, of=torch.uint8)
                encode_rows(idle, values, wire, 0, 0, 0)
                decode_rows(idle, wire, values, 0, 1)
        if kept is not None:
            stats = empty(len(kept.spans), COUNTS, of=torch.float64)
            pair = pair_plan_for(layout, kept, device)
            if pair is None:
                accumulate_rows(idle, values, wire)
                subtract_row(idle, values[0], wire[0], values[0], stats, stats)
            else:
                pair, sent = pair.without_programs(), empty(*wire.shape, of=torch.uint8)
                add_row_changes(pair, sent, wire, values, 0, 1)
                encode_row_changes(pair, values[0], sent[0], wire[0], stats, stats, 0, 0, 0)
        idle = plans[0].without_programs()
        wire = empty(num_rows, layout.row_bytes, of=torch.uint8)
        sum_rows(idle, wire, values[0], 1.0, float(num_rows if divide is None else divide))


def try_out(device: torch.device) -> None:
    """Encode something small. Raises whatever keeps Triton from compiling or launching."""
    layout = tensor_layout(32, Quantizer())
    wire = torch.empty(1, layout.row_bytes, dtype=torch.uint8, device=device)
    encode(torch.zeros(1, 32, device=device), layout, wire, key=0)
