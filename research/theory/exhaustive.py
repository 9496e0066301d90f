"""Moments of roundings over all 65,536 outcomes of their random bits: no sampling.

The outcomes go through the functions that ``round_to_lattice`` is made of, and through the
reference's ``quantize_on``. Moments on lattices are exact in float64: errors are multiples of 2^-17
steps, their squares of 2^-34, and 65,536 of them add up to less than 2^53 of those.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from qsdp.kernels.blocks import (
    FRACTION,
    block_grid,
    dequantize_blocks,
    quantize_on,
    round_positions,
    shift_of,
)
from qsdp.quantizer import Quantizer, Rounding, Scaling
from research.theory.claims import Claim, Estimate, Part
from research.theory.formulas import (
    EPSILON32,
    POSITION_ERROR,
    block_contraction,
    qsgd_nonzeros,
    qsgd_variance,
)
from research.theory.problems import generator

OUTCOMES = torch.arange(FRACTION)
_AT_ONCE = 2  # values whose outcomes are held together: they should stay in a core's cache

SCALINGS: tuple[Scaling, ...] = ("minmax", "symmetric")
BLOCK_QUANTIZERS = (
    Quantizer(2, 32, "shift"),
    Quantizer(8, 32, "shift"),
    Quantizer(2, 32, "stochastic"),
    Quantizer(8, 32, "stochastic"),
    Quantizer(4, 32, "stochastic", scaling="symmetric"),
    Quantizer(4, 32, "dither"),
    Quantizer(4, 32, "dither", scaling="symmetric"),
)


class Moments(NamedTuple):
    """Of every value, over all outcomes, in units of the step; float64.

    Attributes:
        bias: mean error.
        square: mean squared error.
        worst: largest magnitude of an error.
        nonzero: part of the outcomes that are not zero.
    """

    bias: torch.Tensor
    square: torch.Tensor
    worst: torch.Tensor
    nonzero: torch.Tensor


def lattice_moments(positions: torch.Tensor, rounding: Rounding) -> Moments:
    """Moments of rounding values to ``step * Z``, or for shift and dither to its shifts.

    Args:
        positions: (numel,) float64, values by step. Errors are those of the position that the
            library rounds them to, in 65,536ths.
    """
    shifted = rounding in ("shift", "dither")
    r = OUTCOMES if rounding != "nearest" else torch.tensor([FRACTION // 2])
    shift = shift_of(r) if shifted else torch.zeros(len(r), dtype=torch.float64)
    parts = []
    for part in torch.round(positions * FRACTION).to(torch.int64)[:, None].split(_AT_ONCE):
        values = round_positions(part, r) + shift
        error = values - part / FRACTION
        low, high = error.aminmax(dim=-1)
        parts.append(
            Moments(
                error.mean(-1),
                torch.linalg.vecdot(error, error) / len(r),
                torch.maximum(-low, high),
                values.count_nonzero(-1) / len(r),
            )
        )
    return Moments(*(torch.cat(column) for column in zip(*parts, strict=True)))


def block_moments(block: torch.Tensor, quantizer: Quantizer) -> tuple[Moments, float]:
    """Moments of one block in units of its step, and the step.

    Args:
        block: (numel,) float32.

    Stochastic rounding and dither draw for every value. A value's moments depend on its own draw
    alone, so all values go through the outcomes together.
    """
    errors, step = [], 0.0
    for r in OUTCOMES.split(4096):
        rows = block.expand(len(r), -1)
        draws = r if quantizer.rounding == "shift" else r[:, None].expand_as(rows)
        scale, offset, code = quantize_on(block_grid(rows, quantizer), rows, quantizer, draws)
        values = dequantize_blocks(scale, offset, code, quantizer, draws)
        step = float(scale[0].abs())
        errors.append((values.double() - block.double()) / step)
    error = torch.cat(errors)
    return (
        Moments(
            error.mean(0),
            (error**2).mean(0),
            error.abs().amax(0),
            (error + block.double() / step).count_nonzero(0) / len(error),
        ),
        step,
    )


def unbiasedness() -> Part:
    """Every rounding, on lattices and in blocks: mean, largest error, second moment."""
    edge = 1 / FRACTION
    grid = torch.cat(
        (
            torch.arange(-24, 25) / 8,
            torch.tensor([edge, -edge, 0.5 - edge, 0.5 + edge, 1 - edge, 12345.5 + edge]),
            torch.rand(45, generator=generator(5)) * 200 - 100,
        )
    ).double()
    position = torch.round(grid * FRACTION) / FRACTION
    part = position - position.floor()
    shift, stochastic, nearest = (
        lattice_moments(grid, name) for name in ("shift", "stochastic", "nearest")
    )

    def largest(values: torch.Tensor) -> Estimate:
        return Estimate(float(values.abs().max()))

    uniform = (1 - edge**2) / 12
    claims = [
        Claim("shift, dither", "|bias|, steps", largest(shift.bias), "<=", 0.0),
        Claim("shift, dither", "|E e^2 - (1 - 2^-32)/12|", largest(shift.square - uniform),
              "<=", 0.0),
        Claim("shift, dither", "largest |e|, steps", largest(shift.worst), "<=", 0.5),
        Claim("stochastic", "|bias|, steps", largest(stochastic.bias), "<=", 0.0),
        Claim("stochastic", "|E e^2 - f(1 - f)|", largest(stochastic.square - part * (1 - part)),
              "<=", 0.0),
        Claim("stochastic", "largest |e|, steps", largest(stochastic.worst), "<=", 1 - edge),
        Claim("nearest: biased", "|bias|, steps", largest(nearest.bias), ">", 0.5 - 2 * edge),
        Claim("nearest", "largest |e|, steps", largest(nearest.worst), "<=", 0.5),
    ]  # fmt: skip
    claims += [claim for quantizer in BLOCK_QUANTIZERS for claim in _block_claims(quantizer)]
    text = (
        f"errors e of {len(grid)} lattice values and of blocks of 32, over 65,536 outcomes; "
        "reference: exact,\nand for blocks what float32 arithmetic leaves over"
    )
    return Part("Unbiasedness, proved by going through all random bits", text, claims)


def second_moments() -> Part:
    """The gradient quantizers' bounds, as the worst ratio of an exact moment to its bound."""
    vectors = gradient_like(32)
    claims = [*_coin_flip_claims(vectors), *_qsgd_claims(vectors), *_library_claims(vectors)]
    text = (
        "the largest ratio of an exact second moment to its bound; reference: 1\n"
        "QSGD's bound: min(n/s^2, sqrt(n)/s) |v|^2, with s steps from zero to the norm"
    )
    return Part("Second moments of gradient quantizers, over all random bits", text, claims)


