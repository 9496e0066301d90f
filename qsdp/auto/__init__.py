"""``apply_qsdp(model, "auto")``: measure, predict, choose. docs/networks.md, "It decides".

The planner (:mod:`qsdp.plan`) predicts from what was measured; the core knows nothing of it. So the
public :func:`apply_qsdp` is here, above both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qsdp import fsdp
from qsdp.agreement import require_agreement_in
from qsdp.auto.choose import candidates, choose, predict_ways
from qsdp.auto.decision import STOCK, Decision, Link
from qsdp.auto.parts import Part, find_parts
from qsdp.config import QSDPConfig
from qsdp.exchange import check_node_size
from qsdp.param_group import ParamGroup, find_param_groups
from qsdp.plan.model import Work
from qsdp.plan.transfers import slowest
from qsdp.ways import Ways

__all__ = ["AUTO", "Decision", "Link", "apply_qsdp", "decide"]

AUTO = "auto"

_log = logging.getLogger("qsdp")


def apply_qsdp(model: nn.Module, config: QSDPConfig | str) -> nn.Module:
    """Quantize the communication of every FSDP2 module in ``model``.

    Call it after the last ``fully_shard`` and on every rank: the ranks of each FSDP group compare
    their configurations first. A direction that is None in ``config`` keeps FSDP2's own collective.
    Sharded parameters, optimizer state and state dicts stay in full precision. Calling it again
    replaces the configuration.

    ``"auto"`` applies what :func:`decide` decides, at most two seconds later. Where that is full
    precision, FSDP2's own collectives stay, counted for :func:`qsdp.comm_stats`.

    Args:
        model: contains modules wrapped by ``fully_shard``; modified in place.
        config: equal on all ranks; the name of a preset will do (``"w8g8"``), or ``"auto"``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``config`` is neither, or ``model`` is FSDP1.
        ValueError: ``model`` is not wrapped, has a module with another custom collective, a pattern
            matches no parameter, or ranks disagree; on every rank.
    """
    if config != AUTO:
        return fsdp.apply_qsdp(model, config)
    decision = decide(model)
    fsdp.apply_qsdp(model, decision.config)
    # A script that prints comm_stats is to work whatever was decided.
    return fsdp.observe_comms(model) if decision.name == STOCK else model


def decide(
    model: nn.Module,
    *,
    exceptions: Mapping[str, Ways | str | None] | None = None,
    ranks_per_node: int | None = None,
    micro_batches: int = 1,
    sync_every: bool = False,
) -> Decision:
    """Measure, and decide how ``model`` is to communicate; rank 0 logs one line. Changes nothing.

    A collective call after the last ``fully_shard``. Measures what FSDP2's and qsdp's transfers
    take in the model's FSDP groups, and what the codec takes here, in under two seconds (on
    accelerators kernels are compiled before). Then the planner predicts in how many seconds a step
    communicates, and the shortest way among those that keep the loss wins: full precision, and the
    presets ``w8g8`` and ``w4g4``, in one hop or two where nodes have several ranks. Fewer bits must
    take 5 % off what more bits take. All ranks decide alike, by the slowest.

    What HSDP's replicas send is the same in every way and is not counted. Modules are taken to be
    gathered again in backward, as by FSDP2's default.

    Args:
        exceptions: as of :class:`qsdp.QSDPConfig`, for the result and the prediction.
        ranks_per_node: as of :class:`qsdp.QSDPConfig`; 1 leaves out what takes two hops.
        micro_batches: forwards of an optimizer step.
        sync_every: gradients are reduced after each of them rather than after the last.

    Raises:
        TypeError, ValueError: as :func:`apply_qsdp`, on every rank.
    """
    handles = find_param_groups(model)
    asked: tuple[tuple[str, Ways], ...] = ()
    facts: dict[str, Any] = {}
    error: Exception | None = None
    try:
        fsdp.check_comms(handles)
        base = QSDPConfig(exceptions=exceptions or (), ranks_per_node=ranks_per_node)
        base.require_matches([name for h in handles for names in h.aliases for name in names])
        for handle in handles:
            check_node_size(handle.group.size(), ranks_per_node or 1)
        asked = base.exceptions  # type: ignore[assignment]  # as its constructor leaves them
        facts = fsdp.facts_of(AUTO, handles) | {
            "exceptions for auto": base.to_json()["exceptions"],
            "work for auto": [ranks_per_node, micro_batches, sync_every],
        }
    except (TypeError, ValueError) as raised:
        error = raised
    require_agreement_in(fsdp.groups_of(handles), facts, error)
    work = Work(tokens=0.0, micro_batches=micro_batches, sync_every=sync_every, compute_s=0.0)
    decision = _decide(model, handles, asked, ranks_per_node, work)
    if dist.get_rank() == 0:
        _log.warning("qsdp: %s", decision)
    return decision


def _decide(
    model: nn.Module,
    handles: list[ParamGroup],
    exceptions: tuple[tuple[str, Ways], ...],
    ranks_per_node: int | None,
    work: Work,
) -> Decision:
    began = time.perf_counter()
    parts = [part for part in find_parts(model, handles, ranks_per_node) if part.size > 1]
    if reason := _why_not(parts):
        return Decision(STOCK, QSDPConfig(None, None), {}, None, 0, 0.0, reason)
    ways = candidates(parts, exceptions, ranks_per_node)
    predicted, link = predict_ways(parts, ways, work, fsdp.exact_by_model(model))
    values = [*predicted.values(), -link.mbit_per_s, link.latency_ms, time.perf_counter() - began]
    *seconds, rate, latency_ms, took_s = _slowest_of_all(values, fsdp.groups_of(handles))
    predicted = dict(zip(predicted, seconds, strict=True))
    chosen = choose(ways, predicted)
    return Decision(
        chosen.name,
        chosen.config,
        predicted,
        Link(-rate, latency_ms, link.between_nodes),
        sum(part.kept_bytes(chosen.config) for part in parts),
        took_s,
    )


def _why_not(parts: list[Part]) -> str:
    """Why there is nothing to measure; empty if there is something."""
    if not parts:
        return "every FSDP group has one rank, so nothing is sent"
    if not all(part.quantizable for part in parts):
        kinds = sorted({str(d) for part in parts for d in part.dtypes if not part.quantizable})
        return f"{' and '.join(kinds)} cannot be quantized"
    shapes = [p.shape for part in parts for unit in part.model.units for p in unit]
    if all(QSDPConfig().is_vector(shape) for shape in shapes):
        return "no parameter is large enough to be quantized, or has two dimensions"
    return ""


def _slowest_of_all(
    values: list[float], groups: Mapping[dist.ProcessGroup, torch.device]
) -> list[float]:
    """The maximum over all ranks that share a group, directly or through others.

    Twice over the groups: then it has come from any of a mesh's ranks to any other.
    """
    for _ in range(2):
        for group, device in groups.items():
            values = slowest(values, group, device)
    return values
