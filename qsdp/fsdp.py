"""The adapter to FSDP2: installs quantized collectives on a model wrapped by `fully_shard`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qsdp.agreement import require_agreement
from qsdp.comms import (
    ObservedAllGather,
    ObservedReduceScatter,
    QuantizedAllGather,
    QuantizedAllReduce,
    QuantizedReduceScatter,
)
from qsdp.config import QSDPConfig
from qsdp.differences import DifferenceAllGather
from qsdp.kernels.philox import derive_key
from qsdp.learning import LevelLearner
from qsdp.stats import CommStats
from qsdp.two_level import NodeGroups, check_node_size, make_node_groups
from qsdp.units import DefaultAllGather, DefaultReduceScatter, Unit, find_units

_WEIGHTS, _GRADIENTS, _ALL_REDUCE = 0, 1, 2  # for keys


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
        _check_topology(units, config)
    except ValueError as raised:
        error, quantized = str(raised), set()
    facts = _facts(config, units, quantized)
    groups = {group: unit.device for unit in units for group in unit.all_groups}
    for group, device in groups.items():
        require_agreement(facts, error, group, device)
    remove_qsdp(model)
    for unit in units:
        _plan(unit, config)
        _install(unit, config)
    return model


def _plan(unit: Unit, config: QSDPConfig) -> None:
    """Write down how each parameter of the unit travels."""
    named = [(a, p.sharded_param) for a, p in zip(unit.aliases, unit.params, strict=True)]
    unit.quantizers = {
        direction: tuple(config.quantizer(direction, names, param) for names, param in named)
        for direction in ("weights", "gradients", "intra_node", "all_reduce")
    }
    unit.checksum = config.verify
    unit.learned.clear()
    unit.layouts.clear()


def _install(unit: Unit, config: QSDPConfig) -> None:
    """Set the unit's comms; a direction that nothing is quantized in keeps FSDP2's own."""
    nodes = None
    if config.intra_node is not None:
        nodes = _node_groups(unit.group, config.intra_node.ranks)
    planned = unit.quantizers
    learns = any(q is not None and q.learns for d in planned.values() for q in d)
    learner = LevelLearner(unit, config.level_schedule) if learns else None
    if config.weights is not None or any(planned["weights"]):
        key = derive_key(config.seed, _WEIGHTS, unit.index)
        unit.module.set_custom_all_gather(
            DifferenceAllGather(unit, key, nodes, config.weight_memory)
            if config.weight_mode == "difference"
            else QuantizedAllGather(unit, key, nodes, learner)
        )
    # A learner counts reduce-scatters, also where those travel raw.
    if config.gradients is not None or any(planned["gradients"]) or learner is not None:
        key = derive_key(config.seed, _GRADIENTS, unit.index, dist.get_rank())
        unit.module.set_custom_reduce_scatter(
            QuantizedReduceScatter(unit, key, nodes, learner, config.error_feedback)
        )
    if config.all_reduce is not None:
        # Equal on all replicas of a shard: they must agree on the bits of the final gather.
        key = derive_key(config.seed, _ALL_REDUCE, unit.index, dist.get_rank(unit.group))
        unit.module.set_all_reduce_hook(QuantizedAllReduce(unit, key))
        unit.hide_replicas()


@lru_cache(maxsize=64)
def _node_groups(group: dist.ProcessGroup, ranks: int) -> NodeGroups:
    """Made once for a group: applying a configuration again makes no new groups."""
    return make_node_groups(group, ranks)


def remove_qsdp(model: nn.Module) -> nn.Module:
    """Put FSDP2's own collectives back wherever qsdp replaced them; nothing else changes.

    Modules that are still unsharded (the root, after a forward without backward) are resharded, so
    that the next forward gathers anew. Returns ``model``.
    """
    for unit in find_units(model):
        unit.module.reshard()
        if isinstance(comm := unit.fsdp_group._all_gather_comm, ObservedAllGather):
            unit.module.set_custom_all_gather(comm.stock)
        if isinstance(scatter := unit.fsdp_group._reduce_scatter_comm, ObservedReduceScatter):
            unit.module.set_custom_reduce_scatter(scatter.stock)
        if isinstance(unit.fsdp_group._all_reduce_hook, QuantizedAllReduce):
            unit.fsdp_group._all_reduce_hook = None
            unit.show_replicas()
    return model


def observe_comms(model: nn.Module) -> nn.Module:
    """Count bytes and times of FSDP2's own collectives too, without changing what they do.

    Applies to every direction that :func:`apply_qsdp` left alone, so that :func:`comm_stats` is
    complete; :func:`remove_qsdp` takes it off. Returns ``model``.
    """
    units = find_units(model)
    _check_comms(units)
    for unit in units:
        if not isinstance(unit.fsdp_group._all_gather_comm, ObservedAllGather):
            unit.module.set_custom_all_gather(ObservedAllGather(unit))
        if not isinstance(unit.fsdp_group._reduce_scatter_comm, ObservedReduceScatter):
            unit.module.set_custom_reduce_scatter(ObservedReduceScatter(unit))
    return model


def is_quantized(model: nn.Module) -> bool:
    """Whether :func:`apply_qsdp` has replaced a collective of ``model``."""
    return any(
        isinstance(unit.fsdp_group._all_gather_comm, QuantizedAllGather)
        or isinstance(unit.fsdp_group._reduce_scatter_comm, QuantizedReduceScatter)
        or isinstance(unit.fsdp_group._all_reduce_hook, QuantizedAllReduce)
        for unit in find_units(model)
    )


def comm_stats(model: nn.Module, reset: bool = False) -> CommStats:
    """What this rank sent and received since the model was set up or the last reset.

    Covers the collectives that qsdp installed; see :func:`observe_comms` for the others.

    Args:
        reset: start counting again from zero.

    Raises:
        ValueError: nothing of qsdp is installed on ``model``, or only on a part of it.
    """
    found = []
    units = find_units(model)
    _check_complete(units)
    for unit in units:
        gather, scatter = unit.fsdp_group._all_gather_comm, unit.fsdp_group._reduce_scatter_comm
        hook = unit.fsdp_group._all_reduce_hook
        if isinstance(gather, ObservedAllGather):
            found.append(_read(gather, "all_gather", reset))
        if isinstance(scatter, ObservedReduceScatter):
            found.append(_read(scatter, "reduce_scatter", reset))
        if isinstance(hook, QuantizedAllReduce):
            found.append(_read(hook, "all_reduce", reset))
    if not found:
        raise ValueError(
            "comm_stats found no collective of qsdp on this model: call apply_qsdp (with weights "
            "or gradients quantized) or observe_comms on it first"
        )
    return sum(found, CommStats())


def _check_complete(units: list[Unit]) -> None:
    """Raises ValueError where ``fully_shard`` came after :func:`apply_qsdp`."""
    for direction in ("_all_gather_comm", "_reduce_scatter_comm"):
        comms = [getattr(unit.fsdp_group, direction) for unit in units]
        if not any(isinstance(c, QuantizedAllGather | QuantizedReduceScatter) for c in comms):
            continue
        for unit, comm in zip(units, comms, strict=True):
            if not isinstance(comm, ObservedAllGather | ObservedReduceScatter):
                raise ValueError(
                    f"module {unit.path} communicates in full precision, because fully_shard "
                    "wrapped it after apply_qsdp: move apply_qsdp below the last fully_shard"
                )


def _check_comms(units: list[Unit]) -> None:
    for unit in units:
        for comm in (unit.fsdp_group._all_gather_comm, unit.fsdp_group._reduce_scatter_comm):
            ours = isinstance(comm, ObservedAllGather | ObservedReduceScatter)
            if not ours and type(comm) not in (DefaultAllGather, DefaultReduceScatter):
                raise ValueError(
                    f"module {unit.path} already has the custom collective {type(comm).__name__}: "
                    "do not combine qsdp with set_custom_all_gather, set_custom_reduce_scatter, "
                    "set_symm_mem_for_comm or set_allocate_memory_from_process_group_for_comm"
                )


def _check_topology(units: list[Unit], config: QSDPConfig) -> None:
    """Raises ValueError where ``config`` asks for nodes or replicas that the model has not."""
    for unit in units:
        if config.intra_node is not None:
            check_node_size(dist.get_world_size(unit.group), config.intra_node.ranks)
        if config.all_reduce is not None and unit.replicate_group is None:
            raise ValueError(
                f"QSDPConfig(all_reduce=...) is for HSDP and module {unit.path} has no replicas: "
                "pass fully_shard a two-dimensional mesh, or set all_reduce=None"
            )
        hook = unit.fsdp_group._all_reduce_hook
        if config.all_reduce is not None and hook and not isinstance(hook, QuantizedAllReduce):
            raise ValueError(
                f"module {unit.path} already has an all-reduce hook: do not combine "
                "QSDPConfig(all_reduce=...) with set_all_reduce_hook"
            )


def _quantized_names(units: list[Unit], config: QSDPConfig) -> set[str]:
    """Names of the parameters to quantize, by shape and by ``config``'s patterns.

    Raises:
        ValueError: a pattern that matches no parameter.
    """
    config.require_matches([name for unit in units for names in unit.aliases for name in names])
    return {
        aliases[0]
        for unit in units
        for aliases, fsdp_param in zip(unit.aliases, unit.params, strict=True)
        if config.quantizes(aliases, fsdp_param.sharded_param)
    }


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
        "QSDPConfig": config.to_json(),
        "parameters": parameters,
        "number of FSDP modules": len(units),
    }


def _read(
    comm: ObservedAllGather | ObservedReduceScatter | QuantizedAllReduce, name: str, reset: bool
) -> CommStats:
    meter = comm.meter
    stats = CommStats(
        **{f"{name}_sent": meter.sent, f"{name}_received": meter.received},
        **{f"stock_{name}": meter.stock},
        inter_node_sent=meter.inter_node,
        encode_s=meter.seconds("encode"),
        decode_s=meter.seconds("decode"),
        network_s=meter.seconds("network"),
    )
    if reset:
        meter.reset()
    return stats
