"""Runs of `qsdp domains` on disk: a safetensors file for every target and seed."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qsdp.domains.data import Domain
from qsdp.domains.train import Settings, leave_out


def missing(out: Path, targets: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """Targets and seeds without a file, seed by seed."""
    every = [(target, seed) for seed in seeds for target in targets]
    return [pair for pair in every if not _file(out, *pair).is_file()]


def take(options: argparse.Namespace, domains: Sequence[Domain], target: str, seed: int) -> None:
    """Train all cases of a target and seed, and write them whole or not at all."""
    settings = Settings(**{name: getattr(options, name) for name in Settings._fields})
    outcomes = leave_out(domains, target, seed, options.bits, settings)
    about = {
        str(o.bits): {"valid": o.valid, "target": o.target, "step": o.step, "flatness": o.flatness}
        for o in outcomes
    }
    file = _file(options.out, target, seed)
    partial = file.with_suffix(".partial")
    tensors = {f"logits.{o.bits}": o.logits.contiguous() for o in outcomes}
    save_file(tensors, partial, metadata={"outcomes": json.dumps(about)})
    os.replace(partial, file)


def read_runs(
    out: Path, targets: Sequence[str], seeds: Sequence[int]
) -> dict[tuple[str, int], dict[int, dict[str, Any]]]:
    """Of every target and seed that is there, by bits, the fields of an Outcome.

    Raises:
        ValueError: a damaged file.
    """
    runs = {}
    for target in targets:
        for seed in seeds:
            file = _file(out, target, seed)
            if file.is_file():
                runs[target, seed] = _read(file)
    return runs


def _read(file: Path) -> dict[int, dict[str, Any]]:
    try:
        with safe_open(file, "pt") as content:
            about = json.loads(content.metadata()["outcomes"])
            return {
                int(bits): {**fields, "logits": content.get_tensor(f"logits.{bits}")}
                for bits, fields in about.items()
            }
    except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise ValueError(f"{file} is damaged: {error}; delete it to run it again") from error


def _file(out: Path, target: str, seed: int) -> Path:
    return out / f"{target.replace(' ', '-')}-seed-{seed}.safetensors"
