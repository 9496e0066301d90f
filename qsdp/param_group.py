"""A handle to one FSDP2 parameter group: the only file that touches FSDP2's privates.

Checked against torch 2.13. FSDP2 hands a comm one flat buffer and does not say which parameter lies
where; the parameter group knows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        TrainingState,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
except ImportError as error:
    raise ImportError(
        f"qsdp needs the FSDP2 hooks of torch 2.13, which torch {torch.__version__} does not have "
        f"({error}): pip install 'torch>=2.13,<2.14'"
    ) from error

__all__ = [
    "AllGather",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "ParamGroup",
    "ReduceScatter",
    "find_param_groups",
    "gather_asynchronously",
]

# Names that wrappers put into a parameter's path.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")


class ParamGroup:
    """One FSDP2 parameter group: what communicates together.

    Attributes:
        index: position among the model's groups, equal on all ranks.
        path: the module's name, wrappers' parts included.
        module: to set comms on.
        aliases: names of each parameter, the first one its own, in the flat buffer's order.
    """

    def __init__(
        self,
        index: int,
        path: str,
        module: FSDPModule,
        fsdp_group: FSDPParamGroup,
        aliases: tuple[tuple[str, ...], ...],
    ) -> None:
        self.index, self.path, self.module, self.aliases = index, path, module, aliases
        self._group = fsdp_group

    @property
    def names(self) -> tuple[str, ...]:
        """The first name of each parameter."""
        return tuple(names[0] for names in self.aliases)

    @property
    def shapes(self) -> list[torch.Size]:
        """Of the unsharded parameters."""
        return [param.sharded_param.shape for param in self._group.fsdp_params]

    @property
    def shard_numels(self) -> list[int]:
        """Values of each parameter in one rank's row, padding included."""
        return [param.padded_sharded_param_size.numel() for param in self._group.fsdp_params]

    @property
    def gather_dtypes(self) -> list[torch.dtype]:
        """What each parameter is gathered in. FSDP2 packs several dtypes as bytes, in order."""
        cast = self._group.mp_policy.param_dtype
        return [cast or param.sharded_param.dtype for param in self._group.fsdp_params]

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """What gradients are reduced in; None for the dtype of the unsharded parameters."""
        return self._group.mp_policy.reduce_dtype

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Of each sharded parameter, how often torch has counted a change in place.

        Of the DTensor, and of the memory that it stands for, which counts for itself.
        """
        return tuple(
            _changes(param.sharded_param) + _changes(param._sharded_param_data)
            for param in self._group.fsdp_params
        )

    @property
    def holds_payload(self) -> list[bool]:
        """Which parameters are no plain tensors: a subclass packs what it likes."""
        locals_ = (param._sharded_local_tensor for param in self._group.fsdp_params)
        return [type(local) is not torch.Tensor for local in locals_]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the shards."""
        mesh_info = self._group.mesh_info
        assert isinstance(mesh_info, FSDPMeshInfo)
        return mesh_info.shard_process_group

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """With HSDP, the ranks that hold the same shard."""
        mesh_info = vars(self._group).get("_qsdp_mesh_info", self._group.mesh_info)
        return mesh_info.replicate_process_group if isinstance(mesh_info, HSDPMeshInfo) else None

    @property
    def all_groups(self) -> list[dist.ProcessGroup]:
        """The group of the shards, and with HSDP that of the replicas."""
        return [self.group, *([self.replicate_group] if self.replicate_group else [])]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        device = self._group.device
        assert isinstance(device, torch.device)
        return device

    @property
    def in_backward(self) -> bool:
        """Whether FSDP2 gathers for the backward pass: the weights are those of the forward."""
        return self._group._training_state == TrainingState.PRE_BACKWARD

    @property
    def sums_gradients(self) -> bool:
        """Whether the user has set a factor of their own for the reduction of gradients."""
        return self._group.gradient_divide_factor is not None

    @property
    def all_gather_comm(self) -> AllGather:
        """The object that gathers."""
        return self._group._all_gather_comm

    @property
    def reduce_scatter_comm(self) -> ReduceScatter:
        """The object that reduces and scatters."""
        return self._group._reduce_scatter_comm

    @property
    def all_reduce_hook(self) -> Any:
        """What runs on reduced gradients, or None."""
        return self._group._all_reduce_hook

    def set_all_gather(self, comm: AllGather) -> None:
        """Let ``comm`` gather from now on."""
        self.module.set_custom_all_gather(comm)

    def set_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Let ``comm`` reduce and scatter from now on."""
        self.module.set_custom_reduce_scatter(comm)

    def set_all_reduce_hook(self, hook: Any) -> None:
        """Let ``hook`` all-reduce between HSDP's replicas, in place of FSDP2.

        FSDP2 has a hook that runs after its own all-reduce, but no place for one instead of it. So
        the group is told that its replicas are this rank alone: FSDP2 does all that it does for
        replicas (partial sums, empty gradients, buffers that stay alive), and its own all-reduce
        moves nothing. None undoes it.
        """
        replicas = vars(self._group).pop("_qsdp_mesh_info", None)
        if replicas is not None:
            self._group.mesh_info = replicas
        if hook is not None:
            own = self._group.mesh_info
            assert isinstance(own, HSDPMeshInfo)
            alone = copy.copy(own)
            alone.replicate_process_group = _this_rank_alone(dist.get_backend(self.group))
            vars(self._group)["_qsdp_mesh_info"] = own
            self._group.mesh_info = alone
        self._group._all_reduce_hook = hook

    def reshard(self) -> None:
        """Free unsharded parameters, so that the next use gathers anew."""
        self.module.reshard()

    def watch_reductions(self, watcher: Callable[[tuple[int, ...]], None] | None) -> None:
        """Call ``watcher`` before each reduction with the indices of its parameters; None: stop."""
        vars(self._group).pop("post_backward", None)
        if watcher is None:
            return
        group, own = self._group, self._group.post_backward

        def post_backward(*unused: Any) -> None:
            # FSDP2 takes the gradients off their parameters before it calls a comm.
            reduced = tuple(i for i, p in enumerate(group.fsdp_params) if _reduces(group, p))
            if reduced and group.reduce_grads:
                watcher(reduced)
            own(*unused)

        vars(group)["post_backward"] = post_backward

    @property
    def attachment(self) -> Any:
        """What :meth:`attach` was given last, or None."""
        return vars(self._group).get("_qsdp_attachment")

    def attach(self, value: Any) -> None:
        """Remember a value with the group, for whoever finds the group again."""
        vars(self._group)["_qsdp_attachment"] = value


def find_param_groups(model: nn.Module) -> list[ParamGroup]:
    """Every FSDP parameter group of ``model`` once, in module order.

    Raises:
        TypeError, ValueError: a model that qsdp cannot work on, and why.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise TypeError(
            "qsdp works on FSDP2 and this model is wrapped with FSDP1's FullyShardedDataParallel: "
            "wrap it with torch.distributed.fsdp.fully_shard instead (Accelerate: "
            "FullyShardedDataParallelPlugin(fsdp_version=2); Lightning: ModelParallelStrategy)"
        )
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise RuntimeError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_all_gather: "
            "qsdp needs torch>=2.13,<2.14"
        )
    paths = {id(module): _clean(path) for path, module in model.named_modules()}
    found: list[ParamGroup] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = module._get_fsdp_state()._fsdp_param_groups
        if len(groups) > 1:
            raise ValueError(
                f"module {path or '(root)'} has {len(groups)} FSDP parameter groups, qsdp needs "
                "one: do not return different meshes from shard_placement_fn, or call fully_shard "
                "on its submodules"
            )
        for group in groups:
            if id(group) in seen:
                continue
            seen.add(id(group))
            _check_sharded(path or "(root)", group)
            aliases = tuple(_aliases(p, paths) for p in group.fsdp_params)
            found.append(ParamGroup(len(found), path or "(root)", module, group, aliases))
    if not found:
        raise ValueError(_why_none(model))
    return found


