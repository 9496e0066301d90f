"""Philox4x32 (Salmon et al., SC 2011): counter-based random bits, the same on every backend.

[Note: where the random bits come from] Key and counter of a value in ``encode``:

    key      = (low 32 bits of `key`, high 32 bits of `key` XOR the block's content sum)
    counter  = (16 * (j // 128) + j % 16, block index, segment index, row index)

where ``j`` is the value's place in its block, the content sum is the sum modulo 2^32 of the bit
patterns of the block's values as float32. One call gives four 32-bit words, which serve eight
values with 16 bits each: value ``j`` takes the low half (``(j // 16) % 2 == 0``) or the high half
of word ``(j % 128) // 32``. Sixteen neighbouring values read one half-word of sixteen neighbouring
counters, which suits vector registers of any width. Random shift takes the low half of word 0 of
counter 0 for its whole block.

[Note: rounds] Draws take 7 rounds, the fewest with which the authors found no flaw in TestU01's
BigCrush (their section 5): of a kernel with dither, drawing is the largest part. Keys are derived
rarely, and with the usual 10.

The content sum makes the draw a function of the block: unchanged values are rounded alike however
often they are encoded (forward, backward, after a resume), changed values afresh, and no step
counter has to be kept, guessed or restored.
"""

from __future__ import annotations

from functools import lru_cache

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
DRAW_ROUNDS, KEY_ROUNDS = 7, 10  # [Note: rounds]
MASK32 = 0xFFFFFFFF

Word = torch.Tensor | int


def philox4x32(
    counter: tuple[Word, ...], key: tuple[Word, Word], rounds: int = DRAW_ROUNDS
) -> tuple[Word, ...]:
    """Four 32-bit words for a counter of four words and a key of two.

    Words are ints or int64 tensors holding 32-bit values, which broadcast. Products of two 32-bit
    words wrap in int64, but their bits are right, and only bits are used.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK32) ^ c1 ^ k0,
            p1 & MASK32,
            ((p0 >> 32) & MASK32) ^ c3 ^ k1,
            p0 & MASK32,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


@lru_cache(maxsize=4096)  # of every call of a collective the same
def derive_key(seed: int, *words: int) -> int:
    """A 64-bit key from a 64-bit seed and up to four 32-bit words: different inputs, other bits."""
    assert len(words) <= 4
    counter = (*words, *(0,) * (4 - len(words)))
    w0, w1, _, _ = philox4x32(counter, (seed & MASK32, (seed >> 32) & MASK32), KEY_ROUNDS)
    assert isinstance(w0, int) and isinstance(w1, int)
    return (w1 << 32) | w0


def random16_per_value(
    numel: int, counter: tuple[Word, Word, Word], key: tuple[Word, Word]
) -> torch.Tensor:
    """16 random bits for each of ``numel`` values of blocks: (..., numel) int64.

    ``counter`` (block, segment, row) and ``key`` broadcast to the blocks' shape (...).
    """
    num_groups = -(-numel // 128)
    lanes = torch.arange(16 * num_groups, dtype=torch.int64, device=_device(*counter, *key))
    words = philox4x32((lanes, *(_column(w) for w in counter)), (_column(key[0]), _column(key[1])))
    halves = []
    for word in words:
        assert isinstance(word, torch.Tensor)
        grouped = word.unflatten(-1, (num_groups, 16))
        halves += [grouped & 0xFFFF, grouped >> 16]
    return torch.stack(halves, dim=-2).flatten(-3)[..., :numel]


def random16_per_block(counter: tuple[Word, Word, Word], key: tuple[Word, Word]) -> torch.Tensor:
    """16 random bits for each block, of the blocks' shape, int64."""
    word = philox4x32((0, *counter), key)[0]
    assert isinstance(word, torch.Tensor)
    return word & 0xFFFF


def _column(word: Word) -> Word:
    return word.unsqueeze(-1) if isinstance(word, torch.Tensor) else word


def _device(*words: Word) -> torch.device:
    return next(w.device for w in words if isinstance(w, torch.Tensor))
