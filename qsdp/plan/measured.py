"""What was measured in place of what :mod:`qsdp.plan.cluster` would compute from rates.

Seconds of transfers by the bytes of one rank's row, and of the codec by value, on the ranks that
are going to train.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Curve(NamedTuple):
    """Seconds of a transfer by bytes, at the sizes that were measured.

    Attributes:
        points: (bytes, seconds) at two sizes or more, sizes rising.
    """

    points: tuple[tuple[int, float], ...]

    @property
    def latency_s(self) -> float:
        """Of the smallest size."""
        return self.points[0][1]

    @property
    def seconds_per_byte(self) -> float:
        """From the smallest to the largest size; of the largest alone where that took no longer."""
        (small, latency), (large, seconds) = self.points[0], self.points[-1]
        return (seconds - latency) / (large - small) if seconds > latency else seconds / large

    def seconds(self, num_bytes: float) -> float:
        """Between measured sizes by straight lines, beyond the largest as on average."""
        for (small, before), (large, after) in zip(self.points, self.points[1:], strict=False):
            if num_bytes <= large:
                part = max(0.0, (num_bytes - small) / (large - small))
                return before + part * (after - before)
        return self.points[-1][1] + (num_bytes - self.points[-1][0]) * self.seconds_per_byte


class Coding(NamedTuple):
    """Seconds that a value takes of the codec.

    Attributes:
        own_weights: before a gather, each value of a rank's own row.
        every_weights: after it, each value of every row.
        encode_gradients: each value of the rows to every rank.
        decode_gradients: each value of the rows from every rank, sums included.
    """

    own_weights: float
    every_weights: float
    encode_gradients: float
    decode_gradients: float


@dataclass(frozen=True)
class Measured:
    """One way to communicate in one group of ranks.

    Attributes:
        stock_gather, stock_reduce: FSDP2's own collectives, by the bytes of one rank's values.
        gather: of weights by qsdp, in one hop or two, by the bytes of a row on the wire.
        reduce: of gradients; the hop between nodes, where there are two.
        inside: the hop of gradients inside a node, where there are two.
        coding: of what is quantized.
        plain: of what is not; gradients inside a node are not.
    """

    stock_gather: Curve
    stock_reduce: Curve
    gather: Curve
    reduce: Curve
    inside: Curve | None
    coding: Coding
    plain: Coding
