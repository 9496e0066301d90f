"""Chosen widths against fixed ones and coded rows, by the recipe of the quality tables.

    python -m research.widths.recipe [--model 141k] [--cases CASE ...] [--optimizers adamw ...]

The project's GPT on the plays for 1,400 steps, at the learning rate that is best in full precision,
with two simulated ranks: gradients of matrices travel, all else is exact. Runs that are finished
are kept in recipe.json, so that the same command goes on; tables go to recipe.txt, a plot to
recipe.png.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import qsdp
from benchmarks.optimizers.tasks import Plays
from benchmarks.optimizers.train import Optimizers, schedule
from qsdp import Quantizer
from qsdp.trainer.batches import TextBatches, validation_starts, windows
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.evaluate import token_losses
from qsdp.trainer.model import build_model
from qsdp.trainer.text import plays
from qsdp.trainer.tokenizer import encode_to_file, load_tokenizer, open_tokens, train_tokenizer
from research.widths.codec import fixed_bits, send
from research.widths.recipe_table import format_found, plot

HERE = Path(__file__).parent
RANKS = 2
MODELS = {"141k": (64, 2), "875k": (128, 4)}  # width and layers
LEARNING_RATES = {"adamw": 0.006, "sgd": 0.2, "muon": 0.016}
WARMUP_STEPS = 100
WINDOWS = 1024  # of validation
Codec = Callable[[list[torch.Tensor], torch.Generator], tuple[list[torch.Tensor], float]]


class Run(NamedTuple):
    model: str
    optimizer: str
    lr: float
    case: str
    seed: int
    steps: int

    def __str__(self) -> str:
        return f"{self.model} {self.optimizer} {self.lr:g} {self.case}, seed {self.seed}"


def cases() -> dict[str, Codec | None]:
    """By name; those at equal true bits begin with the same number."""
    found: dict[str, Codec | None] = {"full": None}
    for width, block in ((1, 128), (1, 32), (2, 128), (2, 64), (2, 32), (3, 128)):
        budget = fixed_bits(width, block)
        name = f"{budget:g}"
        found[f"{name} fixed"] = partial(send, width=width, block=block)
        # Blocks of 128 have no room for a bit, a scale and a width in 1.125 bits.
        own = 128 if budget > 1.2 else 256
        found[f"{name} chosen"] = partial(send, block=own, budget=budget, least=1)
        found[f"{name} chosen, from 0"] = partial(send, block=own, budget=budget, least=0)
    for budget in (1.75, 2.55, 2.7):  # about what the grids below take, of gradients of each model
        found[f"{budget:g} chosen"] = partial(send, block=128, budget=budget, least=1)
    for bits in (3, 4, 5):
        rice = Quantizer(bits, 1024, "dither", scaling="symmetric", coding="rice")
        found[f"coded, {bits}-bit grid"] = partial(coded, quantizer=rice)
    return found


def coded(
    tensors: list[torch.Tensor], generator: torch.Generator, *, quantizer: Quantizer
) -> tuple[list[torch.Tensor], float]:
    """What the library's rows of variable size decode to, and the bits a value that they took."""
    decoded, sent, total = [], 0, 0
    for x in tensors:
        key = int(torch.randint(1 << 62, (), generator=generator))
        wire = qsdp.encode(x, quantizer, key=key)
        sent, total = sent + wire.numel(), total + x.numel()
        decoded.append(qsdp.decode(wire, x.numel(), quantizer).view_as(x))
    return decoded, 8 * sent / total


