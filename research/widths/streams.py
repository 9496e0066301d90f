"""What Rice codes of a gradient take, counted without writing them, and one step for all values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qsdp.kernels.coded import MAX_LENGTH, gap_parameter

TOP = (1 << 15) - 1  # the largest integer of one step for all: streams, not codes, bound its bits
SEARCHES = 13


def rice_bytes(k: torch.Tensor, top: int) -> torch.Tensor:
    """(blocks,) bytes of each block's header and stream: :func:`qsdp.kernels.coded.encode_block`'s.

    Args:
        k: (blocks, numel) integers from ``-top`` to ``top``.
    """
    magnitude, numel = k.int().abs(), k.shape[1]
    there = magnitude > 0
    count = there.sum(1)
    parameters = range(int(magnitude.max()).bit_length() + 1)  # larger ones take more bits
    dense = torch.stack([(magnitude >> r).sum(1) + numel * (r + 1) for r in parameters]).amin(0)
    dense += 4 + count
    less = (magnitude - 1).clamp(min=0)
    sparse = torch.stack([(less >> r).sum(1) + count * (r + 1) for r in parameters]).amin(0)
    place = torch.arange(numel, dtype=torch.int32)
    last = torch.where(there, place, -1).cummax(1).values
    before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    gaps = torch.where(there, place - before - 1, 0)
    of_gaps = torch.tensor([gap_parameter(numel, max(n, 1)) for n in count.tolist()])
    # Gaps, their last one bits and their parameter's; and signs.
    sparse += 8 + (gaps >> of_gaps[:, None]).sum(1) + count * (of_gaps + 2)
    sparse = torch.where(count == 0, 0, sparse)
    bits = torch.where(4 * count <= 3 * numel, torch.minimum(dense, sparse), dense)
    size, limit = -(-bits // 8), numel * (2 * top).bit_length() // 8
    return 2 + torch.where((size >= limit) | (size > MAX_LENGTH), limit, size)


def rice_bits(k: torch.Tensor, block: int | None) -> int:
    """Of a flat tensor of integers, in blocks (None: one); the last one counts as full."""
    block = block or k.numel()
    rows = torch.nn.functional.pad(k, (0, -k.numel() % block)).view(-1, block)
    return 8 * int(rice_bytes(rows, TOP).sum())


def quantized(x: torch.Tensor, step: float, noise: torch.Tensor | None) -> torch.Tensor:
    """Integers: dithered where there is noise, else to zero below 0.6 steps."""
    if noise is not None:
        return (x / step + noise).round().clamp(-TOP, TOP).int()
    return ((x.abs() / step + 0.4).floor().clamp(max=TOP) * x.sign()).int()


def restored(
    x: torch.Tensor, k: torch.Tensor, step: float, noise: torch.Tensor | None
) -> torch.Tensor:
    """What the receiver decodes; without noise, moved to where a zone's values lie on average.

    That shift is one float32, counted by :func:`one_step`.
    """
    if noise is not None:
        return (k - noise) * step
    there = k != 0
    shift = ((x.abs() / step - k.abs())[there]).mean() if there.any() else torch.tensor(0.0)
    return (k.abs() + shift * there) * k.sign() * step


def finest(spent: Callable[[float], float], room: float, low: float, high: float) -> float:
    """The smallest step found that takes at most ``room``: ``spent`` falls as steps grow."""
    for _ in range(SEARCHES):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if spent(middle) <= room else (middle, high)
    return high


def one_step(
    rows: torch.Tensor, room: float, noise: torch.Tensor | None, block: int | None
) -> tuple[torch.Tensor, float]:
    """One step for all values of all ranks, in Rice codes, as fine as fits.

    Args:
        rows: (ranks, numel).
        room: bits for each rank: the one that takes most decides the step.
        noise: of the shape of ``rows``, known to both ends, or None for a dead zone, which is
            biased.

    Returns:
        Decoded rows, and the most bits that a rank took: codes, headers, the step and the shift.
    """
    own = [None] * len(rows) if noise is None else list(noise)
    scale = rows.square().mean().sqrt().clamp(min=1e-30).item()

    def spent(step: float) -> float:
        return 64 + max(
            rice_bits(quantized(x, step * scale, u), block) for x, u in zip(rows, own, strict=True)
        )

    step = finest(spent, room, 1e-3, 1e4)
    codes = [quantized(x, step * scale, u) for x, u in zip(rows, own, strict=True)]
    decoded = [restored(x, k, step * scale, u) for x, k, u in zip(rows, codes, own, strict=True)]
    return torch.stack(decoded), spent(step)
