"""Device code of the Triton backend: the random bits of :mod:`qsdp.kernels.philox`."""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels.philox import DRAW_ROUNDS, MULTIPLIERS, WEYL

PHILOX_ROUNDS = tl.constexpr(DRAW_ROUNDS)
M0, M1 = (tl.constexpr(word) for word in MULTIPLIERS)
W0, W1 = (tl.constexpr(word) for word in WEYL)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """:func:`qsdp.kernels.philox.philox4x32` for uint32 tensors."""
    for _ in tl.static_range(PHILOX_ROUNDS):
        high0, low0 = tl.umulhi(c0, M0), tl.mul(c0, M0, sanitize_overflow=False)
        high1, low1 = tl.umulhi(c2, M1), tl.mul(c2, M1, sanitize_overflow=False)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, W0, sanitize_overflow=False)
        k1 = tl.add(k1, W1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def draw_per_value(start, block, segment, row, k0, k1, FORMAT: tl.constexpr):
    """16 random bits a value of a tile: [Note: where the random bits come from].

    ``block``, ``k0`` and ``k1`` are (blocks,) uint32; the result is (blocks, tile) int32. The four
    words of a counter serve values 32 apart, their halves values 16 apart.
    """
    BLOCKS: tl.constexpr = FORMAT.blocks
    TILE: tl.constexpr = FORMAT.tile
    GROUPS: tl.constexpr = TILE // 128 if TILE >= 128 else 1
    group = start // 128 + tl.arange(0, GROUPS)
    counter = (16 * group[:, None] + tl.arange(0, 16)[None, :]).to(tl.uint32)
    k0, k1 = k0[:, None, None], k1[:, None, None]
    w0, w1, w2, w3 = philox(counter[None, :, :], block[:, None, None], segment, row, k0, k1)
    if TILE >= 128:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (..., 16, a, b): word 2a + b
        words = tl.reshape(tl.permute(words, (0, 1, 3, 4, 2)), (BLOCKS, GROUPS * 4, 1, 16))
        words = tl.broadcast_to(words, (BLOCKS, GROUPS * 4, 2, 16))
    elif TILE == 64:
        words = tl.reshape(tl.permute(tl.join(w0, w1), (0, 1, 3, 2)), (BLOCKS, 2, 1, 16))
        words = tl.broadcast_to(words, (BLOCKS, 2, 2, 16))
    else:
        words = tl.broadcast_to(tl.reshape(w0, (BLOCKS, 1, 1, 16)), (BLOCKS, 1, 2, 16))
    half = ((tl.arange(0, TILE) >> 4) & 1).to(tl.uint32)
    return ((tl.reshape(words, (BLOCKS, TILE)) >> (half * 16)[None, :]) & 0xFFFF).to(tl.int32)


@triton.jit
def draw_dither(scale, offset, start, block, segment, sender, FORMAT: tl.constexpr):
    """The draw that encoder and decoder share: from what the wire holds of a block, and its sender.

    ``scale`` and ``offset`` are (blocks,) float32, exactly as stored: with a huge block's mark.
    """
    k0 = scale.to(tl.uint32, bitcast=True)
    k1 = tl.zeros_like(k0) if FORMAT.symmetric else offset.to(tl.uint32, bitcast=True)
    return draw_per_value(start, block, segment, sender, k0, k1, FORMAT)


@triton.jit
def shift_of(r):
    """(65535 - 2r) / 131072, exact: what a draw moves a value by, in steps."""
    return (65535 - 2 * r).to(tl.float32) * (0.5 / 65536)