def gradient_like(numel: int) -> dict[str, torch.Tensor]:
    """Vectors that differ in what the bounds depend on: how the norm spreads over values."""
    normal = torch.randn(numel, generator=generator(6), dtype=torch.float64)
    single = torch.zeros(numel, dtype=torch.float64)
    single[3] = -2.5
    return {
        "normal": normal,
        "heavy tails": normal**3,
        "one value": single,
        "equal values": torch.full((numel,), 0.7, dtype=torch.float64),
    }


def lattice_error(vector: torch.Tensor, step: float) -> tuple[float, float]:
    """``E|Q(v) - v|^2`` and ``E|Q(v)|_0`` of rounding stochastically to multiples of ``step``."""
    moments = lattice_moments(vector / step, "stochastic")
    return float(moments.square.sum()) * step**2, float(moments.nonzero.sum())


def _block_claims(quantizer: Quantizer) -> list[Claim]:
    """Bias and largest error of blocks, in steps, beside what float32 arithmetic leaves over.

    Positions: difference, range, division and product err by EPSILON32 each over all steps, twice
    for the scale and once more for its product with a code; the sum with the offset and the offset
    itself by three of the largest value.
    """
    block = torch.randn(32, generator=generator(quantizer.bits))
    moments, step = block_moments(block, quantizer)
    steps = quantizer.steps
    slack = POSITION_ERROR + (7 * steps + 3 * float(block.abs().max()) / step + 3) * EPSILON32
    own = 1.0 if quantizer.rounding == "stochastic" else 0.5
    kind = "symmetric" if quantizer.scaling == "symmetric" else "min-max"
    name = f"{quantizer.rounding}, {quantizer.bits}-bit {kind}"
    bias, worst = (Estimate(float(m.abs().max())) for m in (moments.bias, moments.worst))
    return [
        Claim(name, "|bias|, steps", bias, "<=", slack),
        Claim(name, "largest |e|, steps", worst, "<=", own + slack),
    ]


