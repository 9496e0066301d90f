"""torch's own gradient compression beside qsdp's, on the same training: bytes, error, loss.

    python -m benchmarks.rivals [--seeds 1 2 3] [--only NAME ...] [--out FILE.json]

DistributedDataParallel on two ranks here, with the model, text and steps of
benchmarks/quality/memory.json, under one communication hook after another. What is finished is kept
in the file, so that the same command goes on. The row of bitsandbytes runs where that is installed:
pip install bitsandbytes.

- bytes: what a rank gives to the collectives of its hook, over P ranks times 2 (P - 1) / P for an
  all-reduce and P - 1 for an all-gather, as a ring sends; of qsdp what it counts itself. A mean
  over all steps.
- error: of one reduction, every 100 steps: root mean square of what the hook made of the gradients
  minus their mean, over that of the mean.
- loss: on the validation text, after the last step.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import qsdp
from qsdp.bench.launch import torchrun
from qsdp.columns import format_columns
from qsdp.sweep.spec import read_sweep
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.data import Data, prepare_data
from qsdp.trainer.evaluate import token_losses, validation_loss
from qsdp.trainer.launch import rank_environment
from qsdp.trainer.model import build_model, build_optimizer
from qsdp.trainer.ranks import Ranks, end_rank, process_group, started_by_launcher
from qsdp.trainer.warmup import learning_rate

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "benchmarks" / "quality" / "memory.json"
ERROR_EVERY = 100
BITSANDBYTES = "bitsandbytes, 8 bits"

Ddp = DistributedDataParallel
Install = Callable[[Ddp], qsdp.QuantizedDDPState | None]


def torch_hook(hook: Callable[..., Any]) -> Install:
    return lambda model: model.register_comm_hook(None, hook)


def blockwise_8_bits(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Blocks of 4,096 in bitsandbytes' dynamic 8 bits, gathered by all ranks and averaged there.

    Its codes cannot be added up, so no all-reduce carries them.
    """
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    values = bucket.buffer()
    codes, state = quantize_blockwise(values, blocksize=4096)
    every = [_gathered(part) for part in (codes, state.absmax)]
    total = torch.zeros_like(values)
    for of_rank, absmax in zip(*every, strict=True):
        state.absmax = absmax
        total += dequantize_blockwise(of_rank, state)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(total / dist.get_world_size())
    return future


def _gathered(part: torch.Tensor) -> list[torch.Tensor]:
    every = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(every, part)
    return every


def power_sgd(rank: int) -> Install:
    def install(model: Ddp) -> None:
        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=rank, start_powerSGD_iter=100
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return install


def ours(config: qsdp.QSDPConfig | str) -> Install:
    def install(model: Ddp) -> qsdp.QuantizedDDPState:
        state = qsdp.QuantizedDDPState(model, config)
        model.register_comm_hook(state, qsdp.quantized_ddp_hook)
        return state

    return install


FEEDBACK = qsdp.Feedback(qsdp.Quantizer(4, 128, "nearest", scale_dtype="bfloat16"))
HOOKS: dict[str, Install] = {
    "float32": torch_hook(default_hooks.allreduce_hook),
    "fp16 hook": torch_hook(default_hooks.fp16_compress_hook),
    # DDP refuses it by its name where there is no GPU, and gloo carries it all the same.
    "bf16 hook": torch_hook(lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)),
    "PowerSGD, rank 4": power_sgd(4),
    "PowerSGD, rank 1": power_sgd(1),
    BITSANDBYTES: torch_hook(lambda _, bucket: blockwise_8_bits(bucket)),
    "qsdp, 8 bits": ours("w32g8"),
    "qsdp, 4 bits": ours("w32g4"),
    "qsdp, 2 bits": ours("w32g2"),
    "qsdp, 4 bits with feedback": ours(qsdp.QSDPConfig(None, FEEDBACK)),
}


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if started_by_launcher():
        _work(options)
        end_rank(0)
    environment = rank_environment(2) | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    words = sys.argv[1:] if argv is None else argv
    command = torchrun("--standalone", "--nproc-per-node", "2", "-m", "benchmarks.rivals", *words)
    status = subprocess.run(command, env=environment, cwd=ROOT).returncode
    if status == 0:
        text = format_found(json.loads(options.out.read_text()))
        options.out.with_suffix(".txt").write_text(text + "\n")
        print(text)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--seeds", nargs="+", type=int, default=[1, 2, 3])
    here = importlib.util.find_spec("bitsandbytes") is not None
    add("--only", nargs="+", choices=HOOKS, metavar="NAME", help="; ".join(HOOKS),
        default=[name for name in HOOKS if here or name != BITSANDBYTES])  # fmt: skip
    add("--steps", type=int, help="default: the recipe's")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "rivals.json")
    return parser


