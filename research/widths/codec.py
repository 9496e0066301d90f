"""A simulated codec: rotated blocks on grids of chosen widths, dithered, all bits counted."""

from __future__ import annotations

import torch

from qsdp.kernels.transform import SIZE, hadamard, inverse_hadamard

MAX_WIDTH = 8
SCALE_BITS = 16
WIDTH_BITS = 4  # that say a block's width


def rotate(x: torch.Tensor) -> torch.Tensor:
    """A flat tensor in rows of 32, rotated to the same lengths; padded with zeros."""
    padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % SIZE))
    return hadamard(padded[None])[0] / SIZE**0.5


def unrotate(y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse, in the shape of ``like``."""
    return (inverse_hadamard(y[None])[0] * SIZE**0.5)[: like.numel()].view(like.shape)


def blocks_of(y: torch.Tensor, block: int) -> torch.Tensor:
    """(blocks, block), the last one padded with zeros."""
    return torch.nn.functional.pad(y, (0, -y.numel() % block)).unflatten(0, (-1, block))


def dithered(x: torch.Tensor, width: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Blocks (blocks, n) decoded from ``width`` bits each: unbiased, and zeros for 0 bits.

    Args:
        noise: within [-1/2, 1/2), of the shape of ``x``; known to both ends.
    """
    most = x.abs().amax(1, keepdim=True)
    steps = (2.0 ** width[:, None].float() - 1).clamp(min=1)
    step = 2 * most / steps
    code = ((x + most) / step.clamp(min=1e-30) + noise).round().clamp_(min=0)
    value = (torch.minimum(code, steps) - noise) * step - most
    return torch.where((width[:, None] > 0) & (most > 0), value, 0.0)


def fixed_bits(width: int, block: int) -> float:
    """True bits a value of blocks of one width."""
    return width + SCALE_BITS / block


def chosen_widths(
    rms: torch.Tensor, most: torch.Tensor, block: int, budget: float, least: int, power: float
) -> torch.Tensor:
    """Widths of blocks that make the sum of weighted squared errors least, within a budget.

    Upgrades by one bit are taken by what they gain, the largest first: gains of a block fall from
    bit to bit, so no other choice of the same bits is better.

    Args:
        rms, most: of each block, its root mean square and its largest magnitude.
        budget: true bits a value over all blocks, scales and widths among them.
        least: bits that every block gets.
        power: squared errors weigh rms^-power: 0 for least squares.

    Returns:
        (blocks,) integers from ``least`` to 8.
    """
    widths = torch.arange(MAX_WIDTH + 1).double()
    step = 2 * most[:, None].double() / (2**widths - 1).clamp(min=1)
    errors = step.square() / 12
    errors[:, 0] = rms.double().square()
    weight = torch.where(rms > 0, rms.double().clamp(min=1e-30) ** -power, 0.0)
    gains = (errors[:, :-1] - errors[:, 1:]) * weight[:, None]
    cost = torch.full_like(gains, float(block))
    cost[:, 0] += SCALE_BITS  # a block of 0 bits has no scale
    density = gains / cost
    if least == 0:  # the first bit may gain less than a second one: then both are one upgrade
        together = gains.cumsum(1) / cost.cumsum(1)
        best, first = together.max(1, keepdim=True)
        density = torch.where(torch.arange(MAX_WIDTH) <= first, best, density)
    density[:, :least] = torch.inf
    density = torch.cummin(density, 1).values  # equal but for rounding
    room = budget * block * len(rms) - WIDTH_BITS * len(rms)
    order = density.flatten().argsort(descending=True, stable=True)
    taken = cost.flatten()[order].cumsum(0) <= room
    chosen = torch.zeros(density.numel(), dtype=torch.int64)
    chosen[order] = taken.long()
    taken_bits = chosen.view_as(density).sum(1)
    # The budget may end inside an upgrade of several bits.
    return torch.where((taken_bits == 1) & (density[:, 0] == density[:, 1]), 0, taken_bits)


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
