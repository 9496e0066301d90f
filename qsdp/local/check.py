"""What ReplicaSync looks at before it synchronises anything, so that errors come early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from qsdp.local.config import SyncConfig
from qsdp.local.parts import Entry, digest
from qsdp.wire import VALUE_DTYPES


def check_arguments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: SyncConfig,
    total_steps: int | None,
    lr: Callable[[int], float] | None,
    steps: int,
) -> None:
    """Types, which are the same on all ranks: what is wrong is raised at once.

    Raises:
        TypeError, ValueError: in one line.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ReplicaSync takes the model first, got {type(model).__name__}")
    if isinstance(model, FullyShardedDataParallel):
        raise TypeError("ReplicaSync takes models of fully_shard (FSDP2), and this one is FSDP1")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"ReplicaSync takes the optimizer second, got {type(optimizer).__name__}")
    if not isinstance(config, SyncConfig):
        raise TypeError(f"ReplicaSync takes a qsdp.SyncConfig, got {config!r}")
    if total_steps is not None and (
        not isinstance(total_steps, int) or isinstance(total_steps, bool) or total_steps < 1
    ):
        raise ValueError(
            "ReplicaSync(total_steps=...) must be an integer of at least 1, or None, "
            f"got {total_steps!r}"
        )
    end = steps if total_steps is None else total_steps
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps <= end:
        raise ValueError(
            "ReplicaSync(steps=...) must be an integer from 0 to total_steps, "
            f"{total_steps}, got {steps!r}"
        )
    if lr is not None and not callable(lr):
        raise TypeError(f"ReplicaSync(lr=...) must be a function of the step, or None, got {lr!r}")
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained:
        raise ValueError("ReplicaSync: the model has no parameter that is trained")
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype not in VALUE_DTYPES:
            raise TypeError(
                f"ReplicaSync takes parameters in float32, bfloat16 or float16, and {name} is "
                f"{param.dtype}"
            )


def facts_of(
    model: nn.Module,
    entries: Sequence[Entry],
    config: SyncConfig,
    total_steps: int | None,
    group: dist.ProcessGroup,
    *,
    alike: bool = True,
    alone: bool = False,
) -> tuple[dict[str, Any], str | None]:
    """What all replicas must have in common at the start, and what is wrong on this rank.

    Args:
        alike: whether their weights are, too.
        alone: whether replicas must be one rank each (:class:`Meeting`).
    """
    error = None
    try:
        config.require_matches(name for entry in entries for name in entry.names)
        _check_group(model, entries, group)
        if alone:
            _check_alone(model)
    except ValueError as raised:
        error = str(raised)
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "SyncConfig": config.to_json(),
        "total_steps": total_steps,
        "parameters": {
            entry.name: f"{tuple(entry.tensor.shape)} {entry.tensor.dtype}" for entry in entries
        },
    }
    if alike:
        facts["weights at the start"] = digest(entries)
    return facts, error


def _check_alone(model: nn.Module) -> None:
    """Raises ValueError where the model lives on process groups, which a Meeting takes down."""
    sharded = any(isinstance(param, DTensor) for param in model.parameters())
    if sharded or any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "ReplicaSync: with a Meeting a replica is one rank, and this model is sharded or "
            "wrapped by DDP: give replicas of several ranks a process group"
        )


def _check_group(model: nn.Module, entries: Sequence[Entry], group: dist.ProcessGroup) -> None:
    """Raises ValueError where the group has two ranks of one replica."""
    mine = {dist.get_rank()}
    inside = mine | {
        int(rank)
        for entry in entries
        if isinstance(entry.tensor, DTensor)
        for rank in entry.tensor.device_mesh.mesh.flatten().tolist()
    }
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            inside |= set(dist.get_process_group_ranks(module.process_group))
    ranks = set(dist.get_process_group_ranks(group))
    both = sorted(ranks & inside - mine)
    if both:
        raise ValueError(
            f"ReplicaSync: ranks {both} of the group belong to this rank's own replica: give it "
            'one rank of each replica, such as mesh["replicate"].get_group(), and shard each '
            'replica on mesh["shard"] alone'
        )
