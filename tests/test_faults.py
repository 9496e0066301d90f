"""Faults of real clusters: killed ranks, and runs that are long."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import batch, build, loss_of
from ranks import CONTEXT, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import qsdp
from qsdp import QSDPConfig

pytestmark = pytest.mark.ranks

GROUP_TIMEOUT_S = 20


def train_until_killed(rank: int, store: str, dies_in: str, told: Connection) -> None:
    """Rank 1 kills itself at a chosen place of its third step; rank 0 tells how it ended."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout
    )
    model = qsdp.apply_qsdp(build(), QSDPConfig.preset("w8g8"))
    calls = 0

    def die(*_: object) -> None:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    if dies_in == "forward":
        model.blocks[1].register_forward_pre_hook(die)
    else:
        exchange = dist.batch_isend_irecv

        def dying(ops: list[dist.P2POp]) -> object:
            if ops[0].tag == 1:  # parts of a reduction
                die()  # the other rank has started its half and waits
            return exchange(ops)

        dist.batch_isend_irecv = dying
    try:
        for step in range(10):
            loss_of(model, batch(rank, step)).backward()
        told.send("finished")
    except RuntimeError as error:
        told.send(f"error: {error}")


@pytest.mark.parametrize("dies_in", ("forward", "collective"))
def test_a_killed_rank_ends_the_others_within_the_timeout(dies_in: str) -> None:
    """SIGKILL in forward, and in the middle of a reduce-scatter: the survivor raises."""
    with tempfile.TemporaryDirectory() as folder:
        receive, send = CONTEXT.Pipe(duplex=False)
        processes = [
            CONTEXT.Process(
                target=train_until_killed, args=(rank, os.path.join(folder, "s"), dies_in, send)
            )
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        processes[1].join(timeout=60)
        died = time.monotonic()
        assert processes[1].exitcode == -signal.SIGKILL
        assert receive.poll(GROUP_TIMEOUT_S + 10), "the survivor hangs"
        assert receive.recv().startswith("error: ")
        assert time.monotonic() - died < GROUP_TIMEOUT_S + 10
        for process in processes:
            process.join(timeout=10)
            process.kill()


def resident_and_handles() -> tuple[int, int]:
    """KiB of resident memory and open file handles of this process."""
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(resident.split()[1]), len(os.listdir("/proc/self/fd"))


def train_long(rank: int, steps: int) -> list[tuple[int, int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    fully_shard(model[0])
    fully_shard(model)
    qsdp.apply_qsdp(model, QSDPConfig.preset("w4g4"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            seen.append(resident_and_handles())
    return seen


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_two_thousand_steps_do_not_grow() -> None:
    """Once allocators have settled, resident size and handles stand still to step 2,000.

    Stock FSDP2 grows as much: by 0.1 to 0.3 MiB in steps 500 to 1,000, then not at all.
    """
    for seen in run_ranks(train_long, 2, 2000):
        middle, end = seen[9], seen[-1]
        print(f"resident KiB at step 1000 and 2000: {middle[0]} and {end[0]}; handles {end[1]}")
        assert end[0] - middle[0] < 500
        assert end[1] <= middle[1]
