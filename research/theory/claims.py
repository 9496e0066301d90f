"""Claims: something measured, what it is compared with, and whether the claim holds."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Z = 4.0
"""Half a confidence interval in standard errors: outside of it, 1 time in 16,000."""


class Estimate(NamedTuple):
    """A mean over independent trials and half its confidence interval; 0 for an exact number."""

    mean: float
    error: float = 0.0


def estimate(values: torch.Tensor) -> Estimate:
    """Mean of one number a trial."""
    spread = float(values.std()) if len(values) > 1 else float("inf")
    return Estimate(float(values.mean()), Z * spread / len(values) ** 0.5)


class Claim(NamedTuple):
    """One row of the table.

    Attributes:
        relation: ``<=`` and ``>`` ask it of the whole confidence interval; ``=`` asks that the
            reference lies inside the interval.
        within: for ``=``, how narrow the interval must be: half of it by the reference.
    """

    about: str
    setting: str
    measured: Estimate
    relation: Literal["<=", "=", ">"]
    reference: float
    within: float | None = None

    @property
    def holds(self) -> bool:
        mean, error = self.measured
        if self.relation == "<=":
            return mean + error <= self.reference
        if self.relation == ">":
            return mean - error > self.reference
        narrow = self.within is None or error <= self.within * abs(self.reference)
        return narrow and abs(mean - self.reference) <= error


class Part(NamedTuple):
    """Claims that belong together.

    Attributes:
        text: what is measured, and what the reference is.
        skipped: why there are fewer claims than there could be.
    """

    title: str
    text: str
    claims: list[Claim]
    skipped: str | None = None
