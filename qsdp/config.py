"""QSDPConfig: what crosses the network in which way (:mod:`qsdp.ways`), and the named presets.

What cannot go together cannot be written down, or the constructor says so; what is accepted acts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Any, Literal, cast

from qsdp.quantizer import MAX_BITS, MIN_BITS, Quantizer
from qsdp.ways import (
    ALLOWED,
    DIRECTIONS,
    Differences,
    Direction,
    Feedback,
    Learned,
    Warmup,
    Way,
    Ways,
    require_kind,
    unlearned,
    warmup_from_json,
    way_from_json,
    way_to_json,
    ways_from_json,
)

FULL_PRECISION = 32
# Parameters that are few, that decide much, and that other low-precision training leaves alone:
# routers of mixtures of experts, and what state-space models exponentiate.
EXACT = ("*.gate.*", "*.router.*", "*.A_log", "*.D", "*.dt_bias", "*.dt_proj.*")
# Tables of which a step uses few rows: the preset "bitdp" sends their gradients in 4 bits.
EMBEDDINGS = ("*embed*", "*.wte.*", "*.wpe.*")
_FEW_BITS = 4  # to which presets do more than round
# QSGD's experiments: blocks by bits, and tensors that are not worth it.
_QSGD_BLOCKS = {2: 128, 4: 512, 8: 512}
_QSGD_MIN_NUMEL = 10_000
_WARMUP_STEPS = 100


@dataclass(frozen=True)
class QSDPConfig:
    """Configuration of quantized communication; must be equal on all ranks.

    Attributes:
        weights: the way of the all-gathered weights: a Quantizer, :class:`Learned` or
            :class:`Differences`; None leaves them to FSDP2's own all-gather.
        gradients: the way of the reduce-scattered gradients: a Quantizer, :class:`Learned` or
            :class:`Feedback`; None leaves them to FSDP2's own reduce-scatter.
        exceptions: from glob patterns over parameter names to what counts for these in place of
            ``weights`` and ``gradients``: :class:`Ways`, the name of a preset
            (``{"*.wte.*": "w6g4"}``), or None for full precision in every direction. The first
            pattern that matches counts. Each must match a parameter. Parameters that :data:`EXACT`
            names travel in full precision unless an exception says otherwise.
        ranks_per_node: ranks of an FSDP group in each node, consecutive in it. From 2 on
            collectives take two levels, and each rank's part leaves its node once; 1 for flat ones.
            None goes by the launcher (``LOCAL_WORLD_SIZE``): two levels where every node has the
            same number of ranks of the group, and several.
        inside_node: quantizer of the gradients inside a node, or None for their own dtype there.
        replicas: the way of the gradients between HSDP's replicas: a Quantizer or
            :class:`Feedback`; None leaves them to FSDP2's own all-reduce. Parameters with an
            exception take the exception's gradients there too, unless it learns levels.
        warmup: how gradients travel at first, between replicas too; None as later.
        min_numel: parameters with fewer elements (counted unsharded) travel in full precision, as
            vectors always do, whether they have one dimension or one column (packed weights).
        seed: of the random rounding, 64 bits.
        verify: send a checksum with every row, and raise on the rank that receives a damaged one.

    Raises:
        TypeError, ValueError: a field of the wrong type or out of range, or fields that exclude
            each other.
    """

    weights: Quantizer | Learned | Differences | None = field(
        default_factory=lambda: Quantizer(rounding="shift")
    )
    gradients: Quantizer | Learned | Feedback | None = field(
        default_factory=lambda: Quantizer(rounding="stochastic", scaling="symmetric")
    )
    exceptions: Mapping[str, Ways | str | None] | tuple[tuple[str, Ways], ...] = ()
    ranks_per_node: int | None = None
    inside_node: Quantizer | None = None
    replicas: Quantizer | Feedback | None = None
    warmup: Warmup | None = None
    min_numel: int = 1024
    seed: int = 0
    verify: bool = False

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            require_kind("QSDPConfig", name, getattr(self, name), allowed)
        require_kind("QSDPConfig", "warmup", self.warmup, (Warmup, None))
        if not isinstance(self.verify, bool):
            raise TypeError(f"QSDPConfig(verify=...) must be True or False, got {self.verify!r}")
        for name, top in (("min_numel", 2**63), ("seed", 2**64)):
            if not _is_int(getattr(self, name), 0, top):
                raise ValueError(
                    f"QSDPConfig({name}=...) must be an integer from 0 to {top - 1}, "
                    f"got {getattr(self, name)!r}"
                )
        if self.ranks_per_node is not None and not _is_int(self.ranks_per_node, 1, 2**31):
            raise ValueError(
                "QSDPConfig(ranks_per_node=...) must be an integer of at least 1, or None to go by "
                f"the launcher, got {self.ranks_per_node!r}"
            )
        object.__setattr__(self, "exceptions", _checked_exceptions(self.exceptions))
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Raises ValueError where one field excludes another."""
        if self.inside_node is not None and self.ranks_per_node == 1:
            raise ValueError(
                "QSDPConfig(inside_node=...) is for two-level collectives, and ranks_per_node=1 "
                "asks for flat ones: set it to the ranks of a node, or to None"
            )
        gradients = self.ways("gradients")
        if self.inside_node is not None and not any(gradients):
            raise ValueError(
                "QSDPConfig(inside_node=...) quantizes the first hop of gradients, and "
                "gradients=None leaves them to FSDP2: set gradients, or inside_node=None"
            )
        if self.inside_node is not None and self.inside_node.coded:
            raise ValueError(
                f"QSDPConfig(inside_node=...) has coding={self.inside_node.coding!r}, and rows are "
                'coded between nodes alone: set coding="fixed" there'
            )
        if self.warmup is not None and not any((*gradients, self.replicas)):
            raise ValueError(
                "QSDPConfig(warmup=...) is for gradients that are quantized later, and gradients "
                "and replicas are None: set one of them, or warmup=None"
            )

    def ways(self, direction: Literal["weights", "gradients"]) -> list[Way]:
        """The way of a direction, then those of the exceptions."""
        exceptions = [getattr(ways, direction) for _, ways in self._exceptions]
        return [getattr(self, direction), *exceptions]

    def ways_of(
        self, names: Iterable[str], shape: Sequence[int], exact: Iterable[str] = ()
    ) -> dict[Direction, Way]:
        """How a parameter travels in each direction.

        Args:
            names: of the parameter; tied ones have several.
            shape: unsharded.
            exact: more patterns like those of :data:`EXACT`, of this model's own.
        """
        names = tuple(names)
        if self.is_vector(shape):
            return dict.fromkeys(DIRECTIONS)
        chosen = Ways(self.weights, self.gradients)
        if any(_matches(names, pattern) for pattern in (*EXACT, *exact)):
            chosen = Ways(None, None)
        for pattern, ways in self._exceptions:
            if _matches(names, pattern):
                chosen = ways
                break
        replicas = self.replicas
        if chosen.gradients is None and self.gradients is not None:
            replicas = None
        elif replicas is not None and chosen.gradients is not self.gradients:
            # An exception's reason, such as rows that must stay zero, holds between replicas too.
            replicas = unlearned(chosen.gradients) or replicas
        return {
            "weights": chosen.weights,
            "gradients": chosen.gradients,
            "inside_node": None if chosen.gradients is None else self.inside_node,
            "replicas": replicas,
        }

    def is_vector(self, shape: Sequence[int]) -> bool:
        """Whether a parameter travels in full precision because of its (unsharded) shape."""
        return len(shape) < 2 or prod(shape) in (0, shape[0]) or prod(shape) < self.min_numel

    def require_matches(self, names: list[str]) -> None:
        """Raises ValueError where a pattern matches none of ``names``, all of the model's."""
        for pattern, _ in self._exceptions:
            if pattern not in EMBEDDINGS and not _matches(names, pattern):
                raise ValueError(
                    f"QSDPConfig(exceptions=...): {pattern!r} matches no parameter; the "
                    f"model has {len(names)}, such as {', '.join(names[:3])}"
                )

    @property
    def _exceptions(self) -> tuple[tuple[str, Ways], ...]:
        return cast(tuple[tuple[str, Ways], ...], self.exceptions)

    def with_exceptions(self, exceptions: Mapping[str, Ways | str | None]) -> QSDPConfig:
        """The same with more exceptions, whose patterns come before those that are there."""
        return replace(self, exceptions=(*_checked_exceptions(exceptions), *self._exceptions))

    def to_json(self) -> dict[str, Any]:
        """JSON values that :meth:`from_json` takes."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: way_to_json(values[name]) for name in ALLOWED}
        values["warmup"] = self.warmup and asdict(self.warmup)
        values["exceptions"] = {
            pattern: {name: way_to_json(way) for name, way in vars(ways).items()}
            for pattern, ways in self._exceptions
        }
        return values

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> QSDPConfig:
        """A configuration from JSON values; absent fields take their defaults.

        ``{"preset": "w4g4", ...}`` starts from a preset. A way is a mapping of a Quantizer's
        fields, or ``{"learned": {...}, "schedule": {...}}``, ``{"differences": {...}, "kept":
        {...}}``, ``{"feedback": {...}}``, or null.

        Raises:
            TypeError, ValueError: an unknown field, or one out of range.
        """
        values = dict(content)
        preset = values.pop("preset", None)
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise ValueError(f"unknown field {name!r} of QSDPConfig: it has {sorted(known)}")
        for name in ALLOWED:
            if name in values:
                values[name] = way_from_json(values[name], name)
        if values.get("warmup") is not None:
            values["warmup"] = warmup_from_json(values["warmup"])
        if isinstance(values.get("exceptions"), Mapping):
            values["exceptions"] = {
                pattern: ways_from_json(ways, f"exceptions[{pattern!r}]")
                if isinstance(ways, Mapping)
                else ways
                for pattern, ways in values["exceptions"].items()
            }
        return replace(cls.preset(preset), **values) if preset is not None else cls(**values)

    @classmethod
    def preset(cls, name: str) -> QSDPConfig:
        """A preset: ``w{1..8|32}g{1..8|32}``, bits of weights and gradients, 32 for none.

        From 5 bits on in blocks of 1024: weights rounded by random shift, gradients stochastically
        on a grid that holds zero.
        Below, what keeps the loss (docs/quality.md): weights as :class:`Differences`, which cost
        about a byte of memory a parameter on every rank; gradients dithered after a Hadamard
        transform, in blocks of 128. At 1 bit, differences are signs and a block's mean magnitude.

        Or the recipe of a system: ``bitdp`` (:func:`_bitdp`), ``sdp4bit`` (:func:`_sdp4bit`),
        ``qsgd2``, ``qsgd4`` or ``qsgd8`` (:func:`_qsgd`).

        Raises:
            ValueError: no such preset.
        """
        if name in NAMED_PRESETS:
            return NAMED_PRESETS[name]()
        match = re.fullmatch(r"w(\d+)g(\d+)", name) if isinstance(name, str) else None
        pair = [int(text) for text in match.groups()] if match else []
        if not pair or not all(b == FULL_PRECISION or MIN_BITS <= b <= MAX_BITS for b in pair):
            raise ValueError(
                f"unknown preset {name!r}: presets are w{{bits}}g{{bits}} with bits "
                f"{MIN_BITS} to {MAX_BITS}, or {FULL_PRECISION} for full precision, as in w8g8, "
                f"and {', '.join(NAMED_PRESETS)}"
            )
        return cls(_preset_weights(pair[0]), _preset_gradients(pair[1]))

    def on_nodes_of(self, ranks_per_node: int) -> QSDPConfig:
        """The same for nodes of so many ranks; 1 for flat collectives, which have no inside."""
        inside = None if ranks_per_node == 1 else self.inside_node
        return replace(self, ranks_per_node=ranks_per_node, inside_node=inside)

    @classmethod
    def of(cls, value: object, caller: str) -> QSDPConfig:
        """A configuration, or a preset's name for one.

        Raises:
            TypeError, ValueError: ``value`` is neither; the message begins with ``caller``.
        """
        if isinstance(value, str):
            return cls.preset(value)
        if not isinstance(value, QSDPConfig):
            raise TypeError(
                f'{caller} takes a qsdp.QSDPConfig or the name of a preset such as "w8g8", '
                f"got {value!r}"
            )
        return value


def _matches(names: Iterable[str], pattern: str) -> bool:
    """Whether a name matches; ``*.head.*`` matches ``head.weight`` too."""
    return any(fnmatchcase(n, pattern) or fnmatchcase(f".{n}", pattern) for n in names)


_SIGNS = Quantizer(1, 128, "nearest", scaling="mean", scale_dtype="bfloat16")


def difference_quantizer(bits: int) -> Quantizer | None:
    """Of what replicas moved by, with :class:`Feedback`: ``qsdp train --sync-bits``, 1 to 8 or 32.

    In 1 bit signs and mean magnitudes, which lose less than unbiased bits; feedback returns it.
    """
    return _SIGNS if bits == 1 else _preset_gradients(bits)


def _qsgd(bits: int) -> QSDPConfig:
    """Gradients alone, as QSGD's experiments have them, in Rice numbers."""
    form = Quantizer(bits, _QSGD_BLOCKS[bits], "stochastic", scaling="symmetric", coding="rice")
    return QSDPConfig(None, form, min_numel=_QSGD_MIN_NUMEL)


