"""The adapter to FSDP2: installs quantized collectives on a model that `fully_shard` has wrapped.

The only file that imports FSDP2's private modules; checked against torch 2.13. FSDP2 hands a comm
one flat buffer; the spans of the parameters inside it are read from the FSDP parameter group.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

try:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
except ImportError as error:
    raise ImportError(
        f"qsdp needs the FSDP2 hooks of torch 2.13, which torch {torch.__version__} does not have "
        f"({error}): pip install 'torch>=2.13,<2.14'"
    ) from error

from qsdp.agreement import require_agreement
from qsdp.buffers import pool
from qsdp.collectives import ReduceOp, all_gather_quantized, reduce_scatter_quantized
from qsdp.config import QSDPConfig
from qsdp.kernels import VALUE_DTYPES
from qsdp.kernels.philox import derive_key
from qsdp.quantizer import Quantizer
from qsdp.stats import CommMeter, CommStats
from qsdp.wire import Segment, WireLayout, wire_layout

_WEIGHTS, _GRADIENTS = 0, 1  # directions, for keys

# Names that wrappers put into a parameter's path.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")


def apply_qsdp(model: nn.Module, config: QSDPConfig) -> nn.Module:
    """Quantize the communication of every FSDP2 module in ``model``.

    Call it after the last ``fully_shard`` and on every rank: the ranks of each FSDP group compare
    their configurations first. A direction that is None in ``config`` keeps FSDP2's own collective.
    Sharded parameters, optimizer state and state dicts stay in full precision. Calling it again
    replaces the configuration.

    Args:
        model: contains modules wrapped by ``fully_shard``; modified in place.
        config: equal on all ranks.

    Returns:
        ``model``.

    Raises:
        TypeError: ``config`` is no QSDPConfig, or ``model`` is FSDP1.
        ValueError: ``model`` is not wrapped, has a module with several parameter groups or another
            custom collective, a pattern matches no parameter, or ranks disagree; on every rank.
    """
    if not isinstance(config, QSDPConfig):
        raise TypeError(
            f'apply_qsdp takes a qsdp.QSDPConfig, e.g. QSDPConfig.preset("w8g8"), got {config!r}'
        )
    error: str | None = None
    units = _units(model)
    try:
        quantized = _quantized_names(units, config)
    except ValueError as raised:
        error, quantized = str(raised), set()
    facts = _facts(config, units, quantized)
    groups = {group: unit.device for unit in units for group in unit.all_groups}
    for group, device in groups.items():
        require_agreement(facts, error, group, device)
    remove_qsdp(model)
    for unit in units:
        unit.quantized = tuple(name in quantized for name in unit.names)
        if config.weights is not None:
            key = derive_key(config.seed, _WEIGHTS, unit.index)
            unit.module.set_custom_all_gather(QuantizedAllGather(unit, config.weights, key))
        if config.gradients is not None:
            key = derive_key(config.seed, _GRADIENTS, unit.index, dist.get_rank())
            unit.module.set_custom_reduce_scatter(
                QuantizedReduceScatter(unit, config.gradients, key)
            )
    return model


def remove_qsdp(model: nn.Module) -> nn.Module:
    """Put FSDP2's own collectives back wherever qsdp replaced them; nothing else changes."""
    for unit in _units(model):
        if isinstance(comm := unit.fsdp_group._all_gather_comm, _AllGatherComm):
            unit.module.set_custom_all_gather(comm.stock)
        if isinstance(scatter := unit.fsdp_group._reduce_scatter_comm, _ReduceScatterComm):
            unit.module.set_custom_reduce_scatter(scatter.stock)
    return model


def observe_comms(model: nn.Module) -> nn.Module:
    """Count bytes and times of FSDP2's own collectives too, without changing what they do.

    Applies to every direction that :func:`apply_qsdp` left alone, so that :func:`comm_stats` is
    complete; :func:`remove_qsdp` takes it off. Returns ``model``.
    """
    for unit in _units(model):
        if not isinstance(unit.fsdp_group._all_gather_comm, _AllGatherComm):
            unit.module.set_custom_all_gather(_AllGatherComm(unit))
        if not isinstance(unit.fsdp_group._reduce_scatter_comm, _ReduceScatterComm):
            unit.module.set_custom_reduce_scatter(_ReduceScatterComm(unit))
    return model


def comm_stats(model: nn.Module, reset: bool = False) -> CommStats:
    """What this rank sent and received since the model was set up or the last reset.

    Covers the collectives that qsdp installed; see :func:`observe_comms` for the others.

    Args:
        reset: start counting again from zero.

    Raises:
        ValueError: nothing of qsdp is installed on ``model``.
    """
    total, found = CommStats(), False
    for unit in _units(model):
        gather, scatter = unit.fsdp_group._all_gather_comm, unit.fsdp_group._reduce_scatter_comm
        if isinstance(gather, _AllGatherComm):
            found, total = True, total + _read(gather.meter, "all_gather", reset)
        if isinstance(scatter, _ReduceScatterComm):
            found, total = True, total + _read(scatter.meter, "reduce_scatter", reset)
    if not found:
        raise ValueError(
            "comm_stats found no collective of qsdp on this model: call apply_qsdp (with weights "
            "or gradients quantized) or observe_comms on it first"
        )
    return total


