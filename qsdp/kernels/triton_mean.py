"""Device code of the Triton backend: the mean magnitude of a block, [Note: mean scaling]."""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

HUGE = tl.constexpr(2.0**126)
TINY = tl.constexpr(2.0**-64)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def sum_magnitudes(x, magnitude):
    """Of every block of a tile, the sum that :mod:`qsdp.kernels.blocks` has; masked lanes are zero.

    ``magnitude`` is the bits of the block's largest; the sum of one that is not finite is zero.
    """
    largest = magnitude.to(tl.float32, bitcast=True)
    p, exponent = scaled_exponent(largest)
    down = ((276 - exponent) << 23).to(tl.float32, bitcast=True)
    parts = tl.abs(x) * p[:, None] * down[:, None]
    parts = tl.where((magnitude < INFINITY_BITS)[:, None], parts, 0.0)
    return tl.sum(parts.to(tl.int32).to(tl.int64), axis=1)


@triton.jit
def scaled_exponent(largest):
    """p of a symmetric grid, and the stored exponent of the largest magnitude times that."""
    tiny = (2.0 * largest < TINY) & (largest != 0)
    p = tl.where(largest > HUGE, 0.25, tl.where(tiny, 1 / TINY, 1.0))
    exponent = (largest * p).to(tl.int32, bitcast=True) >> 23
    return p, tl.where(largest == 0, 127, exponent)