def _bitdp() -> QSDPConfig:
    """Gradients in 1 bit, to BitDP's stated goals: signs and mean magnitudes, with feedback.

    For weights nothing, so that DDP takes it too. Replicas of HSDP want the same way in
    ``replicas``. Embeddings in 4 bits; 8 bits for the first 100 steps: set ``warmup`` to a tenth of
    the run's.
    """
    memory = Quantizer(8, 256, "nearest", scaling="symmetric")
    four = Quantizer(4, 128, "stochastic", scaling="symmetric", scale_dtype="bfloat16")
    embeddings = Ways(None, four)
    return QSDPConfig(
        None,
        Feedback(_SIGNS, memory=memory),
        dict.fromkeys(EMBEDDINGS, embeddings),
        warmup=Warmup(_WARMUP_STEPS, _preset_gradients(8)),
    )


def _sdp4bit() -> QSDPConfig:
    """SDP4Bit: differences of weights, and gradients in two hops, all in 4 bits between nodes.

    Inside a node 8 bits. Where nodes have one rank of a group, flat in 4 bits. Gradients are
    rounded stochastically, as in the authors' code; their text rounds to the nearest.
    """
    difference = Quantizer(4, 2048, "nearest", scaling="symmetric")
    inside, between = (
        Quantizer(bits, 128, "stochastic", scaling="symmetric", transform="hadamard")
        for bits in (8, 4)
    )
    return QSDPConfig(Differences(difference), between, inside_node=inside)