@dataclass
class Unit:
    """One FSDP parameter group: what communicates together.

    Attributes:
        index: position among the model's units, equal on all ranks.
        module: a module to set comms on.
        aliases: names of each parameter, the first one its own, in the flat buffer's order.
        quantized: which of them are quantized, once a configuration is applied.
    """

    index: int
    module: FSDPModule
    fsdp_group: FSDPParamGroup
    aliases: tuple[tuple[str, ...], ...]
    quantized: tuple[bool, ...] = ()
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
    def all_groups(self) -> list[dist.ProcessGroup]:
        """The group of the shards, and with HSDP that of the replicas."""
        mesh_info = self.fsdp_group.mesh_info
        if isinstance(mesh_info, HSDPMeshInfo):
            return [self.group, mesh_info.replicate_process_group]
        return [self.group]

    @property
    def device(self) -> torch.device:
        device = self.fsdp_group.device
        assert isinstance(device, torch.device)
        return device

    def all_gather_layout(self, numel: int, quantizer: Quantizer, dtype: torch.dtype) -> WireLayout:
        """Layout of one rank's all-gather input: every parameter's padded shard, in order."""
        segments = self._segments(range(len(self.params)), quantizer)
        layout = wire_layout(segments, dtype)
        assert layout.numel == numel, f"FSDP sends {numel} values, its parameters {layout.numel}"
        return layout

    def reduce_scatter_layout(
        self, numel: int, quantizer: Quantizer, dtype: torch.dtype
    ) -> WireLayout | None:
        """Layout of one rank's part of the reduce-scatter input, or None if it is ambiguous.

        FSDP2 reduces the parameters that got a gradient, and does not say which. All that are
        trainable is the normal case; otherwise every choice whose sizes add up is considered, and
        choices with the same sequence of segments count as one.
        """
        trainable = tuple(
            i for i, param in enumerate(self.params) if param.sharded_param.requires_grad
        )
        key = (trainable, numel, quantizer, dtype)
        if key not in self.layouts:
            segments = self._segments(trainable, quantizer)
            found = subsequences_of_size(segments, numel)
            self.layouts[key] = wire_layout(found[0], dtype) if len(found) == 1 else None
        return self.layouts[key]

    def _segments(self, indices: Sequence[int], quantizer: Quantizer) -> tuple[Segment, ...]:
        sizes = [self.params[i].padded_sharded_param_size.numel() for i in indices]
        return tuple(
            quantizer.segment(size) if self.quantized[i] else Segment(size)
            for i, size in zip(indices, sizes, strict=True)
        )


class _AllGatherComm(AllGather):
    """FSDP2's own all-gather, counted and timed."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.stock: AllGather = unit.fsdp_group._all_gather_comm
        self.meter = CommMeter()

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.stock.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        num_bytes = input_tensor.numel() * input_tensor.element_size()
        _count_stock(self.meter, num_bytes, group)
        with self.meter.phase("network", input_tensor.device):
            return self.stock(output_tensor, input_tensor, group, async_op)


class _ReduceScatterComm(ReduceScatter):
    """FSDP2's own reduce-scatter, counted and timed."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.stock: ReduceScatter = unit.fsdp_group._reduce_scatter_comm
        self.meter = CommMeter()

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.stock.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        _count_stock(self.meter, output_tensor.numel() * output_tensor.element_size(), group)
        with self.meter.phase("network", input_tensor.device):
            return self.stock(output_tensor, input_tensor, group, op, async_op)


