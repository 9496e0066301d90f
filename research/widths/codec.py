"""A simulated codec: rotated blocks on grids of chosen widths, dithered, all bits counted."""

from __future__ import annotations

import math

import torch

from qsdp.kernels.transform import SIZE, hadamard
from qsdp.tune.allocate import Item, within_budget

MAX_WIDTH = 8
SCALE_BITS = 16
WIDTH_BITS = 4  # that say a block's width


# Times a row of 32: the library's transform, to the same lengths, as one product.
_ROTATION = hadamard(torch.eye(SIZE)) * SIZE**0.5


def rotate(x: torch.Tensor) -> torch.Tensor:
    """A flat tensor in rows of 32, rotated to the same lengths; padded with zeros."""
    padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % SIZE))
    return (padded.view(-1, SIZE) @ _ROTATION).flatten()


def unrotate(y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse, in the shape of ``like``."""
    return (y.view(-1, SIZE) @ _ROTATION.T).flatten()[: like.numel()].view(like.shape)


def blocks_of(y: torch.Tensor, block: int) -> torch.Tensor:
    """(blocks, block), the last one padded with zeros."""
    return torch.nn.functional.pad(y, (0, -y.numel() % block)).unflatten(0, (-1, block))


def dithered(
    x: torch.Tensor,
    width: torch.Tensor,
    noise: torch.Tensor,
    most: torch.Tensor | None = None,
    *,
    subtract: bool = True,
) -> torch.Tensor:
    """Blocks (blocks, n) decoded from ``width`` bits each: unbiased, and zeros for 0 bits.

    Args:
        noise: within [-1/2, 1/2), of the shape of ``x``; known to both ends.
        most: (blocks,) bounds of the grids, no magnitude above them; None for the largest ones.
        subtract: receivers take the noise off again; else rounding is stochastic, whose errors
            are twice as large.
    """
    most = x.abs().amax(1, keepdim=True) if most is None else most[:, None]
    steps = (2.0 ** width[:, None].float() - 1).clamp(min=1)
    step = 2 * most / steps
    code = ((x + most) / step.clamp(min=1e-30) + noise).round().clamp_(min=0)
    value = (torch.minimum(code, steps) - noise * subtract) * step - most
    return torch.where((width[:, None] > 0) & (most > 0), value, 0.0)


def fixed_bits(width: int, block: int) -> float:
    """True bits a value of blocks of one width."""
    return width + SCALE_BITS / block


def chosen_widths(
    rms: torch.Tensor,
    most: torch.Tensor,
    block: int,
    budget: float,
    least: int,
    power: float,
    numel: int | None = None,
) -> torch.Tensor:
    """Widths of blocks that make the sum of weighted squared errors least, within a budget.

    With the knapsack of `qsdp tune`, whose items are blocks here.

    Args:
        rms, most: of each block, its root mean square and its largest magnitude.
        budget: true bits a value over all blocks, scales and widths among them.
        least: bits that every block gets.
        power: squared errors weigh rms^-power: 0 for least squares.
        numel: values in all blocks, where the last one is not full.

    Returns:
        (blocks,) integers from ``least`` to 8.

    Raises:
        ValueError: a budget below ``least`` bits with their scales and widths.
    """
    widths = torch.arange(MAX_WIDTH + 1).double()
    step = 2 * most[:, None].double() / (2**widths - 1).clamp(min=1)
    errors = step.square() / 12
    errors[:, 0] = rms.double().square()
    weight = torch.where(rms > 0, rms.double().clamp(min=1e-30) ** -power, 0.0)
    errors *= weight[:, None]
    numel = numel or block * len(rms)
    if least and numel == block * len(rms):
        spare = budget - fixed_bits(least, block) - WIDTH_BITS / block
        return least + _largest_gains(errors[:, least:], math.floor(spare * len(rms) + 1e-9))
    harms = errors[:, least:].tolist()
    sizes = [min(block, numel - at) for at in range(0, numel, block)]
    rates = {size: _rates(size, least) for size in set(sizes)}
    items = [
        Item(str(place), size, {r: size * h for r, h in zip(rates[size], harm, strict=True)})
        for place, (size, harm) in enumerate(zip(sizes, harms, strict=True))
    ]
    found = within_budget(items, budget - WIDTH_BITS * len(rms) / numel)
    return torch.tensor([least + rates[item.numel].index(found[item.name]) for item in items])


def _largest_gains(errors: torch.Tensor, upgrades: int) -> torch.Tensor:
    """Upgrades of each block. What the knapsack gives where they all cost the same: those with the
    largest gains, which fall from bit to bit."""
    if upgrades < 0:
        raise ValueError("the budget must be at least the least bits with their scales and widths")
    gains = -errors.diff(dim=1)
    taken = gains.flatten().topk(min(upgrades, gains.numel())).indices
    return torch.bincount(taken // gains.shape[1], minlength=len(errors))


def _rates(size: int, least: int) -> list[float]:
    """Bits a value of a block of each width. One of 0 bits has no scale."""
    return [fixed_bits(width, size) if width else 0.0 for width in range(least, MAX_WIDTH + 1)]


def send(
    tensors: list[torch.Tensor],
    generator: torch.Generator,
    *,
    block: int,
    width: int | None = None,
    budget: float = 0.0,
    least: int = 1,
    power: float = 0.0,
) -> tuple[list[torch.Tensor], float]:
    """What the receiver decodes of a rank's gradients, and the true bits a value that it took.

    Args:
        width: of all blocks; None to choose widths over all tensors together.
    """
    rotated = [blocks_of(rotate(x), block) for x in tensors]
    joined = torch.cat(rotated)
    if width is not None:
        widths = torch.full((len(joined),), width)
        bits = fixed_bits(width, block)
    else:
        rms, most = joined.square().mean(1).sqrt(), joined.abs().amax(1)
        widths = chosen_widths(rms, most, block, budget, least, power)
        spent = widths.double().sum() * block + SCALE_BITS * (widths > 0).double().sum()
        bits = float(spent + WIDTH_BITS * len(widths)) / joined.numel()
        assert bits <= budget + 1e-9, (bits, budget)
    noise = torch.rand(joined.shape, generator=generator) - 0.5
    decoded = dithered(joined, widths, noise).split([len(part) for part in rotated])
    back = [
        unrotate(part.flatten()[: -(-x.numel() // SIZE) * SIZE], x)
        for part, x in zip(decoded, tensors, strict=True)
    ]
    return back, bits
