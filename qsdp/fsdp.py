"""The adapter to FSDP2: installs quantized collectives on a model wrapped by `fully_shard`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qsdp.agreement import require_agreement_in
from qsdp.comms import (
    ObservedAllGather,
    ObservedReduceScatter,
    QuantizedAllGather,
    QuantizedAllReduce,
    QuantizedReduceScatter,
)
from qsdp.config import QSDPConfig
from qsdp.exchange import check_node_size
from qsdp.param_group import (
    DefaultAllGather,
    DefaultReduceScatter,
    ParamGroup,
    find_param_groups,
)
from qsdp.stats import CommMeter, CommStats, ModuleStats
from qsdp.unit import Unit
from qsdp.ways import Direction, Way, way_name

_log = logging.getLogger("qsdp")
_SHARDED_BYTES = 12  # of a parameter: float32, and two averages of AdamW

# And the direction that each carries.
_COLLECTIVES: dict[str, Direction] = {
    "all_gather": "weights",
    "reduce_scatter": "gradients",
    "all_reduce": "replicas",
}


def apply_qsdp(model: nn.Module, config: QSDPConfig | str) -> nn.Module:
    """Quantize the communication of every FSDP2 module in ``model``.

    Call it after the last ``fully_shard`` and on every rank: the ranks of each FSDP group compare
    their configurations first. A direction that is None in ``config`` keeps FSDP2's own collective.
    Sharded parameters, optimizer state and state dicts stay in full precision. Calling it again
    replaces the configuration.

    Args:
        model: contains modules wrapped by ``fully_shard``; modified in place.
        config: equal on all ranks; the name of a preset will do (``"w8g8"``).

    Returns:
        ``model``.

    Raises:
        TypeError: ``config`` is neither, or ``model`` is FSDP1.
        ValueError: ``model`` is not wrapped, has a module with several parameter groups or another
            custom collective, a pattern matches no parameter, or ranks disagree; on every rank.
    """
    handles = find_param_groups(model)
    facts: dict[str, Any] = {}
    error: Exception | None = None
    try:
        check_comms(handles)
        config = QSDPConfig.of(config, "apply_qsdp")
        config.require_matches([name for h in handles for names in h.aliases for name in names])
        _check_topology(handles, config)
        facts = facts_of(config.to_json(), handles)
    except (TypeError, ValueError) as raised:
        error = raised
    require_agreement_in(groups_of(handles), facts, error)
    assert isinstance(config, QSDPConfig)
    remove_qsdp(model)
    exact = exact_by_model(model)
    units = [Unit(handle, config, exact) for handle in handles]
    for unit in units:
        _install(unit)
        unit.warm_up()
    _warn_of_nothing(units, config)
    _tell_of_nodes(units, config)
    _tell_of_memory(units)
    return model


def _install(unit: Unit) -> None:
    """Set the unit's comms; a direction that nothing is quantized in keeps FSDP2's own."""
    handle, config = unit.handle, unit.config
    handle.attach(unit)
    handle.watch_reductions(unit.before_reduction)
    if config.weights is not None or unit.quantizes("weights"):
        handle.set_all_gather(QuantizedAllGather(unit))
    if config.gradients is not None or unit.quantizes("gradients"):
        handle.set_reduce_scatter(QuantizedReduceScatter(unit))
    if config.replicas is not None:
        handle.set_all_reduce_hook(QuantizedAllReduce(unit))


def remove_qsdp(model: nn.Module) -> nn.Module:
    """Put FSDP2's own collectives back wherever qsdp replaced them; nothing else changes.

    Modules that are still unsharded (the root, after a forward without backward) are resharded, so
    that the next forward gathers anew. Returns ``model``.
    """
    for handle in find_param_groups(model):
        handle.reshard()
        if isinstance(comm := handle.all_gather_comm, ObservedAllGather):
            handle.set_all_gather(comm.stock)
        if isinstance(scatter := handle.reduce_scatter_comm, ObservedReduceScatter):
            handle.set_reduce_scatter(scatter.stock)
        if isinstance(handle.all_reduce_hook, QuantizedAllReduce):
            handle.set_all_reduce_hook(None)
        handle.watch_reductions(None)
        handle.attach(None)
    return model


def observe_comms(model: nn.Module) -> nn.Module:
    """Count the times of all collectives, and the bytes of FSDP2's own too; changes nothing else.

    Bytes of what :func:`apply_qsdp` installed are always counted. Times cost the host some
    microseconds a call. :func:`remove_qsdp` takes it off. Returns ``model``.
    """
    handles = find_param_groups(model)
    check_comms(handles)
    _check_complete(handles)
    for handle in handles:
        if not isinstance(handle.all_gather_comm, ObservedAllGather):
            handle.set_all_gather(ObservedAllGather(handle))
        if not isinstance(handle.reduce_scatter_comm, ObservedReduceScatter):
            handle.set_reduce_scatter(ObservedReduceScatter(handle))
        for comm in _comms(handle):
            if isinstance(meter := getattr(comm, "meter", None), CommMeter):
                meter.timing = True
    return model


def is_quantized(model: nn.Module) -> bool:
    """Whether :func:`apply_qsdp` has replaced a collective of ``model``.

    Raises:
        ValueError: only in a part of it.
    """
    kinds = QuantizedAllGather | QuantizedReduceScatter | QuantizedAllReduce
    handles = find_param_groups(model)
    _check_complete(handles)
    return any(isinstance(comm, kinds) for handle in handles for comm in _comms(handle))


def comm_stats(model: nn.Module, reset: bool = False) -> CommStats:
    """What this rank sent since the model was set up or the last reset.

    Covers the collectives that qsdp installed; see :func:`observe_comms` for the others, and for
    times. Never waits for the device: what it has not finished is counted later.

    Args:
        reset: start counting again from zero.

    Raises:
        ValueError: nothing of qsdp is installed on ``model``, or only on a part of it.
    """
    handles = find_param_groups(model)
    _check_complete(handles)
    counted = [
        (handle, name, comm)
        for handle in handles
        for name, comm in zip(_COLLECTIVES, _comms(handle), strict=True)
        if isinstance(getattr(comm, "meter", None), CommMeter)
    ]
    if not counted:
        raise ValueError(
            "comm_stats found no collective of qsdp on this model: call apply_qsdp (with weights "
            "or gradients quantized) or observe_comms on it first"
        )
    total = sum((comm.meter.read(name) for _, name, comm in counted), CommStats())
    rows = tuple(_module_stats(handle, name, comm) for handle, name, comm in counted)
    if reset:
        for _, _, comm in counted:
            comm.meter.reset()
    return replace(total, modules=rows)


def _module_stats(handle: ParamGroup, collective: str, comm: Any) -> ModuleStats:
    meter, direction = comm.meter, _COLLECTIVES[collective]
    unit = getattr(comm, "unit", None)
    ways: list[Way] = []
    if unit is not None:
        ways = [unit.way(direction, i) for i in unit.everything if unit.way(direction, i)]
    names = sorted({way_name(way) for way in ways})
    return ModuleStats(
        handle.path,
        collective,
        (len(handle.names), len(ways)),
        ", ".join(names) or ("stock" if unit is None else "full precision"),
        "" if unit is None else unit.why_not(direction, handle.gather_dtypes),
        meter.calls,
        (meter.sent, meter.stock),
        sum(meter.seconds(phase) for phase in ("encode", "network", "decode")),
    )


def groups_of(handles: list[ParamGroup]) -> dict[dist.ProcessGroup, torch.device]:
    """All process groups of a model, and where their backends take tensors."""
    return {group: handle.device for handle in handles for group in handle.all_groups}


def units_of(model: nn.Module) -> list[Unit]:
    """The units that :func:`apply_qsdp` made, in module order; none where it was not called."""
    found = [handle.attachment for handle in find_param_groups(model)]
    return [unit for unit in found if isinstance(unit, Unit)]


def exact_by_model(model: nn.Module) -> list[str]:
    """Patterns of what transformers keeps in float32 in this model."""
    parts: set[str] = set()
    for module in model.modules():
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            parts |= set(getattr(module, name, None) or ())
    return [f"*.{part}.*" for part in sorted(parts)]


def _comms(handle: ParamGroup) -> tuple[Any, Any, Any]:
    return handle.all_gather_comm, handle.reduce_scatter_comm, handle.all_reduce_hook


def _check_complete(handles: list[ParamGroup]) -> None:
    """Raises ValueError where ``fully_shard`` came after :func:`apply_qsdp`."""
    if not any(isinstance(handle.attachment, Unit) for handle in handles):
        return
    for handle in handles:
        if not isinstance(handle.attachment, Unit):
            raise ValueError(
                f"module {handle.path} communicates in full precision, because fully_shard "
                "wrapped it after apply_qsdp: move apply_qsdp below the last fully_shard"
            )


def check_comms(handles: list[ParamGroup]) -> None:
    """Raises ValueError where somebody else has replaced a collective."""
    for handle in handles:
        for comm in (handle.all_gather_comm, handle.reduce_scatter_comm):
            ours = isinstance(comm, ObservedAllGather | ObservedReduceScatter)
            if not ours and type(comm) not in (DefaultAllGather, DefaultReduceScatter):
                raise ValueError(
                    f"module {handle.path} already has the custom collective "
                    f"{type(comm).__name__}: do not combine qsdp with set_custom_all_gather, "
                    "set_custom_reduce_scatter, set_symm_mem_for_comm or "
                    "set_allocate_memory_from_process_group_for_comm"
                )


def _check_topology(handles: list[ParamGroup], config: QSDPConfig) -> None:
    """Raises ValueError where ``config`` asks for nodes or replicas that the model has not."""
    for handle in handles:
        check_node_size(dist.get_world_size(handle.group), config.ranks_per_node or 1)
        if config.replicas is not None and handle.replicate_group is None:
            raise ValueError(
                f"QSDPConfig(replicas=...) is for HSDP and module {handle.path} has no replicas: "
                "pass fully_shard a two-dimensional mesh, or set replicas=None"
            )
        hook = handle.all_reduce_hook
        if config.replicas is not None and hook and not isinstance(hook, QuantizedAllReduce):
            raise ValueError(
                f"module {handle.path} already has an all-reduce hook: do not combine "
                "QSDPConfig(replicas=...) with set_all_reduce_hook"
            )


def _tell_of_nodes(units: list[Unit], config: QSDPConfig) -> None:
    """Two levels that nobody asked for are said once, by one rank."""
    sizes = {unit.gather_route.ranks_per_node for unit in units} - {1}
    if config.ranks_per_node is None and sizes and dist.get_rank() == 0:
        _log.warning(
            "qsdp: collectives take two levels, because nodes hold %s ranks of an FSDP group "
            "(LOCAL_WORLD_SIZE=%s); QSDPConfig(ranks_per_node=1) asks for flat ones",
            " or ".join(map(str, sorted(sizes))),
            os.environ.get("LOCAL_WORLD_SIZE"),
        )


def _tell_of_memory(units: list[Unit]) -> None:
    """What differences keep, where it is more than what FSDP2 shards; once, by one rank."""
    kept = sum(unit.kept_bytes for unit in units)
    numel = sum(sum(unit.sizes) for unit in units)
    if kept > _SHARDED_BYTES * numel and dist.get_rank() == 0:
        _log.warning(
            "qsdp: weights that travel as differences keep %.3g GB on every rank, more than its "
            "shards of parameters and AdamW's state (%.3g GB); less keep QSDPConfig("
            "ranks_per_node=...) on nodes of several ranks, qsdp.Differences(offload=True) on "
            "accelerators, and presets from 5 bits of weights on",
            kept / 1e9,
            _SHARDED_BYTES * numel / 1e9,
        )


def _warn_of_nothing(units: list[Unit], config: QSDPConfig) -> None:
    """What was asked for and cannot act is said once, to the caller of :func:`qsdp.apply_qsdp`."""
    if not any((*config.ways("weights"), *config.ways("gradients"), config.replicas)):
        return
    shapes = [shape for unit in units for shape in unit.handle.shapes]
    if all(config.is_vector(shape) for shape in shapes):
        warnings.warn(
            f"qsdp: nothing in this model is quantized: no parameter has two dimensions and "
            f"{config.min_numel} elements; lower QSDPConfig(min_numel=...)",
            stacklevel=4,
        )
    if config.inside_node and not any(unit.reduce_route.two_level for unit in units):
        warnings.warn(
            "qsdp: QSDPConfig(inside_node=...) has no effect: no FSDP group of this model has "
            "several nodes of several ranks",
            stacklevel=4,
        )
    if all(unit.handle.group.size() == 1 for unit in units):
        warnings.warn(
            "qsdp: every FSDP group of this model has one rank, so nothing is sent and nothing "
            "quantized",
            stacklevel=4,
        )


def facts_of(asked: Mapping[str, Any] | str, handles: list[ParamGroup]) -> dict[str, Any]:
    """What must be equal on all ranks, as JSON values.

    Args:
        asked: a configuration's JSON values, or a word in place of one.
    """
    exceptions = () if isinstance(asked, str) else asked["exceptions"]
    return {
        "torch": torch.__version__,
        "QSDPConfig": asked,
        "order of QSDPConfig.exceptions": list(exceptions),
        "parameters": {
            name: str(tuple(shape))
            for handle in handles
            for name, shape in zip(handle.names, handle.shapes, strict=True)
        },
        "number of FSDP modules": len(handles),
    }
