"""Local steps in a run: its ReplicaSync, what a step of one replica counts, what it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import qsdp
from qsdp.config import difference_quantizer
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.warmup import learning_rate

_FULL_PRECISION = 32
# What decides in which tensors a synchronisation remembers something.
_SHAPE_MEMORY = ("sync_bits", "sync_fragments", "sync_overlap", "outer_lr", "outer_momentum")
_OWN = "own."


class Local(NamedTuple):
    """A replica of a run: where it is, and how it keeps together with the others."""

    sync: qsdp.ReplicaSync
    group: dist.ProcessGroup
    """The ranks of this replica."""
    replica: int
    num_replicas: int
    stock_bytes: int
    """That this rank would send in a step to all-reduce its shard's gradients, in float32."""

    def meets(self, step: int, config: TrainConfig) -> bool:
        """Whether all ranks of the job talk in this step, about more than weights.

        They do where replicas synchronise anyway, and now and then so that a request to stop is
        heard in a long round.
        """
        now_and_then = step % config.log_every == 0 or step == config.steps
        return now_and_then or self.sync.due(step)

    def stats(self) -> qsdp.CommStats:
        """Of the step since the last call, beside what data parallel would have sent for it."""
        return dataclasses.replace(self.sync.stats(reset=True), stock_all_reduce=self.stock_bytes)


def sync_config(config: TrainConfig) -> qsdp.SyncConfig:
    """What the flags say. Raises ValueError where a SyncConfig refuses it."""
    assert config.sync_every is not None
    quantizer = difference_quantizer(config.sync_bits)
    way = quantizer and qsdp.Feedback(quantizer)
    outer = None
    if config.outer_lr is not None:
        momentum = 0.9 if config.outer_momentum is None else config.outer_momentum
        outer = qsdp.OuterStep(config.outer_lr, momentum)
    return qsdp.SyncConfig(
        qsdp.SyncSchedule(
            base=config.sync_every,
            alpha=config.sync_alpha,
            power=config.sync_power,
            warmup_steps=config.warmup_steps if config.sync_alpha else 0,
            longest=config.sync_longest,
        ),
        differences=way,
        outer=outer,
        fragments=config.sync_fragments,
        overlap_steps=config.sync_overlap,
        seed=config.seed,
    )


def make_local(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    config: TrainConfig,
    step: int,
) -> Local | None:
    """None without --sync-every. A collective call, with all replicas at equal weights.

    Args:
        step: optimizer steps that were taken already.
    """
    if config.sync_every is None:
        return None
    sync = qsdp.ReplicaSync(
        *(model, optimizer, mesh["replicate"].get_group(), sync_config(config)),
        total_steps=config.steps,
        lr=lambda taken: learning_rate(config, taken + 1),
        steps=step,
    )
    sync.stats(reset=True)
    count = config.replicate
    numel = sum(_local(p).numel() for p in model.parameters() if p.requires_grad)
    # A ring goes around twice, once to reduce and once to gather.
    stock = 2 * (count - 1) * -(-numel // count) * torch.float32.itemsize
    replica = mesh.get_local_rank("replicate")
    return Local(sync, mesh["shard"].get_group(), replica, count, stock)


@contextmanager
def averaged(local: Local | None) -> Iterator[None]:
    """Inside, all ranks evaluate the same weights: the average where replicas differ."""
    if local is None:
        yield
    else:
        with local.sync.average():
            yield


def comm_state(model: nn.Module, local: Local | None) -> dict[str, torch.Tensor]:
    """What communication remembers, inside replicas and between them, for a checkpoint.

    What is equal on all ranks of one replica is not on those of others: it gets the replica's name.
    """
    state = qsdp.comm_state_dict(model)
    if local is None:
        return state
    state = {f"replica{local.replica}.{name}": value for name, value in state.items()}
    return state | {f"sync.{name}": value for name, value in local.sync.state_dict().items()}


def split_state(
    state: Mapping[str, torch.Tensor], local: Local | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What :func:`comm_state` joined: inside this replica, and between replicas."""
    if local is None:
        return dict(state), {}
    inside, between = f"replica{local.replica}.", "sync."
    return (
        {n.removeprefix(inside): value for n, value in state.items() if n.startswith(inside)},
        {n.removeprefix(between): value for n, value in state.items() if n.startswith(between)},
    )


def whole_and_own(tensors: dict[str, Any], local: Local | None) -> dict[str, Any]:
    """What a checkpoint holds of model and optimizer: averages, and each rank's own beside them.

    A collective call. torch.distributed.checkpoint would mix replicas that differ, tensor by
    tensor: under one name all of them must give the same.
    """
    if local is None:
        return tensors
    rank = dist.get_rank()
    own = {f"{_OWN}{name}.rank{rank}": _local(value).clone() for name, value in tensors.items()}
    return local.sync.average_of(tensors) | own


def own_tensors(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Places to read this rank's own into, by their names in a checkpoint."""
    rank = dist.get_rank()
    return {
        f"{_OWN}{name}.rank{rank}": torch.empty_like(_local(value))
        for name, value in tensors.items()
    }


def use_own(tensors: dict[str, Any], own: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """``tensors`` with the values of what was read into :func:`own_tensors`."""
    rank, found = dist.get_rank(), dict[str, Any]()
    for name, value in tensors.items():
        mine = own[f"{_OWN}{name}.rank{rank}"]
        if isinstance(value, DTensor):
            mine = DTensor.from_local(
                *(mine, value.device_mesh, value.placements),
                run_check=False, shape=value.shape, stride=value.stride(),
            )  # fmt: skip
        found[name] = mine
    return found


def same_replicas(saved: Mapping[str, Any], saved_ranks: int, config: TrainConfig) -> bool:
    """Whether each rank of a run that was saved so can go on with what was its own."""
    return (
        saved.get("sync_every") is not None
        and config.sync_every is not None
        and saved.get("replicate") == config.replicate
        and saved_ranks == dist.get_world_size()
    )


def remembers_sync(saved: Mapping[str, Any], config: TrainConfig) -> bool:
    """Whether synchronisations remember the same under a configuration saved as JSON values."""
    now = config.to_json()
    if saved.get("sync_every") is None or config.sync_every is None:
        return False
    return all(saved.get(name) == now[name] for name in _SHAPE_MEMORY)


def describe(config: TrainConfig) -> str:
    """For the line that a run begins with."""
    if config.sync_every is None:
        return ""
    words = [f"local steps, synchronised every {config.sync_every}"]
    if config.sync_alpha:
        words = [f"local steps, synchronised every {config.sync_every} or more (QSR)"]
    if config.sync_bits != _FULL_PRECISION:
        words.append(f"in {config.sync_bits} bits")
    if config.outer_lr is not None:
        words.append(f"outer step {config.outer_lr:g}")
    return ", " + ", ".join(words)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
