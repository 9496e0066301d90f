"""Rows: values to sealed wire bytes, and checked wire bytes to values. The only caller of kernels.

A row is one rank's values in the layout of :mod:`qsdp.wire`; functions here take several at once:
rows have one or two leading dimensions, any strides over these, and count in row-major order.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist

from qsdp.buffers import pool
from qsdp.kernels import Coder, backend_for, coder
from qsdp.quantizer import Quantizer
from qsdp.wire import VALUE_DTYPES, WireLayout, damaged_rows, seal, tensor_layout


def take_rows(num_rows: int, layout: WireLayout, device: torch.device) -> torch.Tensor:
    """(num_rows, layout.row_bytes) uint8, uninitialised."""
    wire = pool.take(num_rows * layout.row_bytes, torch.uint8, device)
    return wire.view(num_rows, layout.row_bytes)


def encode_rows(
    values: torch.Tensor,
    layout: WireLayout,
    wire: torch.Tensor,
    *,
    key: int,
    first_row: int = 0,
    sender: int = 0,
) -> None:
    """Encode ``values`` (..., layout.numel) into ``wire`` (..., layout.row_bytes).

    Args:
        key: 64 bits for random rounding.
        first_row: of the first row's draws; other rows, other draws.
        sender: place of this rank among those whose rows are decoded together; rows of other
            senders are dithered differently, so that their errors average.
    """
    backend = backend_for(values.device)
    backend.encode(values, layout, wire, key=key, first_row=first_row, sender=sender)
    if layout.checksum:
        seal(wire)


def decode_rows(
    wire: torch.Tensor,
    layout: WireLayout,
    values: torch.Tensor,
    senders: Sequence[int] = (),
    *,
    own: int | None = None,
) -> None:
    """Decode ``wire`` into ``values`` (..., layout.numel), of any of the three dtypes.

    Args:
        senders: the global rank that each row came from, for errors; none for rows of one's own.
        own: the ``sender`` of all rows; None where row i is of sender i.

    Raises:
        RuntimeError: naming the ranks whose rows arrived damaged, where the layout has checksums.
    """
    check_rows(wire, layout, senders)
    first, step = (0, 1) if own is None else (own, 0)
    backend_for(wire.device).decode(wire, layout, values, first_sender=first, sender_step=step)


def sum_rows(
    wire: torch.Tensor,
    layout: WireLayout,
    out: torch.Tensor,
    senders: Sequence[int] = (),
    *,
    multiply: float = 1.0,
    divide: float = 1.0,
) -> None:
    """Decode rows and add them in order: ``out = sum * multiply / divide``, (layout.numel,).

    Args:
        wire: (num_rows, layout.row_bytes), at least one row.
        senders: as :func:`decode_rows`.

    Where the layout has maps of zeros, what is zero in all rows is zero in the sum.

    Raises:
        RuntimeError: as :func:`decode_rows`.
    """
    check_rows(wire, layout, senders)
    backend_for(wire.device).decode_sum(wire, layout, out, multiply=multiply, divide=divide)


def encode_changes(
    values: torch.Tensor,
    layout: WireLayout,
    wire: torch.Tensor,
    kept: torch.Tensor,
    kept_layout: WireLayout,
    stats: torch.Tensor,
    *,
    key: int,
    sender: int,
) -> None:
    """Encode what one row's values (numel,) differ by from what ``kept`` holds of them.

    Not sealed, because what it says may have to follow from ``stats``: see :func:`finish_row`.

    Args:
        wire, kept: (row_bytes,) of ``layout`` and of ``kept_layout``.
        stats: (number of segments, 4) float64: see :func:`qsdp.kernels.changes.encode_changes_by`.
        key, sender: as in :func:`encode_rows`; the row counts as row number ``sender``.
    """
    backend_for(values.device).encode_changes(
        *(values, layout, wire, kept, kept_layout, stats), key=key, first_row=sender, sender=sender
    )


def finish_row(wire: torch.Tensor, layout: WireLayout, mark: int | torch.Tensor) -> None:
    """Write the mark of a row (row_bytes,) and seal it, where the layout has a checksum."""
    if isinstance(mark, torch.Tensor):
        layout.marks(wire).copy_(mark)
    else:
        layout.marks(wire).fill_(mark)
    if layout.checksum:
        seal(wire[None])


def add_changes(
    wire: torch.Tensor,
    layout: WireLayout,
    kept: torch.Tensor,
    kept_layout: WireLayout,
    values: torch.Tensor,
    senders: range,
    global_ranks: Sequence[int],
) -> None:
    """Add changes that arrived to what is kept of their rows, and decode that to ``values``.

    Args:
        wire: (num_rows, layout.row_bytes).
        kept: (num_rows, kept_layout.row_bytes), changed in place.
        values: (num_rows, numel), written; a block without changes stays as it is, bit for bit.
        senders: of the rows, as in :func:`encode_changes`.
        global_ranks: of these, for errors.

    Raises:
        RuntimeError: as :func:`decode_rows`.
    """
    check_rows(wire, layout, global_ranks)
    backend_for(values.device).add_changes(
        *(wire, layout, kept, kept_layout, values),
        first_sender=senders.start,
        sender_step=senders.step,
    )


def warm_up(
    layout: WireLayout,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    kept: WireLayout | None = None,
) -> None:
    """Compile what rows of ``layout`` will need on an accelerator, before anybody waits for it.

    Args:
        num_rows: that are decoded at once.
        dtype: of the values.
        kept: how rows are kept whose changes ``layout`` is of.
    """
    prepare = getattr(backend_for(device), "warm_up", None)
    if prepare is not None and layout.numel:
        prepare(layout, num_rows, dtype, device, kept=kept)


def check_rows(wire: torch.Tensor, layout: WireLayout, senders: Sequence[int]) -> None:
    """Verify received rows where the layout has checksums; see :func:`decode_rows`."""
    if not layout.checksum or not senders:
        return
    damaged = [senders[row] for row in damaged_rows(wire)]
    if damaged:
        raise RuntimeError(
            f"rank {dist.get_rank()} received damaged bytes from rank "
            f"{', '.join(map(str, sorted(damaged)))} ({layout.row_bytes} bytes do not match their "
            "checksum): check the network or memory between them; QSDPConfig(verify=True) found it"
        )


def compact_rows(wire: torch.Tensor, layout: WireLayout) -> list[torch.Tensor]:
    """The coded forms of encoded rows (num_rows, layout.row_bytes): uint8 of their own sizes.

    On accelerators the host does it, waits for the rows and copies what it made: a warning says so.
    """
    backend, found = _coder_for(wire.device), []
    for row in wire.cpu():
        room = pool.take(layout.capacity, torch.uint8, row.device)
        length = backend.compact(row.contiguous(), layout, room)
        found.append(room[:length].to(wire.device))
    return found


def expand_rows(
    coded: Sequence[torch.Tensor],
    layout: WireLayout,
    wire: Sequence[torch.Tensor],
    senders: Sequence[int],
) -> None:
    """Write the rows (layout.row_bytes,) whose coded forms arrived to ``wire``.

    Args:
        senders: the global rank that each came from, for errors.

    Raises:
        RuntimeError: naming the ranks whose rows are not what their lengths say.
    """
    damaged = []
    for part, row, sender in zip(coded, wire, senders, strict=True):
        if not _expanded(part, layout, row):
            damaged.append(sender)
    if damaged:
        raise RuntimeError(
            f"rank {dist.get_rank()} received damaged rows from rank "
            f"{', '.join(map(str, sorted(damaged)))}: their lengths do not add up; check the "
            'network or memory between them, or set Quantizer(coding="fixed")'
        )


def _expanded(coded: torch.Tensor, layout: WireLayout, row: torch.Tensor) -> bool:
    """Write the row of its coded form, on any device; whether it is sound."""
    there = row if row.is_cpu and row.is_contiguous() else row.new_empty(row.shape, device="cpu")
    sound = _coder_for(row.device).expand(coded.cpu(), layout, there)
    if there is not row:
        row.copy_(there)
    return sound


def _coder_for(device: torch.device) -> Coder:
    if device.type != "cpu":
        _warn_of_host()
    return coder()


@lru_cache(maxsize=1)
def _warn_of_host() -> None:
    warnings.warn(
        'Quantizer(coding="elias" or "rice"): rows on accelerators are coded by the host, which '
        'waits for them and copies them; set coding="fixed" for the speed of the accelerator',
        stacklevel=5,
    )


def wire_bytes(numel: int, quantizer: Quantizer) -> int:
    """Bytes on the wire for ``numel`` values of one tensor, padding included.

    With a coding they follow from the values: these are the most.
    """
    return tensor_layout(numel, quantizer).most_bytes


def encode(values: torch.Tensor, quantizer: Quantizer, *, key: int = 0) -> torch.Tensor:
    """Quantize and pack a tensor of any shape.

    Args:
        values: float32, bfloat16 or float16; flattened in row-major order. Not modified.
        quantizer: the format.
        key: 64-bit number. Random draws depend on it and on each block's values alone; no
            generator is touched.

    Returns:
        (wire_bytes(values.numel(), quantizer),) uint8 on the same device; with a coding at most as
        many.

    Raises:
        TypeError: values of another dtype.
    """
    if values.dtype not in VALUE_DTYPES:
        raise TypeError(f"qsdp.encode takes float32, bfloat16 or float16, got {values.dtype}")
    layout = tensor_layout(values.numel(), quantizer, values.dtype)
    wire = torch.empty(1, layout.row_bytes, dtype=torch.uint8, device=values.device)
    rows = values.detach().reshape(1, -1).contiguous()
    encode_rows(rows, layout, wire, key=key & (2**64 - 1))
    return compact_rows(wire, layout)[0].clone() if layout.coded_spans else wire[0]


def decode(
    wire: torch.Tensor, numel: int, quantizer: Quantizer, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Unpack and dequantize what :func:`encode` gave for ``numel`` values.

    Args:
        wire: (wire_bytes(numel, quantizer),) uint8.
        quantizer: the format that it was encoded in.
        dtype: of the result; values are computed in float32 and rounded once.

    Returns:
        (numel,) of ``dtype``.

    Raises:
        TypeError: ``wire`` is not uint8, or ``dtype`` is not float32, bfloat16 or float16.
        ValueError: ``wire`` has not the length of ``numel`` encoded values.
        RuntimeError: the lengths that coded values contain do not add up.
    """
    if wire.dtype != torch.uint8 or dtype not in VALUE_DTYPES:
        raise TypeError(
            "qsdp.decode takes uint8 wire and gives float32, bfloat16 or float16, "
            f"got {wire.dtype} and dtype={dtype}"
        )
    layout = tensor_layout(numel, quantizer)
    if layout.coded_spans:
        row = torch.empty(layout.row_bytes, dtype=torch.uint8, device=wire.device)
        if not _expanded(wire.contiguous(), layout, row):
            raise RuntimeError(
                f"qsdp.decode got {wire.numel()} bytes that are not {numel} values at "
                f"bits={quantizer.bits}, coding={quantizer.coding!r}: their lengths do not add up"
            )
        wire = row
    if wire.numel() != layout.row_bytes:
        raise ValueError(
            f"{numel} values at bits={quantizer.bits}, block_size={quantizer.block_size} are "
            f"{layout.row_bytes} bytes on the wire, got {wire.numel()}"
        )
    values = torch.empty(1, numel, dtype=dtype, device=wire.device)
    decode_rows(wire.reshape(1, -1).contiguous(), layout, values)
    return values[0]
