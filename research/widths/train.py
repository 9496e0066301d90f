"""Training with chosen widths against fixed ones at equal true bits: a small character model.

Two simulated ranks; gradients of matrices travel, all else is exact. Writes training.json, a table
and a plot.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from research.widths.codec import fixed_bits, send

HERE = Path(__file__).parent
RANKS, CONTEXT, BATCH = 2, 32, 16
BLOCK = 128
TARGETS = {1.0: (1, 128), 1.5: (1, 32), 2.0: (2, 128), 3.0: (3, 128)}
# By optimizer, what runs without --all.
FEW = {
    "adamw": ("1 fixed", "1 chosen", "2 fixed", "2 chosen", "2 chosen, from 0"),
    "sgd": ("2 fixed", "2 chosen"),
    "muon": ("2 fixed", "2 chosen"),
}
LEARNING_RATES = {"adamw": 3e-3, "sgd": 0.3, "muon": 0.02}


class Model(nn.Module):
    """A transformer of two blocks, tied to nothing else of the project."""

    def __init__(self, vocabulary: int, width: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(CONTEXT, width)
        layer = {"nhead": heads, "dim_feedforward": 4 * width, "dropout": 0.0}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, **layer, batch_first=True, norm_first=True)  # type: ignore[arg-type]
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        self.mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        result: torch.Tensor = self.head(self.norm(x))
        return result


class Momentum:
    """SGD with momentum, or with its direction made orthogonal where it is a matrix (Muon)."""

    def __init__(self, model: nn.Module, lr: float, muon: bool) -> None:
        self._parameters, self.lr, self._muon = list(model.parameters()), lr, muon
        self._moments = [torch.zeros_like(p) for p in self._parameters]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for p, moment in zip(self._parameters, self._moments, strict=True):
            assert p.grad is not None
            moment.mul_(0.9).add_(p.grad)
            square = self._muon and p.ndim == 2
            update = (
                orthogonal(moment) * max(1, p.shape[0] / p.shape[1]) ** 0.5 if square else moment
            )
            lr = self.lr if square or not self._muon else 0.1
            p.sub_(update * lr * scale)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Near the closest orthogonal matrix, by five steps of Newton and Schulz."""
    y = x / (x.norm() + 1e-7)
    y = y.T if x.shape[0] > x.shape[1] else y
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y.T if x.shape[0] > x.shape[1] else y


def corpus() -> tuple[torch.Tensor, torch.Tensor, int]:
    """The project's pages as of now, as characters: training text, validation text, vocabulary."""
    root = HERE.parent.parent
    pages = sorted((root / "docs").glob("*.md"))
    text = "".join(page.read_text() for page in pages)
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([letters[letter] for letter in text])
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:], len(letters)


def batch(ids: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(ids) - CONTEXT - 1, (BATCH, 1), generator=generator)
    places = starts + torch.arange(CONTEXT)
    return ids[places], ids[places + 1]


def train(optimizer: str, codec: dict[str, Any] | None, seed: int, steps: int) -> dict[str, float]:
    """Validation loss and true bits a value of one run."""
    training, validation, vocabulary = corpus()
    torch.manual_seed(seed)
    model = Model(vocabulary)
    data, noise = (torch.Generator().manual_seed(seed * 1000 + i) for i in range(2))
    lr = LEARNING_RATES[optimizer]
    adam = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01)
    own = Momentum(model, lr, optimizer == "muon")
    matrices = [p for p in model.parameters() if p.ndim == 2]
    bits = 32.0
    for step in range(steps):
        model.zero_grad()
        arrived = [torch.zeros_like(p) for p in matrices]
        for _ in range(RANKS):
            tokens, targets = batch(training, data)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in matrices]
            (loss / RANKS).backward()
            if codec is None:
                continue
            grads = [
                p.grad - b for p, b in zip(matrices, before, strict=True) if p.grad is not None
            ]
            decoded, bits = send(grads, noise, **codec)
            for total, part in zip(arrived, decoded, strict=True):
                total += part
        if codec is not None:
            for p, total in zip(matrices, arrived, strict=True):
                p.grad = total
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = min(1.0, (step + 1) / 20) * (
            0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2
        )
        if optimizer == "adamw":
            adam.param_groups[0]["lr"] = lr * scale
            adam.step()
        else:
            own.step(scale)
    return {"loss": evaluate(model, validation), "bits": bits}


