"""What one FSDP parameter group sends in each direction, and what it remembers for that."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from qsdp.config import QSDPConfig
from qsdp.exchange import Route, launched_ranks_per_node, route
from qsdp.feedback import FedBack, Reduction
from qsdp.kernels.philox import derive_key
from qsdp.levels import Learnable, LevelLearner
from qsdp.memory import KeptWeights
from qsdp.param_group import ParamGroup
from qsdp.rows import warm_up
from qsdp.streams import Turns
from qsdp.watch import Watch
from qsdp.ways import (
    Differences,
    Direction,
    Way,
    kept_layout,
    quantizer_of,
    row_layout,
    schedule_of,
)
from qsdp.wire import VALUE_DTYPES, WireLayout

_WEIGHTS, _GRADIENTS, _REPLICAS = 0, 1, 2  # for keys; DDP's is 3
_LEARNED_DIRECTIONS: tuple[Direction, ...] = ("weights", "gradients")


@dataclass
class Part:
    """What is gathered in one dtype: all of a unit, but for units of several dtypes.

    Attributes:
        indices: of the parameters.
        dtype: of their values.
        layout: of one rank's row, with the tables of levels as they are now.
        kept: what is kept of them, where a parameter travels as differences.
    """

    indices: tuple[int, ...]
    dtype: torch.dtype
    layout: WireLayout
    kept: KeptWeights | None


class Unit:
    """The plan of one parameter group: ways, layouts, tables, memory. Made when qsdp is applied.

    Attributes:
        handle: of the parameter group.
        ways: of each parameter, in the flat buffer's order.
        gather_route, reduce_route: with whom rows are exchanged, in one hop or two.
        learner: tables of levels and their clock.
        fed_back: what error feedback adds to gradients.
        turns: order between uses of what is remembered.
        watch: whether weights may have changed otherwise than by an optimizer.
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
        self.names, self.sizes = handle.names, tuple(handle.shard_numels)
        self.everything = tuple(range(len(self.ways)))
        self.gather_route, self.reduce_route = self._routes()
        self.learner = LevelLearner()
        self.fed_back = FedBack(self.names, self.ways, handle.device)
        self.turns, self.watch = Turns(handle.device), Watch(handle)
        self.weights_key = derive_key(config.seed, _WEIGHTS, handle.index)
        self.gradients_key = derive_key(config.seed, _GRADIENTS, handle.index, dist.get_rank())
        # Equal on all replicas of a shard: they must agree on the bits of the final gather.
        own_shard = handle.group.rank()
        self.replicas_key = derive_key(config.seed, _REPLICAS, handle.index, own_shard)
        self.learns = any(
            self.learnable(d, i) for d in _LEARNED_DIRECTIONS for i in self.everything
        )
        self._before_reduction: tuple[int, ...] = ()
        self._parts: dict[tuple[torch.dtype, ...], list[Part]] = {}
        self._reductions: dict[tuple[tuple[int, ...], torch.dtype], Reduction] = {}

    def _routes(self) -> tuple[Route, Route]:
        """Of weights and of gradients: two hops where nodes have several ranks of the group."""
        group, device = self.handle.group, self.handle.device
        reduce_group = self.handle.reduce_group
        per_node = self.config.ranks_per_node or launched_ranks_per_node(group)
        return route(group, device, per_node), route(reduce_group, device, per_node)

    def reduces_in(self, group: dist.ProcessGroup) -> bool:
        """Whether ``group`` has the ranks of the shards; gradients are exchanged in it then.

        FSDP2 may give reductions a group of their own at any time, so that they and gathers do not
        wait for each other.
        """
        known = self.reduce_route
        if group is known.group:
            return True
        if tuple(dist.get_process_group_ranks(group)) != known.global_ranks:
            return False
        self.reduce_route = route(group, self.handle.device, known.ranks_per_node)
        return True

    def warm_up(self) -> None:
        """Compile kernels and make tables now, before collectives that have a timeout."""
        gathered, reduced = self.handle.gather_dtypes, self.handle.reduce_dtype
        if self.handle.device.type == "cpu":
            return
        for part in self.parts() if self.quantizes("weights") else ():
            size, device = self.gather_route.size, self.handle.device
            kept = part.kept
            warm_up(part.layout, size, part.dtype, device, kept.layout if kept else None)
        if self.quantizes("gradients") and len({*gathered}) == 1:
            dtype = reduced or gathered[0]
            reductions = [self._later_reduction(self.everything, dtype)]
            if self.warms_up:
                reductions.append(self._warm_reduction(self.everything, dtype))
            for layout in (each for r in reductions for each in (r.layout, r.inside)):
                warm_up(layout, self.reduce_route.size, layout.dtype, self.handle.device)

    def quantizes(self, direction: Direction) -> bool:
        """Whether a parameter is quantized in this direction."""
        return any(ways[direction] is not None for ways in self.ways)

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
        return Learnable(direction, self.names[index], quantizer, schedule)

    def layout(
        self, direction: Direction, indices: tuple[int, ...], dtype: torch.dtype
    ) -> WireLayout:
        """Layout of one rank's values of some parameters."""
        return row_layout(
            [self.sizes[i] for i in indices],
            [self.way(direction, i) for i in indices],
            direction,
            dtype,
            self.config.verify,
            [self.learner.tables.get((direction, self.names[i])) for i in indices],
        )

    def raw_layout(self, numel: int, dtype: torch.dtype) -> WireLayout:
        """Layout of as many values in full precision."""
        return row_layout([numel], [None], "weights", dtype, self.config.verify)

    def before_reduction(self, indices: tuple[int, ...]) -> None:
        """Take note of the parameters whose gradients are about to be reduced."""
        was_warm = self.warms_up
        self._before_reduction = indices
        self.learner.reductions += 1
        if was_warm != self.warms_up:
            self._reductions.clear()

    @property
    def warms_up(self) -> bool:
        """Whether gradients travel as the warm-up says, now that they are being reduced."""
        warmup = self.config.warmup
        return warmup is not None and self.learner.reductions <= warmup.steps

    def reduction(self, numel: int, dtype: torch.dtype) -> Reduction:
        """Of the parameters whose gradients are being reduced.

        Args:
            numel: of one rank's part of them.
            dtype: of the gradients.

        In full precision, with a warning, where FSDP2 reduces something else than was seen.
        """
        indices = self._before_reduction
        found = self._reductions.get((indices, dtype))
        if found is None:
            found = self._reductions[indices, dtype] = self._reduction(indices, dtype)
        if found.layout.numel == numel:
            return found
        warnings.warn(
            f"qsdp: gradients of module {self.handle.path} travel in full precision: FSDP2 reduces "
            f"{numel} values a rank, which are not those of the parameters with a gradient",
            stacklevel=3,
        )
        raw = self.raw_layout(numel, dtype)
        sums = self.raw_layout(numel, torch.float32) if self.reduce_route.two_level else raw
        return Reduction(None, sums, raw, raw, ())

    def _reduction(self, indices: tuple[int, ...], dtype: torch.dtype) -> Reduction:
        if self.warms_up:
            return self._warm_reduction(indices, dtype)
        return self._later_reduction(indices, dtype)

    def _later_reduction(self, indices: tuple[int, ...], dtype: torch.dtype) -> Reduction:
        """As the configuration says once there is no warm-up, or it has ended."""
        feedback = self.fed_back.names("gradients", indices)
        sums = torch.float32 if self.reduce_route.two_level else dtype
        return Reduction(
            indices,
            self.layout("gradients", indices, sums),
            self.layout("inside_node", indices, dtype),
            self.layout("replicas", indices, dtype),
            feedback if any(feedback) else (),
        )

    def _warm_reduction(self, indices: tuple[int, ...], dtype: torch.dtype) -> Reduction:
        assert self.config.warmup is not None
        quantizer, sizes = self.config.warmup.gradients, [self.sizes[i] for i in indices]

        def layout(direction: Direction, kind: torch.dtype, way: Way) -> WireLayout:
            ways = [way if self.way(direction, i) is not None else None for i in indices]
            return row_layout(sizes, ways, direction, kind, self.config.verify)

        sums = torch.float32 if self.reduce_route.two_level else dtype
        return Reduction(
            indices,
            layout("gradients", sums, quantizer),
            layout("inside_node", dtype, None),
            layout("replicas", dtype, quantizer),
            (),
            warm=True,
        )

    def learn(
        self, direction: Direction, indices: Sequence[int], rows: torch.Tensor, layout: WireLayout
    ) -> bool:
        """Learn new levels from ``rows`` (num_rows, numel) of these parameters, where it is due.

        Returns:
            Whether tables have changed, and layouts with them.
        """
        candidates = [
            (learnable, rows[:, span.values])
            for index, span in zip(indices, layout.spans, strict=True)
            if (learnable := self.learnable(direction, index)) is not None
        ]
        if not candidates or not self.learner.learn_if_due(candidates, self.handle.group):
            return False
        self._tables_changed()
        return True

    def use_tables(self, learner: LevelLearner) -> None:
        """Take over a learner from a saved state."""
        self.learner = learner
        self._tables_changed()

    def _tables_changed(self) -> None:
        self._reductions.clear()
        for parts in self._parts.values():
            for part in parts:
                part.layout = self.layout("weights", part.indices, part.dtype)

    def parts(self, dtype: torch.dtype | None = None, numel: int = 0) -> list[Part]:
        """What is gathered, by dtype.

        Args:
            dtype: of FSDP2's buffer; None for what it is going to be.
            numel: of one rank's part of it.

        None at all for a buffer that somebody else has packed.
        """
        if dtype is None or dtype == torch.uint8:
            return self._parts_of(tuple(self.handle.gather_dtypes), dtype, numel)
        found = self._parts.get((dtype,))
        return self._parts_of((dtype,) * len(self.sizes), dtype, numel) if found is None else found

    def _parts_of(
        self, dtypes: tuple[torch.dtype, ...], dtype: torch.dtype | None, numel: int
    ) -> list[Part]:
        packed = sum(size * kind.itemsize for size, kind in zip(self.sizes, dtypes, strict=True))
        kinds = tuple(dict.fromkeys(dtypes))
        if dtype == torch.uint8 and (packed != numel or len(kinds) == 1):
            return []
        if not set(kinds) <= set(VALUE_DTYPES):
            return []
        key = dtypes if len(kinds) > 1 else kinds
        if key not in self._parts:
            self._parts = {key: [self._part(dtypes, kind) for kind in kinds]}
        return self._parts[key]

    def _part(self, dtypes: tuple[torch.dtype, ...], dtype: torch.dtype) -> Part:
        indices = tuple(i for i in self.everything if dtypes[i] == dtype)
        ways = [self.way("weights", i) for i in indices]
        layout = self.layout("weights", indices, dtype)
        if not any(isinstance(way, Differences) for way in ways):
            return Part(indices, dtype, layout, None)
        rows = kept_layout([self.sizes[i] for i in indices], ways, dtype, self.config.verify)
        kept = KeptWeights(
            rows,
            [way.quantizer if isinstance(way, Differences) else None for way in ways],
            *(self.gather_route.counterparts, self.gather_route.rank, self.handle.device),
            offload=any(isinstance(way, Differences) and way.offload for way in ways),
        )
        return Part(indices, dtype, layout, kept)

    @property
    def kept_bytes(self) -> int:
        """Memory for differences on this rank."""
        if not any(isinstance(ways["weights"], Differences) for ways in self.ways):
            return 0
        return sum(part.kept.wire.nbytes for part in self.parts() if part.kept is not None)