def train(run: Run, folder: Path) -> dict[str, Any]:
    """Validation loss, and mean bits a value of the gradients."""
    torch.set_num_threads(1)
    width, layers = MODELS[run.model]
    config = TrainConfig(
        folder=folder,
        vocab_size=512,
        width=width,
        heads=2,
        layers=layers,
        batch_size=8,
        steps=run.steps,
        seed=run.seed,
    )
    tokenizer, training, validation = _data(folder, config.vocab_size)
    model = build_model(config, tokenizer)
    shape = (1, RANKS, config.batch_size // RANKS)
    own = [TextBatches(training, config.sequence_length, shape, rank=rank, seed=run.seed)
           for rank in range(RANKS)]  # fmt: skip
    codec, noise = cases()[run.case], torch.Generator().manual_seed(run.seed)
    stepper = Optimizers(model, run.optimizer, run.lr, Plays.ends)
    bits = 0.0
    for step in range(1, run.steps + 1):
        bits += backward(model, [part.batch(step, 0) for part in own], codec, noise) / run.steps
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step(schedule(step, run.steps, WARMUP_STEPS))
        stepper.zero_grad()
    loss = evaluate(model, validation, config.sequence_length)
    return {**run._asdict(), "loss": loss, "bits": bits}


def _data(folder: Path, vocab_size: int) -> tuple[Any, Any, Any]:
    """Tokenizer, training tokens and validation tokens, as a run of `qsdp train` has them."""
    text = plays()
    tokenizer = load_tokenizer(train_tokenizer(text, vocab_size, folder))
    files = (encode_to_file(documents, tokenizer, folder) for documents in text)
    training, validation = map(open_tokens, files)
    return tokenizer, training, validation


def backward(
    model: nn.Module, batches: list[torch.Tensor], codec: Codec | None, noise: torch.Generator
) -> float:
    """Gradients as the mean over ranks, matrices as they arrive; returns bits a value of one."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    arrived = [torch.zeros_like(p) for p in matrices]
    bits = 32.0
    for batch in batches:
        (token_losses(model, batch).mean() / len(batches)).backward()  # type: ignore[arg-type]
        grads = [p.grad for p in matrices if p.grad is not None]
        assert len(grads) == len(matrices) and all(v.grad is not None for v in vectors)
        if codec is not None:
            grads, bits = codec(grads, noise)
        for total, part in zip(arrived, grads, strict=True):
            total += part
        for p in matrices:
            p.grad = None
    for p, total in zip(matrices, arrived, strict=True):
        p.grad = total
    return bits


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Any, sequence_length: int) -> float:
    starts = validation_starts(len(tokens), sequence_length, WINDOWS)
    losses = [
        token_losses(model, windows(tokens, part, sequence_length)).mean()  # type: ignore[arg-type]
        for part in starts.reshape(-1, 16)
    ]
    return float(torch.stack(losses).mean())


def wanted(options: argparse.Namespace) -> Iterator[Run]:
    """Seed by seed, so that what is there after an interruption can be paired."""
    for seed in options.seeds:
        for optimizer in options.optimizers:
            lr = options.lr or LEARNING_RATES[optimizer]
            for case in options.cases:
                yield Run(options.model, optimizer, lr, case, seed, options.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--model", choices=MODELS, default="141k")
    add("--optimizers", nargs="+", choices=LEARNING_RATES, default=list(LEARNING_RATES))
    add("--cases", nargs="+", choices=cases(), metavar="CASE", default=list(cases()))
    add("--seeds", nargs="+", type=int, default=[1, 2, 3])
    add("--lr", type=float, help="in place of the optimizer's own")
    add("--steps", type=int, default=1400)
    add("--processes", type=int, default=2)
    add("--out", type=Path, default=HERE / "recipe.json")
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else []
    there = {Run(*(result[field] for field in Run._fields)) for result in found}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool,
    ):
        _data(Path(folder), 512)  # once, before all look for it
        left = [run for run in wanted(options) if run not in there]
        running = {pool.submit(train, run, Path(folder)): run for run in left}
        for future in as_completed(running):
            result = future.result()
            print(f"{running[future]}: {result['loss']:.4f} at {result['bits']:.3f}", flush=True)
            found.append(result)
            partial_file = options.out.with_suffix(".partial")
            partial_file.write_text(json.dumps(found, indent=0) + "\n")
            partial_file.replace(options.out)
    options.out.with_suffix(".txt").write_text(format_found(found))
    plot(found, options.out.with_suffix(".png"))
    print(format_found(found))


if __name__ == "__main__":
    main()
