"""Part 4: ranks as threads on one device. Are bytes and values right, whatever is slow or reused?

    python -m benchmarks.gpu.threaded [--device cpu]

Quantized collectives of equal inputs give the CPU's bytes and values; training gives the same bits
with delays and memory pressure as without; backward computes with the forward's weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import qsdp
from benchmarks.gpu.checks import Checks, require
from benchmarks.gpu.models import Block, config_of, quantize, shard, stack_of_blocks
from benchmarks.gpu.options import device_of
from benchmarks.gpu.stress import Stress
from benchmarks.gpu.threads import Recorder, run_threads
from qsdp.kernels.compare import dtype_name, example_values, same_bits

CPU = torch.device("cpu")
PRESETS = ("w8g8", "w4g4", "w3g3")
STEPS = 4


class Job(NamedTuple):
    """A training that every rank runs; small enough that the host is not far ahead."""

    device: torch.device
    preset: str
    ranks: int = 2
    replicas: int = 1
    changes: tuple[tuple[str, Any], ...] = ()
    param_dtype: torch.dtype | None = None
    depth: int = 3
    width: int = 256


class Result(NamedTuple):
    """Of one rank, on the CPU."""

    losses: list[float]
    shards: list[torch.Tensor]


def main(argv: list[str] | None = None) -> int:
    """Run the checks; 1 if one fails."""
    device = device_of(__doc__, argv)
    width = 256 if device.type == "cuda" else 64
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else streams may differ
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Fresh memory filled with NaN would hide that somebody else's bytes are still in it.
    torch.utils.deterministic.fill_uninitialized_memory = False
    checks, times = Checks(), 2 if device.type == "cuda" else 1
    checks.run("collectives: the CPU's bytes and values", partial(collectives_equal, device))
    stock = Job(device, "stock", width=width)
    checks.run("w32g32 is stock FSDP2, bit for bit", partial(equals_stock, stock))
    jobs = {preset: Job(device, preset, width=width) for preset in PRESETS}
    for preset, job in jobs.items():
        checks.run(f"{preset}: backward has the forward's weights", partial(gathered_twice, job))
    jobs["w8g8, bfloat16"] = jobs["w8g8"]._replace(param_dtype=torch.bfloat16)
    replicas = (("replicas", qsdp.QSDPConfig.preset("w8g8").gradients),)
    for preset in PRESETS[:2]:
        hsdp = jobs[preset]._replace(ranks=4, replicas=2, changes=replicas)
        checks.run(f"HSDP 2 x 2, {preset}: replicas stay equal", partial(replicas_equal, hsdp))
        jobs[f"HSDP 2 x 2, {preset}"] = hsdp
    for name, job in jobs.items():
        stressed = partial(stress_changes_nothing, job, times)
        checks.run(f"{name}: the same with delays and pressure", stressed)
    return checks.status


def collectives_equal(device: torch.device, numel: int = 100_003) -> str:
    """The same inputs on the CPU and on ``device``: equal bytes sent, equal values received.

    On ``device`` with delays, too: inputs are overwritten as soon as a call returns.
    """
    count = 0
    for preset in PRESETS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            job = partial(collect, preset=preset, dtype=dtype, numel=numel)
            wanted, sent = _collect_all(partial(job, device=CPU), None)
            for stress in (None, Stress(device)):
                got, also_sent = _collect_all(partial(job, device=device), stress)
                name = f"{preset} {dtype_name(dtype)}{' with delays' if stress else ''}"
                for rank in range(2):
                    _require_same_sends(sent[rank], also_sent[rank], f"{name}, rank {rank}")
                    for kind, value in wanted[rank].items():
                        require(same_bits(got[rank][kind], value), f"{name}: {kind} of rank {rank}")
                        count += 1
                require(same_bits(got[0]["gather"], got[1]["gather"]), f"{name}: ranks differ")
    return f"{count} results of {numel} values"


def _collect_all(job: Callable[[int], Any], stress: Stress | None) -> tuple[list[Any], list[Any]]:
    """What two ranks receive, and what they send."""
    recorder = Recorder(2, stress.before) if stress else Recorder(2)
    with stress.kernels() if stress else nullcontext():
        return run_threads(job, 2, recorder=recorder), recorder.sent


def _require_same_sends(a: list[Any], b: list[Any], name: str) -> None:
    require(len(a) == len(b) > 0, f"{name}: {len(a)} and {len(b)} exchanges")
    for (kind, ours), (_, theirs) in zip(a, b, strict=True):
        require(torch.equal(ours.cpu(), theirs.cpu()), f"{name}: bytes given to {kind} differ")


def collect(
    rank: int, *, device: torch.device, preset: str, dtype: torch.dtype, numel: int
) -> dict[str, torch.Tensor]:
    """Quantized collectives of values that hold what is hard; what arrives, on the CPU."""
    config = config_of(preset)
    weights = getattr(config.weights, "quantizer", config.weights)
    values = example_values(2, 2 * numel, dtype)[rank].to(device)
    out = {}
    for name, async_op in (("gather", False), ("gather later", True)):
        output = torch.empty(2 * numel, dtype=dtype, device=device)
        own = values[:numel].clone()
        work = qsdp.all_gather_quantized(output, own, quantizer=weights, key=7, async_op=async_op)
        _finish(work, own)
        out[name] = output
    for name, async_op in (("reduce", False), ("reduce later", True)):
        output = torch.empty(numel, dtype=dtype, device=device)
        own = values.clone()
        work = qsdp.reduce_scatter_quantized(
            output, own, quantizer=config.gradients, key=7, async_op=async_op
        )
        _finish(work, own)
        out[name] = output
    return {name: value.cpu() for name, value in out.items()}


def _finish(work: dist.Work | None, input: torch.Tensor) -> None:
    """What was given may be overwritten at once."""
    input.fill_(torch.nan)
    if work is not None:
        work.wait()


def train(rank: int, job: Job, stress: Stress | None, seen: list[list[Any]] | None) -> Result:
    """A few steps; the losses are read at the end, so that the host runs ahead.

    Args:
        seen: by rank, to which the weights of every use of a matrix are added.
    """
    model = stack_of_blocks(job.depth, job.width).to(job.device)
    if seen is not None:
        _record_weights(model, seen[rank])
    shard(model, job.device, replicas=job.replicas, param_dtype=job.param_dtype)
    quantize(model, job.preset, **dict(job.changes))
    if stress is not None:
        stress.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(32, job.width, generator=generator).to(job.device)
        if job.param_dtype is not None:
            inputs = inputs.to(job.param_dtype)
        loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    shards = [p.to_local().detach().cpu() for p in model.parameters()]
    return Result([loss.item() for loss in losses], shards)


def _record_weights(model: torch.nn.Module, seen: list[Any]) -> None:
    """Of every matrix of a block: its weights in forward, and those when its gradient arrives."""

    def watch(module: torch.nn.Linear, name: str) -> None:
        def forward(_: Any, __: Any, output: torch.Tensor) -> None:
            seen.append((name, "forward", module.weight.detach().clone()))
            output.register_hook(backward)

        def backward(_: torch.Tensor) -> None:
            seen.append((name, "backward", module.weight.detach().clone()))

        module.register_forward_hook(forward)

    for index, block in enumerate(m for m in model.modules() if isinstance(m, Block)):
        for name, module in block.named_children():
            if isinstance(module, torch.nn.Linear):
                watch(module, f"{index}.{name}")


def run_job(job: Job, stress: Stress | None = None, seen: Any = None) -> list[Result]:
    """Train on all ranks."""
    recorder = Recorder(job.ranks, stress.before) if stress else Recorder(job.ranks)
    recorder.keeps = False
    with stress.kernels() if stress else nullcontext():
        return run_threads(train, job.ranks, job, stress, seen, recorder=recorder)


def require_equal(a: list[Result], b: list[Result], what: str) -> None:
    """Losses and shards of all ranks, bit for bit."""
    for rank, (ours, theirs) in enumerate(zip(a, b, strict=True)):
        require(
            ours.losses == theirs.losses,
            f"{what}: losses of rank {rank} are {ours.losses} and {theirs.losses}",
        )
        same = all(torch.equal(x, y) for x, y in zip(ours.shards, theirs.shards, strict=True))
        require(same, f"{what}: equal losses, but other shards on rank {rank}")
        require(all(map(torch.isfinite, map(torch.tensor, ours.losses))), f"{what}: not finite")


def equals_stock(stock: Job) -> str:
    """With nothing quantized, losses and shards are stock's."""
    wanted = run_job(stock)
    require_equal(run_job(stock), wanted, "stock twice")
    require_equal(run_job(stock._replace(preset="w32g32")), wanted, "w32g32 and stock")
    return f"loss {wanted[0].losses[0]:.4f} to {wanted[0].losses[-1]:.4f}"


