"""What one FSDP parameter group sends in each direction, and what it remembers for that."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from qsdp.config import QSDPConfig
from qsdp.exchange import NodeGroups, node_groups
from qsdp.kernels.philox import derive_key
from qsdp.levels import Learnable, LevelLearner
from qsdp.memory import Keeping, KeptWeights, Residuals
from qsdp.param_group import ParamGroup
from qsdp.ways import (
    Differences,
    Direction,
    Feedback,
    Way,
    quantizer_of,
    row_layout,
    schedule_of,
)
from qsdp.wire import VALUE_DTYPES, Segment, WireLayout

_WEIGHTS, _GRADIENTS, _REPLICAS = 0, 1, 2  # for keys; DDP's is 3


@dataclass
class Part:
    """What is gathered in one dtype: all of a unit, but for units of several dtypes.

    Attributes:
        indices: of the parameters.
        dtype: of their values.
        kept: what is kept of them, where a parameter travels as differences.
    """

    indices: tuple[int, ...]
    dtype: torch.dtype
    kept: KeptWeights | None


class Unit:
    """The plan of one parameter group: ways, layouts, tables, memory. Made when qsdp is applied.

    Attributes:
        handle: of the parameter group.
        ways: of each parameter, in the flat buffer's order.
        nodes: for two-level collectives; None for flat ones.
        learner: tables of levels and their clock.
        residuals: of gradients, for error feedback.
        replica_residuals: of the all-reduce between replicas: of what this rank contributes, and of
            the sums that it forwards.
        weights_key, gradients_key, replicas_key: of the random rounding.

    Args:
        exact: patterns of parameters that this model wants in full precision.
    """

    def __init__(self, handle: ParamGroup, config: QSDPConfig, exact: Iterable[str] = ()) -> None:
        self.handle, self.config = handle, config
        named = zip(handle.aliases, handle.shapes, handle.holds_payload, strict=True)
        self.ways = [
            config.ways_of(names, () if payload else shape, exact)
            for names, shape, payload in named
        ]
        self.nodes: NodeGroups | None = None
        if config.ranks_per_node is not None:
            self.nodes = node_groups(handle.group, config.ranks_per_node)
        self.learner = LevelLearner()
        self.residuals, self.replica_residuals = Residuals(), (Residuals(), Residuals())
        self.weights_key = derive_key(config.seed, _WEIGHTS, handle.index)
        self.gradients_key = derive_key(config.seed, _GRADIENTS, handle.index, dist.get_rank())
        # Equal on all replicas of a shard: they must agree on the bits of the final gather.
        own_shard = handle.group.rank()
        self.replicas_key = derive_key(config.seed, _REPLICAS, handle.index, own_shard)
        self._reduced: tuple[int, ...] = ()
        self._parts: dict[tuple[torch.dtype, ...], list[Part]] = {}
        self._layouts: dict[tuple[Direction, tuple[int, ...], torch.dtype], WireLayout] = {}

    @property
    def everything(self) -> tuple[int, ...]:
        """Indices of all parameters."""
        return tuple(range(len(self.ways)))

    def quantizes(self, direction: Direction) -> bool:
        """Whether a parameter is quantized in this direction."""
        return any(ways[direction] is not None for ways in self.ways)

    @property
    def learns(self) -> bool:
        """Whether levels are learned in a direction."""
        return any(self.learnable(d, i) for d in ("weights", "gradients") for i in self.everything)

    def why_not(self, direction: Direction, dtypes: Sequence[torch.dtype]) -> str:
        """Why parameters of this unit are not quantized in a direction; empty if all are.

        Args:
            dtypes: that the parameters are gathered in.
        """
        sizes = self.handle.shapes
        left_out = [i for i in self.everything if self.way(direction, i) is None]
        if not set(dtypes) <= set(VALUE_DTYPES):
            return f"{', '.join(sorted(map(str, set(dtypes))))} cannot be quantized"
        vectors = [i for i in left_out if self.config.is_vector(sizes[i])]
        others = [self.handle.names[i] for i in left_out if i not in vectors]
        reasons = ["vectors and parameters below min_numel are exact"] if vectors else []
        if others:
            reasons.append(f"exact by name or exception: {', '.join(others[:3])}")
        return "; ".join(reasons)

    def way(self, direction: Direction, index: int) -> Way:
        """How a parameter travels."""
        return self.ways[index][direction]

    def learnable(self, direction: Direction, index: int) -> Learnable | None:
        """What the learner needs to know of a parameter; None where its levels are not learned."""
        way = self.way(direction, index)
        quantizer, schedule = quantizer_of(way), schedule_of(way)
        if quantizer is None or schedule is None:
            return None
        return Learnable(direction, self.handle.names[index], quantizer, schedule)

    def layout(
        self, direction: Direction, indices: tuple[int, ...], dtype: torch.dtype
    ) -> WireLayout:
        """Layout of one rank's values of some parameters."""
        key = (direction, indices, dtype)
        if key not in self._layouts:
            sizes, names = self.handle.shard_numels, self.handle.names
            self._layouts[key] = row_layout(
                [sizes[i] for i in indices],
                [self.way(direction, i) for i in indices],
                direction,
                dtype,
                self.config.verify,
                [self.learner.tables.get((direction, names[i])) for i in indices],
            )
        return self._layouts[key]

    def raw_layout(self, numel: int, dtype: torch.dtype) -> WireLayout:
        """Layout of as many values in full precision."""
        return row_layout([numel], [None], "weights", dtype, self.config.verify)

    def before_reduction(self, indices: tuple[int, ...]) -> None:
        """Take note of the parameters whose gradients are about to be reduced."""
        self._reduced = indices
        self.learner.reductions += 1

    def reduced(self, numel: int) -> tuple[int, ...] | None:
        """Indices of the parameters whose gradients are being reduced.

        Args:
            numel: of one rank's part of them.

        None, with a warning, where FSDP2 reduces something else than was seen.
        """
        sizes = self.handle.shard_numels
        if sum(sizes[i] for i in self._reduced) == numel:
            return self._reduced
        warnings.warn(
            f"qsdp: gradients of module {self.handle.path} travel in full precision: FSDP2 reduces "
            f"{numel} values a rank, which are not those of the parameters with a gradient",
            stacklevel=3,
        )
        return None

    def learn(
        self, direction: Direction, indices: Sequence[int], rows: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Learn new levels from ``rows`` (num_rows, numel) of these parameters, where it is due."""
        spans = self.layout(direction, tuple(indices), dtype).spans
        candidates = [
            (learnable, rows[:, span.values])
            for index, span in zip(indices, spans, strict=True)
            if (learnable := self.learnable(direction, index)) is not None
        ]
        if candidates and self.learner.learn_if_due(candidates, self.handle.group):
            self._layouts.clear()

    def use_tables(self, learner: LevelLearner) -> None:
        """Take over a learner from a saved state."""
        self.learner = learner
        self._layouts.clear()

    def parts(self, dtype: torch.dtype | None = None, numel: int = 0) -> list[Part]:
        """What is gathered, by dtype.

        Args:
            dtype: of FSDP2's buffer; None for what it is going to be.
            numel: of one rank's part of it.

        None at all for a buffer that somebody else has packed.
        """
        sizes, own = self.handle.shard_numels, self.handle.gather_dtypes
        dtypes = tuple(own) if dtype is None or dtype == torch.uint8 else (dtype,) * len(own)
        packed = sum(size * kind.itemsize for size, kind in zip(sizes, dtypes, strict=True))
        if dtype == torch.uint8 and (packed != numel or len(set(dtypes)) == 1):
            return []
        if not set(dtypes) <= set(VALUE_DTYPES):
            return []
        if dtypes not in self._parts:
            self._parts = {dtypes: [self._part(dtypes, kind) for kind in dict.fromkeys(dtypes)]}
        return self._parts[dtypes]

    def _part(self, dtypes: tuple[torch.dtype, ...], dtype: torch.dtype) -> Part:
        indices = tuple(i for i in self.everything if dtypes[i] == dtype)
        ways = [self.way("weights", i) for i in indices]
        if not any(isinstance(way, Differences) for way in ways):
            return Part(indices, dtype, None)
        sizes, group = self.handle.shard_numels, self.handle.group
        keeping = [_keeping(way, sizes[i]) for way, i in zip(ways, indices, strict=True)]
        device = self.handle.device
        return Part(indices, dtype, KeptWeights(keeping, dtype, group.size(), group.rank(), device))

    def feeds_back(self, direction: Direction, index: int) -> bool:
        """Whether what is lost of a parameter's gradients is added to the next ones."""
        return isinstance(self.way(direction, index), Feedback)

    def residual(self, indices: tuple[int, ...], layout: WireLayout) -> torch.Tensor | None:
        """Of these parameters' gradients, for :func:`qsdp.reduce_scatter_quantized`."""
        names = self._feedback_names("gradients", indices)
        if not any(names):
            return None
        return self.residuals.together(names, layout, self.handle.group.size(), self.handle.device)

    def replica_residual(
        self, indices: tuple[int, ...], pieces: WireLayout, num_replicas: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of these parameters' gradients, for :func:`qsdp.all_reduce_quantized`."""
        names = self._feedback_names("replicas", indices)
        if not any(names):
            return None
        sent, forwarded = self.replica_residuals
        device = self.handle.device
        return (
            sent.together(names, pieces, num_replicas, device),
            forwarded.together(names, pieces, 1, device),
        )

    def _feedback_names(
        self, direction: Direction, indices: tuple[int, ...]
    ) -> tuple[str | None, ...]:
        names = self.handle.names
        return tuple(names[i] if self.feeds_back(direction, i) else None for i in indices)


def _keeping(way: Way, numel: int) -> Keeping:
    """What travels as differences is kept as its way says, all else as it is gathered."""
    if isinstance(way, Differences):
        return Keeping(Segment(numel, way.kept), differences=way.quantizer)
    return Keeping(Segment(numel), differences=None)
