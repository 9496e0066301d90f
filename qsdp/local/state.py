"""What ReplicaSync remembers: anchors, residuals, averages under way; as one mapping and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from qsdp.local.config import SyncConfig
from qsdp.local.flight import Flight
from qsdp.local.parts import Part
from qsdp.residuals import Residuals
from qsdp.stages import piece_layout
from qsdp.ways import Feedback

FORMAT = 1
_NOWHERE = -1  # as the step of a part that is not under way
_HINT = "make ReplicaSync with the model and the configuration that it was saved with"


class SyncMemory:
    """The parts of a model, and what quantization lost of each.

    Args:
        parts: of the trained parameters.
        buffers: averaged as they are, or None.
        num_replicas: that share the work now.

    Attributes:
        flights: averages under way, oldest first.
    """

    def __init__(
        self, parts: Sequence[Part], buffers: Part | None, config: SyncConfig, num_replicas: int
    ) -> None:
        self.parts, self.buffers = list(parts), buffers
        self.num_replicas = num_replicas
        self.flights: list[Flight] = []
        self._feeds_back = isinstance(config.differences, Feedback)
        self._overlaps = config.overlap_steps > 0
        # Of what this rank contributes, and of the sums that it forwards.
        way = config.differences
        names = (entry.name for part in self.parts for entry in part.entries)
        ways = dict.fromkeys(names, way) if isinstance(way, Feedback) else {}
        self._sent, self._forwarded = Residuals(ways), Residuals(ways)

    @property
    def all_parts(self) -> list[Part]:
        return self.parts if self.buffers is None else [*self.parts, self.buffers]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def residuals(self, part: Part) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What both ends add to a part, changed in place by who sends it; None without feedback."""
        if not self._feeds_back or not part.layout.quantized or part is self.buffers:
            return None
        names = tuple(
            entry.name if span.segment.quantizer is not None else None
            for entry, span in zip(part.entries, part.layout.spans, strict=True)
        )
        pieces = piece_layout(part.layout, self.num_replicas)
        return (
            self._sent.together(names, pieces, self.num_replicas, part.device),
            self._forwarded.together(names, pieces, 1, part.device),
        )

    def start_afresh(self, num_replicas: int) -> None:
        """Forget what was lost and what is under way: it was between other replicas."""
        self.num_replicas = num_replicas
        self.flights = []
        self._sent.load({})
        self._forwarded.load({})

    def state(self, progress: Sequence[int]) -> dict[str, torch.Tensor]:
        """Copies. Waits for averages under way.

        Args:
            progress: steps, and the round's number, first step and interval.
        """
        for flight in self.flights:
            flight.wait()
        state = {"progress": torch.tensor([FORMAT, *progress, *self._here()])}
        for part in self.all_parts:
            for kind, flat in part.memories():
                whole = part.split(flat, whole=True)
                state |= {f"{kind}.{name}": piece for name, piece in whole.items()}
        return state | {f"{n}.rank{dist.get_rank()}": t for n, t in self._own().items()}

    def load(self, state: Mapping[str, torch.Tensor], same: bool) -> None:
        """Continue with copies of what :meth:`state` gave, once :meth:`check` has seen it.

        Args:
            same: what :meth:`check` said.
        """
        for part in self.all_parts:
            for kind, flat in part.memories():
                part.join({e.name: state[f"{kind}.{e.name}"] for e in part.entries}, flat)
        self.start_afresh(self.num_replicas)
        if same:
            self._load_own(state)
        elif self._own():
            then, here = state["progress"][5:].tolist(), self._here()
            warnings.warn(
                f"qsdp: this state of a synchronisation was saved by {then[0]} replicas on "
                f"{then[1]} ranks, and here are {here[0]} on {here[1]}: residuals start afresh, "
                "and averages that were under way are dropped",
                stacklevel=4,
            )

    def check(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether a state is of as many replicas and ranks.

        Raises:
            ValueError: it is of something else.
        """
        if "progress" not in state or int(state["progress"][0]) != FORMAT:
            version = int(state["progress"][0]) if "progress" in state else "none"
            raise ValueError(f"ReplicaSync.load_state_dict reads format {FORMAT}, got {version}")
        same = bool(state["progress"][5:].tolist() == self._here())
        own = f".rank{dist.get_rank()}"
        fresh = self.state([0] * 4)
        expected = {n: v for n, v in fresh.items() if same or not n.endswith(own)}
        for name, value in expected.items():
            if name not in state:
                raise ValueError(f"ReplicaSync.load_state_dict: the state lacks {name!r}: {_HINT}")
            if state[name].shape != value.shape:
                raise ValueError(
                    f"ReplicaSync.load_state_dict: {name!r} has shape {tuple(state[name].shape)} "
                    f"in the state and {tuple(value.shape)} here: {_HINT}"
                )
        for name in state:
            if name not in expected and ".rank" not in name:
                raise ValueError(
                    f"ReplicaSync.load_state_dict: there is no place for {name!r}: {_HINT}"
                )
        return same

    def _here(self) -> list[int]:
        return [self.num_replicas, dist.get_world_size()]

    def _own(self) -> dict[str, torch.Tensor]:
        """What is this rank's own, in the sizes that it always has."""
        known = {f"sent.{name}": value for name, value in self._sent.state().items()}
        known |= {f"forwarded.{name}": value for name, value in self._forwarded.state().items()}
        own = {
            name: known[name] if name in known else torch.zeros(shape)
            for name, shape in self._shapes().items()
        }
        if not self._overlaps:
            return own
        flights = {id(flight.part): flight for flight in self.flights}
        steps = torch.full((len(self.parts), 2), _NOWHERE, dtype=torch.int64)
        for index, part in enumerate(self.parts):
            flight = flights.get(id(part))
            start = average = torch.zeros(part.layout.numel)
            if flight is not None:
                steps[index] = torch.tensor([flight.sent, flight.arrives])
                start, average = flight.start, flight.average
            for kind, flat in (("start", start), ("average", average)):
                own |= {f"{kind}.{name}": piece for name, piece in part.split(flat).items()}
        return own | {"under_way": steps}

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Of residuals, by name."""
        shapes: dict[str, tuple[int, int]] = {}
        for part in self.parts if self._feeds_back else ():
            pieces = piece_layout(part.layout, self.num_replicas)
            for entry, span in zip(part.entries, pieces.spans, strict=True):
                if span.segment.quantizer is not None:
                    shapes[f"sent.{entry.name}"] = (self.num_replicas, span.segment.numel)
                    shapes[f"forwarded.{entry.name}"] = (1, span.segment.numel)
        return shapes

    def _load_own(self, state: Mapping[str, torch.Tensor]) -> None:
        suffix = f".rank{dist.get_rank()}"
        for kind, residuals in (("sent.", self._sent), ("forwarded.", self._forwarded)):
            mine = [name for name in self._shapes() if name.startswith(kind)]
            residuals.load({n.removeprefix(kind): state[n + suffix].to(self.device) for n in mine})
        if not self._overlaps:
            return
        steps = state["under_way" + suffix].tolist()
        # In the order of their sending, in which they are taken up.
        for sent, arrives, index in sorted((*pair, i) for i, pair in enumerate(steps)):
            if sent == _NOWHERE:
                continue
            part = self.parts[index]
            flats = []
            for kind in ("start", "average"):
                flat = torch.empty(part.layout.numel, device=self.device)
                part.join({e.name: state[f"{kind}.{e.name}{suffix}"] for e in part.entries}, flat)
                flats.append(flat)
            self.flights.append(Flight(part, flats[0], flats[1], sent, arrives, None))
