"""What the replicas of test_meeting.py run: each a job of its own, found through a file store."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from qsdp import Meeting, QSDPConfig, ReplicaSync, SyncConfig, SyncSchedule
from qsdp.ways import Feedback

STEPS, DIES_AFTER, WAITS_AT = 48, 10, 20
ALONE = "alone"  # a file that those write who go on without a replica
TIMEOUT_S = 90


def left_alone(folder: str, rank: int) -> None:
    """Two replicas of one process group, of which the second ends in its first round."""
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True, file=sys.stderr)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)
    torch.manual_seed(0)
    model = nn.Linear(32, 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = SyncConfig(SyncSchedule(base=2), Feedback(QSDPConfig.preset("w32g4").gradients))
    sync = ReplicaSync(model, optimizer, dist.group.WORLD, config)
    assert not sync.step()
    if rank == 1:
        os._exit(1)
    before = model.weight.detach().clone()
    try:
        sync.step()
    except RuntimeError as error:
        kept = torch.equal(before, model.weight.detach()) and sync.steps == 1
        torch.save((str(error), kept), Path(folder) / "error.pt")
    os._exit(0)


def data(name: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of one replica: a line through 32 dimensions, with noise."""
    generator = torch.Generator().manual_seed(1000 * step + name)
    x = torch.randn(64, 32, generator=generator)
    truth = torch.linspace(-1, 1, 32)
    return x, x @ truth + 0.1 * torch.randn(64, generator=generator)


def replica(folder: str, name: int, dies: bool, returns: bool) -> None:
    """Train; ``dies`` ends it without a word in a round; ``returns`` is one that was started again.

    Writes ``NAME.pt``: weights, the loss on data of nobody, steps and warnings.
    """
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True, file=sys.stderr)
    torch.set_num_threads(1)
    torch.manual_seed(99 if returns else 0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    store = dist.FileStore(os.path.join(folder, "store"), -1)
    meeting = Meeting(store, 3, timeout=10.0, join_timeout=60.0)
    way = Feedback(QSDPConfig.preset("w32g8").gradients)
    config = SyncConfig(SyncSchedule(base=4), differences=way)
    sync = ReplicaSync(model, optimizer, meeting, config, total_steps=STEPS)
    joined_at = sync.steps
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while sync.steps < STEPS:
            if dies and sync.steps == DIES_AFTER:
                os._exit(1)
            x, y = data(name, sync.steps)
            (model(x).squeeze(1) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            while sync.num_replicas < 3 and sync.steps == WAITS_AT and not meeting.somebody_waits():
                time.sleep(0.05)
            sync.step()
            if sync.num_replicas < 3:
                (Path(folder) / ALONE).touch()
    x, y = data(1000, 0)
    with torch.no_grad():
        loss = float((model(x).squeeze(1) - y).square().mean())
    result = {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "loss": loss,
        "joined_at": joined_at,
        "num_replicas": sync.num_replicas,
        "warnings": [str(w.message) for w in caught if "qsdp" in str(w.message)],
    }
    torch.save(result, Path(folder) / f"{name}.pt")
    dist.destroy_process_group()
