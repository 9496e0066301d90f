"""The map of zeros: which groups of 32 values are all zero, so that they can be decoded as zeros.

Gradients of what was not used, such as rows of an embedding, are exactly zero, and an optimizer
that divides by their size must not see noise in their place. Most formats have no code for zero:
a min-max grid does not contain it, and dither moves it.
"""

from __future__ import annotations

import torch

from qsdp.wire import ZERO_GROUP

_BITS = 8


def map_zeros(values: torch.Tensor, maps: torch.Tensor) -> None:
    """Write a bit for every 32 values, the last group may be short: set where all are zero.

    Args:
        values: (num_rows, numel) float32, bfloat16 or float16, rows contiguous.
        maps: (num_rows, map_bytes(numel)) uint8, written completely; bits of no group are zero.
    """
    numel = values.shape[1]
    groups = torch.nn.functional.pad(values != 0, (0, -numel % ZERO_GROUP)).unflatten(
        1, (-1, ZERO_GROUP)
    )
    zero = torch.nn.functional.pad(~groups.any(-1), (0, -groups.shape[1] % _BITS))
    places = torch.arange(_BITS, dtype=torch.uint8, device=values.device)
    bits = zero.unflatten(1, (-1, _BITS)).to(torch.uint8) << places
    maps.copy_(bits.sum(-1, dtype=torch.uint8))


def write_zeros(values: torch.Tensor, maps: torch.Tensor) -> None:
    """Write zeros to the groups of ``values`` (num_rows, numel) whose bits are set."""
    if maps.device.type == "cpu" and not maps.any():
        return  # as nearly always
    places = torch.arange(_BITS, dtype=torch.uint8, device=maps.device)
    bits = ((maps[:, :, None] >> places) & 1).bool().flatten(1)
    values.masked_fill_(bits.repeat_interleave(ZERO_GROUP, dim=1)[:, : values.shape[1]], 0.0)
