"""Stochastic gradient descent with quantization in it, on many independent trials at once.

Three ways to quantize weights, as endless iterators over steps:

- :func:`overwritten`: the iterate is replaced by its quantization (what QSDP's theorem is about);
- :func:`with_masters`: gradients are taken at quantized weights, full-precision ones are updated
  (what FSDP2 with qsdp does);
- :func:`with_differences`: a copy follows the full-precision weights by quantized differences
  (SDP4Bit).

They round with the library's quantizers, through a :data:`Rounder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import torch

from qsdp.kernels.philox import derive_key
from qsdp.quantizer import Quantizer, Rounding
from qsdp.rows import decode_rows, encode_rows
from qsdp.wire import tensor_layout
from research.theory.lattice import round_to_lattice
from research.theory.problems import Problem, generator

Rounder = Callable[[torch.Tensor, int], torch.Tensor]
"""(num_rows, dim) float64 and a 64-bit key to the rounded values; rows draw independently."""

Rate = float | torch.Tensor
"""A step size, or one a row as (num_rows, 1)."""

Scheme = Callable[..., Iterator[torch.Tensor]]
"""``overwritten`` or ``sent_by_masters``: an iteration with its points."""

_WEIGHTS, _GRADIENTS = 1, 2


class Pair(NamedTuple):
    """Full-precision weights and the copy at which the next gradient is taken."""

    master: torch.Tensor
    model: torch.Tensor


def exact(x: torch.Tensor, key: int) -> torch.Tensor:
    """No quantization."""
    return x


def on_lattice(step: float, rounding: Rounding) -> Rounder:
    """Round to the lattice of an absolute step; dither is a shift for every value."""
    per_value = rounding == "dither"
    name = "shift" if per_value else rounding

    def rounder(x: torch.Tensor, key: int) -> torch.Tensor:
        return round_to_lattice(x, step, name, key=key, per_value=per_value)

    return rounder


def in_blocks(quantizer: Quantizer) -> Rounder:
    """Encode and decode as communication does, one wire row a trial (float32 on the way)."""

    def rounder(x: torch.Tensor, key: int) -> torch.Tensor:
        layout = tensor_layout(x.shape[1], quantizer)
        wire = torch.empty(len(x), layout.row_bytes, dtype=torch.uint8)
        values = x.float()
        encode_rows(values, layout, wire, key=key)
        decode_rows(wire, layout, values)
        return values.double()

    return rounder


def by_largest(x: torch.Tensor, key: int) -> torch.Tensor:
    """Nearest multiple of each row's largest magnitude: SDP4Bit's ternary quantizer."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return largest * round_to_lattice(x / largest, 1.0, "nearest", key=key)


def overwritten(
    problem: Problem,
    start: torch.Tensor,
    rate: Rate,
    *,
    weights: Rounder,
    gradients: Rounder = exact,
    seed: int = 0,
) -> Iterator[torch.Tensor]:
    """x_1, x_2, ... of ``x <- weights(x - rate * gradients(sample(x)))`` from x_0 = start."""
    draw, x, step = generator(seed), start, 0
    while True:
        slope = gradients(problem.sample(x, draw), derive_key(seed, step, _GRADIENTS))
        x = weights(x - rate * slope, derive_key(seed, step, _WEIGHTS))
        step += 1
        yield x


def with_masters(
    problem: Problem,
    start: torch.Tensor,
    rate: Rate,
    *,
    weights: Rounder,
    gradients: Rounder = exact,
    seed: int = 0,
) -> Iterator[Pair]:
    """Pairs of ``model = weights(master)``, with ``master -= rate * gradients(sample(model))``."""
    draw, master, step = generator(seed), start, 0
    while True:
        model = weights(master, derive_key(seed, step, _WEIGHTS))
        yield Pair(master, model)
        slope = gradients(problem.sample(model, draw), derive_key(seed, step, _GRADIENTS))
        master = master - rate * slope
        step += 1


def with_differences(
    problem: Problem,
    start: torch.Tensor,
    rate: Rate,
    *,
    weights: Rounder,
    gradients: Rounder = exact,
    seed: int = 0,
) -> Iterator[Pair]:
    """Pairs of SDP4Bit's iteration, from master = model = start.

    1. ``master <- master - rate * gradients(sample(model))``
    2. ``model <- model + weights(master - model)``
    """
    draw, master, model, step = generator(seed), start, start, 0
    while True:
        yield Pair(master, model)
        slope = gradients(problem.sample(model, draw), derive_key(seed, step, _GRADIENTS))
        master = master - rate * slope
        model = model + weights(master - model, derive_key(seed, step, _WEIGHTS))
        step += 1


def models(pairs: Iterator[Pair]) -> Iterator[torch.Tensor]:
    """The models of each pair."""
    return (pair.model for pair in pairs)


def sent_by_masters(
    problem: Problem,
    start: torch.Tensor,
    rate: Rate,
    *,
    weights: Rounder,
    gradients: Rounder = exact,
    seed: int = 0,
) -> Iterator[torch.Tensor]:
    """The models of :func:`with_masters`."""
    return models(
        with_masters(problem, start, rate, weights=weights, gradients=gradients, seed=seed)
    )


def last(iterates: Iterator[torch.Tensor], steps: int) -> torch.Tensor:
    """The ``steps``-th item."""
    return next(islice(iterates, steps - 1, None))


def time_average(
    iterates: Iterator[torch.Tensor],
    measure: Callable[[torch.Tensor], torch.Tensor],
    *,
    skip: int = 0,
    steps: int,
) -> torch.Tensor:
    """Mean of ``measure`` over ``steps`` items after the first ``skip``: one number a row."""
    total = sum(measure(x) for x in islice(iterates, skip, skip + steps))
    assert isinstance(total, torch.Tensor)
    return total / steps
