"""Bits a value of fixed, Elias and Rice codes on real gradients and on differences of weights.

    python -m benchmarks.quality.coded_bytes [--steps 150] [--out FILE]

Trains the small character model of ``research/widths`` in one process. Gradients are one rank's, of
matrices; differences are those that ``qsdp.Differences`` takes after every AdamW step. Counted is
what travels: scales, headers of blocks and codes; full precision takes 32 bits.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from torch import nn

import qsdp
from qsdp import Quantizer
from qsdp.quantizer import CODINGS
from research.widths.train import Model, batch, corpus

GRADIENTS = {
    "qsgd2: 2 bits, 128, max": Quantizer(2, 128, "stochastic", scaling="symmetric"),
    "qsgd4: 4 bits, 512, max": Quantizer(4, 512, "stochastic", scaling="symmetric"),
    "qsgd8: 8 bits, 512, max": Quantizer(8, 512, "stochastic", scaling="symmetric"),
    "2 bits, 512, 2-norm (s = 1)": Quantizer(2, 512, "stochastic", scaling="l2"),
    "6 bits, 1024, 2-norm (s = 31)": Quantizer(6, 1024, "stochastic", scaling="l2"),
}
DIFFERENCES = {
    "2 bits, 1024, nearest": Quantizer(2, 1024, "nearest", scaling="symmetric"),
    "4 bits, 1024, nearest": Quantizer(4, 1024, "nearest", scaling="symmetric"),
    "4 bits, 128, nearest": Quantizer(4, 128, "nearest", scaling="symmetric"),
    "8 bits, 1024, nearest": Quantizer(8, 1024, "nearest", scaling="symmetric"),
}
LOOKS = 10  # steps at which bytes are counted, spread over the run


def bits_a_value(tensors: list[torch.Tensor], form: Quantizer) -> dict[str, float]:
    """Of each coding."""
    numel = sum(x.numel() for x in tensors)
    found = {}
    for coding in CODINGS:
        coded = replace(form, coding=coding)  # type: ignore[arg-type]
        found[coding] = 8 * sum(qsdp.encode(x, coded).numel() for x in tensors) / numel
    return found


def measure(steps: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Bits a value at some steps, by what travels, format and coding."""
    training, _, vocabulary = corpus()
    torch.manual_seed(1)
    model, data = Model(vocabulary), torch.Generator().manual_seed(1)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    kept = {name: [p.detach().clone() for p in matrices] for name in DIFFERENCES}
    found: dict[str, dict[str, list[dict[str, float]]]] = {"gradients": {}, "differences": {}}
    for step in range(1, steps + 1):
        model.zero_grad()
        tokens, targets = batch(training, data)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        look = step % max(steps // LOOKS, 1) == 0
        gradients = [p.grad.flatten() for p in matrices if p.grad is not None]
        for name, form in GRADIENTS.items() if look else ():
            found["gradients"].setdefault(name, []).append(bits_a_value(gradients, form))
        for name, form in DIFFERENCES.items():
            changes = [
                (p.detach() - k).flatten() for p, k in zip(matrices, kept[name], strict=True)
            ]
            if look:
                found["differences"].setdefault(name, []).append(bits_a_value(changes, form))
            for change, k in zip(changes, kept[name], strict=True):
                k += qsdp.decode(qsdp.encode(change, form), change.numel(), form).view_as(k)
    return found


def table(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    lines = [
        f"{'what':<12} {'format':<31} {'fixed':>7} {'elias':>7} {'rice':>7} {'rice/fixed':>11}"
    ]
    for what, formats in found.items():
        for name, looks in formats.items():
            fixed, elias, rice = (mean(look[coding] for look in looks) for coding in CODINGS)
            row = (
                f"{what:<12} {name:<31} {fixed:7.3f} {elias:7.3f} {rice:7.3f} {rice / fixed:11.2f}"
            )
            lines.append(row)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = table(measure(options.steps))
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
