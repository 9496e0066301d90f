"""What quantized communication remembers between steps, as copies in one mapping of tensors.

Names of what belongs to one rank end with ``.rankR``, so that torch.distributed.checkpoint, which
takes one tensor a name, keeps all of them. Sizes follow from the model, its configuration and the
number of ranks: a state of a fresh model has the same names and sizes, and can be loaded into.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qsdp.agreement import require_agreement_in
from qsdp.exchange import gather_between
from qsdp.fsdp import groups_of, units_of
from qsdp.levels import Learnable, LevelLearner, uniform_levels
from qsdp.memory import KeptWeights
from qsdp.param_group import find_param_groups
from qsdp.stages import piece_layout
from qsdp.unit import Unit

FORMAT = 4
_NEVER = -1  # as the step of tables that were not learned yet


def comm_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a resumed run needs of communication, for it to equal an uninterrupted one bit for bit.

    Learned levels with their clock (equal on all ranks), and this rank's own rows of weights that
    travel as differences, and residuals of error feedback. Copies; save it on every rank, with
    torch.distributed.checkpoint, ``torch.save`` or safetensors. Empty where qsdp remembers nothing,
    as with values of fixed formats.
    """
    units = [unit for unit in units_of(model) if _remembers(unit)]
    if not units:
        return {}
    state = {"format": torch.tensor([FORMAT, dist.get_world_size()])}
    for unit in units:
        with unit.turns:
            state |= _shared_state(unit) | _own_state(unit)
    return state


def load_comm_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Continue with what :func:`comm_state_dict` gave; a collective call, on every rank.

    Call it after :func:`qsdp.apply_qsdp`. An empty state changes nothing. A state of another number
    of ranks, or of error feedback where a node had another number of them, gives its levels and
    their clock; weights that travel as differences start with one
    gather in full precision then, and error feedback with nothing, with a warning.

    Raises:
        ValueError: a state of another model, configuration or version, or states that differ
            between ranks in more than their values; on every rank.
    """
    units = [unit for unit in units_of(model) if _remembers(unit)]
    error, same_ranks = None, False
    try:
        same_ranks = _check(state, comm_state_dict(model))
    except ValueError as raised:
        error = raised
    facts = {"communication state": {"names": sorted(map(_without_rank, state))}}
    require_agreement_in(groups_of(find_param_groups(model)), facts, error)
    if not state:
        return
    for unit in units:
        with unit.turns:
            _load_shared(unit, state)
            if same_ranks:
                _load_own(unit, state)
    if not same_ranks and any(_kept(unit) or _feeds_back(unit) for unit in units):
        then, now = int(state["format"][1]), dist.get_world_size()
        difference = (
            f"and here are {now}" if then != now else "with other numbers of them on a node"
        )
        warnings.warn(
            f"qsdp: this state of communication was saved by {then} ranks {difference}: "
            "differences and error feedback start afresh",
            stacklevel=2,
        )


def _remembers(unit: Unit) -> bool:
    clock = unit.learns or unit.config.warmup is not None
    return clock or bool(_kept(unit)) or _feeds_back(unit)


def _kept(unit: Unit) -> dict[str, KeptWeights]:
    """What is kept, by its name in a state."""
    parts, path = unit.parts(), unit.handle.path
    names = [path if len(parts) == 1 else f"{path}.{str(p.dtype)[6:]}" for p in parts]
    return {n: p.kept for n, p in zip(names, parts, strict=True) if p.kept is not None}


def _feeds_back(unit: Unit) -> bool:
    return bool(_blank_residuals(unit))


def _learnables(unit: Unit) -> list[Learnable]:
    directions = ("weights", "gradients")
    found = [unit.learnable(d, i) for d in directions for i in unit.everything]  # type: ignore[arg-type]
    return [learnable for learnable in found if learnable is not None]


def _shared_state(unit: Unit) -> dict[str, torch.Tensor]:
    """Equal on all ranks."""
    learner, path = unit.learner, unit.handle.path
    started = any(kept.started for kept in _kept(unit).values())
    state = {f"progress.{path}": torch.tensor([learner.reductions, int(started)])}
    for item in _learnables(unit):
        table = learner.tables.get(item[:2])
        levels = uniform_levels(item.quantizer.bits) if table is None else table
        state[f"levels.{item.direction}.{item.name}"] = torch.as_tensor(levels, dtype=torch.float64)
        state[f"learned_at.{item.direction}.{item.name}"] = torch.tensor(
            learner.learned_at.get(item[:2], _NEVER)
        )
    return state


def _load_shared(unit: Unit, state: Mapping[str, torch.Tensor]) -> None:
    learner = LevelLearner(int(state[f"progress.{unit.handle.path}"][0]))
    for item in _learnables(unit):
        name = f"{item.direction}.{item.name}"
        learned_at = int(state[f"learned_at.{name}"])
        if learned_at != _NEVER:
            learner.learned_at[item[:2]] = learned_at
            learner.tables[item[:2]] = tuple(state[f"levels.{name}"].tolist())
    unit.use_tables(learner)


def _own_state(unit: Unit) -> dict[str, torch.Tensor]:
    """This rank's own."""
    own: dict[str, torch.Tensor] = {}
    for name, kept in _kept(unit).items():
        own |= {f"{kind}.{name}": value for kind, value in kept.state().items()}
    known = {
        f"{kind}.{name}": residual
        for kind, residuals in _residuals(unit).items()
        for name, residual in residuals.state().items()
    }
    own |= _blank_residuals(unit) | known
    return {f"{name}.rank{dist.get_rank()}": value for name, value in own.items()}


