"""QSDPConfig and its presets."""

from __future__ import annotations

import json

import pytest

from qsdp import IntraNode, LevelSchedule, Override, QSDPConfig, Quantizer

WIDTHS = (*range(2, 9), 32)


@pytest.mark.parametrize("weights", WIDTHS)
@pytest.mark.parametrize("gradients", WIDTHS)
def test_every_preset_has_its_bits(weights: int, gradients: int) -> None:
    config = QSDPConfig.preset(f"w{weights}g{gradients}")
    assert (config.weights.bits if config.weights else 32) == weights
    assert (config.gradients.bits if config.gradients else 32) == gradients


def test_default_is_w8g8_with_unbiased_rounding() -> None:
    assert QSDPConfig() == QSDPConfig.preset("w8g8")
    assert QSDPConfig().weights == Quantizer(8, 1024, "shift")
    assert QSDPConfig().gradients == Quantizer(8, 1024, "stochastic")


@pytest.mark.parametrize("name", ("w9g8", "w1g8", "w8", "8", "", "W8G8", "w8g8 ", "w16g16", None))
def test_unknown_presets_are_named(name: str) -> None:
    with pytest.raises(ValueError, match="presets are w{bits}g{bits} with bits 2 to 8, or 32"):
        QSDPConfig.preset(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"weights": 8}, "QSDPConfig(weights=...) must be a qsdp.Quantizer or None, got 8"),
        ({"gradients": "w8"}, "QSDPConfig(gradients=...)"),
        ({"min_numel": -1}, "QSDPConfig(min_numel=...) must be an integer from 0"),
        ({"seed": 1.5}, "QSDPConfig(seed=...)"),
        ({"seed": 2**64}, "QSDPConfig(seed=...)"),
        ({"keep_full_precision": "*.wte"}, "sequence of glob patterns, got '*.wte'"),
        ({"keep_full_precision": (3,)}, "sequence of glob patterns"),
    ),
)
def test_bad_fields_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        QSDPConfig(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_patterns_may_be_any_sequence_and_configs_are_hashable() -> None:
    config = QSDPConfig(keep_full_precision=["*.a", "*.b"])  # type: ignore[arg-type]
    assert config.keep_full_precision == ("*.a", "*.b")
    assert hash(config) == hash(QSDPConfig(keep_full_precision=("*.a", "*.b")))


def test_json_round_trip() -> None:
    """Every field, nested ones included; absent fields take their defaults."""
    config = QSDPConfig(
        weights=Quantizer(3, 64, "nearest", levels="learned", scale_dtype="bfloat16"),
        gradients=Quantizer(2, 64, "nearest", levels=(0.0, 0.25, 0.75, 1.0)),
        keep_full_precision=("*.a",),
        overrides={"*.b": Override(None, Quantizer(4)), "*.c": "w2g32"},
        level_schedule=LevelSchedule(3, 7, "gradient"),
        intra_node=IntraNode(2, Quantizer(8)),
        verify=True,
    )
    assert QSDPConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    config = QSDPConfig(
        Quantizer(4, rounding="nearest"),
        weight_mode="difference",
        weight_memory=Quantizer(8, rounding="nearest"),
        error_feedback=True,
    )
    assert QSDPConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert QSDPConfig.from_json({}) == QSDPConfig()
    assert QSDPConfig.from_json({"preset": "w4g32"}) == QSDPConfig.preset("w4g32")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weight": None}, "unknown field 'weight' of QSDPConfig"),
        ({"weights": {"bit": 4}}, "unknown field 'bit' of weights"),
        ({"weights": "w4"}, "weights must be a mapping"),
        ({"weights": {"bits": 9}}, r"Quantizer\(bits=...\) must be"),
        ({"preset": "w9g9"}, "unknown preset"),
        ({"weight_mode": "delta"}, "must be one of value, difference, got 'delta'"),
        ({"error_feedback": 1}, "must be True or False, got 1"),
        ({"level_schedule": {"every": 0}}, "must be an integer of at least 1, got 0"),
        ({"level_schedule": {"method": "x"}}, "must be one of kmeans, gradient, got 'x'"),
        ({"level_schedule": 4}, "must be a qsdp.LevelSchedule"),
        ({"intra_node": {"ranks": 2}, "error_feedback": True}, "does not go with two-level"),
        ({"weight_memory": {"rounding": "nearest"}}, "is for weight_mode='difference'"),
        (
            {"weight_mode": "difference", "weight_memory": {"rounding": "shift"}},
            "must have rounding='nearest', got 'shift'",
        ),
        ({"weight_mode": "difference", "weight_memory": 8}, "must be a mapping"),
        (
            {"all_reduce": {"rounding": "nearest", "levels": "learned"}},
            'levels="learned" is not for all_reduce',
        ),
    ],
)
def test_bad_json_is_named(content: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        QSDPConfig.from_json(content)


@pytest.mark.parametrize("overrides", ["w4g4", {"*": 4}, {3: "w4g4"}, 7])
def test_bad_overrides_are_named(overrides: object) -> None:
    with pytest.raises(TypeError, match=r"QSDPConfig\(overrides=...\) must be a mapping"):
        QSDPConfig(overrides=overrides)


def test_learned_levels_need_nearest() -> None:
    with pytest.raises(ValueError, match='set rounding="nearest"'):
        Quantizer(4, levels="learned")
    with pytest.raises(ValueError, match='must be "learned" or numbers'):
        Quantizer(4, rounding="nearest", levels="best")
