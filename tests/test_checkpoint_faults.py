"""Checkpoints of two ranks when the disk is full, when a rank is killed, and on other ranks."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import CONTEXT
from torch import nn
from torch.distributed.fsdp import fully_shard

import qsdp
from qsdp import Differences, Feedback, Learned, LevelSchedule, QSDPConfig, Quantizer
from qsdp.trainer import checkpoint

pytestmark = pytest.mark.ranks

GROUP_TIMEOUT_S = 20
WIDTH = 96
NEAREST = Quantizer(4, rounding="nearest")
CONFIG = QSDPConfig(
    weights=Differences(NEAREST),
    gradients=Feedback(Learned(NEAREST, LevelSchedule(first_step=1, every=2))),
)


def sharded_run(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded, quantized model and its optimizer after ``steps`` steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    fully_shard(model[0])
    fully_shard(model)
    qsdp.apply_qsdp(model, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Path:
    description = checkpoint.Description(step, 1.0, {}, shapes(model), "abc", [{}, {}], 2)
    comm = qsdp.comm_state_dict(model)
    return checkpoint.save_checkpoint(folder, model, optimizer, description, keep=9, comm=comm)


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def save_until_killed(rank: int, folder: Path, told: Connection) -> None:
    """Save; fail to save for want of space; save again; die on rank 1 in the middle of a save."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    model, optimizer = sharded_run(steps=3)
    save(folder, model, optimizer, 1)
    told.send((full_weights(model), qsdp.comm_state_dict(model)))
    check_loads_on_as_many_ranks(folder / "step-00000001")

    # A file size limit gives the error of a full disk in the middle of a write, on one rank.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
    try:
        save(folder, model, optimizer, 2)
        told.send("saved")
    except ValueError as error:
        told.send(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    save(folder, model, optimizer, 3)

    checksums = checkpoint._checksums

    def die(partial: Path) -> dict[str, object]:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # its part of the files is written
        return checksums(partial)

    checkpoint._checksums = die
    try:
        save(folder, model, optimizer, 4)
        told.send("saved")
    except RuntimeError as error:
        told.send(f"error: {error}")


@pytest.mark.timeout(180)
def test_full_disk_and_killed_rank_leave_the_checkpoints_before() -> None:
    """Every rank gets the error; the next save works; what was saved loads on one rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pipes, processes = [], []
        for rank in range(2):
            receive, send = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=save_until_killed, args=(rank, folder, send))
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            saved = [ask(pipe) for pipe in pipes]
            failures = [ask(pipe) for pipe in pipes]
            processes[1].join(timeout=60)
            died = time.monotonic()
            assert processes[1].exitcode == -signal.SIGKILL
            assert ask(pipes[0]).startswith("error: ")
            assert time.monotonic() - died < GROUP_TIMEOUT_S + 10
        finally:
            for process in processes:
                process.join(timeout=10)
                process.kill()
        assert "File too large" in failures[0] and failures[0] == failures[1]
        found = checkpoint.complete_checkpoints(folder)
        assert [path.name for path in found] == ["step-00000001", "step-00000003"]
        check_loads_on_one_rank(folder, found[-1], *saved[0])


def ask(pipe: Connection) -> object:
    assert pipe.poll(GROUP_TIMEOUT_S + 40), "a rank hangs"
    return pipe.recv()


def check_loads_on_as_many_ranks(path: Path) -> None:
    """A model of other weights and another history comes to what was saved, bit for bit."""
    whole, _ = sharded_run(steps=3)
    model, optimizer = sharded_run(steps=1)
    description = checkpoint.load_checkpoint(
        path, model, optimizer, parameters=shapes(model), tokenizer="abc"
    )
    comm = checkpoint.load_comm(path, description, qsdp.comm_state_dict(model))
    qsdp.load_comm_state_dict(model, comm)
    expected, found = qsdp.comm_state_dict(whole), qsdp.comm_state_dict(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    x = torch.ones(1, WIDTH)
    assert torch.equal(model(x), whole(x))


def check_loads_on_one_rank(
    folder: Path, path: Path, saved: dict[str, torch.Tensor], comm: dict[str, torch.Tensor]
) -> None:
    store = folder / "lone"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        model, optimizer = sharded_run(steps=1)
        description = checkpoint.load_checkpoint(
            path, model, optimizer, parameters=shapes(model), tokenizer="abc"
        )
        assert description.step == 3
        loaded = full_weights(model)
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        moments = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
        assert len(moments) == 4 and all(moment.abs().sum() > 0 for moment in moments)
        state = checkpoint.load_comm(path, description, qsdp.comm_state_dict(model))
        shared = {name for name in comm if not name.endswith(".rank0")}
        assert state.keys() == shared and len(shared) < len(comm)
        assert all(torch.equal(state[name], comm[name]) for name in shared)
        with pytest.warns(UserWarning, match="saved by 2 ranks and here are 1"):
            qsdp.load_comm_state_dict(model, state)
        found = qsdp.comm_state_dict(model)
        levels = [name for name in shared if name.startswith(("levels.", "learned_at."))]
        assert len(levels) == 4 and all(torch.equal(found[n], comm[n]) for n in levels)
    finally:
        dist.destroy_process_group()
