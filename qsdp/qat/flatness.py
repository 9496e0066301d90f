"""How flat the loss is around a model's weights (QT-DoG section 4.3, after SWAD)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize


@torch.no_grad()
def flatness(
    model: nn.Module,
    loss: Callable[[nn.Module], torch.Tensor | float],
    gamma: float,
    *,
    samples: int = 100,
    seed: int = 0,
) -> float:
    """Mean rise of the loss at distance ``gamma``: ``E[loss(w') - loss(w)]`` over w' on a sphere.

    Of the weights that the model computes with: fake-quantized ones are moved off their grid, as
    they are. Lower is flatter. Works on a copy, so that ``model`` does not change.

    Args:
        loss: of a model, on data of the caller's; in whatever mode ``model`` is in.
        gamma: radius of the sphere around all parameters together.
        samples: draws; the paper takes 100.
        seed: of the draws. The same seed gives the same directions to models of one shape.

    Raises:
        ValueError: a radius or a number that is not positive, or a sharded model.
    """
    if not math.isfinite(gamma) or gamma <= 0:
        raise ValueError(f"flatness(gamma=...) must be a positive number, got {gamma!r}")
    if samples < 1:
        raise ValueError(f"flatness(samples=...) must be at least 1, got {samples!r}")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("flatness takes a whole model: load a full state dict into a plain one")
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for name in list(getattr(module, "parametrizations", ())):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    # By name: taking a parametrization off moves a weight to the end of its module.
    parameters = [parameter for _, parameter in sorted(plain.named_parameters())]
    centre = [parameter.clone() for parameter in parameters]
    at_centre = float(loss(plain))
    rises = 0.0
    for sample in range(samples):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sample)
        noise = [torch.randn(p.shape, generator=generator, dtype=torch.float32) for p in parameters]
        norm = math.sqrt(sum(float(part.double().square().sum()) for part in noise))
        for parameter, middle, part in zip(parameters, centre, noise, strict=True):
            moved = middle.float() + part.to(middle.device) * (gamma / norm)
            parameter.copy_(moved.to(middle.dtype))
        rises += float(loss(plain)) - at_centre
    return rises / samples
