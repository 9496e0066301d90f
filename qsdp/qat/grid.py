"""Fake quantization of one weight, with its gradients. All arithmetic is in float32.

Weights come as (groups, values): the values of a group share a step.

Weights that arrive in another dtype, which is bfloat16 where FSDP2's mixed precision gathers them,
are computed with in that dtype: the value is ``code * step`` in float32, rounded once. In bfloat16
steps are numbers of bfloat16, too. So whoever multiplies an exported code by its exported step in
bfloat16 has the weight that training computed with, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from qsdp.kernels.blocks import block_grid, quantize_on
from qsdp.qat.quantizer import FakeQuantizer


def groups_of(weight: torch.Tensor, quantizer: FakeQuantizer) -> torch.Tensor:
    """``weight`` as (groups, values); a view where it is contiguous."""
    if quantizer.per == "tensor":
        return weight.reshape(1, -1)
    if quantizer.per == "channel":
        return weight.reshape(weight.shape[0], -1)
    assert quantizer.block_size is not None
    return weight.reshape(-1, quantizer.block_size)


def codes_and_steps(
    groups: torch.Tensor, quantizer: FakeQuantizer, log2_step: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (groups, values) as integers in float32, and steps (groups, 1) float32.

    Their product in the dtype of ``groups`` is the quantized weight, bit for bit. A group that
    holds a NaN or an infinity becomes NaN with ``step="largest"``.

    Args:
        log2_step: (groups,), of learned steps.
    """
    if log2_step is not None:
        steps = steps_in(log2_step, groups.dtype)
        codes = (groups.float() / steps).clamp(quantizer.lowest, quantizer.highest).round()
        return codes, steps
    codes, steps = _on_the_largest(groups.float(), quantizer)
    if groups.dtype == torch.float32:
        return codes, steps
    # What arrives may be on a grid already, because it travelled as codes. Its largest value was
    # then rounded to this dtype, perhaps up, and gives the step above: with the step itself all
    # values are points of the grid, and stay what they are.
    below = _one_below(steps)
    again = (groups.float() / below).round().clamp(quantizer.lowest, quantizer.highest)
    there = ((again * below).to(groups.dtype) == groups).all(1, keepdim=True)
    return torch.where(there, again, codes), torch.where(there, below, steps)


def steps_in(log2_step: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(groups, 1) float32: learned steps, as numbers of the dtype that weights arrive in."""
    steps = torch.exp2(log2_step.float())
    if dtype != torch.float32:
        steps = steps.clamp(min=torch.finfo(dtype).tiny).to(dtype).float()
    return steps[:, None]


def _one_below(steps: torch.Tensor) -> torch.Tensor:
    """The next smaller numbers of bfloat16, of positive ones; steps of the format are in it."""
    return (steps.to(torch.bfloat16).view(torch.int16) - 1).view(torch.bfloat16).float()


def _on_the_largest(
    groups: torch.Tensor, quantizer: FakeQuantizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and steps of :func:`codes_and_steps` for values in float32."""
    # The format's own arithmetic, so that the wire has the same bits. The format's block_size is
    # not used here: a block is what it is handed.
    form = quantizer.grid(32)
    half = torch.full(groups.shape[:1], 1 << 15, dtype=torch.int64, device=groups.device)
    scale, _, codes = quantize_on(block_grid(groups, form), groups, form, half)
    # A negative scale marks values near the end of float32's range, as a quarter.
    steps = torch.where(scale < 0, scale * -4.0, scale)
    signed = torch.where(steps[:, None] == 0, 0.0, codes.float() - quantizer.highest)
    return signed, steps[:, None]


def initial_log2_step(groups: torch.Tensor, quantizer: FakeQuantizer) -> torch.Tensor:
    """(groups,) float32: ``log2(2 mean|w| / sqrt(2^(b-1) - 1))``, as in LSQ; 0 for zeros."""
    mean = groups.detach().float().abs().mean(1)
    step = 2.0 * mean / quantizer.highest**0.5
    return torch.where(step > 0, step, 1.0).log2()


def gradient_scale(numel: int, quantizer: FakeQuantizer) -> float:
    """What LSQ multiplies the gradient of a step by: ``1 / sqrt((2^(b-1) - 1) numel)``."""
    return float((quantizer.highest * numel) ** -0.5)


def learned_steps(
    weight: torch.Tensor, log2_step: torch.Tensor, quantizer: FakeQuantizer
) -> torch.Tensor:
    """``weight`` on its grid, with LSQ's gradients for weight and steps.

    The weight's gradient passes straight through where it was not clipped, and is 0 where it was.
    The step's is ``code - w / s`` where not clipped, the code where clipped, summed over the group,
    times :func:`gradient_scale`; and times ``s ln 2``, because it is log2 s that is trained.
    """
    out: torch.Tensor = _LearnedSteps.apply(weight, log2_step, quantizer)  # type: ignore[no-untyped-call]
    return out


def largest_steps(weight: torch.Tensor, quantizer: FakeQuantizer) -> torch.Tensor:
    """``weight`` on the grid of its largest magnitudes; the gradient passes straight through."""
    out: torch.Tensor = _LargestSteps.apply(weight, quantizer)  # type: ignore[no-untyped-call]
    return out


def not_yet(weight: torch.Tensor, log2_step: torch.Tensor) -> torch.Tensor:
    """``weight`` itself, and a gradient of zeros for the steps.

    So that an optimizer has a state for every step from the beginning, as checkpoints expect.
    """
    out: torch.Tensor = _NotYet.apply(weight, log2_step)  # type: ignore[no-untyped-call]
    return out


class _LearnedSteps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, log2_step: torch.Tensor, quantizer: FakeQuantizer
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, log2_step)
        ctx.quantizer = quantizer
        codes, steps = codes_and_steps(groups_of(weight, quantizer), quantizer, log2_step)
        return (codes * steps).reshape(weight.shape).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        weight, log2_step = ctx.saved_tensors
        quantizer: FakeQuantizer = ctx.quantizer
        groups = groups_of(weight, quantizer).float()
        gradient = groups_of(gradients[0], quantizer).float()
        steps = steps_in(log2_step, weight.dtype)
        position = groups / steps
        inside = (position >= quantizer.lowest) & (position <= quantizer.highest)
        codes = position.clamp(quantizer.lowest, quantizer.highest).round()
        per_value = torch.where(inside, codes - position, codes)
        of_step = (gradient * per_value).sum(1) * gradient_scale(weight.numel(), quantizer)
        of_step = of_step * (steps[:, 0] * 0.6931471805599453)
        of_weight = torch.where(inside, gradient, 0.0).reshape(weight.shape)
        return of_weight.to(weight.dtype), of_step.to(log2_step.dtype), None


class _LargestSteps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, quantizer: FakeQuantizer) -> torch.Tensor:
        codes, steps = codes_and_steps(groups_of(weight, quantizer), quantizer, None)
        return (codes * steps).reshape(weight.shape).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _NotYet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, log2_step: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(log2_step)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], torch.zeros_like(ctx.saved_tensors[0])
