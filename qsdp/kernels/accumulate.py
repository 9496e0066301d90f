"""Accumulating into encoded rows, step by step, for backends that have no kernel of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qsdp.wire import WireLayout

Accumulate = Callable[[torch.Tensor, WireLayout, torch.Tensor, torch.Tensor], None]


def stepwise(encode: Callable[..., Any], decode: Callable[..., Any]) -> Accumulate:
    """The ``accumulate`` of a backend with these."""

    def accumulate(
        values: torch.Tensor, layout: WireLayout, before: torch.Tensor, wire: torch.Tensor
    ) -> None:
        """Add what ``before`` holds to ``values``, encode the sums, and decode them again.

        Args:
            values: (num_rows, layout.numel), replaced by what ``wire`` holds then. Values of
                segments in full precision are taken as they are: nothing is added to them.
            before: (num_rows, layout.row_bytes) uint8; where it holds no finite number, it counts
                as zero.
            wire: (num_rows, layout.row_bytes) uint8, written completely; not ``before``. Random
                rounding has key 0.
        """
        kept = torch.empty_like(values)
        decode(before, layout, kept)
        torch.nan_to_num(kept, nan=0.0, posinf=0.0, neginf=0.0, out=kept)
        for span in layout.spans:
            if span.segment.bits is not None:
                part = slice(span.value_offset, span.value_offset + span.segment.numel)
                values[:, part] += kept[:, part]
        encode(values, layout, wire, key=0)
        decode(wire, layout, values)

    return accumulate
