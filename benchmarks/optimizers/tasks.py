"""What is trained: a convolutional network under DDP, and the project's GPT under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsdp
from qsdp.domains.data import glyphs
from qsdp.sweep.spec import read_sweep
from qsdp.trainer.data import Data, prepare_data
from qsdp.trainer.evaluate import token_losses, validation_loss
from qsdp.trainer.model import build_model, shard
from qsdp.trainer.ranks import Ranks
from qsdp.ways import quantizer_of
from qsdp.wire import tensor_layout

RECIPE = Path(__file__).parents[1] / "quality" / "bitdp.json"
_NOISE = 0.4  # standard deviation; images are from 0 to 1
_IMAGES = 1797  # of each domain, as many as there are handwritten ones
_HELD_OUT = 400  # of each domain
_DRAWS = 3  # of the noise, for validation


class Sent(NamedTuple):
    """Bytes of gradients that a rank sent, and that it would have in float32."""

    sent: int
    stock: int


class Running(Protocol):
    """A model in training on this rank."""

    model: nn.Module

    def loss(self, step: int) -> torch.Tensor: ...

    def validate(self) -> dict[str, float]: ...

    def sent(self) -> Sent:
        """Since the last call."""


class Sizes(NamedTuple):
    """Of a model's gradients in one way, for a rank of some."""

    own: int
    """Bytes in float32 of the parameters that travel in the way of the configuration itself."""
    others: int
    """Bytes on the wire of all others: vectors, small ones, and exceptions."""


def sizes(model: nn.Module, config: qsdp.QSDPConfig, num_ranks: int, hops: int) -> Sizes:
    """``hops``: how often a rank sends its parts, 2 for an all-reduce."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    own = others = 0
    for param, its in names.items():
        way = config.ways_of(its, param.shape)["gradients"]
        piece = -(-param.numel() // num_ranks)
        if way is not None and way == config.gradients:
            own += 4 * piece
        else:
            quantizer = quantizer_of(way)
            others += 4 * piece if quantizer is None else tensor_layout(piece, quantizer).row_bytes
    return Sizes(own * hops * (num_ranks - 1), others * hops * (num_ranks - 1))


class Glyphs:
    """Digits in four kinds of typefaces and by hand, under noise that is new in every step."""

    name = "CNN, glyphs, DDP"
    steps, warmup_steps, hops = 700, 50, 2
    ends = ("0.weight", "10.weight")  # the first layer and the head, which are not Muon's

    def __init__(self, ranks: Ranks, batch: int = 32) -> None:
        self._ranks, self._batch = ranks, batch
        generator = torch.Generator().manual_seed(7)
        train, held = [], []
        for domain in glyphs(_IMAGES, 0):
            order = torch.randperm(len(domain.labels), generator=generator)
            for parts, chosen in ((held, order[:_HELD_OUT]), (train, order[_HELD_OUT:])):
                parts.append((domain.images[chosen], domain.labels[chosen]))
        self._train, (clean, labels) = _joined(train), _joined(held)
        noisy = [_noisy(clean, generator) for _ in range(_DRAWS)]
        self._held = torch.cat(noisy), labels.repeat(_DRAWS)

    def plain(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(256, 10),
        )  # fmt: skip

    def start(self, seed: int, config: qsdp.QSDPConfig) -> Running:
        return _RunningGlyphs(self, seed, config)

    def batch(self, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = (seed * 1_000_003 + step) * self._ranks.num_ranks + self._ranks.rank
        generator = torch.Generator().manual_seed(key)
        images, labels = self._train
        chosen = torch.randint(len(labels), (self._batch,), generator=generator)
        return _noisy(images[chosen], generator), labels[chosen]

    def held_of_rank(self) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self._held
        mine = slice(self._ranks.rank, None, self._ranks.num_ranks)
        return images[mine], labels[mine]


class _RunningGlyphs:
    def __init__(self, task: Glyphs, seed: int, config: qsdp.QSDPConfig) -> None:
        self._task, self._seed = task, seed
        self.model = DistributedDataParallel(task.plain(seed))
        self._state = qsdp.QuantizedDDPState(self.model, config)
        self.model.register_comm_hook(self._state, qsdp.quantized_ddp_hook)

    def loss(self, step: int) -> torch.Tensor:
        images, labels = self._task.batch(self._seed, step)
        return F.cross_entropy(self.model(images), labels)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        images, labels = self._task.held_of_rank()
        logits = torch.cat([self.model.module(part) for part in images.split(512)]).double()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(1) == labels).double().sum()
        total = torch.stack([loss, right, torch.tensor(float(len(labels)), dtype=torch.float64)])
        dist.all_reduce(total)
        loss, right = (total[:2] / total[2]).tolist()
        return {"loss": loss, "accuracy": right}

    def sent(self) -> Sent:
        stats = self._state.stats(reset=True)
        return Sent(stats.sent, stats.stock_sent)


def _joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(labels)


def _noisy(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return images + _NOISE * torch.randn(images.shape, generator=generator)


class Plays:
    """The GPT of benchmarks/quality/bitdp.json with fewer steps."""

    name = "GPT, plays, FSDP2"
    steps, warmup_steps, hops = 500, 50, 1
    ends = ("transformer.wte.weight", "transformer.wpe.weight")

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder, self._of_seed = ranks, folder, dict[int, tuple[Any, Data]]()

    def _prepared(self, seed: int) -> tuple[Any, Data]:
        if seed not in self._of_seed:
            sweep = read_sweep(RECIPE)
            config = sweep.config(sweep.cases[0], seed, self._folder)
            self._of_seed[seed] = config, prepare_data(config, self._ranks)
        return self._of_seed[seed]

    def plain(self, seed: int) -> nn.Module:
        config, data = self._prepared(seed)
        return build_model(config, data.tokenizer)

    def start(self, seed: int, config: qsdp.QSDPConfig) -> Running:
        recipe, data = self._prepared(seed)
        return _RunningPlays(self.plain(seed), recipe, data, config, self._ranks)


class _RunningPlays:
    def __init__(
        self, model: Any, recipe: Any, data: Data, config: qsdp.QSDPConfig, ranks: Ranks
    ) -> None:
        self.model, self._recipe, self._data, self._ranks = model, recipe, data, ranks
        shard(model, recipe, ranks)
        qsdp.apply_qsdp(model, config)
        qsdp.observe_comms(model)

    def loss(self, step: int) -> torch.Tensor:
        return token_losses(self.model, self._data.batches.batch(step, 0)).mean()

    def validate(self) -> dict[str, float]:
        recipe, limit = self._recipe, self._recipe.final_eval_windows
        loss = validation_loss(self.model, self._data.valid, recipe, self._ranks, limit=limit)
        return {"loss": loss}

    def sent(self) -> Sent:
        stats = qsdp.comm_stats(self.model, reset=True)
        return Sent(stats.reduce_scatter_sent, stats.stock_reduce_scatter)


Task = Glyphs | Plays
