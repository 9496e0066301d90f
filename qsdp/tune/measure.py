"""What quantizing each parameter does to a trained model, measured on its own training text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from qsdp import Quantizer, decode, encode
from qsdp.trainer.evaluate import token_losses
from qsdp.tune.allocate import WIDTHS, Item

PROBE = 2  # bits: few, so that the loss answers louder than its own noise


def relative_error(values: torch.Tensor, quantizer: Quantizer) -> float:
    """Squared error over squared length of one tensor, encoded and decoded."""
    flat = values.detach().float().flatten()
    decoded = decode(encode(flat, quantizer), flat.numel(), quantizer)
    return float((decoded - flat).square().sum() / flat.square().sum().clamp(min=1e-30))


@torch.no_grad()
def weight_items(
    model: PreTrainedModel,
    parameters: Mapping[str, nn.Parameter],
    quantizer: Quantizer,
    batches: Iterable[torch.Tensor],
) -> list[Item[int]]:
    """What each weight matrix's width does to the loss, in nats.

    The loss is measured with one matrix at a time quantized to 2 bits. Near a minimum the loss
    grows with the squared error, so other widths follow from their own squared errors, which are
    measured too. A matrix whose loss did not rise gets the smallest rise that any other showed.
    """
    batches = list(batches)
    base = _loss(model, batches)
    rises: dict[str, float] = {}
    errors: dict[str, dict[int, float]] = {}
    for name, parameter in parameters.items():
        errors[name] = {
            width: relative_error(parameter, replace(quantizer, bits=width)) for width in WIDTHS
        }
        kept = parameter.detach().clone()
        probe = replace(quantizer, bits=PROBE)
        flat = decode(encode(kept.float(), probe), kept.numel(), probe)
        parameter.copy_(flat.view_as(kept))
        rises[name] = _loss(model, batches) - base
        parameter.copy_(kept)
    smallest = min((rise for rise in rises.values() if rise > 0), default=1e-9)
    return [
        Item(
            name,
            parameter.numel(),
            {
                width: max(rises[name], smallest) * errors[name][width] / errors[name][PROBE]
                for width in WIDTHS
            },
        )
        for name, parameter in parameters.items()
    ]


def gradient_items(
    model: PreTrainedModel,
    parameters: Mapping[str, nn.Parameter],
    quantizer: Quantizer,
    batches: Iterable[torch.Tensor],
) -> list[Item[int]]:
    """The share of each gradient that its width loses, by its part of all elements.

    Adam scales every gradient to the same size of step, so what counts is the relative error.
    """
    losses = {name: dict.fromkeys(WIDTHS, 0.0) for name in parameters}
    total = sum(parameter.numel() for parameter in parameters.values())
    batches = list(batches)
    for batch in batches:
        model.zero_grad()
        token_losses(model, batch).mean().backward()
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            for width in WIDTHS:
                error = relative_error(parameter.grad, replace(quantizer, bits=width))
                losses[name][width] += error * parameter.numel() / total / len(batches)
    model.zero_grad()
    return [Item(name, parameters[name].numel(), harm) for name, harm in losses.items()]


def _loss(model: PreTrainedModel, batches: list[torch.Tensor]) -> float:
    return float(sum(token_losses(model, batch).double().mean() for batch in batches)) / len(
        batches
    )
