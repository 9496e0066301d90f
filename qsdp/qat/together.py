"""Learned steps on shards and on replicas: where they are put, and how replicas begin alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from qsdp.local.sync import ReplicaSync


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def put(value: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a tensor that every rank has into one that may be sharded; moves nothing."""
    if isinstance(into, DTensor):
        mesh, placements = into.device_mesh, into.placements
        placed = distribute_tensor(value, mesh, placements, src_data_rank=None)
        into.to_local().copy_(placed.to_local())
    else:
        into.copy_(value)


@torch.no_grad()
def begin_alike(
    sync: ReplicaSync,
    steps: Mapping[str, torch.Tensor],
    initialize: Callable[[], None],
    taken: int,
) -> None:
    """Set learned steps on all replicas to those of the replicas' average; collective.

    To a synchronisation they are then what replicas have had in common all along. Otherwise it
    would take the way from nothing to the first steps for a move of training, and an outer step
    with momentum would go on in that direction.

    Args:
        steps: log2 of them, by the names of the model's parameters.
        initialize: sets them from the weights as they are.
        taken: how many optimizer steps were.

    Raises:
        ValueError: ``sync`` counted another number, and so may take replicas for equal.
    """
    if sync.steps != taken:
        raise ValueError(
            f"fake quantization is at step {taken} and ReplicaSync at step {sync.steps}: call "
            "sync.step() first, and count with both from the beginning"
        )
    with sync.average():
        initialize()
        found = {name: _local(step).clone() for name, step in steps.items()}
    for name, step in steps.items():
        _local(step).copy_(found[name])
    state = sync.state_dict()
    anchored = any(name.startswith("anchor.") for name in state)
    own = f".rank{dist.get_rank()}"
    for name, value in found.items():
        # What was sent before, of parts that are under way, moved by nothing.
        nothing = torch.zeros_like(value)
        for key, now in (
            (f"anchor.{name}", value),
            (f"momentum.{name}", nothing),
            (f"start.{name}{own}", value),
            (f"average.{name}{own}", nothing if anchored else value),
        ):
            if key in state:
                _local(state[key]).copy_(now)
    sync.load_state_dict(state)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
