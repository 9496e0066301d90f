"""One optimizer step on one rank: what training does, and what the benchmarks time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import qsdp
from qsdp.qat import FakeQuantization
from qsdp.trainer.batches import Batches
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.evaluate import token_losses
from qsdp.trainer.local import Local
from qsdp.trainer.ranks import Ranks
from qsdp.trainer.warmup import learning_rate


class Training(NamedTuple):
    """What a step works on."""

    config: TrainConfig
    ranks: Ranks
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    batches: Batches
    local: Local | None = None
    """With --sync-every."""
    fake: FakeQuantization | None = None


class StepResult(NamedTuple):
    """What a step tells about itself: ``metrics`` of this rank, and whether any rank wants to stop.

    ``loss`` and ``grad_norm`` in ``metrics`` are equal on all ranks. With --sync-every the norm is
    that of one replica, and so is the loss of steps in which replicas do not meet.
    """

    metrics: dict[str, Any]
    comm: qsdp.CommStats
    stopping: bool
    met: bool
    """Whether all ranks know of this step."""


def take_step(
    training: Training, step: int, stop_requested: Callable[[], bool] = lambda: False
) -> StepResult:
    """Take optimizer step ``step`` (1, 2, ...); every rank calls it with the same number."""
    config, ranks, model, optimizer, batches, local, fake = training
    seed = np.random.SeedSequence([config.seed, step, ranks.rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(seed[0]))
    qsdp.comm_stats(model, reset=True)
    if local is not None:  # checkpoints and validations of the average are no part of a step
        local.sync.stats(reset=True)
    started = time.perf_counter()
    lr = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    micro_batches = config.micro_batches(ranks.num_ranks)
    # Loss and stop requests travel together: all ranks leave after the same step.
    shared = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        model.set_requires_gradient_sync(last or config.sync_every_micro_batch)
        batch = batches.batch(step, micro_batch).to(ranks.device)
        loss = token_losses(model, batch).mean() / micro_batches
        loss.backward()
        shared[0] += loss.detach().double() / ranks.num_ranks
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
    assert isinstance(norm, DTensor)
    norm_value = norm.full_tensor().item()
    optimizer.step()
    optimizer.zero_grad()
    shared[1] = float(stop_requested())
    synchronised = local is not None and local.sync.due(step)
    met = _share(shared, training, step)
    if fake is not None:
        fake.step(None if local is None else local.sync)
    mean_loss, stops = shared.tolist()
    step_s = time.perf_counter() - started
    comm = qsdp.comm_stats(model)
    if local is not None:
        comm += local.stats()
    metrics = {
        "step": step,
        "loss": mean_loss,
        "lr": lr,
        "grad_norm": norm_value,
        "tokens_per_s": config.batch_size * config.sequence_length / step_s,
        "step_s": step_s,
        # Collectives may overlap with the computation on GPUs, so this is what remains of the step.
        "compute_s": max(0.0, step_s - comm.encode_s - comm.decode_s - comm.network_s),
        "encode_s": comm.encode_s,
        "decode_s": comm.decode_s,
        "network_s": comm.network_s,
        "sent": comm.sent,
        "stock_sent": comm.stock_sent,
    }
    if local is not None:
        metrics |= {"sync_interval": local.sync.round.interval, "synchronised": synchronised}
    return StepResult(metrics, comm, stops > 0, met)


def _share(shared: torch.Tensor, training: Training, step: int) -> bool:
    """Add up loss and stop requests over all ranks; whether it was all of them.

    Replicas with steps of their own synchronise first, if they are to. Where they do not meet, the
    loss becomes that of one replica, and nobody stops.
    """
    local = training.local
    if local is not None:
        met = local.meets(step, training.config)
        local.sync.step()
        if not met:
            dist.all_reduce(shared, group=local.group)
            shared[0] *= local.num_replicas
            shared[1] = 0.0
            return False
    dist.all_reduce(shared)
    return True