def _load_own(unit: Unit, state: Mapping[str, torch.Tensor]) -> None:
    suffix = f".rank{dist.get_rank()}"
    started = bool(state[f"progress.{unit.handle.path}"][1])
    for name, kept in _kept(unit).items() if started else ():
        kept.restart(*(state[f"{kind}.{name}{suffix}"] for kind in ("kept", "digests", "pace")))
        rows = kept.rows()
        for work in gather_between(rows, unit.gather_route):
            work.wait()
        kept.refill(rows)
    for kind, residuals in _residuals(unit).items():
        names = [name for name in _blank_residuals(unit) if name.startswith(f"{kind}.")]
        device = unit.handle.device
        residuals.load(
            {name.removeprefix(f"{kind}."): state[name + suffix].to(device) for name in names}
        )


def _residuals(unit: Unit) -> dict[str, Any]:
    sent, forwarded = unit.fed_back.replicas
    own = {"residual": unit.fed_back.residuals, "residual_inside": unit.fed_back.inside}
    return own | {"replica_sent": sent, "replica_forwarded": forwarded}


def _blank_residuals(unit: Unit) -> dict[str, torch.Tensor]:
    """Every residual that error feedback may have, by its name in a state, as of a fresh model."""
    handle, sizes, way = unit.handle, unit.handle.shard_numels, unit.reduce_route
    of, found = _residuals(unit), {}

    def add(kind: str, name: str, num_rows: int, numel: int) -> None:
        found[f"{kind}.{name}"] = of[kind].blank(name, num_rows, numel, handle.device)

    for index, name in enumerate(handle.names):
        if unit.fed_back.takes("gradients", index):
            add("residual", name, way.num_nodes if way.two_level else way.size, sizes[index])
            if way.two_level and unit.way("inside_node", index) is not None:
                add("residual_inside", name, way.size, sizes[index])
        if unit.fed_back.takes("replicas", index):
            assert handle.replicate_group is not None
            replicas = handle.replicate_group.size()
            piece = piece_layout(unit.raw_layout(sizes[index], torch.float32), replicas).numel
            add("replica_sent", name, replicas, piece)
            add("replica_forwarded", name, 1, piece)
    return found


def _check(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether the state is of as many ranks, placed on nodes as here.

    Raises:
        ValueError: it is of another model, configuration or version.
    """
    hint = "apply the configuration that it was saved with first"
    if not state:
        return False
    if "format" not in state or int(state["format"][0]) != FORMAT:
        version = int(state["format"][0]) if "format" in state else "none"
        raise ValueError(f"load_comm_state_dict reads format {FORMAT}, got {version}")
    if not expected:
        raise ValueError(
            f"load_comm_state_dict: this model's communication remembers nothing, the state holds "
            f"{sorted(state)[:3]}...: {hint}"
        )
    same_ranks = int(state["format"][1]) == dist.get_world_size() and all(
        _placed_alike(state.get(name), value) for name, value in expected.items() if _rank_of(name)
    )
    wanted = {name: value for name, value in expected.items() if same_ranks or not _rank_of(name)}
    for name, value in wanted.items():
        if name not in state:
            raise ValueError(f"load_comm_state_dict: the state lacks {name!r}: {hint}")
        found = state[name]
        if found.shape != value.shape or found.dtype != value.dtype:
            raise ValueError(
                f"load_comm_state_dict: {name!r} has shape {tuple(found.shape)} of {found.dtype} "
                f"in the state and {tuple(value.shape)} of {value.dtype} in this model: {hint}"
            )
    mine = {_without_rank(name) for name in expected}
    for name in state:
        placed_elsewhere = not same_ranks and name.startswith("residual_inside.")
        if _without_rank(name) not in mine and not placed_elsewhere:
            raise ValueError(f"load_comm_state_dict: this model has no place for {name!r}: {hint}")
    return same_ranks


def _placed_alike(found: torch.Tensor | None, value: torch.Tensor) -> bool:
    """Whether a rank's own tensor is of as many rows as here: their number goes by the nodes.

    What differs in more than that is of another configuration, and not decided here.
    """
    if found is None or found.ndim != value.ndim or value.ndim < 2:
        return True
    return len(found) == len(value) or found.shape[1:] != value.shape[1:]


def _rank_of(name: str) -> str:
    stem, _, last = name.rpartition(".rank")
    return last if stem and last.isdigit() else ""


def _without_rank(name: str) -> str:
    return name.rpartition(".rank")[0] if _rank_of(name) else name
