"""What `qsdp tune` does: measure, choose, and say it as a configuration."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel

from qsdp import Differences, Feedback, Learned, QSDPConfig, Quantizer, Ways
from qsdp.arguments import did_you_mean
from qsdp.trainer.batches import batch_starts, windows
from qsdp.trainer.checkpoint import complete_checkpoints, load_weights
from qsdp.trainer.comm import PRESETS
from qsdp.trainer.comm_file import embedded_comm
from qsdp.trainer.command import read_config
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.data import vocabulary_digest
from qsdp.trainer.metrics import write_json
from qsdp.trainer.model import build_model
from qsdp.trainer.tables import new_table, print_table
from qsdp.trainer.text import read_text
from qsdp.trainer.tokenizer import encode_to_file, load_tokenizer, open_tokens, train_tokenizer
from qsdp.tune.allocate import Item, average_bits, total_harm, within_budget, within_harm
from qsdp.tune.measure import gradient_items, weight_items
from qsdp.ways import quantizer_of


def tune(options: argparse.Namespace) -> None:
    """Measure as the options of :mod:`qsdp.tune.command` say, write the file and print the table.

    Raises:
        OSError, ValueError: a run, a base or a checkpoint that cannot be used.
    """
    base = _base(options.base)
    quantizers = {way: quantizer_of(getattr(base, way)) for way in ("weights", "gradients")}
    if not any(quantizers.values()):
        raise ValueError(f"--base {options.base} quantizes nothing: there is nothing to tune")
    config = read_config(options.run)
    if config.fake_quantize is not None:
        raise ValueError(
            f"{options.run} was trained with --fake-quantize {config.fake_quantize}, which has "
            "chosen the bits of its weights already; give a run without it"
        )
    model = _trained_model(options.run, config)
    named = dict(model.named_parameters())
    chosen = {n: p for n, p in named.items() if _follows(base, n, p)}
    if not chosen:
        raise ValueError(
            f"--base {options.base or 'w4g4'} quantizes no parameter of {options.run}: there is "
            "nothing to tune"
        )
    batches = _batches(options.run, config, model, options.batches)
    widths: dict[str, dict[str, int]] = {}
    items: dict[str, list[Item[int]]] = {}
    for direction, measure in (("weights", weight_items), ("gradients", gradient_items)):
        quantizer = quantizers[direction]
        if quantizer is None:
            continue
        items[direction] = measure(model, chosen, quantizer, batches)
        if options.max_loss is not None and direction == "weights":
            widths[direction] = within_harm(items[direction], options.max_loss)
        else:
            widths[direction] = within_budget(items[direction], options.bits)
    write_json(options.out, _config(base, widths))
    _say(options, items, widths)


def _say(
    options: argparse.Namespace,
    items: dict[str, list[Item[int]]],
    widths: dict[str, dict[str, int]],
) -> None:
    print_table(_table(items, widths))
    for direction, found in items.items():
        uniform = {item.name: round(options.bits) for item in found}
        unit = "nats" if direction == "weights" else "of the gradients"
        print(
            f"{direction}: {average_bits(found, widths[direction]):.2f} bits on average; expected "
            f"harm {total_harm(found, widths[direction]):.4g} {unit}, uniform "
            f"{round(options.bits)} bits {total_harm(found, uniform):.4g}"
        )
    print(f"use it with: qsdp train --comm {shlex.quote(str(options.out))}")


def _base(name: str | None) -> QSDPConfig:
    if name is None:
        base = QSDPConfig.preset("w4g4")
        return replace(base, weights=quantizer_of(base.weights))
    base = _named_base(name)
    for direction in ("weights", "gradients"):
        quantizer = quantizer_of(getattr(base, direction))
        if quantizer is not None and quantizer.scaling == "mean":
            raise ValueError(
                f"--base {name}: {direction} travel as signs, which have no other width: give "
                'scaling="minmax" or "symmetric"'
            )
    if isinstance(base.weights, Differences):
        raise ValueError(
            f"--base must send weights as values, for it is their error that is measured; {name} "
            'sends differences: give a JSON file with "weights": {"bits": 4, ...}'
        )
    return base


def _follows(base: QSDPConfig, name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter travels as the base says for all: it is large, and no exception."""
    ways = base.ways_of((name,), parameter.shape)
    return (ways["weights"], ways["gradients"]) == (base.weights, base.gradients)


def _named_base(name: str) -> QSDPConfig:
    text = embedded_comm(name, "--base")
    try:
        if not text.startswith("{"):
            return QSDPConfig.preset(text)
        content = json.loads(text)
        content.pop("name", None)
        return QSDPConfig.from_json(content)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--base {name}: {error}{did_you_mean(name, PRESETS)}") from error


def _trained_model(run_folder: Path, config: TrainConfig) -> PreTrainedModel:
    """The full-precision weights of the run's last checkpoint, on one process."""
    found = complete_checkpoints(run_folder / "checkpoints")
    if not found:
        raise ValueError(
            f"{run_folder} holds no checkpoint: `qsdp train` writes one at its end, and every "
            "--checkpoint-every steps"
        )
    tokenizer = load_tokenizer(_tokenizer(run_folder, config))
    model = build_model(config, tokenizer)
    load_weights(found[-1], model, vocabulary_digest(tokenizer))
    return model


def _tokenizer(run_folder: Path, config: TrainConfig) -> Path:
    if config.dataset:
        raise ValueError("qsdp tune measures on text files: this run streamed a data set")
    given = config.tokenizer or config.model
    return given or train_tokenizer(read_text(config), config.vocab_size, run_folder / "data")


def _batches(
    run_folder: Path, config: TrainConfig, model: PreTrainedModel, count: int
) -> list[torch.Tensor]:
    """Batches of the run's own training text, the first of its order."""
    tokenizer = load_tokenizer(_tokenizer(run_folder, config))
    path = encode_to_file(read_text(config).train, tokenizer, run_folder / "data")
    tokens = open_tokens(path)
    length = config.sequence_length
    return [
        windows(
            tokens,
            batch_starts(len(tokens), length, config.batch_size, seed=config.seed, step=step),
            length,
        )
        for step in range(1, count + 1)
    ]


def _config(base: QSDPConfig, widths: dict[str, dict[str, int]]) -> dict[str, Any]:
    """QSDPConfig's fields: the base, and an exception for every parameter that was measured."""

    def way(direction: str, name: str) -> Any:
        bits = widths.get(direction, {}).get(name)
        return None if bits is None else _with_bits(getattr(base, direction), bits)

    names = next(iter(widths.values()))
    ways = {name: Ways(way("weights", name), way("gradients", name)) for name in names}
    return base.with_exceptions(ways).to_json()


def _with_bits(way: Quantizer | Learned | Feedback, bits: int) -> Quantizer | Learned | Feedback:
    """The same way with another width."""
    if isinstance(way, Quantizer):
        return replace(way, bits=bits)
    return replace(way, quantizer=_with_bits(way.quantizer, bits))  # type: ignore[arg-type]


def _table(items: dict[str, list[Item[int]]], widths: dict[str, dict[str, int]]) -> Table:
    header = ["parameter", "elements"]
    for direction in items:
        header += [direction, "at 2 bits"]
    shown = new_table(
        "Chosen bits, and what 2 bits would do",
        "weights: rise of the loss in nats; gradients: part that is lost, of all elements",
        header,
    )
    for place, item in enumerate(next(iter(items.values()))):
        cells = [f"{item.numel:,}"]
        for direction, found in items.items():
            cells += [str(widths[direction][item.name]), f"{found[place].harm[2]:.2g}"]
        shown.add_row(item.name, *cells)
    return shown
