"""One bit a value, and what error feedback makes of it: contraction, telescoping, convergence.

Workers descend a common quadratic whose minimisers differ between them, so that at the minimiser
of the mean their gradients are not zero. Each sends signs and a mean magnitude a block. Without
feedback the mean of what they send is not zero there either, and the descent ends elsewhere; with
it what was sent adds up to the gradients, and falling steps reach the minimiser.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

from qsdp.quantizer import Quantizer
from research.theory.claims import Claim, Estimate, Part, estimate
from research.theory.descent import in_blocks
from research.theory.problems import generator

SIGNS = Quantizer(1, 32, "nearest", scaling="mean", scale_dtype="bfloat16")
_WORKERS, _DIM, _RATE, _HALF = 4, 64, 0.05, 200
# bfloat16 rounds a up by less than 1/128: of n a^2 the square of that is lost.
_ROUNDED = 2.0**-14


def contraction(*, trials: int = 2000) -> Part:
    """``|x - C(x)|^2 = |x|^2 - n a^2`` of blocks of all kinds of tails."""
    x = torch.randn(trials, 32, generator=generator(1), dtype=torch.float64)
    claims = []
    for power in (1.0, 3.0, 9.0):
        block = (x.sign() * x.abs() ** power).float().double()
        left = ((block - in_blocks(SIGNS)(block, 0)) ** 2).sum(-1)
        expected = (block**2).sum(-1) - 32 * block.abs().mean(-1) ** 2
        worst = float(((left - expected) / (block**2).sum(-1)).abs().max())
        text = f"|normal|^{power:g}, blocks of 32"
        claims.append(Claim("off from |x|^2 - n a^2", text, Estimate(worst), "<=", _ROUNDED))
    return Part("BitDP: signs and mean magnitudes contract", "largest, of |x|^2", claims)


def descent(*, steps: int = 2000, trials: int = 16) -> Part:
    """With feedback the quadratic is solved, without it the descent stalls."""
    text = f"{_WORKERS} workers, {_DIM} values, T {steps}"
    excess, telescoped = {}, 0.0
    for feedback in (True, False):
        run = _excesses(feedback, trials)
        final, telescoped_now = next(islice(run, steps, None))
        excess[feedback] = estimate(final)
        telescoped = max(telescoped, telescoped_now if feedback else 0.0)
    claims = [
        Claim("sent + left - gradients", text, Estimate(telescoped), "<=", 1e-9),
        Claim("with feedback", text, excess[True], "<=", 1e-3),
        Claim("without it: stalls", text, excess[False], ">", 1e-2),
    ]
    about = "f - min f over that of the start; the first row: largest, over all steps"
    return Part("BitDP: a quadratic with and without error feedback", about, claims)


def _excesses(feedback: bool, trials: int) -> Iterator[tuple[torch.Tensor, float]]:
    """At every step f - min f over that of the start, one a trial, and what telescoping lost."""
    curvature = torch.linspace(0.2, 1.0, _DIM, dtype=torch.float64)
    away = torch.randn(_WORKERS, trials, _DIM, generator=generator(2), dtype=torch.float64)
    away -= away.mean(0)  # minimisers of the workers; that of the mean is zero
    x = torch.ones(trials, _DIM, dtype=torch.float64)
    start = (curvature * x**2).sum(-1)
    left, sent, gradients = (torch.zeros_like(away) for _ in range(3))
    step = 0
    while True:
        yield (curvature * x**2).sum(-1) / start, float((sent + left - gradients).abs().max())
        exact = curvature * (x - away)
        wanted = exact + left if feedback else exact
        arrived = torch.stack([in_blocks(SIGNS)(rows, step) for rows in wanted])
        gradients += exact
        left = wanted - arrived if feedback else left
        sent += arrived
        x = x - _RATE / (1 + step / _HALF) * arrived.mean(0)
        step += 1
