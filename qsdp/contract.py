"""What qsdp relies on in FSDP2, read off training steps of a tiny model on the torch that is here.

One process, on torch's fake process group, whose collectives move nothing: what counts is what
FSDP2 hands to a comm, when, and in which order. `qsdp check` runs it for users.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace as Facts
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers "fake"

from qsdp.buffers import BufferPool
from qsdp.param_group import AllGather, ReduceScatter, find_param_groups, gather_asynchronously


def differences() -> list[str]:
    """What is not as qsdp relies on, one line each; empty where all is as expected.

    Raises:
        RuntimeError: a process group exists already; the check makes its own.
    """
    if dist.is_initialized():
        raise RuntimeError("the check of FSDP2's hooks makes a process group of its own")
    found: list[str] = []
    for part in (_signatures, _memory, _step, _mixed_precision, _replicas):
        try:
            found += [fact for fact, holds in part().items() if not holds]
        except Exception as error:  # a torch of the future may raise anything
            message = " ".join(str(error).split())
            found.append(f"{part.__name__} raises nothing: {type(error).__name__} {message}"[1:])
    return found


def _signatures() -> dict[str, bool]:
    """Of what ours override. More parameters do no harm until FSDP2 passes them: see ``_Comm``."""
    called = "self", "output_tensor", "input_tensor", "group", "async_op"
    expected: dict[Any, tuple[str, ...]] = {
        AllGather.__call__: called,
        ReduceScatter.__call__: (*called, "op"),
        AllGather.allocate: ("self", "size", "dtype", "device"),
        ReduceScatter.allocate: ("self", "size", "dtype", "device"),
    }
    facts = {}
    for method, names in expected.items():
        there = inspect.signature(method).parameters
        needed = {name for name, p in there.items() if p.default is p.empty}
        same = needed <= {*names} <= {*there}
        facts[f"{method.__qualname__} takes {', '.join(names[1:])} and no more"] = same
    return facts


def _memory() -> dict[str, bool]:
    """What buffers are reused by."""
    pool, size = BufferPool(), (4096, torch.float32, torch.device("cpu"))
    held = pool.take(*size)
    address = held.data_ptr()
    fresh = [pool.take(*size).data_ptr() != address]
    view = held[8:]
    del held
    fresh.append(pool.take(*size).data_ptr() != address)
    del view
    again = pool.take(*size).data_ptr() == address
    return {"storages count their references, views included": all(fresh) and again}


def _step() -> dict[str, bool]:
    """A forward and a backward on two ranks."""
    with _trained(2) as seen:
        handle, (first, second), (reduced,) = seen.handle, seen.gather.calls, seen.reduce.calls
        numels, indices = handle.shard_numels, seen.watched[0]
        row = torch.cat([torch.full((n,), i + 1.0) for i, n in enumerate(numels)])
        sums = [torch.full((numels[i],), (8.0, 16.0)[i]) for i in indices]
        grad = next(seen.model.parameters()).grad.to_local()
        gather_asynchronously(seen.model)
        seen.model(torch.ones(8, 6))
        return {
            "a gather gets the padded shards of all parameters in order": all(
                torch.equal(call.values, row) for call in (first, second)
            ),
            "a gather's output has the rows of all ranks": first.output.numel() == 2 * row.numel(),
            "a gather runs in the group of the shards": first.group is handle.group,
            "gathers of forward and backward are told apart": (first.backward, second.backward)
            == (False, True),
            "gathers are asynchronous on request": seen.gather.calls[-1].more == {"async_op": True}
            and not first.more.get("async_op"),
            "comms get no arguments that qsdp does not know": {*first.more} <= {"async_op"}
            and {*reduced.more} <= {"op", "async_op"},
            "parameters with a gradient are told before they are reduced": indices == (0, 1)
            and len(seen.watched) == 1,
            "a reduction gets a row of gradients for each rank, in that order": torch.equal(
                reduced.values.view(2, -1), torch.cat(sums).expand(2, -1)
            ),
            "a reduction runs in the group that is read": reduced.group is handle.reduce_group,
            "a reduction averages": reduced.more["op"] == dist.ReduceOp.AVG,
            "gradients are views of a reduction's output": grad.untyped_storage().data_ptr()
            == reduced.output.untyped_storage().data_ptr(),
        }


def _mixed_precision() -> dict[str, bool]:
    """bfloat16 on float32 masters, which reduces in the one or the other, by torch's version."""
    with _trained(2, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)) as seen:
        gathered, reduced = seen.gather.calls[0], seen.reduce.calls[0]
        dtypes = seen.handle.gather_dtypes
        expected = seen.handle.reduce_dtype or dtypes[0]
        return {
            "weights are gathered in the dtype that is read": {*dtypes} == {gathered.values.dtype},
            "gradients are reduced in the dtype that is read": reduced.values.dtype == expected,
        }


