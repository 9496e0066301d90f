"""DDP's communication hooks side by side: loss, bytes on the network, time of a step.

    python benchmarks/ddp_hooks.py [--steps 150]

Two gloo ranks on this machine train a small GPT on the plays of Shakespeare, byte by byte, once
with each hook, from the same start. Bytes are what the kernel counts on the loopback interface, for
both ranks together; nothing else should use it meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import qsdp
from qsdp.trainer.text import plays

SHAPE = {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 256}
QUIET = {"bos_token_id": None, "eos_token_id": None}
BATCH, LENGTH = 8, 128
POWER_SGD = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 10}


def quantized(bits: int, *, feedback: bool = False, **fields: object) -> Callable[..., None]:
    def register(model: DistributedDataParallel) -> None:
        quantizer = qsdp.Quantizer(bits, rounding="stochastic", **fields)
        gradients = qsdp.Feedback(quantizer) if feedback else quantizer
        config = qsdp.QSDPConfig(weights=None, gradients=gradients)
        model.register_comm_hook(qsdp.QuantizedDDPState(model, config), qsdp.quantized_ddp_hook)

    return register


def power_sgd(model: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, **POWER_SGD)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "none (float32 all-reduce)": lambda model: None,
    "fp16_compress_hook": lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16_compress_hook": lambda m: m.register_comm_hook(None, default_hooks.bf16_compress_hook),
    "powerSGD_hook, rank 4": power_sgd,
    "quantization_pertensor_hook": lambda m: m.register_comm_hook(
        dist.group.WORLD, quantization_hooks.quantization_pertensor_hook
    ),
    "qsdp 8 bit": quantized(8),
    "qsdp 4 bit": quantized(4),
    "qsdp 4 bit, error feedback": quantized(4, feedback=True),
    "qsdp 4 bit, QSGD max-norm": quantized(4, scaling="symmetric"),
    "qsdp 2 bit, error feedback": quantized(2, feedback=True),
}


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("/proc/net/dev shows no interface lo")


def train(rank: int, store: str, hook: str, steps: int, results: dict[str, object]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    text = torch.tensor(list(plays().train[0].encode()), dtype=torch.long)
    torch.manual_seed(0)
    module = GPT2LMHeadModel(GPT2Config(**SHAPE, **QUIET))
    model = DistributedDataParallel(module)
    try:
        HOOKS[hook](model)
        losses, seconds, first = run(model, text, rank, steps)
        counted = (loopback_bytes() - first) / (steps - 2)
        if rank == 0:
            late = statistics.mean(losses[-20:])
            results[hook] = (late, counted, statistics.median(seconds))
    except Exception as error:
        if rank == 0:
            results[hook] = " ".join(f"{type(error).__name__}: {error}".split())[:60]
    dist.destroy_process_group()


def run(
    model: nn.Module, text: torch.Tensor, rank: int, steps: int
) -> tuple[list[float], list[float], int]:
    """Losses of all steps, seconds of all but the first two, and the counter after those."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    losses, seconds, first = [], [], 0
    for step in range(steps):
        if step == 2:
            dist.barrier()
            first = loopback_bytes()
        begin = time.perf_counter()
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        ids = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / 2)
        if step >= 2:
            seconds.append(time.perf_counter() - begin)
    return losses, seconds, first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", nargs="+", default=list(HOOKS), choices=list(HOOKS))
    options = parser.parse_args()
    print(f"{'hook':<28} {'loss':>7} {'kB a step':>10} {'fewer':>6} {'ms a step':>10}")
    stock = 0.0
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        for number, hook in enumerate(options.only):
            results = manager.dict()
            store = str(Path(folder) / str(number))
            try:
                mp.spawn(train, (store, hook, options.steps, results), nprocs=2)
                found = results[hook]
            except mp.ProcessExitedException as error:
                found = str(error)
            if isinstance(found, str):
                print(f"{hook:<28} fails on gloo: {found}", flush=True)
                continue
            loss, counted, seconds = found
            stock = stock or counted
            print(
                f"{hook:<28} {loss:7.4f} {counted / 1e3:10.1f} {stock / counted:5.2f}x "
                f"{seconds * 1e3:10.1f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
