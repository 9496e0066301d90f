"""One target left out: a model trained on the other domains, and quantized from a step on.

Training is shared up to the switch: all cases begin with the same weights and optimizer state and
see the same batches afterwards, so that what differs is the quantization.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from qsdp.domains.data import Domain
from qsdp.qat import FakeQuantizer, fake_quantize, flatness

ERM = 32  # bits of what is not quantized
_KEPT = ("0", "10")  # the first layer and the head stay in full precision, as in the paper's code


class Settings(NamedTuple):
    """Of every run."""

    steps: int
    switch: int
    batch: int
    """Images of each source domain in a step."""
    lr: float
    check_every: int
    gamma: float
    samples: int
    """Draws of the flatness; 0 leaves it out."""


class Outcome(NamedTuple):
    """What became of one case."""

    bits: int
    valid: float
    """Accuracy on what was held out of the sources, at the chosen step: the best of those after
    the switch, the first of equal ones."""
    target: float
    """Accuracy on the target, which was not looked at before."""
    step: int
    flatness: float | None
    logits: torch.Tensor
    """(images of the target, classes) float32."""


class Sources(NamedTuple):
    """Of every source domain, images and labels to train on; and all of what is held out."""

    train: list[tuple[torch.Tensor, torch.Tensor]]
    images: torch.Tensor
    labels: torch.Tensor


def leave_out(
    domains: Sequence[Domain], target: str, seed: int, bits: Sequence[int], settings: Settings
) -> list[Outcome]:
    """Train on all domains but ``target``: without quantization, then with each of ``bits``."""
    sources = hold_out([domain for domain in domains if domain.name != target], seed)
    away = next(domain for domain in domains if domain.name == target)
    torch.manual_seed(seed)
    model = network(int(max(domain.labels.max() for domain in domains)) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    _train(model, optimizer, sources, seed, range(settings.switch), settings)
    outcomes = []
    for width in (ERM, *bits):
        # Together, so that the copied optimizer owns the copied parameters.
        mine, its = copy.deepcopy((model, optimizer))
        if width != ERM:
            handle = fake_quantize(mine, FakeQuantizer(width), keep=_KEPT)
            its.add_param_group({"params": handle.parameters()})
        outcomes.append(_finish(mine, its, sources, away, seed, width, settings))
    return outcomes


def network(classes: int) -> nn.Sequential:
    """Four convolutions and a head, for images of one channel; see ``_KEPT`` for its places."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(128, classes),
    )  # fmt: skip


def hold_out(sources: Sequence[Domain], seed: int) -> Sources:
    """A fifth of every source for the choice of the step."""
    train, held = [], []
    for place, (_, images, labels) in enumerate(sources):
        generator = torch.Generator().manual_seed(1000 * seed + place)
        order = torch.randperm(len(labels), generator=generator)
        cut = len(labels) // 5
        held.append((images[order[:cut]], labels[order[:cut]]))
        train.append((images[order[cut:]], labels[order[cut:]]))
    images, labels = (torch.cat(parts) for parts in zip(*held, strict=True))
    return Sources(train, images, labels)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sources: Sources,
    seed: int,
    steps: range,
    settings: Settings,
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        batch: list[Any] = []
        for images, labels in sources.train:
            chosen = torch.randint(len(labels), (settings.batch,), generator=generator)
            batch.append((images[chosen], labels[chosen]))
        images, labels = (torch.cat(parts) for parts in zip(*batch, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def _finish(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sources: Sources,
    away: Domain,
    seed: int,
    bits: int,
    settings: Settings,
) -> Outcome:
    """Train to the end; then the target, once, at the step that the sources choose."""
    best, best_step, best_state = -1.0, 0, model.state_dict()
    for start in range(settings.switch, settings.steps, settings.check_every):
        stop = min(start + settings.check_every, settings.steps)
        _train(model, optimizer, sources, seed, range(start, stop), settings)
        valid = accuracy(logits_of(model, sources.images), sources.labels)
        if valid > best:
            best, best_step, best_state = valid, stop, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)
    logits = logits_of(model, away.images)
    flat = None
    if settings.samples:
        flat = flatness(
            model,
            lambda moved: F.cross_entropy(logits_of(moved, sources.images), sources.labels),
            settings.gamma,
            samples=settings.samples,
            seed=seed,
        )
    return Outcome(bits, best, accuracy(logits, away.labels), best_step, flat, logits)


@torch.no_grad()
def logits_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(part) for part in images.split(512)])


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float((logits.argmax(1) == labels).double().mean())