def _work(options: argparse.Namespace) -> None:
    """One training after another; rank 0 writes what each gave."""
    with process_group("cpu", 600.0) as ranks, tempfile.TemporaryDirectory() as folder:
        found = json.loads(options.out.read_text()) if options.out.exists() else {}
        folders = [folder]
        dist.broadcast_object_list(folders)
        sweep = read_sweep(RECIPE)
        for seed in options.seeds:
            config = sweep.config(sweep.cases[0], seed, Path(folders[0]))
            config = dataclasses.replace(config, steps=options.steps or config.steps)
            data = prepare_data(config, ranks)
            for name in options.only:
                if str(seed) in found.get(name, {}):
                    continue
                result = _train(HOOKS[name], config, data, ranks)
                found.setdefault(name, {})[str(seed)] = result
                if ranks.rank == 0:
                    print(f"seed {seed}, {name}: {result}", flush=True)
                    options.out.write_text(json.dumps(found, indent=1) + "\n")


def _train(install: Install, config: TrainConfig, data: Data, ranks: Ranks) -> dict[str, float]:
    model = Ddp(build_model(config, data.tokenizer))
    optimizer = build_optimizer(model, config)
    state, sent, errors = install(model), [], []
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        batch = data.batches.batch(step, 0)
        exact = _exact_mean(model, batch, ranks) if step % ERROR_EVERY == 0 else None
        given: list[float] = []
        with _counted(given, ranks.num_ranks):
            token_losses(model, batch).mean().backward()
        sent.append(state.stats(reset=True).sent if state is not None else sum(given))
        if exact is not None:
            errors.append(float((_gradients(model) - exact).norm() / exact.norm()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
    loss = validation_loss(model.module, data.valid, config, ranks, limit=config.final_eval_windows)
    return {
        "sent": statistics.mean(sent),
        "error": statistics.mean(errors) if errors else math.nan,
        "loss": loss,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _exact_mean(model: Ddp, batch: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The mean of the ranks' gradients in float32, which are then forgotten."""
    with model.no_sync():
        token_losses(model, batch).mean().backward()
    mean = _gradients(model)
    dist.all_reduce(mean)
    model.zero_grad()
    return mean / ranks.num_ranks


def _gradients(model: Ddp) -> torch.Tensor:
    """Of matrices, whose reduction hooks compress, as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.ndim > 1])


@contextmanager
def _counted(given: list[float], num_ranks: int) -> Iterator[None]:
    """Note the bytes that a ring sends of every tensor that goes into a collective."""
    all_reduce, all_gather = dist.all_reduce, dist.all_gather

    def reducing(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        given.append(tensor.nbytes * 2 * (num_ranks - 1) / num_ranks)
        return all_reduce(tensor, *args, **keywords)

    def gathering(every: list[torch.Tensor], tensor: torch.Tensor) -> Any:
        given.append(tensor.nbytes * (num_ranks - 1))
        return all_gather(every, tensor)

    with (
        mock.patch.object(dist, "all_reduce", reducing),
        mock.patch.object(dist, "all_gather", gathering),
    ):
        yield


def format_found(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """A table; changes of perplexity against float32, paired by seed."""
    base, rows = found["float32"], []
    for name, seeds in found.items():
        results = list(seeds.values())
        changes = [
            100 * math.expm1(result["loss"] - base[seed]["loss"])
            for seed, result in seeds.items()
            if seed in base
        ]
        error = f" ± {statistics.stdev(changes) / len(changes) ** 0.5:.2f}" if changes[1:] else ""
        sent = statistics.mean(r["sent"] for r in results)
        stock = statistics.mean(r["sent"] for r in base.values())
        rows.append(
            (
                name,
                str(len(results)),
                f"{sent / 1e3:.1f}",
                f"{stock / sent:.2f}",
                f"{statistics.mean(r['error'] for r in results):.4f}",
                f"{math.exp(statistics.mean(r['loss'] for r in results)):.2f}",
                f"{statistics.mean(changes):+.2f} %{error}",
            )
        )
    header = ("hook", "seeds", "kB a step", "fewer", "error", "perplexity", "change")
    parameters = next(iter(base.values()))["parameters"]
    return "\n".join(
        [
            f"{parameters:,} parameters under DistributedDataParallel, 2 ranks; perplexity and its",
            "change against float32, paired by seed: mean and standard error",
            "",
            format_columns(header, rows),
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
