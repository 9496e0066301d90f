"""A handle to one FSDP2 parameter group: the only file that touches FSDP2's privates.

FSDP2 hands a comm one flat buffer and does not say which parameter lies where; the parameter group
knows. Tried on torch 2.9 to 2.15. What differs between them is told apart here, by what torch has
and never by its version; :mod:`qsdp.contract` checks what all of qsdp relies on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

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
        f"qsdp needs FSDP2's custom collectives, which torch 2.9 and newer have and torch "
        f"{torch.__version__} has not ({error}): pip install 'torch>=2.9'"
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

# What is read below and every torch that was tried has.
_OF_GROUPS = (
    *("fsdp_params", "mesh_info", "device", "post_backward", "reduce_grads"),
    *("gradient_divide_factor", "_training_state", "_reduce_scatter_process_group"),
    *("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook"),
)
_OF_PARAMS = (
    *("mp_policy", "sharded_param", "padded_sharded_param_size", "_module_info"),
    *("_sharded_param_data", "_sharded_local_tensor"),
)


class ParamGroup:
    """One FSDP2 parameter group: what communicates together.

    Attributes:
        index: position among the model's groups, equal on all ranks.
        path: the module's name, wrappers' parts included; with the group's place in brackets where
            a module has several (parameters on several meshes).
        module: that it belongs to.
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
        params = self._group.fsdp_params
        return [param.mp_policy.param_dtype or param.sharded_param.dtype for param in params]

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """What gradients are reduced in; None for the dtype of the unsharded parameters."""
        params = self._group.fsdp_params
        asked: torch.dtype | None = params[0].mp_policy.reduce_dtype
        if asked is not None or not hasattr(FSDPParam, "unsharded_grad_dtype"):
            return asked
        # Since torch 2.15, the masters' dtypes (or grad_dtype, which a user may set), promoted.
        reduced = [param.sharded_param for param in params if param.sharded_param.requires_grad]
        kinds: set[Any] = {param.grad_dtype for param in reduced}
        return reduce(torch.promote_types, kinds) if kinds and None not in kinds else None

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
    def reduce_group(self) -> dist.ProcessGroup:
        """What gradients are reduced in: ``group``, or another of the same ranks.

        The latter since torch 2.13, by ``set_separate_reduce_scatter_group``, at any time.
        """
        return self._group._reduce_scatter_process_group

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
        self._set_comm("all_gather", comm)

    def set_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Let ``comm`` reduce and scatter from now on."""
        self._set_comm("reduce_scatter", comm)

    def _set_comm(self, collective: str, comm: AllGather | ReduceScatter) -> None:
        if len(_groups_of(self.module)) == 1:
            getattr(self.module, f"set_custom_{collective}")(comm)
        else:  # torch's setter does not say for which
            setattr(self._group, f"_{collective}_comm", comm)

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
        """Call ``watcher`` before each reduction with the indices of its parameters; None: stop.

        In the order in which the flat buffer holds their gradients: the parameters' own, but since
        torch 2.15 by the dtypes of their sharded gradients first.
        """
        vars(self._group).pop("post_backward", None)
        if watcher is None:
            return
        group, own = self._group, self._group.post_backward

        def post_backward(*unused: Any) -> None:
            # FSDP2 takes the gradients off their parameters before it calls a comm.
            params = group.fsdp_params
            order = getattr(group, "_reduce_scatter_param_indices", None) or range(len(params))
            reduced = tuple(i for i in order if _reduces(group, params[i]))
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
    paths = {id(module): _clean(path) for path, module in model.named_modules()}
    found: list[ParamGroup] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        _require(module, ("_get_fsdp_state", "set_custom_all_gather", "set_custom_reduce_scatter"))
        groups = _groups_of(module)
        for place, group in enumerate(groups):
            if id(group) in seen:
                continue
            seen.add(id(group))
            name = (path or "(root)") + (f"[{place}]" if len(groups) > 1 else "")
            _check_sharded(name, group)
            _require(group, _OF_GROUPS)
            for param in group.fsdp_params:
                _require(param, _OF_PARAMS)
            aliases = tuple(_aliases(p, paths) for p in group.fsdp_params)
            found.append(ParamGroup(len(found), name, module, group, aliases))
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


def _require(owner: object, names: tuple[str, ...]) -> None:
    """Raises RuntimeError now, unless ``owner`` has all attributes: private ones come and go."""
    for name in names:
        if not hasattr(owner, name):
            raise RuntimeError(
                f"torch {torch.__version__} has no {type(owner).__name__}.{name}, by which qsdp "
                "reads FSDP2: torch 2.9 to 2.15 have it; `qsdp check` tells what else differs"
            )


def _groups_of(module: FSDPModule) -> list[FSDPParamGroup]:
    """Of one module: none without own parameters, several with parameters on several meshes."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    only = state._fsdp_param_group  # up to torch 2.11
    return [] if only is None else [only]


def _reduces(group: FSDPParamGroup, param: FSDPParam) -> bool:
    """Whether FSDP2 is about to reduce a gradient of ``param``, by its own conditions."""
    if not hasattr(param, "_unsharded_param"):
        return False
    # Up to torch 2.14, gradients of the reduced dtype are accumulated beside the parameter.
    beside = getattr(param, "unsharded_accumulated_grad", None)
    if beside is not None or param.unsharded_param.grad is not None:
        return True
    # Since torch 2.15, what waits for the all-reduce between replicas is reduced along, as zeros.
    waiting = getattr(group, "_get_partial_reduce_grad", None)
    if waiting is not None and waiting(param) is not None:
        return True
    unused = getattr(group, "reduce_scatter_unused_params", False)  # since torch 2.13
    return bool(unused and param.unsharded_param.requires_grad)


# By the default group, with which it ends.
_alone: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()


def _this_rank_alone(backend: str) -> dist.ProcessGroup:
    """Made without the other ranks, once."""
    assert dist.group.WORLD is not None
    of_backend = _alone.setdefault(dist.group.WORLD, {})
    if backend not in of_backend:
        of_backend[backend] = dist.new_group(
            [dist.get_rank()], backend=backend, use_local_synchronization=True
        )
    return of_backend[backend]


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
