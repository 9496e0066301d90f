"""Changes of remembered rows, step by step: what a backend does without a kernel of its own for it.

The sender encodes what its values differ by from what everybody keeps of them; all add what arrives
to what they keep. The reference is made of these steps; cpu.cpp does the same in one pass over
memory, and so does Triton where the two layouts allow it, and both give the same bytes.

There are two layouts of the same segments: ``layout`` of the changes, which travel, and
``kept_layout`` of what is kept. A segment that is kept in full precision is taken as it is: nothing
is subtracted or added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qsdp.kernels.blocks import block_parts
from qsdp.wire import Span, WireLayout

# Of the digest of a segment: what float64 holds exactly, with room to spare.
DIGEST_BITS = 48
PLACE = 0x9E3779B9  # odd, and without a pattern
_LOW = 2**32 - 1
_NAN_BITS = 0x7FC00000
_CHUNK = 1 << 20  # values whose 64-bit numbers are in memory at once


def encode_changes_by(
    encode: Callable[..., None], difference: Callable[..., None]
) -> Callable[..., None]:
    """The ``encode_changes`` of a backend whose ``encode`` and ``difference`` these are."""

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
        """Encode what one row's values differ by from what is kept of them.

        Args:
            values: (layout.numel,) of the layouts' dtype, contiguous.
            layout: of changes, without maps of zeros.
            wire: (layout.row_bytes,) uint8, written completely.
            kept: (kept_layout.row_bytes,) uint8, of sender 0; where it decodes to no finite number,
                it counts as zero.
            kept_layout: without maps of zeros.
            stats: (number of segments, 4) float64, written. Of a segment that is not kept in full
                precision: the sum of squares of changes, as the dtype rounds them, that of values,
                a digest of the values, how many changes are not finite. Of others the digest alone;
                the rest is zero. Sums of squares are within a relative 1e-4, if float32 holds them,
                and the same for every number of threads. For digests see :func:`digest`.
            key, first_row, sender: as in ``encode``.
        """
        change = torch.empty_like(values)
        difference(values, kept_layout, kept, change, stats)
        encode(change[None], layout, wire[None], key=key, first_row=first_row, sender=sender)

    return encode_changes


def add_changes_by(
    decode: Callable[..., None], accumulate: Callable[..., None]
) -> Callable[..., None]:
    """The ``add_changes`` of a backend whose ``decode`` and ``accumulate`` these are."""

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
        """Decode rows of changes, add what is kept, keep the sums, and decode them again.

        Args:
            wire: (num_rows, layout.row_bytes) uint8. Row i came from sender ``first_sender + i *
                sender_step``.
            layout: of changes, without maps of zeros.
            kept: (num_rows, kept_layout.row_bytes) uint8, changed in place but for what follows
                the layout's payload. Where it holds no finite number, it counts as zero. A block to
                which only zeros are added keeps its bytes: encoding what was decoded may move them.
                Random rounding has key 0.
            kept_layout: without maps of zeros.
            values: (num_rows, layout.numel) of the layouts' dtype, written: what is kept now.
        """
        decode(wire, layout, values, first_sender=first_sender, sender_step=sender_step)
        accumulate(values, kept_layout, kept)

    return add_changes


def accumulate_by(encode: Callable[..., None], decode: Callable[..., None]) -> Callable[..., None]:
    """The ``accumulate`` of a backend whose ``encode`` and ``decode`` these are, step by step."""

    def accumulate(values: torch.Tensor, kept_layout: WireLayout, kept: torch.Tensor) -> None:
        """The last part of ``add_changes``: add what is kept, keep the sums, decode them again.

        Args:
            values: (num_rows, kept_layout.numel), replaced by what is kept then. Values of segments
                in full precision are taken as they are: nothing is added to them.
            kept: (num_rows, kept_layout.row_bytes) uint8, changed in place.
        """
        assert not any(kept_layout.zero_maps)
        known, sums = torch.empty_like(values), kept.clone()
        decode(kept, kept_layout, known)
        known = _finite(known)
        idle = []
        for span in kept_layout.spans:
            if span.segment.quantizer is not None and span.segment.numel:
                parts = block_parts(values[:, span.values], span)
                idle.append((span, [(~blocks.any(-1), place) for blocks, _, place in parts]))
                values[:, span.values] += known[:, span.values]
        encode(values, kept_layout, sums, key=0)
        for span, blocks in idle:
            _keep_bytes(kept_layout, span, kept, sums, blocks)
        payload = slice(kept_layout.payload_bytes)
        kept[:, payload] = sums[:, payload]
        decode(kept, kept_layout, values)

    return accumulate


def difference_by(decode: Callable[..., None]) -> Callable[..., None]:
    """The ``difference`` of a backend whose ``decode`` this is, step by step."""

    def difference(
        values: torch.Tensor,
        kept_layout: WireLayout,
        kept: torch.Tensor,
        change: torch.Tensor,
        stats: torch.Tensor,
    ) -> None:
        """The first part of ``encode_changes``: ``change`` and ``stats``, written.

        Segments that are kept in full precision are taken as they are: nothing is subtracted.
        """
        assert not any(kept_layout.zero_maps)
        known = torch.empty_like(values)
        decode(kept[None], kept_layout, known[None])
        known = _finite(known)
        stats.zero_()
        for span, row in zip(kept_layout.spans, stats, strict=True):
            new, moved = values[span.values], change[span.values]
            row[2] = digest(new)
            if span.segment.quantizer is None:
                moved.copy_(new)
                continue
            torch.sub(new, known[span.values], out=moved)
            row[0], row[1] = moved.double().square().sum(), new.double().square().sum()
            row[3] = (~moved.isfinite()).sum()

    return difference


def digest(values: torch.Tensor) -> torch.Tensor:
    """Of a segment: a whole number below 2^48 that tells its values from others, float64.

    A sum of the values' bits as float32, each times an odd number that differs by place. Values of
    which one differs always have another digest, and nearly always do any others. All NaN count as
    one. On the device of ``values``, which is not waited for.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, values.numel(), _CHUNK):
        part = values[start : start + _CHUNK].float()
        bits = part.contiguous().view(torch.int32).to(torch.int64) & _LOW
        bits[part.isnan()] = _NAN_BITS
        places = torch.arange(start, start + len(part), dtype=torch.int64, device=values.device)
        total += (bits * ((2 * places + 1) * PLACE & _LOW)).sum()
    found: torch.Tensor = (total & (2**DIGEST_BITS - 1)).double()
    return found


def _keep_bytes(
    layout: WireLayout,
    span: Span,
    before: torch.Tensor,
    wire: torch.Tensor,
    idle: list[tuple[torch.Tensor, slice]],
) -> None:
    """Copy scales, offsets and codes of some of a segment's blocks from ``before`` to ``wire``.

    ``idle`` says which: for its full blocks and its short last one, (num_rows, num_blocks) bool and
    their bytes among the segment's codes.
    """
    flags = torch.cat([which for which, _ in idle], dim=1)
    pairs: list[tuple[Any, ...]] = [(flags, layout.meta(before, span), layout.meta(wire, span))]
    for which, place in idle:
        old, new = (
            layout.codes(rows, span)[:, place].unflatten(1, (which.shape[1], -1))
            for rows in (before, wire)
        )
        pairs.append((which, old, new))
    for which, old, new in pairs:
        new.copy_(torch.where(which[..., None], old, new))


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Zeros in place of what is not finite."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
