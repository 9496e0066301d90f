"""What quantized communication remembers between steps, to be saved with a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qsdp.comms import QuantizedAllGather, QuantizedReduceScatter
from qsdp.differences import DifferenceAllGather
from qsdp.learning import LevelLearner
from qsdp.units import Unit, find_units

_FORMAT = 1


def comm_state_dict(model: nn.Module) -> dict[str, Any]:
    """The learned levels and their schedule: JSON values, equal on all ranks.

    Empty where levels are not learned: other configurations remember nothing that a resumed run
    would need, but see :func:`comm_tensors`.
    """
    units = {}
    for unit, learner in _learners(find_units(model)):
        tables: dict[str, dict[str, list[float]]] = {}
        for (direction, name), table in learner.unit.learned.items():
            tables.setdefault(direction, {})[name] = list(table)
        units[unit.path] = {
            "reductions": learner.reductions,
            "learned_at": dict(learner.learned_at),
            "levels": tables,
        }
    return {"format": _FORMAT, "units": units} if units else {}


def load_comm_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """Continue with the levels of :func:`comm_state_dict`, on any number of ranks.

    Call it on every rank after :func:`qsdp.apply_qsdp`. An empty state changes nothing: levels are
    learned as in a new run.

    Raises:
        ValueError: a state of another model, configuration or version.
    """
    if not state:
        return
    if state.get("format") != _FORMAT:
        raise ValueError(
            f"load_comm_state_dict reads format {_FORMAT}, got {state.get('format')!r}"
        )
    learners = {unit.path: learner for unit, learner in _learners(find_units(model))}
    if learners.keys() != state["units"].keys():
        theirs, ours = sorted(state["units"]), sorted(learners)
        raise ValueError(
            f"load_comm_state_dict: the state is of the modules {theirs[:3]}..., this model learns "
            f"levels in {ours[:3]}...: apply the configuration that it was saved with first"
        )
    for path, learner in learners.items():
        saved = state["units"][path]
        for direction, tables in saved["levels"].items():
            known = dict(zip(learner.unit.names, learner.unit.quantizers[direction], strict=True))
            for name, table in tables.items():
                quantizer = known.get(name)
                if quantizer is None or not quantizer.learns or len(table) != 1 << quantizer.bits:
                    raise ValueError(
                        f"load_comm_state_dict: {len(table)} levels for the {direction} of {name}, "
                        f"which this model quantizes by {quantizer}"
                    )
            learner.unit.learn(direction, {name: tuple(t) for name, t in tables.items()})
        learner.reductions, learner.learned_at = saved["reductions"], dict(saved["learned_at"])


def comm_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What differs between ranks: this rank's own tensors, by name; each rank saves its own.

    ``known.PATH`` is this rank's row of the weights that all ranks decoded last, and ``sent.PATH``
    the row that it stands for (``weight_mode="difference"``), ``lost.PATH`` what error feedback
    will add. A resumed run equals an uninterrupted one bit for bit if they are given to
    :func:`load_comm_tensors`; without them it starts with a raw gather, and with no error to feed
    back.
    """
    found: dict[str, torch.Tensor] = {}
    for unit in find_units(model):
        gather, scatter = unit.fsdp_group._all_gather_comm, unit.fsdp_group._reduce_scatter_comm
        if isinstance(gather, DifferenceAllGather):
            found |= {f"{name}.{unit.path}": row for name, row in gather.own_rows().items()}
        if isinstance(scatter, QuantizedReduceScatter) and scatter.lost is not None:
            found[f"lost.{unit.path}"] = scatter.lost
    return found


def load_comm_tensors(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Continue with :func:`comm_tensors` of the same rank of the same number of ranks.

    Raises:
        ValueError: a tensor that this model has no use for.
    """
    units = {unit.path: unit for unit in find_units(model)}
    for name, value in tensors.items():
        kind, _, path = name.partition(".")
        group = units[path].fsdp_group if path in units else None
        gather, scatter = (
            getattr(group, "_all_gather_comm", None),
            getattr(group, "_reduce_scatter_comm", None),
        )
        if kind == "known" and isinstance(gather, DifferenceAllGather):
            gather.start_from(value, tensors.get(f"sent.{path}"))
        elif kind == "sent" and isinstance(gather, DifferenceAllGather):
            pass  # goes with the known row
        elif kind == "lost" and isinstance(scatter, QuantizedReduceScatter):
            scatter.lost = value.clone()
        else:
            raise ValueError(
                f"load_comm_tensors: this model has no place for {name!r}: apply the configuration "
                "that it was saved with first"
            )


def _learners(units: list[Unit]) -> list[tuple[Unit, LevelLearner]]:
    found = []
    for unit in units:
        comms = (unit.fsdp_group._all_gather_comm, unit.fsdp_group._reduce_scatter_comm)
        learners = [
            comm.learner
            for comm in comms
            if isinstance(comm, QuantizedAllGather | QuantizedReduceScatter) and comm.learner
        ]
        found += [(unit, learner) for learner in learners[:1]]
    return found
