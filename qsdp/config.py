"""QSDPConfig: what crosses the network in how many bits, and the named presets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

import torch

from qsdp.levels import LevelSchedule
from qsdp.quantizer import MAX_BITS, MIN_BITS, Quantizer

FULL_PRECISION = 32
_FEW_BITS = 4  # to which presets do more than round

WeightMode = Literal["value", "difference"]


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
class Override:
    """How some parameters travel, in place of the configuration's own quantizers; None for raw."""

    weights: Quantizer | None
    gradients: Quantizer | None

    def __post_init__(self) -> None:
        _require_quantizer("Override", "weights", self.weights)
        _require_quantizer("Override", "gradients", self.gradients)


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
        overrides: from glob patterns over parameter names to an :class:`Override`, or the name of a
            preset (``{"*.wte.*": "w6g4"}``). The first pattern that matches counts; rules that keep
            parameters in full precision come before. Each must match a parameter.
        level_schedule: when levels are learned, for quantizers with ``levels="learned"``.
        weight_mode: ``value``, or ``difference``: every rank keeps the weights that it decoded last
            and gathers quantized differences to them (SDP4Bit), so that errors do not add up, and
            the gather in backward moves nothing. Costs memory for the whole model on every rank;
            how much, ``weight_memory`` says. Apply the configuration again after loading other
            weights into a model that has trained.
        weight_memory: with ``weight_mode="difference"``, the quantizer in which a rank keeps the
            weights that it decoded last, which are also those that it computes with: about a byte a
            parameter with 8 bits, rounded to nearest. None keeps them in the dtype that FSDP
            gathers.
        error_feedback: add to each gradient what quantization lost of the one before. Costs one
            float32 for each element of the model on every rank.
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
    overrides: Mapping[str, Override | str] | tuple[tuple[str, Override], ...] = ()
    level_schedule: LevelSchedule = LevelSchedule()
    weight_mode: WeightMode = "value"
    weight_memory: Quantizer | None = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for name in ("weights", "gradients", "all_reduce", "weight_memory"):
            _require_quantizer("QSDPConfig", name, getattr(self, name))
        for name in ("verify", "error_feedback"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"QSDPConfig({name}=...) must be True or False, got {getattr(self, name)!r}"
                )
        if self.weight_mode not in get_args(WeightMode):
            raise ValueError(
                f"QSDPConfig(weight_mode=...) must be one of {', '.join(get_args(WeightMode))}, "
                f"got {self.weight_mode!r}"
            )
        if not isinstance(self.level_schedule, LevelSchedule):
            raise TypeError(
                "QSDPConfig(level_schedule=...) must be a qsdp.LevelSchedule, "
                f"got {self.level_schedule!r}"
            )
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
        object.__setattr__(self, "overrides", _checked_overrides(self.overrides))
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Raises ValueError where one field excludes another."""
        if self.intra_node is not None and self.error_feedback:
            raise ValueError(
                "QSDPConfig: error_feedback=True does not go with two-level collectives: "
                "set intra_node=None"
            )
        if self.weight_memory is not None:
            if self.weight_mode != "difference":
                raise ValueError(
                    "QSDPConfig(weight_memory=...) is for weight_mode='difference', "
                    f"got weight_mode={self.weight_mode!r}"
                )
            if self.weight_memory.rounding != "nearest":
                raise ValueError(
                    "QSDPConfig(weight_memory=...) must have rounding='nearest', "
                    f"got {self.weight_memory.rounding!r}"
                )
        inner = self.intra_node.gradients if self.intra_node is not None else None
        for name, quantizer in (
            ("all_reduce", self.all_reduce),
            ("intra_node.gradients", inner),
            ("weights with weight_mode='difference'", self._difference_quantizer()),
            ("weight_memory", self.weight_memory),
        ):
            if quantizer is not None and quantizer.learns:
                raise ValueError(
                    f'QSDPConfig: levels="learned" is not for {name}: give it a table, or None'
                )

    @property
    def _override_pairs(self) -> tuple[tuple[str, Override], ...]:
        return cast(tuple[tuple[str, Override], ...], self.overrides)

    def _difference_quantizer(self) -> Quantizer | None:
        return self.weights if self.weight_mode == "difference" else None

    def quantizer(
        self, direction: str, names: Iterable[str], param: torch.Tensor
    ) -> Quantizer | None:
        """How a parameter of these names travels in a direction; None for full precision.

        Args:
            direction: ``weights``, ``gradients``, ``all_reduce`` or ``intra_node``.
            names: of the parameter; tied ones have several.
        """
        names = tuple(names)
        if not self.quantizes(names, param):
            return None
        if direction in ("weights", "gradients"):
            for pattern, override in self._override_pairs:
                if any(fnmatchcase(name, pattern) for name in names):
                    chosen: Quantizer | None = getattr(override, direction)
                    return chosen
        if direction == "intra_node":
            return self.intra_node.gradients if self.intra_node is not None else None
        own: Quantizer | None = getattr(self, direction)
        return own

    def quantizes(self, names: Iterable[str], param: torch.Tensor) -> bool:
        """Whether a parameter of these names (tied ones have several) is one to quantize."""
        kept = any(fnmatchcase(name, p) for name in names for p in self.keep_full_precision)
        return param.ndim > 1 and param.numel() >= self.min_numel and not kept

    def require_matches(self, names: list[str]) -> None:
        """Raises ValueError where a pattern matches none of ``names``, all of the model's."""
        patterns = [("keep_full_precision", pattern) for pattern in self.keep_full_precision]
        patterns += [("overrides", pattern) for pattern, _ in self._override_pairs]
        for field_name, pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"QSDPConfig({field_name}=...): {pattern!r} matches no parameter; the "
                    f"model has {len(names)}, such as {', '.join(names[:3])}"
                )

    def to_json(self) -> dict[str, Any]:
        """JSON values that :meth:`from_json` takes."""
        return {**asdict(self), "overrides": {p: asdict(o) for p, o in self._override_pairs}}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> QSDPConfig:
        """A configuration from JSON values; absent fields take their defaults.

        ``{"preset": "w4g4", ...}`` starts from a preset.

        Raises:
            TypeError, ValueError: an unknown field, or one out of range.
        """
        values = dict(content)
        preset = values.pop("preset", None)
        base = asdict(cls.preset(preset)) if preset is not None else {}
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise ValueError(f"unknown field {name!r} of QSDPConfig: it has {sorted(known)}")
        values = {**base, **values}
        for name in ("weights", "gradients", "all_reduce", "weight_memory"):
            if name in values:
                values[name] = _quantizer_from_json(values[name], name)
        if values.get("intra_node") is not None:
            inner = dict(values["intra_node"])
            inner["gradients"] = _quantizer_from_json(
                inner.get("gradients"), "intra_node.gradients"
            )
            values["intra_node"] = IntraNode(**inner)
        if isinstance(values.get("level_schedule"), Mapping):
            values["level_schedule"] = LevelSchedule(**values["level_schedule"])
        if "keep_full_precision" in values:
            values["keep_full_precision"] = tuple(values["keep_full_precision"])
        overrides = dict(values.get("overrides") or {})
        values["overrides"] = {
            pattern: override
            if isinstance(override, str)
            else Override(*(_quantizer_from_json(override[d], d) for d in ("weights", "gradients")))
            for pattern, override in overrides.items()
        }
        return cls(**values)

    @classmethod
    def preset(cls, name: str) -> QSDPConfig:
        """The preset ``w{2..8|32}g{2..8|32}``: bits of weights and gradients, 32 for none.

        From 5 bits on in blocks of 1024: weights rounded by random shift, gradients stochastically.
        Below, what keeps the loss (docs/quality.md): weights as differences, kept in 8 bits, which
        costs a byte of memory a parameter on every rank; gradients dithered after a Hadamard
        transform, in blocks of 128.

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
        differences = weights <= _FEW_BITS
        return cls(
            weights=None if weights == FULL_PRECISION else _preset_weights(weights),
            gradients=None if gradients == FULL_PRECISION else _preset_gradients(gradients),
            weight_mode="difference" if differences else "value",
            weight_memory=Quantizer(8, rounding="nearest") if differences else None,
        )


def _preset_weights(bits: int) -> Quantizer:
    return Quantizer(bits, rounding="nearest" if bits <= _FEW_BITS else "shift")


def _preset_gradients(bits: int) -> Quantizer:
    if bits > _FEW_BITS:
        return Quantizer(bits, rounding="stochastic")
    return Quantizer(bits, 128, "dither", scale_dtype="bfloat16", transform="hadamard")


def _quantizer_from_json(value: Any, name: str) -> Quantizer | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping of Quantizer's fields or null, got {value!r}")
    known = {f.name for f in fields(Quantizer)}
    for key in value:
        if key not in known:
            raise ValueError(f"unknown field {key!r} of {name}: a Quantizer has {sorted(known)}")
    values = dict(value)
    if isinstance(values.get("levels"), list):
        values["levels"] = tuple(values["levels"])
    return Quantizer(**values)


def _checked_overrides(value: object) -> tuple[tuple[str, Override], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise TypeError(
            "QSDPConfig(overrides=...) must be a mapping from patterns to qsdp.Override or preset "
            f"names, got {value!r}"
        )
    checked = []
    for pattern, override in pairs:
        if isinstance(override, str):
            preset = QSDPConfig.preset(override)
            override = Override(preset.weights, preset.gradients)
        if not isinstance(pattern, str) or not isinstance(override, Override):
            raise TypeError(
                "QSDPConfig(overrides=...) must be a mapping from patterns to qsdp.Override or "
                f"preset names, got {pattern!r}: {override!r}"
            )
        checked.append((pattern, override))
    return tuple(checked)


def _require_quantizer(owner: str, name: str, value: object) -> None:
    if value is not None and not isinstance(value, Quantizer):
        raise TypeError(f"{owner}({name}=...) must be a qsdp.Quantizer or None, got {value!r}")
