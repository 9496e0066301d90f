"""What of FSDP2's private structure qsdp reads: parameter groups, and the spans inside a buffer.

The only file that imports FSDP2's private modules; checked against torch 2.13. FSDP2 hands a comm
one flat buffer and does not say which parameter lies where; the parameter group knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
        DataParallelMeshInfo,
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

from qsdp.quantizer import Quantizer
from qsdp.wire import Segment, WireLayout, wire_layout

__all__ = [
    "AllGather",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "ReduceScatter",
    "Unit",
    "find_units",
    "subsequences_of_size",
]

# Where a parameter group keeps its mesh while its replicas are hidden from FSDP2.
_OWN_MESH_INFO = "_qsdp_mesh_info"

# Names that wrappers put into a parameter's path.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass
class Unit:
    """One FSDP parameter group: what communicates together.

    Attributes:
        index: position among the model's units, equal on all ranks.
        path: the module's name, wrappers' parts included.
        module: a module to set comms on.
        aliases: names of each parameter, the first one its own, in the flat buffer's order.
        quantizers: how each of them travels in each direction, once a configuration is applied;
            None for full precision.
        learned: tables of levels by direction and name.
        checksum: whether rows carry checksums.
    """

    index: int
    path: str
    module: FSDPModule
    fsdp_group: FSDPParamGroup
    aliases: tuple[tuple[str, ...], ...]
    quantizers: dict[str, tuple[Quantizer | None, ...]] = field(default_factory=dict)
    learned: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    checksum: bool = False
    layouts: dict[Any, WireLayout | None] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(names[0] for names in self.aliases)

    @property
    def params(self) -> list[FSDPParam]:
        return self.fsdp_group.fsdp_params

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the shards."""
        mesh_info = self.fsdp_group.mesh_info
        assert isinstance(mesh_info, FSDPMeshInfo)
        return mesh_info.shard_process_group

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """With HSDP, the ranks that hold the same shard."""
        mesh_info = self._own_mesh_info()
        return mesh_info.replicate_process_group if isinstance(mesh_info, HSDPMeshInfo) else None

    @property
    def all_groups(self) -> list[dist.ProcessGroup]:
        """The group of the shards, and with HSDP that of the replicas."""
        return [self.group, *([self.replicate_group] if self.replicate_group else [])]

    def hide_replicas(self) -> None:
        """Make FSDP2 treat an HSDP parameter group as if it had no replicas, to reduce nothing."""
        own = self._own_mesh_info()
        assert isinstance(own, HSDPMeshInfo)
        hidden = FSDPMeshInfo(
            own.mesh,
            shard_mesh_dim=own.shard_mesh_dim,
            dp_mesh_dims=own.dp_mesh_dims,
            spmd_mesh=own.spmd_mesh,
        )
        hidden.reduce_scatter_process_group = own.reduce_scatter_process_group
        vars(self.fsdp_group)[_OWN_MESH_INFO] = own
        self.fsdp_group.mesh_info = hidden

    def show_replicas(self) -> None:
        """Undo :meth:`hide_replicas`."""
        self.fsdp_group.mesh_info = self._own_mesh_info()
        vars(self.fsdp_group).pop(_OWN_MESH_INFO, None)

    def _own_mesh_info(self) -> DataParallelMeshInfo:
        own: DataParallelMeshInfo = vars(self.fsdp_group).get(
            _OWN_MESH_INFO, self.fsdp_group.mesh_info
        )
        return own

    @property
    def device(self) -> torch.device:
        device = self.fsdp_group.device
        assert isinstance(device, torch.device)
        return device

    @property
    def in_backward(self) -> bool:
        """Whether FSDP2 gathers for the backward pass: the weights are those of the forward."""
        return self.fsdp_group._training_state == TrainingState.PRE_BACKWARD

    def learn(self, direction: str, tables: dict[str, tuple[float, ...]]) -> None:
        """Use these tables of levels from now on."""
        self.learned |= {(direction, name): table for name, table in tables.items()}
        self.layouts.clear()

    def all_gather_layout(self, numel: int, dtype: torch.dtype) -> WireLayout:
        """Layout of one rank's all-gather input: every parameter's padded shard, in order."""
        key = ("weights", numel, dtype)
        layout = self.layouts.get(key)
        if layout is None:
            segments = self._segments(range(len(self.params)), "weights")
            layout = self.layouts[key] = wire_layout(segments, dtype, self.checksum)
            assert layout.numel == numel, f"FSDP sends {numel} values, not {layout.numel}"
        return layout

    def reduce_scatter_layout(
        self, numel: int, direction: str, dtype: torch.dtype
    ) -> WireLayout | None:
        """Layout of one rank's part of the reduce-scatter input, or None if it is ambiguous.

        FSDP2 reduces the parameters that got a gradient, and does not say which. All that are
        trainable is the normal case; otherwise every choice whose sizes add up is considered, and
        choices with the same sequence of segments count as one.
        """
        trainable = self.trainable
        key = (trainable, numel, direction, dtype)
        if key not in self.layouts:
            segments = self._segments(trainable, direction)
            found = subsequences_of_size(segments, numel)
            unique = len(found) == 1
            self.layouts[key] = wire_layout(found[0], dtype, self.checksum) if unique else None
        return self.layouts[key]

    @property
    def trainable(self) -> tuple[int, ...]:
        """Indices of the parameters that can get a gradient."""
        return tuple(i for i, p in enumerate(self.params) if p.sharded_param.requires_grad)

    def _segments(self, indices: Sequence[int], direction: str) -> tuple[Segment, ...]:
        segments = []
        for i in indices:
            size = self.params[i].padded_sharded_param_size.numel()
            quantizer = self.quantizers[direction][i]
            learned = self.learned.get((direction, self.names[i]))
            segments.append(
                Segment(size) if quantizer is None else quantizer.segment(size, learned)
            )
        return tuple(segments)


def find_units(model: nn.Module) -> list[Unit]:
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
    units: list[Unit] = []
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
            units.append(Unit(len(units), path or "(root)", module, group, aliases))
    if not units:
        raise ValueError(_why_no_units(model))
    return units


def _why_no_units(model: nn.Module) -> str:
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


def subsequences_of_size(
    segments: tuple[Segment, ...], numel: int, limit: int = 2
) -> list[tuple[Segment, ...]]:
    """Distinct subsequences of ``segments`` whose sizes add up to ``numel``, ``limit`` at most.

    Zero-sized segments are always kept: they change nothing on the wire.
    """
    if sum(s.numel for s in segments) == numel:
        return [segments]
    # found[size]: distinct subsequences of the segments so far. Two a size are enough to know
    # that a size is ambiguous, which bounds the work by len(segments) * number of sizes.
    found: dict[int, list[tuple[Segment, ...]]] = {0: [()]}
    for segment in segments:
        for size, choices in sorted(found.items(), reverse=True):
            total = size + segment.numel
            if total > numel:
                continue
            taken = [(*choice, segment) for choice in choices]
            kept = found.get(total, []) if segment.numel else []
            found[total] = list(dict.fromkeys([*kept, *taken]))[:limit]
    return found.get(numel, [])


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
