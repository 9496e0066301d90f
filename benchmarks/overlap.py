"""Does it pay on CPU to gather the next block's weights while this block computes?

    python -m benchmarks.overlap [--mbit 10000 1000 200] [--rounds 9] [--out FILE]

It needs root, as benchmarks.network does.

FSDP2 has no streams on CPU: by default a gather ends before the block that it is for begins.
`_set_unshard_async_op` with explicit prefetching starts it one block earlier. Two hosts of one rank
on one machine, joined by a shaped link; the variants take their steps in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import qsdp
from benchmarks.network.hosts import INTERFACE, Hosts, require_privileges

SHAPE = {"n_embd": 320, "n_layer": 6, "n_head": 5, "n_positions": 128, "vocab_size": 2048}
NO_WARNINGS = {"bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLM"}
BATCH = (4, 128)


def build(comm: str, *, overlap: bool) -> nn.Module:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE, **NO_WARNINGS))
    blocks = list(model.transformer.h)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    qsdp.apply_qsdp(model, comm)
    if overlap:
        model._set_unshard_async_op(True)
        for block, following in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([following])
        model.set_modules_to_forward_prefetch(blocks[:1])
    return model


def stepper(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        ids = torch.randint(0, SHAPE["vocab_size"], BATCH, generator=generator)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rounds: int) -> None:
    """What one rank runs."""
    dist.init_process_group("gloo")
    variants = {
        (comm, overlap): stepper(build(comm, overlap=overlap))
        for comm in ("w32g32", "w8g8", "w4g4")
        for overlap in (False, True)
    }
    seconds: dict[tuple[str, bool], list[float]] = {variant: [] for variant in variants}
    for number in range(rounds + 1):
        for variant, step in variants.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if number:
                seconds[variant].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        for comm in ("w32g32", "w8g8", "w4g4"):
            plain, early = (statistics.median(seconds[comm, o]) for o in (False, True))
            ratios = [a / b for a, b in zip(seconds[comm, False], seconds[comm, True], strict=True)]
            print(
                f"{comm:>7}: {plain * 1e3:6.0f} ms, prefetched {early * 1e3:6.0f} ms; "
                f"faster by {statistics.median(ratios):.2f}x (median of pairs, "
                f"{min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, nargs="+", default=[10_000, 1_000, 200, 100])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="also write what is printed to this file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options.rounds)
        return 0
    require_privileges()
    parts = []
    with Hosts(2) as hosts:
        for mbit in options.mbit:
            hosts.limit(mbit / 1e3)
            title = f"two hosts, {mbit:g} Mbit/s, gloo, one thread a rank"
            parts.append(f"{title}\n{_both_ranks(hosts, options.rounds)}")
            print(parts[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(parts))
    return 0


def _both_ranks(hosts: Hosts, rounds: int) -> str:
    """What rank 0 prints. Raises CalledProcessError where a rank fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    processes = []
    for host in range(2):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--node-rank", str(host), "--nproc-per-node", "1"),
            *("--master-addr", hosts.address(0), "--master-port", "29400"),
            *("-m", "benchmarks.overlap", "--rank", "--rounds", str(rounds)),
        ]
        inside = hosts.inside(host, command)
        processes.append(
            subprocess.Popen(inside, env=environment, stdout=subprocess.PIPE, text=True)
        )
    printed = [process.communicate()[0] for process in processes]
    for process in processes:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return printed[0]


if __name__ == "__main__":
    sys.exit(main())
