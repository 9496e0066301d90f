"""The adapter to FSDP2: installs quantized collectives on a model wrapped by `fully_shard`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qsdp.agreement import require_agreement
from qsdp.buffers import pool
from qsdp.collectives import ReduceOp, all_gather_quantized, reduce_scatter_quantized
from qsdp.config import QSDPConfig
from qsdp.kernels import VALUE_DTYPES
from qsdp.kernels.philox import derive_key
from qsdp.quantizer import Quantizer
from qsdp.stats import CommMeter, CommStats
from qsdp.units import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ReduceScatter,
    Unit,
    find_units,
)
from qsdp.wire import Segment, wire_layout

_WEIGHTS, _GRADIENTS = 0, 1  # directions, for keys


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
    units = find_units(model)
    _check_comms(units)
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
    """Put FSDP2's own collectives back wherever qsdp replaced them; nothing else changes.

    Modules that are still unsharded (the root, after a forward without backward) are resharded, so
    that the next forward gathers anew. Returns ``model``.
    """
    for unit in find_units(model):
        unit.module.reshard()
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
    units = find_units(model)
    _check_comms(units)
    for unit in units:
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
    for unit in find_units(model):
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


def _check_comms(units: list[Unit]) -> None:
    for unit in units:
        for comm in (unit.fsdp_group._all_gather_comm, unit.fsdp_group._reduce_scatter_comm):
            ours = isinstance(comm, _AllGatherComm | _ReduceScatterComm)
            if not ours and type(comm) not in (DefaultAllGather, DefaultReduceScatter):
                raise ValueError(
                    f"module {unit.path} already has the custom collective {type(comm).__name__}: "
                    "do not combine qsdp with set_custom_all_gather, set_custom_reduce_scatter, "
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
