"""What error feedback adds to a unit's gradients, in each hop and between replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qsdp.exchange import Route
from qsdp.residuals import Residuals
from qsdp.ways import Direction, Feedback, Way
from qsdp.wire import WireLayout


@dataclass(frozen=True)
class Reduction:
    """Gradients that are reduced together: some parameters', in one dtype.

    Attributes:
        indices: of the parameters; None where they are not known, and all travel as they are.
        layout: of the row that reaches its owner; of sums, in float32, where rows take two hops.
        inside: of the rows inside a node, where rows take two hops.
        replicas: of what HSDP's replicas reduce.
        feedback: names of the parameters, None for those without error feedback; empty if none has.
        warm: whether gradients travel as the warm-up says.
    """

    indices: tuple[int, ...] | None
    layout: WireLayout
    inside: WireLayout
    replicas: WireLayout
    feedback: tuple[str | None, ...]
    warm: bool = False


class FedBack:
    """Residuals of one unit, by the names of its parameters.

    Attributes:
        residuals: of gradients; of sums, where rows take two hops.
        inside: of gradients inside a node, where rows take two hops.
        replicas: of the all-reduce between replicas: of what this rank contributes, and of the sums
            that it forwards.

    Args:
        names: of the parameters.
        ways: of each, by direction.
    """

    def __init__(
        self, names: Sequence[str], ways: Sequence[Mapping[Direction, Way]], device: torch.device
    ) -> None:
        self._names, self._ways, self._device = names, ways, device
        gradients, replicas = (self._those("gradients"), self._those("replicas"))
        self.residuals, self.inside = Residuals(gradients), Residuals(gradients)
        self.replicas = Residuals(replicas), Residuals(replicas)

    def _those(self, direction: Direction) -> dict[str, Feedback]:
        ways = zip(self._names, (ways[direction] for ways in self._ways), strict=True)
        return {name: way for name, way in ways if isinstance(way, Feedback)}

    def takes(self, direction: Direction, index: int) -> bool:
        """Whether what is lost of a parameter's gradients is added to the next ones."""
        return isinstance(self._ways[index][direction], Feedback)

    def names(self, direction: Direction, indices: tuple[int, ...]) -> tuple[str | None, ...]:
        """Of these parameters; None for those without feedback."""
        return tuple(self._names[i] if self.takes(direction, i) else None for i in indices)

    def of(
        self, reduction: Reduction, way: Route
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Inside nodes, and of what reaches the owners; then :meth:`keep` what is left of it."""
        names, inside = reduction.feedback, None
        if not names:
            return None, None
        if way.two_level and reduction.inside.quantized:
            inside = self.inside.together(names, reduction.inside, way.size, self._device)
        rows = way.num_nodes if way.two_level else way.size
        return inside, self.residuals.together(names, reduction.layout, rows, self._device)

    def keep(self, reduction: Reduction, way: Route) -> None:
        """Pack what is kept in few bits, once the gradients are reduced."""
        if reduction.feedback:
            self.residuals.keep(reduction.feedback, reduction.layout)
            if way.two_level and reduction.inside.quantized:
                self.inside.keep(reduction.feedback, reduction.inside)

    def of_replicas(
        self, reduction: Reduction, pieces: WireLayout, num_replicas: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As :func:`qsdp.all_reduce_quantized` takes it; then :meth:`keep_replicas`."""
        names = self._replica_names(reduction)
        if not any(names):
            return None
        sent, forwarded = self.replicas
        return (
            sent.together(names, pieces, num_replicas, self._device),
            forwarded.together(names, pieces, 1, self._device),
        )

    def keep_replicas(self, reduction: Reduction, pieces: WireLayout) -> None:
        """Pack what is kept in few bits, once the replicas' gradients are reduced."""
        names = self._replica_names(reduction)
        for residuals in self.replicas if any(names) else ():
            residuals.keep(names, pieces)

    def _replica_names(self, reduction: Reduction) -> tuple[str | None, ...]:
        if reduction.indices is None or reduction.warm:
            return ()
        return self.names("replicas", reduction.indices)