def _coin_flip_claims(vectors: dict[str, torch.Tensor]) -> list[Claim]:
    square = nonzero = 0.0
    for vector in vectors.values():
        for step in (0.01, 0.3, 5.0):
            error, count = lattice_error(vector, step)
            size = float(vector.abs().sum()) + _one_norm_slack(vector, step)
            square, nonzero = max(square, error / (step * size)), max(nonzero, count / size * step)
    return [
        Claim("coin flip", "E|Q(v) - v|^2 / (delta |v|_1)", Estimate(square), "<=", 1.0),
        Claim("coin flip", "E|Q(v)|_0 / (|v|_1 / delta)", Estimate(nonzero), "<=", 1.0),
    ]


def _qsgd_claims(vectors: dict[str, torch.Tensor]) -> list[Claim]:
    """QSGD's scalings, as lattices whose step is a norm by s."""
    claims = []
    for name in ("2-norm", "max-norm"):
        square = nonzero = 0.0
        for vector in vectors.values():
            norm = float(vector.norm() if name == "2-norm" else vector.abs().max())
            for levels in (1, 4, 15):
                step = norm / levels
                error, count = lattice_error(vector, step)
                allowed = qsgd_variance(len(vector), levels) * float((vector**2).sum())
                square = max(square, error / (allowed + step * _one_norm_slack(vector, step)))
                allowed = qsgd_nonzeros(len(vector), levels) + len(vector) * POSITION_ERROR
                nonzero = max(nonzero, count / allowed)
        text = "E|Q(v) - v|^2 / QSGD's bound"
        claims.append(Claim(f"QSGD, {name}", text, Estimate(square), "<=", 1.0))
        if name == "2-norm":
            text = "E|Q(v)|_0 / (s (s + sqrt n))"
            claims.append(Claim(f"QSGD, {name}", text, Estimate(nonzero), "<=", 1.0))
    return claims


def _library_claims(vectors: dict[str, torch.Tensor]) -> list[Claim]:
    """Blocks: symmetric ones keep QSGD's bound with s = 2^(bits-1) - 1; min-max ones half of it.

    A min-max grid does not contain zero, so the part of the bound that rests on it fails.
    """
    worst = dict.fromkeys(SCALINGS, 0.0)
    for vector in vectors.values():
        for bits in (2, 4):
            for scaling in SCALINGS:
                quantizer = Quantizer(bits, 32, "stochastic", scaling=scaling)
                if scaling == "minmax" and vector.max() == vector.min():
                    continue  # decodes exactly
                moments, step = block_moments(vector.float(), quantizer)
                factor = block_contraction(quantizer, len(vector))
                if scaling == "symmetric":
                    factor = min(factor, _zero_grid_factor(quantizer, len(vector)))
                error = float(moments.square.sum()) * step**2
                worst[scaling] = max(worst[scaling], error / (factor * float((vector**2).sum())))
    # Zeros in the middle of a step: the norm of two values, the noise of all the others.
    zeros = torch.zeros(192)
    zeros[0], zeros[1] = -1, 1
    moments, step = block_moments(zeros, Quantizer(2, 192, "stochastic"))
    error = float(moments.square.sum()) * step**2 / float((zeros**2).sum())
    return [
        Claim("symmetric blocks", "E|Q(v) - v|^2 / QSGD's bound", Estimate(worst["symmetric"]),
              "<=", 1.0),
        Claim("min-max blocks", "E|Q(v) - v|^2 / (n / 2 L^2)|v|^2", Estimate(worst["minmax"]),
              "<=", 1.0),
        Claim("min-max, zeros: fails", "E|Q(v) - v|^2 / |v|^2, QSGD's bound", Estimate(error), ">",
              qsgd_variance(len(zeros), 1.5)),
    ]  # fmt: skip


def _zero_grid_factor(quantizer: Quantizer, dim: int) -> float:
    """QSGD's sqrt(n)/s with s = L/2, beside the errors of float32 arithmetic."""
    steps = quantizer.steps
    slack = 2 * dim * (POSITION_ERROR + 10 * steps * EPSILON32) / (steps / 2) ** 2
    return math.sqrt(dim) / (steps / 2) + slack


def _one_norm_slack(vector: torch.Tensor, step: float) -> float:
    """The bounds hold for positions, whose 1-norm may exceed the vector's by this much."""
    return len(vector) * POSITION_ERROR * step
