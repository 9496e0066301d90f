"""Relative error of quantized weights and gradients of a model in training, by technique and bits.

    python benchmarks/quality/errors.py RUN [--steps N ...] [--out FILE]

RUN is a folder of `qsdp train` with several checkpoints (`--checkpoint-every N --keep-checkpoints
9`). At each of them, all weight matrices and the gradients of one batch are encoded and decoded;
errors are root mean squares over all elements, relative to those of the values. Writes a table and
a plot.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from qsdp import Learned, Quantizer, decode, encode
from qsdp.levels import _histogram, best_levels, spread_out
from qsdp.trainer.checkpoint import complete_checkpoints
from qsdp.trainer.command import read_config
from qsdp.trainer.evaluate import token_losses
from qsdp.trainer.model import build_model
from qsdp.trainer.tokenizer import load_tokenizer
from qsdp.tune.choose import _batches, _tokenizer

BITS = (2, 3, 4, 5, 6, 8)
SMALL = {"block_size": 128, "scale_dtype": "bfloat16"}
TECHNIQUES = {
    "nearest": Quantizer(rounding="nearest"),
    "shift": Quantizer(rounding="shift"),
    "stochastic": Quantizer(rounding="stochastic"),
    "learned": Learned(Quantizer(rounding="nearest")),
    "nearest 128": Quantizer(rounding="nearest", **SMALL),
    "dither 128": Quantizer(rounding="dither", **SMALL),
    "dither hadamard 128": Quantizer(rounding="dither", transform="hadamard", **SMALL),
    "learned 128": Learned(Quantizer(rounding="nearest", **SMALL)),
}


def squared_error(values: torch.Tensor, technique: Quantizer | Learned, bits: int) -> float:
    flat = values.detach().float().flatten()
    if isinstance(technique, Learned):
        quantizer = replace(technique.quantizer, bits=bits)
        # As the ranks of a run would learn it together.
        table = spread_out(best_levels(_histogram(flat[None], quantizer), bits))
        quantizer = replace(quantizer, levels=table)
    else:
        quantizer = replace(technique, bits=bits)
    decoded = decode(encode(flat, quantizer), flat.numel(), quantizer)
    return float((decoded - flat).double().square().sum())


def predicted(values: list[torch.Tensor], bits: int) -> float:
    """Of nearest, shift and dither at block 1024: steps squared by 12, if errors are uniform."""
    total = 0.0
    for value in values:
        flat = value.detach().float().flatten()
        for block in flat.split(1024):
            step = float(block.max() - block.min()) / (2**bits - 1)
            total += len(block) * step * step / 12
    return total


def curves(values: list[torch.Tensor]) -> dict[str, list[float]]:
    """Relative errors by technique, one for each of BITS."""
    length = sum(float(v.detach().double().square().sum()) for v in values)
    found = {
        name: [
            math.sqrt(sum(squared_error(v, technique, bits) for v in values) / length)
            for bits in BITS
        ]
        for name, technique in TECHNIQUES.items()
    }
    found["predicted, 1024"] = [math.sqrt(predicted(values, bits) / length) for bits in BITS]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/quality/results/errors"))
    parser.add_argument("--steps", nargs="+", type=int, default=[], help="default: all saved")
    options = parser.parse_args()
    config = read_config(options.run)
    model = build_model(config, load_tokenizer(_tokenizer(options.run, config)))
    matrices = {n: p for n, p in model.named_parameters() if p.ndim > 1}
    (batch,) = _batches(options.run, config, model, 1)
    found: dict[str, dict[str, dict[str, list[float]]]] = {"weights": {}, "gradients": {}}
    for path in complete_checkpoints(options.run / "checkpoints"):
        number = int(path.name.split("-")[1])
        if options.steps and number not in options.steps:
            continue
        state = {"model." + name: p.data for name, p in model.named_parameters()}
        load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
        model.zero_grad()
        token_losses(model, batch).mean().backward()
        step = f"step {number}"
        found["weights"][step] = curves(list(matrices.values()))
        found["gradients"][step] = curves([p.grad for p in matrices.values()])
    text = "\n\n".join(
        table(kind, step, rows) for kind, steps in found.items() for step, rows in steps.items()
    )
    print(text)
    options.out.with_suffix(".txt").write_text(text + "\n")
    draw(found, options.out.with_suffix(".png"))
    return 0


def table(kind: str, step: str, rows: dict[str, list[float]]) -> str:
    head = f"{kind}, {step}".ljust(24) + "".join(f"{bits:>9} bit" for bits in BITS)
    lines = [name.ljust(24) + "".join(f"{v:13.4f}" for v in row) for name, row in rows.items()]
    return "\n".join([head, *lines])


def draw(found: dict[str, dict[str, dict[str, list[float]]]], path: Path) -> None:
    columns = max(len(steps) for steps in found.values())
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(3.2 * columns + 1.5, 6), layout="constrained")
        grid = figure.subplots(2, columns, sharex=True, sharey="row", squeeze=False)
    for row, (kind, steps) in zip(grid, found.items(), strict=True):
        row[0].set_ylabel(f"relative error of {kind}")
        for axes, (step, lines) in zip(row, steps.items(), strict=False):
            axes.set_title(f"{kind}, {step}", fontsize=9, loc="left")
            for name, values in lines.items():
                known = name.startswith("predicted")
                style = {"color": "black", "linestyle": ":"} if known else {"marker": "."}
                axes.plot(BITS, values, label=name, linewidth=1, **style)
            axes.set_yscale("log")
            axes.grid(color="#dddddd", linewidth=0.5)
            axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("bits")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
