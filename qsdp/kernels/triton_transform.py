"""Device code of the Triton backend: the rotation of :mod:`qsdp.kernels.transform`.

[Note: butterflies under Triton] Seen as a cube of 2 x 2 x 2 x 2 x 2, 32 values have their partner
at distance 1, 2, 4, 8 or 16 along one axis. Both partners learn the other's value from the sum of
their bit patterns along it, which in integers is exact, and undone by subtracting one's own. So the
values keep their places: the compiler takes partners from registers and from the same warp.
"""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels import transform

SIZE = tl.constexpr(transform.SIZE)
STAGES = tl.constexpr(5)
SIGN_BITS = tl.constexpr(transform.SIGN_BITS)


@triton.jit
def hadamard(x, numel, start, MASKED: tl.constexpr):
    """[Note: transform] of a tile (blocks, tile) float32 of blocks of ``numel`` values.

    Blocks begin at multiples of 32, so groups are whole in a tile. Lanes past the last whole group,
    masked ones among them, stay as they are.
    """
    return _whole_groups(x, _butterflies(_flip_signs(x) * (1 / SIZE)), numel, start, MASKED)


@triton.jit
def inverse_hadamard(y, numel, start, MASKED: tl.constexpr):
    """The inverse."""
    return _whole_groups(y, _flip_signs(_butterflies(y)), numel, start, MASKED)


@triton.jit
def _whole_groups(before, after, numel, start, MASKED: tl.constexpr):
    if MASKED:
        column = start + tl.arange(0, before.shape[1])
        return tl.where(column[None, :] < (numel & -SIZE)[:, None], after, before)
    else:
        return after


@triton.jit
def _butterflies(x):
    """At distances 1, 2, 4, 8, 16 each pair becomes its sum and its difference."""
    CUBE: tl.constexpr = (x.numel // SIZE, 2, 2, 2, 2, 2)
    y = tl.reshape(x, CUBE)
    for stage in tl.static_range(STAGES):
        bits = y.to(tl.int32, bitcast=True)
        both = tl.sum(bits, axis=STAGES - stage, keep_dims=True)
        partner = tl.sub(both, bits, sanitize_overflow=False).to(tl.float32, bitcast=True)
        sign = tl.arange(0, 2) << 31  # of the second, which is subtracted
        for _ in tl.static_range(STAGES - stage):
            sign = tl.expand_dims(sign, 0)
        for _ in tl.static_range(stage):
            sign = tl.expand_dims(sign, -1)
        y = partner + (bits ^ sign).to(tl.float32, bitcast=True)
    return tl.reshape(y, x.shape)


@triton.jit
def _flip_signs(x):
    lane = (tl.arange(0, x.shape[1]) & 31).to(tl.uint32)[None, :]
    sign = (tl.full((1, 1), SIGN_BITS, tl.uint32) << (31 - lane)) & 0x80000000
    return (x.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
