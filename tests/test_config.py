"""QSDPConfig and its presets."""

from __future__ import annotations

import pytest

from qsdp import QSDPConfig, Quantizer

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
