"""QSDPConfig: what crosses the network in how many bits, and the named presets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from qsdp.quantizer import MAX_BITS, MIN_BITS, Quantizer

FULL_PRECISION = 32


@dataclass(frozen=True)
class IntraNode:
    """Two-level collectives, for nodes with several ranks of an FSDP group.

    Attributes:
        ranks: of the group in each node, consecutive in it; at least 2.
        gradients: quantizer inside the node, or None for the gradients' own dtype there.

    Raises:
        TypeError, ValueError: a field of the wrong type or out of range.
    """

    ranks: int
    gradients: Quantizer | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, int) or isinstance(self.ranks, bool) or self.ranks < 2:
            raise ValueError(
                f"IntraNode(ranks=...) must be an integer of at least 2, got {self.ranks!r}"
            )
        _require_quantizer("IntraNode", "gradients", self.gradients)


@dataclass(frozen=True)
class QSDPConfig:
    """Configuration of quantized communication; must be equal on all ranks.

    Attributes:
        weights: quantizer of the all-gathered weights, or None for FSDP2's own all-gather.
        gradients: quantizer of the reduce-scattered gradients, or None for FSDP2's own.
        min_numel: parameters with fewer elements (counted unsharded) travel in full precision, as
            one-dimensional ones always do.
        keep_full_precision: glob patterns over parameter names (``"*.wte.*"``) that travel in full
            precision too. Each must match a parameter.
        seed: of the random rounding, 64 bits.
        intra_node: two-level collectives, or None for flat ones. What crosses between nodes is
            quantized by ``weights`` and ``gradients``; each rank's part leaves its node once.
        all_reduce: quantizer of the all-reduce of gradients between HSDP's replicas, or None for
            FSDP2's own; other models must leave it None.
        verify: send a checksum with every row, and raise on the rank that receives a damaged one.

    Raises:
        TypeError, ValueError: a field of the wrong type or out of range.
    """

    weights: Quantizer | None = field(default_factory=lambda: Quantizer(rounding="shift"))
    gradients: Quantizer | None = field(default_factory=lambda: Quantizer(rounding="stochastic"))
    min_numel: int = 1024
    keep_full_precision: tuple[str, ...] = ()
    seed: int = 0
    intra_node: IntraNode | None = None
    all_reduce: Quantizer | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        for name in ("weights", "gradients", "all_reduce"):
            _require_quantizer("QSDPConfig", name, getattr(self, name))
        if not isinstance(self.verify, bool):
            raise TypeError(f"QSDPConfig(verify=...) must be True or False, got {self.verify!r}")
        if self.intra_node is not None and not isinstance(self.intra_node, IntraNode):
            raise TypeError(
                "QSDPConfig(intra_node=...) must be a qsdp.IntraNode or None, "
                f"got {self.intra_node!r}"
            )
        for name, top in (("min_numel", 2**63), ("seed", 2**64)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < top:
                raise ValueError(
                    f"QSDPConfig({name}=...) must be an integer from 0 to {top - 1}, got {value!r}"
                )
        patterns = self.keep_full_precision
        if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
            raise TypeError(
                "QSDPConfig(keep_full_precision=...) must be a sequence of glob patterns, "
                f"got {patterns!r}"
            )
        object.__setattr__(self, "keep_full_precision", tuple(patterns))

    def quantizes(self, names: Iterable[str], param: torch.Tensor) -> bool:
        """Whether a parameter of these names (tied ones have several) is one to quantize."""
        kept = any(fnmatchcase(name, p) for name in names for p in self.keep_full_precision)
        return param.ndim > 1 and param.numel() >= self.min_numel and not kept

    def require_matches(self, names: list[str]) -> None:
        """Raises ValueError where a pattern matches none of ``names``, all of the model's."""
        for pattern in self.keep_full_precision:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"QSDPConfig(keep_full_precision=...): {pattern!r} matches no parameter; the "
                    f"model has {len(names)}, such as {', '.join(names[:3])}"
                )

    @classmethod
    def preset(cls, name: str) -> QSDPConfig:
        """The preset ``w{2..8|32}g{2..8|32}``: bits of weights and gradients, 32 for none.

        Weights are rounded by random shift, gradients stochastically; blocks of 1024.

        Raises:
            ValueError: no such preset.
        """
        match = re.fullmatch(r"w(\d+)g(\d+)", name) if isinstance(name, str) else None
        bits = [int(text) for text in match.groups()] if match else []
        if not bits or not all(b == FULL_PRECISION or MIN_BITS <= b <= MAX_BITS for b in bits):
            raise ValueError(
                f"unknown preset {name!r}: presets are w{{bits}}g{{bits}} with bits "
                f"{MIN_BITS} to {MAX_BITS}, or {FULL_PRECISION} for full precision, as in w8g8"
            )
        weights, gradients = bits
        return cls(
            weights=None if weights == FULL_PRECISION else Quantizer(weights, rounding="shift"),
            gradients=(
                None if gradients == FULL_PRECISION else Quantizer(gradients, rounding="stochastic")
            ),
        )


def _require_quantizer(owner: str, name: str, value: object) -> None:
    if value is not None and not isinstance(value, Quantizer):
        raise TypeError(f"{owner}({name}=...) must be a qsdp.Quantizer or None, got {value!r}")
