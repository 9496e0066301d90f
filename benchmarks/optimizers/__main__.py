"""Gradients in one bit with AdamW, SGD with momentum and Muon, on a CNN and a GPT.

    python -m benchmarks.optimizers [--tasks cnn gpt] [--seeds 1 2 3] [--out FILE.json]
    python -m benchmarks.optimizers --overflow [--tasks cnn gpt] [--seeds 1]

Two ranks here, gloo, a thread each. Every optimizer first looks for its learning rate in full
precision, by factors of 2 until the best has a worse one on either side (seed 0), and takes the
smallest that is within half a percent of the best; then each trains with gradients in each of the
ways, from the same weights with the same batches. With --overflow
AdamW with "bitdp" trains 2,000 steps twice, once with all gradients of one rank inf at one step and
NaN at another; the steps are left out, as GradScaler does. What is finished is kept in the file,
so that the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.optimizers.table import format_found, format_overflow
from benchmarks.optimizers.tasks import Glyphs, Plays, Task
from benchmarks.optimizers.train import OPTIMIZERS, cases_of, train
from qsdp.bench.launch import torchrun
from qsdp.trainer.launch import rank_environment
from qsdp.trainer.ranks import Ranks, end_rank, process_group, started_by_launcher

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
START_LR = {
    "cnn": {"adamw": 0.004, "sgd": 0.1, "muon": 0.004},
    "gpt": {"adamw": 0.004, "sgd": 0.4, "muon": 0.004},
}
TUNING_SEED = 0
_AS_GOOD = 0.005
LONG = 2000
INF_AT, NAN_AT = 700, 1300

Found = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    name = "optimizers-overflow" if options.overflow else "optimizers"
    out = options.out or RESULTS / f"{name}.json"
    if started_by_launcher():
        _work(options, out)
        end_rank(0)
    environment = rank_environment(2) | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    words = sys.argv[1:] if argv is None else argv
    command = torchrun(
        "--standalone", "--nproc-per-node", "2", "-m", "benchmarks.optimizers", *words
    )
    status = subprocess.run(command, env=environment, cwd=ROOT).returncode
    if status == 0:
        found = json.loads(out.read_text())
        text = format_overflow(found) if options.overflow else format_found(found)
        out.with_suffix(".txt").write_text(text + "\n")
        print(text)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--tasks", nargs="+", choices=START_LR, default=list(START_LR))
    add("--seeds", nargs="+", type=int, default=[1, 2, 3])
    add("--steps", type=int, help="default: the task's, 2,000 with --overflow")
    add("--overflow", action="store_true", help="2,000 steps with an overflow on one rank")
    add("--out", type=Path)
    return parser


def _work(options: argparse.Namespace, out: Path) -> None:
    """One training after another; rank 0 writes what each gave."""
    torch.set_num_threads(1)
    with process_group("cpu", 600.0) as ranks, tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        found = json.loads(out.read_text()) if out.exists() else {}
        for name in options.tasks:
            task = Glyphs(ranks) if name == "cnn" else Plays(ranks, Path(folders[0]))
            results = found.setdefault(task.name, {})
            runs = _overflows if options.overflow else _comparisons
            for line in runs(task, name, results, options, ranks):
                if ranks.rank == 0:
                    print(f"{task.name}: {line}", flush=True)
                    out.write_text(json.dumps(found, indent=1) + "\n")


def _comparisons(
    task: Task, name: str, results: Found, options: argparse.Namespace, ranks: Ranks
) -> Iterator[str]:
    """Seed by seed, so that what is there after an interruption can be paired."""
    results["steps"] = options.steps or task.steps
    tuning, found = results.setdefault("tuning", {}), results.setdefault("runs", {})
    for optimizer in OPTIMIZERS:
        losses = tuning.setdefault(optimizer, {})
        while (lr := next_rate(losses, START_LR[name][optimizer])) is not None:
            result = train(task, optimizer, lr, "float32", TUNING_SEED, ranks, steps=options.steps)
            losses[repr(lr)] = result["loss"]
            yield f"{optimizer}, {lr:g}: {result['loss']:.4f}"
    for seed in options.seeds:
        for optimizer in OPTIMIZERS:
            lr = chosen_rate(tuning[optimizer])
            for case in cases_of(optimizer):
                by_seed = found.setdefault(optimizer, {}).setdefault(case, {})
                if str(seed) not in by_seed:
                    result = train(task, optimizer, lr, case, seed, ranks, steps=options.steps)
                    by_seed[str(seed)] = result
                    yield f"{optimizer}, {case}, seed {seed}: {result}"


def _overflows(
    task: Task, name: str, results: Found, options: argparse.Namespace, ranks: Ranks
) -> Iterator[str]:
    steps, lr = options.steps or LONG, START_LR[name]["adamw"]
    damage = {INF_AT * steps // LONG: float("inf"), NAN_AT * steps // LONG: float("nan")}
    for seed in options.seeds:
        for case, hurt in (("undisturbed", {}), ("one rank overflows", damage)):
            by_seed = results.setdefault(case, {})
            if str(seed) not in by_seed:
                result = train(task, "adamw", lr, "bitdp", seed, ranks, steps=steps, damage=hurt)
                by_seed[str(seed)] = result | {"steps": steps}
                yield f"{case}, seed {seed}: {result}"


def next_rate(losses: dict[str, float], start: float) -> float | None:
    """The learning rate to try next; None when the best has a worse one on either side."""
    if not losses:
        return start
    best = best_rate(losses)
    wanted = (best / 2, best * 2)
    return next((lr for lr in wanted if repr(lr) not in losses), None)


def best_rate(losses: dict[str, float]) -> float:
    return float(min(losses, key=lambda lr: losses[lr]))


def chosen_rate(losses: dict[str, float]) -> float:
    """The smallest that is as good as the best: the largest is where some seeds go wrong."""
    least = min(losses.values())
    return min(float(lr) for lr, loss in losses.items() if loss <= (1 + _AS_GOOD) * least)


if __name__ == "__main__":
    raise SystemExit(main())