def _replicas() -> dict[str, bool]:
    """Two replicas of two shards, with the all-reduce between them replaced."""
    hooked: list[torch.Tensor] = []
    moved: list[int] = []

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, **_: Any) -> None:
        moved.append(dist.get_world_size(group))

    with mock.patch.object(dist, "all_reduce", all_reduce), _trained(4, hooked.append) as seen:
        outputs = [call.output.data_ptr() for call in seen.reduce.calls]
        seen.handle.set_all_reduce_hook(None)
        replicas = seen.handle.replicate_group
        return {
            "the hook gets what was reduced, once": [t.data_ptr() for t in hooked] == outputs,
            "FSDP2's own all-reduce stays with this rank": {*moved} <= {1},
            "the replicas come back": replicas is not None and replicas.size() == 2,
        }


class _Small(nn.Module):
    """Its last parameter does not divide by the ranks and gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + 2 * self.bias


class _Comm:
    """Notes its calls, and does what it would if all ranks sent the same.

    ``more`` holds what FSDP2 names beside tensors and group. qsdp's own comms take what is in
    ``_signatures`` and nothing else; a torch that passes more is a difference here and a TypeError
    there. Attributes that a later torch gives its classes, such as the layout in which a gather
    writes, are inherited with their defaults: rows by ranks, as today.
    """

    def __init__(self, handle: Any) -> None:
        self.handle, self.calls = handle, list[Facts]()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, **more: Any) -> None:
        values, output, own = input_tensor.clone(), output_tensor, self.handle.in_backward
        self.calls.append(Facts(output=output, values=values, group=group, more=more, backward=own))
        rows = values.view(1, -1) if output.numel() > values.numel() else values.view(2, -1)
        output.view(-1, rows.shape[1]).copy_(rows[:1])


class _Gather(_Comm, AllGather):  # type: ignore[misc]
    pass


class _Reduce(_Comm, ReduceScatter):  # type: ignore[misc]
    pass


@contextmanager
def _trained(ranks: int, hook: Any = None, **kwargs: Any) -> Iterator[Facts]:
    """A model after a step, in a process group of its own, with comms that took notes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        shape = (2,) if hook is None else (ranks // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model: Any = fully_shard(_Small(), mesh=mesh, reshard_after_forward=True, **kwargs)
        for index, parameter in enumerate(model.parameters()):
            parameter.data.fill_(index + 1)
        (handle,) = find_param_groups(model)
        gather, scatter, watched = _Gather(handle), _Reduce(handle), list[tuple[int, ...]]()
        handle.set_all_gather(gather)
        handle.set_reduce_scatter(scatter)
        handle.watch_reductions(watched.append)
        if hook is not None:
            handle.set_all_reduce_hook(hook)
        model(torch.ones(8, 6)).sum().backward()
        yield Facts(model=model, handle=handle, gather=gather, reduce=scatter, watched=watched)
    finally:
        dist.destroy_process_group()