def stress_changes_nothing(job: Job, times: int = 2) -> str:
    """Delays and pressure on memory leave losses and shards as they are."""
    quiet = run_job(job)
    for turn in range(times):
        require_equal(run_job(job, Stress(job.device)), quiet, f"run {turn} with delays")
    return f"loss {quiet[0].losses[0]:.4f} to {quiet[0].losses[-1]:.4f}"


def gathered_twice(job: Job) -> str:
    """Forward and backward of every step see the same weights, equal on all ranks."""
    seen: list[list[Any]] = [[] for _ in range(job.ranks)]
    run_job(job, Stress(job.device), seen)
    require(len(seen[0]) == 2 * 7 * job.depth * STEPS, f"{len(seen[0])} uses of matrices")
    for rank, uses in enumerate(seen):
        latest: dict[str, torch.Tensor] = {}
        for place, (name, when, weight) in enumerate(uses):
            other = seen[0][place][2]
            require(torch.equal(weight, other), f"{name}, {when}: ranks 0 and {rank} differ")
            if when == "backward":
                require(torch.equal(weight, latest.pop(name)), f"{name} changed before backward")
            else:
                latest[name] = weight
    return f"{len(seen[0])} uses on {job.ranks} ranks"


def replicas_equal(job: Job) -> str:
    """Ranks that hold the same shard hold the same values after some steps."""
    results = run_job(job)
    shards = job.ranks // job.replicas
    for rank in range(shards, job.ranks):
        ours, theirs = results[rank].shards, results[rank % shards].shards
        same = all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
        require(same, f"ranks {rank} and {rank % shards} hold other values")
    return f"loss {results[0].losses[0]:.4f} to {results[0].losses[-1]:.4f}"


if __name__ == "__main__":
    raise SystemExit(main())
