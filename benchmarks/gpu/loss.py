"""Part 7: the loss of a GPT of 125 million parameters, with qsdp and without, on two threads.

    python -m benchmarks.gpu.loss [--device cpu] [--steps N] [--configurations stock w8g8 ...]

Tokens are bytes of the text files of this repository; the batches are the same for all.
"""

from __future__ import annotations

import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import qsdp
from benchmarks.gpu.checks import Checks, require
from benchmarks.gpu.models import GPT_125M, TINY, Shape, gpt, quantize, shard
from benchmarks.gpu.options import parser_of
from benchmarks.gpu.threads import run_threads
from qsdp.columns import format_columns

ROOT = Path(__file__).parent.parent.parent
CONFIGURATIONS = ("stock", "w8g8", "w4g4")
RANKS = 2
LAST = 20  # steps that the final loss is the mean of
# Of the final loss: losses of a short run differ by some percent for any change of rounding.
TOLERANCE = 0.05


class Training(NamedTuple):
    """What every rank runs."""

    device: torch.device
    shape: Shape
    name: str
    steps: int
    batch: int


def main(argv: list[str] | None = None) -> int:
    """Train all; 1 if one fails or ends far from stock."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, help="(200; on CPU 40)")
    parser.add_argument("--configurations", nargs="+", default=CONFIGURATIONS)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    shape, batch = (GPT_125M, 8) if on_gpu else (TINY, 2)
    steps = options.steps or (200 if on_gpu else 40)
    checks, found = Checks(), {}
    for name in options.configurations:
        job = Training(device, shape, name, steps, batch)
        checks.run(name, lambda job=job: _train_all(job, found))
    print("\n" + _table(found, steps), flush=True)
    return checks.status


def _train_all(job: Training, found: dict[str, list[float]]) -> str:
    start = time.perf_counter()
    ranks = run_threads(train, RANKS, job)
    seconds = (time.perf_counter() - start) / job.steps
    losses = torch.tensor([losses for losses, _ in ranks]).mean(0)
    found[job.name] = losses.tolist()
    final, stock = _final(found[job.name]), _final(found.get("stock", found[job.name]))
    require(bool(losses.isfinite().all()), "losses are not finite")
    far = abs(final - stock) > TOLERANCE * stock
    require(not far, f"the last losses are {final:.4f}, stock's {stock:.4f}")
    return f"loss {losses[0]:.4f} to {final:.4f}, {1e3 * seconds:.0f} ms a step{ranks[0][1]}"


def train(rank: int, job: Training) -> tuple[list[float], str]:
    """The losses of this rank, and what was sent."""
    model = gpt(job.shape, job.device)
    shard(model, job.device, param_dtype=torch.bfloat16 if job.device.type == "cuda" else None)
    quantize(model, job.name)
    on_gpu = job.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=on_gpu or None)
    losses = []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 20)
        loss = model(batch_of(rank, step, job).to(job.device, non_blocking=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    sent = "" if job.name == "stock" else f", {qsdp.comm_stats(model).ratio:.2f} times fewer bytes"
    return torch.stack(losses).tolist(), sent


@lru_cache(maxsize=1)
def corpus() -> torch.Tensor:
    """Bytes of the repository's documents and sources, in the order of their names."""
    paths = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("qsdp/**/*.py"), ROOT / "README.md"])
    text = b"\n".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch_of(rank: int, step: int, job: Training) -> torch.Tensor:
    """Random pieces of the text; other ones for every rank and step."""
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    text, length = corpus(), job.shape.sequence + 1
    starts = torch.randint(0, len(text) - length, (job.batch,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()])


def _final(losses: list[float]) -> float:
    last = losses[-LAST:]
    return sum(last) / len(last)


def _table(found: dict[str, list[float]], steps: int) -> str:
    """Losses along the way, and the mean of the last ones."""
    marks = sorted({0, *range(9, steps, max(steps // 8, 1)), steps - 1})
    header: list[Any] = ["", *(f"step {mark + 1}" for mark in marks), f"last {LAST}"]
    rows = [
        (name, *(f"{losses[mark]:.4f}" for mark in marks), f"{_final(losses):.4f}")
        for name, losses in found.items()
    ]
    return format_columns(header, rows)


if __name__ == "__main__":
    sys.exit(main())