class QuantizedAllGather(_AllGatherComm):
    """All-gather of quantized weights.

    Equal weights give equal wire bytes however often they are gathered (see philox.py), so forward,
    backward and all micro-batches between two optimizer steps see the same decoded weights.
    """

    def __init__(self, unit: Unit, quantizer: Quantizer, key: int) -> None:
        super().__init__(unit)
        self.quantizer, self.key = quantizer, key

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return pool.take(int(size[0]), dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        # Another group: with reshard_after_forward=<int> the backward gather runs on a smaller
        # one, over values that the forward decoded. Quantizing those again would change them.
        # Another dtype: uint8 is a buffer that somebody else has packed.
        if group is not self.unit.group or input_tensor.dtype not in VALUE_DTYPES:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        layout = self.unit.all_gather_layout(
            input_tensor.numel(), self.quantizer, input_tensor.dtype
        )
        return all_gather_quantized(
            output_tensor,
            input_tensor,
            group,
            quantizer=layout,
            key=self.key,
            async_op=async_op,
            meter=self.meter,
        )


class QuantizedReduceScatter(_ReduceScatterComm):
    """Reduce-scatter of quantized gradients."""

    def __init__(self, unit: Unit, quantizer: Quantizer, key: int) -> None:
        super().__init__(unit)
        self.quantizer, self.key = quantizer, key

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return pool.take(int(size[0]), dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        layout = None
        if input_tensor.dtype in VALUE_DTYPES:
            layout = self.unit.reduce_scatter_layout(
                output_tensor.numel(), self.quantizer, input_tensor.dtype
            )
        if layout is None:
            # Every rank takes this branch together: it follows from sizes and dtypes alone.
            _warn_full_precision(self.unit, input_tensor)
            layout = wire_layout((Segment(output_tensor.numel()),), input_tensor.dtype)
            if input_tensor.dtype not in VALUE_DTYPES:
                return super().__call__(output_tensor, input_tensor, group, op, async_op)
        return reduce_scatter_quantized(
            output_tensor,
            input_tensor,
            group,
            quantizer=layout,
            op=op,
            key=self.key,
            async_op=async_op,
            meter=self.meter,
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


def _units(model: nn.Module) -> list[Unit]:
    """Every FSDP parameter group of ``model`` once, in module order.

    Raises:
        TypeError, ValueError: a model that qsdp cannot work on, and why.
    """
    if isinstance(model, FullyShardedDataParallel):
        raise TypeError(
            "qsdp works on FSDP2 and this model is wrapped with FSDP1's FullyShardedDataParallel: "
            "wrap it with torch.distributed.fsdp.fully_shard instead"
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
            _check_group(path or "(root)", group)
            aliases = tuple(_aliases(p, paths) for p in group.fsdp_params)
            units.append(Unit(len(units), module, group, aliases))
    if not units:
        raise ValueError(
            "apply_qsdp found no FSDP2 module in this model: call "
            "torch.distributed.fsdp.fully_shard on its blocks and on the model first"
        )
    return units


def _check_group(path: str, group: FSDPParamGroup) -> None:
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        raise ValueError(
            f"module {path} is replicated, not sharded: qsdp quantizes fully_shard's collectives, "
            "and replicate has none of them"
        )
    comms = (group._all_gather_comm, group._reduce_scatter_comm)
    known = (_AllGatherComm, _ReduceScatterComm, DefaultAllGather, DefaultReduceScatter)
    for comm in comms:
        if not isinstance(comm, known):
            raise ValueError(
                f"module {path} already has the custom collective {type(comm).__name__}: do not "
                "combine qsdp with set_custom_all_gather, set_custom_reduce_scatter, "
                "set_symm_mem_for_comm or set_allocate_memory_from_process_group_for_comm"
            )


def _quantized_names(units: list[Unit], config: QSDPConfig) -> set[str]:
    """Names of the parameters to quantize, by shape and by ``config``'s patterns.

    Raises:
        ValueError: a pattern that matches no parameter.
    """
    every = [alias for unit in units for aliases in unit.aliases for alias in aliases]
    for pattern in config.keep_full_precision:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise ValueError(
                f"QSDPConfig(keep_full_precision=...): {pattern!r} matches no parameter; the "
                f"model has {len(every)}, such as {', '.join(every[:3])}"
            )
    quantized = set()
    for unit in units:
        for aliases, fsdp_param in zip(unit.aliases, unit.params, strict=True):
            param = fsdp_param.sharded_param
            kept = any(fnmatchcase(a, p) for a in aliases for p in config.keep_full_precision)
            if param.ndim > 1 and param.numel() >= config.min_numel and not kept:
                quantized.add(aliases[0])
    return quantized


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


def _facts(config: QSDPConfig, units: list[Unit], quantized: set[str]) -> dict[str, Any]:
    """What must be equal on all ranks, as JSON values."""
    parameters = {
        name: f"{tuple(param.sharded_param.shape)} "
        f"{'quantized' if name in quantized else 'in full precision'}"
        for unit in units
        for name, param in zip(unit.names, unit.params, strict=True)
    }
    return {
        "torch": torch.__version__,
        "QSDPConfig": asdict(config),
        "parameters": parameters,
        "number of FSDP modules": len(units),
    }


def _count_stock(meter: CommMeter, row_bytes: int, group: dist.ProcessGroup) -> None:
    moved = row_bytes * (dist.get_world_size(group) - 1)
    meter.count(sent=moved, received=moved, stock=moved)


def _read(meter: CommMeter, collective: str, reset: bool) -> CommStats:
    stats = CommStats(
        **{f"{collective}_sent": meter.sent, f"{collective}_received": meter.received},
        **{f"stock_{collective}": meter.stock},
        encode_s=meter.seconds("encode"),
        decode_s=meter.seconds("decode"),
        network_s=meter.seconds("network"),
    )
    if reset:
        meter.reset()
    return stats


def _warn_full_precision(unit: Unit, buffer: torch.Tensor) -> None:
    warnings.warn(
        f"qsdp: gradients of {unit.names[0]} and {len(unit.names) - 1} more travel in full "
        f"precision: FSDP2 reduces {buffer.numel()} values of {buffer.dtype}, and which parameters "
        "these are is not clear",
        stacklevel=3,
    )
