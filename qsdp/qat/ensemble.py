"""Ensemble of Quantization (EoQ, QT-DoG section 3.4): several models, one mean of their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Ensemble(nn.Module):
    """The mean of its members' logits, in float32; see :func:`ensemble`."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        total: torch.Tensor | None = None
        for member in self.members:
            output = member(*args, **kwargs)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            total = logits.float() if total is None else total + logits.float()
        assert total is not None
        return total / len(self.members)


def ensemble(models: Sequence[nn.Module]) -> Ensemble:
    """One model that answers with the mean of the logits of ``models``.

    The models are not copied and stay in the mode that they are in. Each is called with the same
    arguments and answers with logits, or with an object that has them as ``logits``; all in the
    same shape.

    Raises:
        ValueError: no model.
    """
    if not models:
        raise ValueError("ensemble takes at least one model, got none")
    return Ensemble(models)
