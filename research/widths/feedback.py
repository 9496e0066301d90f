"""Training with JointSQ's classes and their rivals at equal true bits, with and without feedback.

Characters as in :mod:`research.widths.train`, and digits of ``qsdp.domains`` with a small CNN.
Gradients of matrices travel, all else is exact. Every rank keeps what its codec lost and adds it to
its next gradient. Writes feedback.json, a table and a plot.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from qsdp.domains.data import glyphs
from qsdp.domains.train import accuracy, hold_out, logits_of, network
from research.widths import schemes
from research.widths.schemes import Scheme
from research.widths.train import LEARNING_RATES, Model, Momentum, batch, corpus, evaluate

HERE = Path(__file__).parent
RATES = (1.02, 0.32, 0.032)  # 31x, 100x and 1000x fewer than float32
FINE = (5.02, 2.07)  # without feedback: what squared errors of research.widths.reductions are worth
# Blocks are longer where there is less room for what a block says of itself.
WIDTH_BLOCKS = {1.02: 128, 0.32: 256}
CODE_BLOCKS = {1.02: 1024, 0.32: 4096}


class Task(NamedTuple):
    """What is trained: a model, a loss of a rank's next batch, and what is measured at the end."""

    model: nn.Module
    loss: Callable[[torch.Generator], torch.Tensor]
    measure: Callable[[], dict[str, float]]
    ranks: int
    rates: dict[str, float]
    """Learning rates by optimizer."""


@functools.cache
def text() -> tuple[torch.Tensor, torch.Tensor, int]:
    return corpus()


def characters(seed: int) -> Task:
    training, validation, vocabulary = text()
    torch.manual_seed(seed)
    model = Model(vocabulary)

    def loss(data: torch.Generator) -> torch.Tensor:
        tokens, targets = batch(training, data)
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return Task(model, loss, lambda: {"loss": evaluate(model, validation)}, 2, LEARNING_RATES)


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all five domains: images and labels to train on, and a fifth that is held out."""
    sources = hold_out(glyphs(1000, 1), 1)
    images, labels = (torch.cat(parts) for parts in zip(*sources.train, strict=True))
    return images, labels, sources.images, sources.labels


def convolutions(seed: int) -> Task:
    images, labels, held, answers = digits()
    torch.manual_seed(seed)
    model = network(10)

    def loss(data: torch.Generator) -> torch.Tensor:
        chosen = torch.randint(len(labels), (32,), generator=data)
        return F.cross_entropy(model(images[chosen]), labels[chosen])

    def measure() -> dict[str, float]:
        logits = logits_of(model, held)
        return {
            "loss": F.cross_entropy(logits, answers).item(),
            "accuracy": 100 * accuracy(logits, answers),
        }

    return Task(model, loss, measure, 4, {"sgd": 0.3, "adamw": 3e-3})


TASKS = {"characters": characters, "digits": convolutions}
STEPS = {"characters": 150, "digits": 400}
# The paper's optimizer, the usual one, and one that divides by the singular values of a gradient.
RUNS = (("characters", "sgd"), ("characters", "adamw"), ("characters", "muon"), ("digits", "sgd"))


def cases(rate: float) -> dict[str, tuple[Scheme, bool]]:
    """Schemes and whether what they lose is fed back."""
    if rate in FINE:
        width, of = int(rate), {5.02: 1024, 2.07: 256}[rate]
        return {
            "fixed, alone": (schemes.fixed(width, of), False),
            "fixed, correlated, alone": (schemes.fixed(width, of, together=True), False),
            "widths from 1, alone": (schemes.widths(128, 1), False),
            "one step, dither, alone": (schemes.dithered_steps(1024), False),
            "dead zone, alone": (schemes.dead_zone(1024), False),
        }
    code, block = CODE_BLOCKS.get(rate), WIDTH_BLOCKS.get(rate)
    found: dict[str, tuple[Scheme, bool]] = {
        "classes (JointSQ)": (schemes.jointsq(nearest=False), True),
        "classes, nearest": (schemes.jointsq(nearest=True), True),
        "dead zone, Rice": (schemes.dead_zone(code), True),
        "top-k, 4 bits": (schemes.largest, True),
    }
    if block is not None:  # of 0.032 bits the widths alone would take nearly all
        found["widths from 0"] = (schemes.widths(block, 0), True)
        found["dead zone, alone"] = (schemes.dead_zone(code), False)
        found["widths from 0, alone"] = (schemes.widths(block, 0), False)
    if rate > 1:  # room for a scale and a width beside one bit
        found["widths from 1, alone"] = (schemes.widths(1536, 1), False)
        found["signs"] = (schemes.signs, True)
    return found


def joined(gradients: list[torch.Tensor]) -> torch.Tensor:
    """One row, every tensor padded with zeros to groups of 32."""
    return torch.cat([F.pad(g.flatten(), (0, -g.numel() % 32)) for g in gradients])


def parted(row: torch.Tensor, like: list[nn.Parameter]) -> list[torch.Tensor]:
    parts = row.split([-(-p.numel() // 32) * 32 for p in like])
    return [part[: p.numel()].view_as(p) for part, p in zip(parts, like, strict=True)]


class Sender:
    """All ranks' gradients on their way: the mean of what arrives, and what is kept for later."""

    def __init__(self, scheme: Scheme, bits: float, feedback: bool, noise: torch.Generator) -> None:
        self._scheme, self._bits, self._feedback, self._noise = scheme, bits, feedback, noise
        self.residual: torch.Tensor | float = 0.0
        self.most = 0.0

    def mean(self, rows: torch.Tensor) -> torch.Tensor:
        """(numel,) of gradients (ranks, numel)."""
        rows = rows + self.residual
        decoded, spent = self._scheme(rows, self._bits, self._noise)
        self.most = max(self.most, spent)
        if self._feedback:
            self.residual = rows - decoded
        return decoded.mean(0)