@torch.no_grad()
def evaluate(model: nn.Module, ids: torch.Tensor) -> float:
    windows = ids[: (len(ids) - 1) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    targets = ids[1 : windows.numel() + 1].view(-1, CONTEXT)
    return nn.functional.cross_entropy(model(windows).flatten(0, 1), targets.flatten()).item()


def cases() -> dict[str, dict[str, Any] | None]:
    """Fixed widths, and chosen ones at the same true bits."""
    found: dict[str, dict[str, Any] | None] = {"full": None}
    for name, (width, block) in TARGETS.items():
        budget = fixed_bits(width, block)
        found[f"{name:g} fixed"] = {"width": width, "block": block}
        found[f"{name:g} chosen"] = {"block": BLOCK, "budget": budget, "least": 1}
        found[f"{name:g} chosen, from 0"] = {"block": BLOCK, "budget": budget, "least": 0}
    # No room for one bit, a scale and a width in every block of 128.
    found["1 chosen"] = {"block": 256, "budget": fixed_bits(1, 128), "least": 1}
    found["2 fixed, 64"] = {"width": 2, "block": 64}
    found["2 fixed, 32"] = {"width": 2, "block": 32}
    found["2 chosen, weighted"] = {"block": BLOCK, "budget": 2.125, "least": 1, "power": 1.0}
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Mean loss and its standard error, by optimizer and case."""
    lines = ["optimizer  case                  bits    loss    +-       over full"]
    for optimizer in LEARNING_RATES:
        here = [r for r in results if r["optimizer"] == optimizer]
        full = {r["seed"]: r["loss"] for r in here if r["case"] == "full"}
        for case in dict.fromkeys(r["case"] for r in here):
            runs = [r for r in here if r["case"] == case]
            losses = [r["loss"] for r in runs]
            paired = [r["loss"] - full[r["seed"]] for r in runs]
            error = statistics.stdev(paired) / len(paired) ** 0.5 if len(paired) > 1 else math.nan
            lines.append(
                f"{optimizer:<10} {case:<20} {runs[0]['bits']:6.3f} {statistics.mean(losses):8.4f} "
                f"{error:8.4f} {statistics.mean(paired):+9.4f}"
            )
    return "\n".join(lines) + "\n"


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Loss over full precision by true bits, a panel for each optimizer."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(LEARNING_RATES), figsize=(11, 3.4), sharey=True)
    for panel, optimizer in zip(panels, LEARNING_RATES, strict=True):
        here = [r for r in results if r["optimizer"] == optimizer]
        full = {r["seed"]: r["loss"] for r in here if r["case"] == "full"}
        for kind, marker in (("fixed", "o"), ("chosen", "s"), ("chosen, from 0", "x")):
            runs = [r for r in here if r["case"].partition(" ")[2] == kind]
            bits, over = [r["bits"] for r in runs], [r["loss"] - full[r["seed"]] for r in runs]
            panel.plot(bits, over, marker, label=kind, alpha=0.7)
        panel.axhline(0, color="gray", lw=0.8)
        panel.set_title(optimizer)
        panel.set_xlabel("true bits a value")
    panels[0].set_ylabel("loss over full precision, same seed")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", default=list(LEARNING_RATES))
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after these")
    parser.add_argument("--all", action="store_true", help="every case with every optimizer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    for seed in range(1, options.seeds + 1):
        for optimizer in options.optimizers:
            for case, codec in cases().items():
                if not options.all and case not in ("full", *FEW[optimizer]):
                    continue
                if time.monotonic() - began > 60 * options.minutes:
                    continue
                found = train(optimizer, codec, seed, options.steps)
                results.append({"optimizer": optimizer, "case": case, "seed": seed} | found)
                (HERE / "training.json").write_text(json.dumps(results, indent=0) + "\n")
    (HERE / "training.txt").write_text(table(results))
    plot(results, HERE / "training.png")
    print(table(results))


if __name__ == "__main__":
    main()
