"""Has anything but an optimizer changed the weights? What the host can tell without the device."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class Versioned(Protocol):
    """Something whose tensors count their changes."""

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Of each parameter, how often it was changed in place."""


class Watch:
    """Looks at one unit's parameters from gather to gather.

    It notices every change in place outside ``Optimizer.step`` (weights loaded, averaged, merged),
    and every change between training and evaluation, around which weights are swapped through
    ``.data``, which counts nothing. An optimizer that is no ``torch.optim.Optimizer`` is noticed at
    each step, which costs some waiting and nothing else.
    """

    def __init__(self, weights: Versioned) -> None:
        self._weights = weights
        self._expected: tuple[int, ...] = ()
        self._training = False
        self._otherwise = True  # changed by something else
        _watches.add(self)
        _register()

    def notices(self) -> bool:
        """Whether weights may have changed otherwise than by an optimizer since the last call."""
        versions, training = self._weights.weight_versions, torch.is_grad_enabled()
        noticed = self._otherwise or versions != self._expected or training != self._training
        self._expected, self._training, self._otherwise = versions, training, False
        return noticed

    def before_step(self) -> None:
        """An optimizer is about to step: what has changed until now was not by it."""
        self._otherwise |= self._weights.weight_versions != self._expected

    def after_step(self) -> None:
        """An optimizer has stepped: what has changed since was by it."""
        self._expected = self._weights.weight_versions


_watches: WeakSet[Watch] = WeakSet()
_registered: list[Any] = []


def _register() -> None:
    """Hooks on all optimizers, once: whose they are does not matter, versions tell."""
    if _registered:
        return
    _registered.append(register_optimizer_step_pre_hook(_before_step))
    _registered.append(register_optimizer_step_post_hook(_after_step))


def _before_step(*unused: Any) -> None:
    for watch in list(_watches):
        watch.before_step()


def _after_step(*unused: Any) -> None:
    for watch in list(_watches):
        watch.after_step()
