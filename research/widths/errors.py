"""JointSQ's classes, a dead zone and blocks of chosen widths: squared error at equal true bits.

Everything is counted: scales, widths, the entropy of class maps, and of the dead zone the bytes
that :mod:`qsdp.kernels.coded` writes. Writes errors.txt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from research.widths.codec import blocks_of, chosen_widths, dithered, fixed_bits
from research.widths.streams import rice_bytes
from research.widths.train import Model, batch, corpus

HERE = Path(__file__).parent
NUMEL, BLOCK = 1 << 13, 128
BITS = (0.32, 1.02, 2.0, 3.0)  # 100x, 32x, 16x, 11x fewer than float32
# JointSQ takes magnitudes from t on in 2 bits, from 4 t in 4, from 21.95 t in 8.
CLASSES = ((1.0, 2), (4.0, 4), (21.95, 8))
Codec = Callable[[torch.Tensor, float], tuple[torch.Tensor, float]]


def entropy(counts: torch.Tensor) -> float:
    """Bits of a symbol with these counts."""
    p = counts[counts > 0].double() / counts.sum()
    return float(-(p * p.log2()).sum())


def stochastic(x: torch.Tensor, top: int, most: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return (x / most * top + noise).floor() * most / top


def classes(
    x: torch.Tensor, t: float, nearest: bool, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, float]:
    """JointSQ's classes from threshold t: decoded values, and true bits a value."""
    generator = generator or torch.Generator().manual_seed(1)
    magnitude, decoded, total = x.abs(), torch.zeros_like(x), 0.0
    kind = sum((magnitude >= t * factor).long() for factor, _ in CLASSES)
    assert isinstance(kind, torch.Tensor)
    for place, (_, bits) in enumerate(CLASSES, 1):
        own = kind == place
        if own.any():
            noise = torch.rand(int(own.sum()), generator=generator)
            noise = torch.full_like(noise, 0.5) if nearest else noise
            top = (1 << (bits - 1)) - 1
            decoded[own] = stochastic(x[own], top, magnitude[own].max(), noise)
            total += bits * float(own.sum()) + 32
    counts = torch.bincount(kind, minlength=4)
    return decoded, total / x.numel() + entropy(counts)


def dead_zone(x: torch.Tensor, step: float) -> tuple[torch.Tensor, float]:
    """One step for all, magnitudes below 0.6 steps to zero, Rice codes in blocks of 1024."""
    k = (x.abs() / step + 0.4).floor().clamp(max=127) * x.sign()
    blocks = torch.nn.functional.pad(k.long(), (0, -k.numel() % 1024)).view(-1, 1024)
    sizes = int(rice_bytes(blocks, 127).sum())
    # Where a zone's values lie on average, which its magnitude is decoded to.
    shift = ((x.abs() / step - k.abs())[k != 0]).mean() if (k != 0).any() else torch.tensor(0.0)
    return (k.abs() + shift * (k != 0)) * k.sign() * step, (8 * sizes + 64) / x.numel()


def top_k(x: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
    """The largest in 4 bits, nearest, and the entropy of where they are."""
    count = max(int(share * x.numel()), 1)
    own = x.abs() >= x.abs().kthvalue(x.numel() - count + 1).values
    decoded = torch.zeros_like(x)
    most = x.abs().max()
    decoded[own] = stochastic(x[own], 7, most, torch.tensor(0.5))
    counts = torch.tensor([int(own.sum()), x.numel() - int(own.sum())])
    return decoded, entropy(counts) + 4 * share + 32 / x.numel()


def search(codec: Callable[[float], tuple[torch.Tensor, float]], bits: float, low: float,
           high: float) -> tuple[torch.Tensor, float]:  # fmt: skip
    """The finest that fits: ``codec`` takes more bits the smaller its argument."""
    best = codec(high)
    for _ in range(12):
        middle = (low * high) ** 0.5
        found = codec(middle)
        if found[1] <= bits:
            best, high = found, middle
        else:
            low = middle
    return best


def widths(x: torch.Tensor, bits: float, least: int) -> tuple[torch.Tensor, float]:
    """Blocks of chosen widths."""
    rows = blocks_of(x, BLOCK)
    rms, most = rows.square().mean(1).sqrt(), rows.abs().amax(1)
    chosen = chosen_widths(rms, most, BLOCK, bits, least, 0.0)
    noise = torch.rand(rows.shape, generator=torch.Generator().manual_seed(2)) - 0.5
    spent = float(chosen.sum()) + 16 / BLOCK * float((chosen > 0).sum()) + 4 / BLOCK * len(chosen)
    return dithered(rows, chosen, noise).flatten()[: x.numel()], spent / len(chosen)


def fixed(x: torch.Tensor, bits: float) -> tuple[torch.Tensor, float]:
    """Blocks of one width, the widest that fits; nan where one bit does not."""
    width = int(bits + 0.125 - fixed_bits(0, BLOCK))
    rows = blocks_of(x, BLOCK)
    noise = torch.rand(rows.shape, generator=torch.Generator().manual_seed(2)) - 0.5
    decoded = dithered(rows, torch.full((len(rows),), width), noise).flatten()[: x.numel()]
    return (decoded if width else x * torch.nan), fixed_bits(width, BLOCK)


CODECS: dict[str, Codec] = {
    "classes, stochastic": lambda x, b: search(lambda t: classes(x, t, False), b, 1e-3, 100.0),
    "classes, nearest": lambda x, b: search(lambda t: classes(x, t, True), b, 1e-3, 100.0),
    "dead zone, Rice": lambda x, b: search(lambda s: dead_zone(x, s), b, 1e-2, 100.0),
    "top-k, 4 bits": lambda x, b: search(lambda s: top_k(x, 1 / s), b, 1.0, 1e4),
    "widths, from 0": lambda x, b: widths(x, b, 0),
    "one width": fixed,
}


def samples() -> dict[str, torch.Tensor]:
    """Of unit variance or so, and one model's gradient, in the order of its parameters."""
    generator = torch.Generator().manual_seed(5)
    laplace = torch.empty(NUMEL).exponential_(generator=generator)
    sign = torch.randint(0, 2, (NUMEL,), generator=generator) * 2 - 1
    normal = torch.randn(NUMEL, generator=generator)
    heavy = normal / torch.randn(3, NUMEL, generator=generator).square().mean(0).sqrt()
    return {"normal": normal, "Laplace": laplace * sign, "t3": heavy, "gradient": gradient()}


def gradient() -> torch.Tensor:
    training, _, vocabulary = corpus()
    torch.manual_seed(1)
    model, data = Model(vocabulary), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(40):
        model.zero_grad()
        tokens, targets = batch(training, data)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    parts = [p.grad.flatten() for p in model.parameters() if p.ndim == 2 and p.grad is not None]
    rows = torch.cat(parts).split(1024)[:-1]  # eight stretches, spread over the model
    found = torch.cat(rows[:: len(rows) // (NUMEL // 1024)])[:NUMEL]
    return found / found.square().mean().sqrt()


def main() -> None:
    lines = [f"{'values':<9} {'codec':<20} " + " ".join(f"{b:>6g} bits" for b in BITS)]
    for name, x in samples().items():
        for codec, run in CODECS.items():
            cells = []
            for bits in BITS:
                decoded, spent = run(x, bits)
                assert spent <= bits + 0.126, (codec, bits, spent)
                error = (decoded - x).square().sum() / x.square().sum()
                cells.append(f"{error.item():11.3f}")
            lines.append(f"{name:<9} {codec:<20} " + " ".join(cells))
    text = "\n".join(lines) + "\n"
    (HERE / "errors.txt").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
