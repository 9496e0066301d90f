"""A model as the planner sees it: its FSDP units by process group, with dtypes and nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from qsdp.config import QSDPConfig
from qsdp.exchange import launched_ranks_per_node
from qsdp.param_group import ParamGroup
from qsdp.plan.sizes import Model, Parameter, unit_rows
from qsdp.plan.transfers import slowest
from qsdp.wire import VALUE_DTYPES


@dataclass(frozen=True)
class Part:
    """What one process group communicates.

    Attributes:
        model: its units; the first is empty where the root belongs to another group.
        dtypes: in which most weights are gathered and their gradients reduced.
        ranks_per_node: ranks of the group in each node, 1 where nodes differ.
    """

    group: dist.ProcessGroup
    device: torch.device
    model: Model
    dtypes: tuple[torch.dtype, torch.dtype]
    ranks_per_node: int

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.group.size()

    @property
    def nodes(self) -> int:
        """That the ranks are on."""
        return self.size // self.ranks_per_node

    @property
    def has_hops(self) -> bool:
        """Whether rows may take two: there are several nodes of several ranks."""
        return self.nodes > 1 and self.ranks_per_node > 1

    @property
    def largest_row(self) -> int:
        """Bytes of one rank's values of the largest unit."""
        itemsize = max(dtype.itemsize for dtype in self.dtypes)
        return itemsize * max(
            sum(parameter.shard_numel(self.size) for parameter in unit) for unit in self.model.units
        )

    @property
    def quantizable(self) -> bool:
        """Whether the kernels take these dtypes."""
        return {*self.dtypes} <= set(VALUE_DTYPES)

    def kept_bytes(self, config: QSDPConfig) -> int:
        """Memory for differences on each rank: rows of all ranks, or of one in each node."""
        hops = self.has_hops and config.ranks_per_node != 1
        found, rows = 0, self.nodes if hops else self.size
        for unit in self.model.units:
            row = unit_rows(unit, self.size, config, *self.dtypes)
            found += rows * row.kept
        return found

    def config_here(self, config: QSDPConfig) -> QSDPConfig:
        """``config`` without the exceptions that match nothing of this part."""
        matching = [pair for pair in config.exceptions if _matches(pair, self.model.names)]
        return replace(config, exceptions=tuple(matching))  # type: ignore[arg-type]


def find_parts(
    model: nn.Module, handles: Sequence[ParamGroup], ranks_per_node: int | None
) -> list[Part]:
    """The model by process groups, in the order of its modules; a collective call.

    Args:
        ranks_per_node: 1 for flat collectives only, None to go by the launcher.
    """
    named = model.named_parameters(remove_duplicate=False)
    trained = {_without_wrappers(name) for name, p in named if p.requires_grad}
    by_group: dict[dist.ProcessGroup, list[ParamGroup]] = {}
    for handle in handles:
        by_group.setdefault(handle.group, []).append(handle)
    return [_part(group, own, trained, ranks_per_node) for group, own in by_group.items()]


def _part(
    group: dist.ProcessGroup,
    handles: Sequence[ParamGroup],
    trained: set[str],
    ranks_per_node: int | None,
) -> Part:
    device = handles[0].device
    per_node = ranks_per_node or launched_ranks_per_node(group)
    # What the launcher says may differ between ranks; then nodes count as unknown to all.
    most, least = slowest((per_node, -per_node), group, device)
    units = [_unit(handle, trained) for handle in handles]
    if handles[0].index or handles[0].path != "(root)":
        units = [(), *units]  # the planner takes the first for the root, which stays gathered
    bits: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    for handle in handles:
        for dtype, numel in zip(handle.gather_dtypes, handle.shard_numels, strict=True):
            bits[dtype, handle.reduce_dtype or dtype] += numel
    return Part(
        group,
        device,
        Model("this model", tuple(units), (1.0,) * len(units)),
        max(bits, key=lambda pair: bits[pair]),
        per_node if most == -least and group.size() % per_node == 0 else 1,
    )


def _unit(handle: ParamGroup, trained: set[str]) -> tuple[Parameter, ...]:
    fields = zip(
        handle.aliases, handle.shapes, handle.shard_numels, handle.holds_payload, strict=True
    )
    return tuple(
        # Payload is opaque: a vector, which is never quantized.
        Parameter(
            names,
            (shape.numel(),) if payload else tuple(shape),
            not trained.isdisjoint(names),
            numel,
        )  # fmt: skip
        for names, shape, numel, payload in fields
    )


def _without_wrappers(name: str) -> str:
    """A parameter's name as parameter groups have it."""
    for part in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name


def _matches(pair: object, names: Iterable[str]) -> bool:
    try:
        QSDPConfig(exceptions=(pair,)).require_matches(list(names))  # type: ignore[arg-type]
    except ValueError:
        return False
    return True
