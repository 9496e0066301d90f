"""Rounding to the unbounded lattice of an absolute step: what the paper's theory quantizes with.

The rule and the random bits are those of blocks (:mod:`qsdp.kernels.blocks`), without extremes
and without codes that must fit in a byte.
"""

from __future__ import annotations

import torch

from qsdp.kernels.blocks import FRACTION, round_positions, shift_of
from qsdp.kernels.philox import MASK32, random16_per_block, random16_per_value


def round_to_lattice(
    x: torch.Tensor, step: float, rounding: str, *, key: int, per_value: bool = False
) -> torch.Tensor:
    """Round every value to a point of the lattice.

    ``nearest`` and ``stochastic`` give points of ``step * Z``; ``shift`` gives points of
    ``step * (Z + shift)``, QSDP's random-shift quantizer (section 4, definition 1), and ``dither``
    the same with one shift for every value.

    Args:
        x: (num_rows, numel) float64, finite, with ``|x| < 2^36 * step``; positions are rounded to
            65,536ths of a step.
        key: 64 bits; other keys, other draws. Rows draw independently.
        per_value: ``shift`` with one shift for every value, in place of one a row: ``dither``.

    Returns:
        A tensor like ``x``.

    Raises:
        ValueError: an unknown rounding.
    """
    if rounding not in ("nearest", "stochastic", "shift", "dither"):
        raise ValueError(f"round_to_lattice knows no rounding {rounding!r}")
    shifted = rounding in ("shift", "dither")
    num_rows, numel = x.shape
    counter = (0, 0, torch.arange(num_rows, device=x.device))
    philox_key = (key & MASK32, key >> 32)
    if rounding == "nearest":
        r = torch.full_like(x, FRACTION // 2, dtype=torch.int64)
    elif rounding == "shift" and not per_value:
        r = random16_per_block(counter, philox_key)[:, None]
    else:
        r = random16_per_value(numel, counter, philox_key)
    lattice = round_positions(torch.round(x / step * FRACTION).to(torch.int64), r).to(x.dtype)
    return step * (lattice + shift_of(r) if shifted else lattice)
