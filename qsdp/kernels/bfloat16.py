"""Directed rounding to bfloat16, which a block's rounded scale and offset need to cover it."""

from __future__ import annotations

import torch


def round_down_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """float32 to the next float32 below, or itself, that bfloat16 holds."""
    bits = x.view(torch.int32)
    return (torch.where(x < 0, bits + 0xFFFF, bits) & ~0xFFFF).view(torch.float32)


def round_up_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """The same upwards, for x >= 0."""
    return ((x.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
