"""`qsdp bench train`: step times of stock FSDP2 and of qsdp on your own cluster.

    torchrun ... -m qsdp bench train --preset gpt2-125m     on the ranks that your torchrun starts
    qsdp bench train --nproc 2                              on ranks of this machine

The trainer's own step on random tokens, with one way to communicate after another in turn, each
round in another order. Nothing is shaped: the network is what it is.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from qsdp.bench.launch import run_ranks
from qsdp.bench.parsers import train_parser
from qsdp.bench.steps import TIMES, bench_config, measure, medians, prepare, ranks_per_node
from qsdp.columns import format_columns
from qsdp.plan.variant import parse_variant
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.model import num_parameters
from qsdp.trainer.ranks import process_group

COLUMNS = ("variant", "step s", "compute", "encode", "network", "decode", "MB sent", "vs fp32",
           "vs bf16")  # fmt: skip


def main(argv: list[str]) -> int:
    """Measure on every rank, print on rank 0; returns the exit status."""
    options = train_parser().parse_args(argv)
    for name in options.variants:
        parse_variant(name)
    for name in ("steps", "warm_up"):
        if getattr(options, name) < (1 if name == "steps" else 0):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is too small: {getattr(options, name)}")
    return run_ranks(["train", *argv], options.nproc, lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    with process_group(options.device, options.timeout) as ranks:
        config = _config(options)
        per_node = ranks_per_node(int(os.environ["LOCAL_WORLD_SIZE"]), ranks.num_ranks)
        contenders = {
            name: prepare(parse_variant(name), config, ranks, per_node) for name in options.variants
        }
        parameters = num_parameters(next(iter(contenders.values())).training.model)
        samples = measure(contenders, steps=options.steps, warm_up=options.warm_up, first_step=1)
        if ranks.rank == 0:
            found = _rows({name: medians(s) for name, s in samples.items()})
            if options.json:
                print(json.dumps(found, indent=1))
                return
            print(
                f"{parameters:,} parameters, {config.batch_size} x {config.sequence_length} tokens "
                f"a step, {ranks.num_ranks} ranks, {per_node} a node, on {ranks.device.type}; "
                f"medians of {options.steps} steps"
            )
            print(format_columns(COLUMNS, [_cells(row) for row in found]))


def _config(options: argparse.Namespace) -> TrainConfig:
    settings = {
        name: value
        for name in ("batch_size", "sequence_length")
        if (value := getattr(options, name)) is not None
    }
    shape = {"layers": options.layers, "width": options.width, "heads": options.heads}
    return bench_config(preset=options.preset, **shape, **settings)


def _rows(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians and speed-ups over the two ways of stock, None where stock was not measured."""
    rows = []
    for name, values in found.items():
        speedups = {
            f"speedup_over_{stock}": found[f"stock-{stock}"]["step_s"] / values["step_s"]
            if f"stock-{stock}" in found
            else None
            for stock in ("fp32", "bf16")
        }
        rows.append({"variant": name, **values, **speedups})
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    times = [f"{row[name]:.4f}" for name in TIMES]
    speedups = [row[f"speedup_over_{stock}"] for stock in ("fp32", "bf16")]
    return [row["variant"], *times, f"{row['sent'] / 1e6:.1f}",
            *("-" if s is None else f"{s:.2f}" for s in speedups)]  # fmt: skip