NAMED_PRESETS: dict[str, Callable[[], QSDPConfig]] = {
    "sdp4bit": _sdp4bit,
    "bitdp": _bitdp,
    **{f"qsgd{bits}": partial(_qsgd, bits) for bits in _QSGD_BLOCKS},
}


def _preset_weights(bits: int) -> Quantizer | Differences | None:
    if bits == FULL_PRECISION:
        return None
    if bits > _FEW_BITS:
        return Quantizer(bits, rounding="shift")
    return Differences(_SIGNS if bits == 1 else Quantizer(bits, rounding="nearest"))


def _preset_gradients(bits: int) -> Quantizer | None:
    if bits == FULL_PRECISION:
        return None
    if bits > _FEW_BITS:
        return Quantizer(bits, rounding="stochastic", scaling="symmetric")
    return Quantizer(bits, 128, "dither", scale_dtype="bfloat16", transform="hadamard")


def _checked_exceptions(value: object) -> tuple[tuple[str, Ways], ...]:
    expected = (
        "QSDPConfig(exceptions=...) must be a mapping from patterns to qsdp.Ways, preset names or "
        "None for full precision"
    )
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise TypeError(f"{expected}, got {value!r}")
    checked = []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"{expected}, got {value!r}")
        pattern, ways = pair
        if isinstance(ways, str):
            if ways in NAMED_PRESETS:
                raise ValueError(
                    f"QSDPConfig(exceptions=...): {ways!r} is more than ways, for {pattern!r} name "
                    "a preset such as w4g4, or qsdp.Ways"
                )
            preset = QSDPConfig.preset(ways)
            ways = Ways(preset.weights, preset.gradients)
        elif ways is None:
            ways = Ways(None, None)
        if not isinstance(pattern, str) or not isinstance(ways, Ways):
            raise TypeError(f"{expected}, got {pattern!r}: {ways!r}")
        checked.append((pattern, ways))
    return tuple(checked)


def _is_int(value: object, low: int, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < end