def gather_asynchronously(model: nn.Module) -> None:
    """Let every gather of a root FSDP module be an asynchronous call, also without streams.

    On CPU, where FSDP2 gathers synchronously otherwise, prefetching overlaps only then.
    """
    assert isinstance(model, FSDPModule)
    model._set_unshard_async_op(True)


def _changes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # those count none


def _reduces(group: FSDPParamGroup, param: FSDPParam) -> bool:
    """Whether FSDP2 is about to reduce a gradient of ``param``, by its own conditions."""
    if not hasattr(param, "_unsharded_param"):
        return False
    if param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None:
        return True
    return bool(group.reduce_scatter_unused_params and param.unsharded_param.requires_grad)


@lru_cache(maxsize=4)
def _this_rank_alone(backend: str) -> dist.ProcessGroup:
    """Made without the other ranks, once."""
    group: dist.ProcessGroup = dist.new_group(
        [dist.get_rank()], backend=backend, use_local_synchronization=True
    )
    return group


def _why_none(model: nn.Module) -> str:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return (
            "qsdp found no FSDP2 module in this model, which is wrapped with "
            "DistributedDataParallel: for DDP use model.register_comm_hook(qsdp.QuantizedDDPState("
            "model, config), qsdp.quantized_ddp_hook), or shard with fully_shard in place of DDP"
        )
    return (
        "qsdp found no FSDP2 module in this model: call torch.distributed.fsdp.fully_shard on its "
        "blocks and on the model first, and move apply_qsdp below (Accelerate: below "
        "accelerator.prepare; Lightning: to the end of configure_model)"
    )


def _check_sharded(path: str, group: FSDPParamGroup) -> None:
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        raise ValueError(
            f"module {path} is replicated, not sharded: qsdp quantizes fully_shard's collectives, "
            "and replicate has none of them"
        )


def _aliases(fsdp_param: FSDPParam, paths: dict[int, str]) -> tuple[str, ...]:
    """Every name of a parameter (tied ones have several). Holds whether it is sharded or not."""
    info = fsdp_param._module_info
    owners = zip(
        (info.module, *info.shared_modules),
        (info.param_name, *info.shared_param_names),
        strict=True,
    )
    return tuple(f"{paths[id(owner)]}.{name}".lstrip(".") for owner, name in owners)


def _clean(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_PARTS)
