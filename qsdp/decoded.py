"""The weights that training computes with: the sharded masters after quantized communication.

At few bits they are another model than the masters, and the one whose loss training reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from qsdp.comms import QuantizedAllGather
from qsdp.param_group import find_param_groups


def decoded_state_dict(model: nn.Module, *, full: bool = False) -> dict[str, torch.Tensor]:
    """A state dict of the weights that every rank decodes, in the dtype that it computes in.

    A collective call: modules are gathered one after another, so that no rank holds more than one
    of them whole, and end sharded. Names are those of ``model.state_dict()``, persistent buffers
    among them; nothing in ``model`` changes. Without :func:`qsdp.apply_qsdp` these are the masters.

    Args:
        full: whole tensors on the CPU of rank 0, and an empty dict on the other ranks, as for
            export. Otherwise every rank gets its shards, as DTensors of the parameters' placements:
            for ``torch.distributed.checkpoint``, or ``load_state_dict`` of a model sharded alike.
    """
    state: dict[str, torch.Tensor] = {}
    for name, sharded, whole in _gathered(model):
        if not full:
            state[name] = _own_shard(whole, sharded)
            continue
        part = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if dist.get_rank() == 0:
            state[name] = part.to("cpu", copy=True)
    for name, value in model.state_dict().items():
        if name not in state and (not full or dist.get_rank() == 0):
            state[name] = value.detach().to("cpu", copy=True) if full else value.detach().clone()
    return {name: state[name] for name in model.state_dict() if name in state}


@contextmanager
def decoded_weights(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the parameters of ``model`` are the weights that training computes with.

    For evaluation, and for whatever saves a model by itself (``model.state_dict()``,
    ``save_pretrained``). Weights travel in full precision meanwhile, so that a forward sees exactly
    them. Afterwards the masters are back, bit for bit, and so is the communication with all that it
    remembers. A collective call at both ends; every rank holds a second copy of its shards inside.

    Parameters must not be changed inside: changes would be lost.
    """
    decoded = decoded_state_dict(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own = {name: _local(parameter) for name, parameter in parameters.items() if name in decoded}
    masters = {name: local.detach().clone() for name, local in own.items()}
    gathers = [
        (handle, comm)
        for handle in find_param_groups(model)
        if isinstance(comm := handle.all_gather_comm, QuantizedAllGather)
    ]
    try:
        for handle, comm in gathers:
            handle.set_all_gather(comm.stock)
        with torch.no_grad():
            for name, local in own.items():
                local.copy_(_local(decoded[name]))
        del decoded
        yield model
    finally:
        for handle, _ in gathers:
            handle.reshard()  # what is gathered must not outlive this
        with torch.no_grad():
            for name, local in own.items():
                local.copy_(masters[name])
        for handle, comm in gathers:
            handle.set_all_gather(comm)


def _gathered(model: nn.Module) -> Iterator[tuple[str, DTensor, torch.Tensor]]:
    """Of every sharded parameter, by each of its names: the shard, and the whole while it lasts."""
    modules = list(
        {id(handle.module): handle.module for handle in find_param_groups(model)}.values()
    )
    for module in modules:
        module.reshard()
    sharded = dict(model.named_parameters(remove_duplicate=False))
    for module in modules:
        module.unshard()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            before = sharded[name]
            if parameter is not before and isinstance(before, DTensor):
                yield name, before, parameter.detach()
        module.reshard()


def _own_shard(whole: torch.Tensor, sharded: DTensor) -> DTensor:
    """This rank's part of ``whole``, laid out as ``sharded`` is."""
    # FSDP's dimensions come first in the mesh, tensor parallelism has cut ``whole`` already.
    index = next(i for i, place in enumerate(sharded.placements) if not place.is_replicate())
    dim: int = getattr(sharded.placements[index], "dim")  # noqa: B009  # of any kind of shard
    mesh = sharded.device_mesh
    chunks = _local(whole).chunk(mesh.size(index), dim)
    rank = mesh.get_local_rank(index)
    own = chunks[rank] if rank < len(chunks) else _local(whole).narrow(dim, 0, 0)
    local = own.to(sharded.to_local().device, copy=True)
    placed: DTensor = DTensor.from_local(
        local,
        mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
    return placed


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, or all of one that is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
