"""Whole gradients of all ranks under a budget of true bits: JointSQ's classes and what rivals them.

A scheme takes rows (ranks, numel) and bits a value, and gives what receivers decode and the most
bits a value that a rank took: never above the budget, which is checked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qsdp.kernels.transform import SIZE
from research.widths.codec import (
    SCALE_BITS,
    WIDTH_BITS,
    blocks_of,
    chosen_widths,
    dithered,
    rotate,
    unrotate,
)
from research.widths.errors import CLASSES, classes, entropy, top_k
from research.widths.streams import finest, one_step

Sent = tuple[torch.Tensor, float]
Scheme = Callable[[torch.Tensor, float, torch.Generator], Sent]


def noise_of(rows: torch.Tensor, generator: torch.Generator, together: bool) -> torch.Tensor:
    """Of the shape of ``rows``, within [-1/2, 1/2), uniform for every rank.

    Args:
        together: the ranks' draws of a value lie 1/n apart, in an order of its own, so that errors
            of ranks with nearly equal values cancel; else they are independent.
    """
    if not together:
        return torch.rand(rows.shape, generator=generator) - 0.5
    order = torch.rand(rows.shape, generator=generator).argsort(0)
    first = torch.rand(rows[:1].shape, generator=generator)
    return (first + order / len(rows)) % 1 - 0.5


def scales(magnitudes: torch.Tensor) -> torch.Tensor:
    """Float32 as bfloat16, upwards: no value may be above its block's bound."""
    return ((magnitudes.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def checked(decoded: torch.Tensor, spent: float, bits: float) -> Sent:
    """No rank may be over the budget."""
    assert spent <= bits + 1e-6, (spent, bits)
    return decoded, spent


def joined(sent: list[Sent], bits: float) -> Sent:
    """Of every rank, as rows, and the most bits that one took."""
    return checked(torch.stack([decoded for decoded, _ in sent]), max(b for _, b in sent), bits)


def jointsq(nearest: bool) -> Scheme:
    """Classes of 0, 2, 4 and 8 bits over the whole gradient of a rank."""

    def send(rows: torch.Tensor, bits: float, generator: torch.Generator) -> Sent:
        return joined([_classes(x, bits, nearest, generator) for x in rows], bits)

    return send


def _classes(x: torch.Tensor, bits: float, nearest: bool, generator: torch.Generator) -> Sent:
    scale = x.square().mean().sqrt().clamp(min=1e-30)
    x = x / scale
    ordered = x.abs().sort().values
    widths = torch.tensor([0, *(width for _, width in CLASSES)])

    def spent(t: float) -> float:
        edges = torch.searchsorted(ordered, torch.tensor([t * factor for factor, _ in CLASSES]))
        ends = torch.cat((torch.tensor([0]), edges, torch.tensor([len(x)])))
        counts = ends.diff()
        scales = 32 * int((counts[1:] > 0).sum())
        return (float((counts * widths).sum()) + scales) / len(x) + entropy(counts)

    t = finest(spent, bits, 1e-3, 1e4)
    decoded, found = classes(x, t, nearest, generator)
    return decoded * scale, found


def largest(rows: torch.Tensor, bits: float, generator: torch.Generator) -> Sent:
    """The largest values in 4 bits, and the entropy of where they are."""
    numel = rows.shape[1]

    def spent(inverse: float) -> float:
        kept = max(int(numel / inverse), 1)
        return entropy(torch.tensor([kept, numel - kept])) + (4 * kept + 32) / numel

    inverse = finest(spent, bits - 1e-3, 1.0, 1e5)
    return joined([top_k(x, 1 / inverse) for x in rows], bits)


def dead_zone(block: int | None) -> Scheme:
    """One step for all values of all ranks, Rice codes."""

    def send(rows: torch.Tensor, bits: float, generator: torch.Generator) -> Sent:
        decoded, spent = one_step(rows, bits * rows.shape[1], None, block)
        return checked(decoded, spent / rows.shape[1], bits)

    return send


def dithered_steps(block: int | None, together: bool = False, rotated: bool = False) -> Scheme:
    """One step for all, dithered and so unbiased, Rice codes."""

    def send(rows: torch.Tensor, bits: float, generator: torch.Generator) -> Sent:
        turned = torch.stack([rotate(x) for x in rows]) if rotated else rows
        noise = noise_of(turned, generator, together)
        decoded, spent = one_step(turned, bits * rows.shape[1], noise, block)
        if rotated:
            decoded = torch.stack([unrotate(y, x) for y, x in zip(decoded, rows, strict=True)])
        return checked(decoded, spent / rows.shape[1], bits)

    return send


def widths(
    block: int, least: int, *, together: bool = False, shared: bool = False, rotated: bool = True
) -> Scheme:
    """Blocks of chosen widths, dithered.

    Args:
        shared: widths and scales fit all ranks, which agreed on them: they are sent once more.
    """

    def send(rows: torch.Tensor, bits: float, generator: torch.Generator) -> Sent:
        turned = torch.stack([blocks_of(rotate(x) if rotated else x, block) for x in rows])
        noise = noise_of(turned.flatten(1), generator, together).view_as(turned)
        rms, most = turned.square().mean(2).sqrt(), scales(turned.abs().amax(2))
        numel = -(-rows.shape[1] // SIZE) * SIZE
        budget = bits * rows.shape[1] / numel
        if shared:  # a float of each block and a width for all, the former reduced to the largest
            most = most.amax(0, keepdim=True).expand_as(most)
            rms = rms.square().mean(0, keepdim=True).sqrt().expand_as(rms)
            budget -= SCALE_BITS * turned.shape[1] / numel
        sent = []
        for own, x in enumerate(rows):
            chosen = chosen_widths(rms[own], most[own], block, budget, least, 0.0, numel)
            decoded = dithered(turned[own], chosen, noise[own], most[own])
            values = torch.full_like(chosen, block)
            values[-1] -= turned[own].numel() - numel
            spent = float((chosen * values).sum()) + SCALE_BITS * float((chosen > 0).sum())
            spent += (WIDTH_BITS + SCALE_BITS * shared) * len(chosen)
            flat = decoded.flatten()
            back = unrotate(flat[:numel], x) if rotated else flat[: len(x)]
            sent.append((back, spent / len(x)))
        return joined(sent, bits)

    return send


def fixed(width: int, block: int, *, together: bool = False, subtract: bool = True) -> Scheme:
    """Rotated blocks of one width and a scale of 16 bits each.

    Args:
        subtract: receivers know the dither and subtract it; else this is stochastic rounding.
    """

    def send(rows: torch.Tensor, bits: float, generator: torch.Generator) -> Sent:
        turned = torch.stack([blocks_of(rotate(x), block) for x in rows])
        noise = noise_of(turned.flatten(1), generator, together).view_as(turned)
        count, most = torch.full((turned.shape[1],), width), scales(turned.abs().amax(2))
        sent = []
        for own, x in enumerate(rows):
            decoded = dithered(turned[own], count, noise[own], most[own], subtract=subtract)
            numel = -(-len(x) // SIZE) * SIZE
            spent = (width * numel + SCALE_BITS * len(count)) / len(x)
            sent.append((unrotate(decoded.flatten()[:numel], x), spent))
        return joined(sent, bits)

    return send


def signs(rows: torch.Tensor, bits: float, generator: torch.Generator) -> Sent:
    """A sign of each value and the mean magnitude of each 1,024, as in the preset ``bitdp``."""
    sent = []
    for x in rows:
        blocks = blocks_of(x, 1024)
        mean = blocks.abs().mean(1, keepdim=True).bfloat16().float()
        decoded = torch.where(blocks >= 0, mean, -mean).flatten()[: len(x)]
        sent.append((decoded, 1 + SCALE_BITS * len(blocks) / len(x)))
    return joined(sent, bits)