def train(
    task: Task, optimizer: str, make: Callable[[torch.Generator], Sender] | None, seed: int,
    steps: int,
) -> dict[str, float]:  # fmt: skip
    """What is measured at the end of one run, and the most bits a value of a step."""
    data, noise = (torch.Generator().manual_seed(seed * 1000 + i) for i in range(2))
    sender = make(noise) if make else None
    parameters, lr = list(task.model.parameters()), task.rates[optimizer]
    matrices = [i for i, p in enumerate(parameters) if p.ndim >= 2]
    adam = torch.optim.AdamW(parameters, lr, weight_decay=0.01)
    own = Momentum(task.model, lr, muon=optimizer == "muon")
    for step in range(steps):
        ranks = [torch.autograd.grad(task.loss(data), parameters) for _ in range(task.ranks)]
        for place, p in enumerate(parameters):
            p.grad = torch.stack([found[place] for found in ranks]).mean(0)
        if sender is not None:
            rows = torch.stack([joined([found[i] for i in matrices]) for found in ranks])
            sent = parted(sender.mean(rows), [parameters[i] for i in matrices])
            for i, part in zip(matrices, sent, strict=True):
                parameters[i].grad = part
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scale = 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2
        scale *= min(1.0, (step + 1) / 20)
        if optimizer == "adamw":
            adam.param_groups[0]["lr"] = lr * scale
            adam.step()
        else:
            own.step(scale)
    return task.measure() | {"bits": sender.most if sender else 32.0}


def key(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("task", "optimizer", "rate", "case", "seed"))


def planned(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs, those of a seed together."""
    found = []
    for seed in range(1, options.seeds + 1):
        for task, optimizer in RUNS:
            rates = [r for r in options.rates if r in RATES or (task, optimizer) == RUNS[1]]
            cells = [(32.0, "full"), *((r, case) for r in rates for case in cases(r))]
            for rate, case in cells:
                found.append(
                    {"task": task, "optimizer": optimizer, "rate": rate, "case": case, "seed": seed}
                )
    return found


def outcome(run: dict[str, Any]) -> dict[str, float]:
    task, rate = TASKS[run["task"]](run["seed"]), run["rate"]
    if run["case"] == "full":
        return train(task, run["optimizer"], None, run["seed"], STEPS[run["task"]])
    scheme, feedback = cases(rate)[run["case"]]
    make = functools.partial(Sender, scheme, rate, feedback)
    return train(task, run["optimizer"], make, run["seed"], STEPS[run["task"]])


def table(results: list[dict[str, Any]]) -> str:
    """Means over the seeds; differences are from full precision with the same seed."""
    lines = [
        "task       optimizer bits   case                     seeds    loss  over full     +-  "
        "accuracy"
    ]
    full = {(r["task"], r["optimizer"], r["seed"]): r["loss"] for r in results if r["rate"] == 32}
    for cell in dict.fromkeys(key(r)[:-1] for r in sorted(results, key=place)):
        runs = [r for r in results if key(r)[:-1] == cell]
        over = [r["loss"] - full[r["task"], r["optimizer"], r["seed"]] for r in runs]
        error = statistics.stdev(over) / len(over) ** 0.5 if len(over) > 1 else math.nan
        right = [r["accuracy"] for r in runs if "accuracy" in r]
        task, optimizer, rate, case = cell
        lines.append(
            f"{task:<10} {optimizer:<8} {rate:>6g}  {case:<24} {len(runs):>5} "
            f"{statistics.mean(r['loss'] for r in runs):7.4f} {statistics.mean(over):+10.4f} "
            f"{error:6.4f}" + (f" {statistics.mean(right):8.1f} %" if right else "")
        )
    return "\n".join(lines) + "\n"


def place(run: dict[str, Any]) -> tuple[Any, ...]:
    return RUNS.index((run["task"], run["optimizer"])), -run["rate"]


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Loss over full precision by true bits, a panel for each task and optimizer."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(RUNS), figsize=(16, 4.6))
    for panel, (task, optimizer) in zip(panels, RUNS, strict=True):
        here = [r for r in results if (r["task"], r["optimizer"]) == (task, optimizer)]
        full = {r["seed"]: r["loss"] for r in here if r["rate"] == 32}
        for case in dict.fromkeys(c for rate in RATES for c in cases(rate)):
            runs = [r for r in here if r["case"] == case and r["rate"] in RATES]
            rates = sorted({r["rate"] for r in runs})
            means = [
                statistics.mean(r["loss"] - full[r["seed"]] for r in runs if r["rate"] == rate)
                for rate in rates
            ]
            style = "x--" if "alone" in case else "o-"
            panel.plot(rates, means, style, label=case, alpha=0.75)
        panel.axhline(0, color="gray", lw=0.8)
        panel.set_xscale("log")
        panel.set_title(f"{task}, {optimizer}")
        panel.set_xlabel("true bits a value")
    panels[0].set_ylabel("loss over full precision, same seed")
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    lines = panels[0].get_legend_handles_labels()
    figure.legend(*lines, loc="lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[*RATES, *FINE])
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    saved = HERE / "feedback.json"
    results: list[dict[str, Any]] = json.loads(saved.read_text()) if saved.is_file() else []
    done, began = set(map(key, results)), time.monotonic()
    for run in planned(options):  # those in the file are not run again
        if key(run) not in done and time.monotonic() - began < 60 * options.minutes:
            results.append(run | outcome(run))
            saved.write_text(json.dumps(results, indent=0) + "\n")
    (HERE / "feedback.txt").write_text(table(results))
    plot(results, HERE / "feedback.png")
    print(table(results))


if __name__ == "__main__":
    main()
