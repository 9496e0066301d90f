"""QSDPConfig and its presets."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from qsdp import (
    Differences,
    Feedback,
    Learned,
    LevelSchedule,
    QSDPConfig,
    Quantizer,
    Warmup,
    Ways,
    wire_bytes,
)
from qsdp.ways import DIRECTIONS, quantizer_of

WIDTHS = (*range(1, 9), 32)
NEAREST = Quantizer(4, rounding="nearest")
FED_BACK, KEPT = Feedback(NEAREST), Differences(NEAREST)


@pytest.mark.parametrize("weights", WIDTHS)
@pytest.mark.parametrize("gradients", WIDTHS)
def test_every_preset_has_its_bits(weights: int, gradients: int) -> None:
    config = QSDPConfig.preset(f"w{weights}g{gradients}")
    for way, bits in ((config.weights, weights), (config.gradients, gradients)):
        quantizer = quantizer_of(way)
        assert (quantizer.bits if quantizer else 32) == bits
    assert isinstance(config.weights, Differences) == (weights <= 4)


def test_default_is_w8g8_with_unbiased_rounding() -> None:
    assert QSDPConfig() == QSDPConfig.preset("w8g8")
    assert QSDPConfig().weights == Quantizer(8, 1024, "shift")
    assert QSDPConfig().gradients == Quantizer(8, 1024, "stochastic", scaling="symmetric")


@pytest.mark.parametrize("name", ("w9g8", "w0g8", "w8", "8", "", "W8G8", "w8g8 ", "w16g16", None))
def test_unknown_presets_are_named(name: str) -> None:
    with pytest.raises(ValueError, match="presets are w{bits}g{bits} with bits 1 to 8, or 32"):
        QSDPConfig.preset(name)


def test_presets_of_systems() -> None:
    """sdp4bit's wire is that of the paper's formula; bitdp's is 1.125 bits, embeddings apart."""
    config = QSDPConfig.preset("sdp4bit")
    bits = [
        8 * wire_bytes(2048 * 64, quantizer_of(way)) / (2048 * 64)
        for way in (config.weights, config.inside_node, config.gradients)
    ]
    assert bits == [4.015625, 8.25, 4.25]
    flat = config.on_nodes_of(1)
    assert flat.inside_node is None and flat.gradients == config.gradients
    assert config.on_nodes_of(2).inside_node == config.inside_node
    one = QSDPConfig.preset("bitdp")
    assert wire_bytes(1 << 20, quantizer_of(one.gradients)) * 28 < 4 << 20
    assert wire_bytes(1 << 20, replace(quantizer_of(one.gradients), block_size=1024)) * 31 < 4 << 20
    one.require_matches(["conv.weight"])  # a model without embeddings
    for name in ("blocks.0.up.weight", "model.embed_tokens.weight", "wte.weight"):
        way = one.ways_of([name], (256, 256))["gradients"]
        assert isinstance(way, Feedback) == name.startswith("blocks"), name
        assert quantizer_of(way).bits == (1 if name.startswith("blocks") else 4)
    for preset in (config, one):
        assert QSDPConfig.from_json(json.loads(json.dumps(preset.to_json()))) == preset
    with pytest.raises(ValueError, match="'bitdp' is more than ways, for .* name a preset such as"):
        QSDPConfig(exceptions={"*.a": "bitdp"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (
            {"weights": 8},
            "QSDPConfig(weights=...) must be a qsdp.Quantizer, qsdp.Learned, qsdp.Differences or "
            "None, got 8",
        ),
        ({"weights": FED_BACK}, "QSDPConfig(weights=...) must be"),
        ({"gradients": KEPT}, "QSDPConfig(gradients=...) must be"),
        ({"replicas": Learned(NEAREST)}, "QSDPConfig(replicas=...) must be"),
        ({"inside_node": FED_BACK, "ranks_per_node": 2}, "QSDPConfig(inside_node=...) must be"),
        ({"gradients": "w8"}, "QSDPConfig(gradients=...)"),
        ({"min_numel": -1}, "QSDPConfig(min_numel=...) must be an integer from 0"),
        ({"seed": 1.5}, "QSDPConfig(seed=...)"),
        ({"warmup": 3}, "QSDPConfig(warmup=...) must be a qsdp.Warmup or None, got 3"),
        ({"warmup": Warmup(3), "gradients": None}, "set one of them, or warmup=None"),
        ({"seed": 2**64}, "QSDPConfig(seed=...)"),
        ({"verify": 1}, "QSDPConfig(verify=...) must be True or False, got 1"),
        ({"ranks_per_node": 0}, "QSDPConfig(ranks_per_node=...) must be an integer of at least 1"),
        (
            {"inside_node": NEAREST, "ranks_per_node": 1},
            "set it to the ranks of a node, or to None",
        ),
        (
            {"inside_node": NEAREST, "ranks_per_node": 2, "gradients": None},
            "set gradients, or inside_node=None",
        ),
    ),
)
def test_bad_fields_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        QSDPConfig(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_exceptions_may_be_pairs_and_configs_are_hashable() -> None:
    config = QSDPConfig(exceptions=[("*.a", None), ("*.b", "w4g4")])  # type: ignore[arg-type]
    same = QSDPConfig(exceptions={"*.a": Ways(None, None), "*.b": "w4g4"})
    assert config == same and hash(config) == hash(same)
    assert QSDPConfig.of("w4g4", "somebody") == QSDPConfig.preset("w4g4")


def test_first_exception_counts_and_more_can_be_added() -> None:
    config = QSDPConfig(exceptions={"*.b": "w4g4", "a.*": None})
    assert config.ways_of(["a.b"], (64, 64))["gradients"] == QSDPConfig.preset("w4g4").gradients
    assert config.ways_of(["x", "a.c"], (64, 64)) == dict.fromkeys(DIRECTIONS), "tied names count"
    config = config.with_exceptions({"a.b": None})
    assert config.ways_of(["a.b"], (64, 64)) == dict.fromkeys(DIRECTIONS)
    assert config.ways_of(["c"], (64, 64))["weights"] == config.weights


def test_a_preset_as_an_exception_is_the_whole_preset() -> None:
    """Its differences came off, and its rounding stayed, which is neither preset nor plain."""
    for name in ("w4g4", "w8g8", "w32g4"):
        preset = QSDPConfig.preset(name)
        ways = QSDPConfig(exceptions={"*": name}).ways_of(["a"], (64, 64))
        assert (ways["weights"], ways["gradients"]) == (preset.weights, preset.gradients)


def test_full_precision_is_full_precision_in_every_direction() -> None:
    """Inside nodes and between replicas too, where an exception leaves gradients alone."""
    config = QSDPConfig(
        ranks_per_node=2, inside_node=NEAREST, replicas=NEAREST, exceptions={"*.a": None}
    )
    assert config.ways_of(["x.a"], (64, 64)) == dict.fromkeys(DIRECTIONS)
    assert all(config.ways_of(["x.b"], (64, 64)).values())
    for shape in ((4096,), (2, 511)):
        assert config.ways_of(["x.b"], shape) == dict.fromkeys(DIRECTIONS), "vectors, small ones"
    replicas = QSDPConfig(gradients=None, replicas=NEAREST)
    assert replicas.ways_of(["x"], (64, 64))["replicas"] == NEAREST


def test_an_exception_holds_between_replicas_too() -> None:
    """BitDP's embeddings, whose unused rows must stay zero; learned levels are for shards alone."""
    four = Quantizer(4)
    learned = Ways(None, Feedback(Learned(NEAREST)))
    config = QSDPConfig(
        replicas=NEAREST, exceptions={"*.a": Ways(None, four), "*.b": learned, "*.c": "w8g8"}
    )
    assert config.ways_of(["x.a"], (64, 64))["replicas"] == four
    assert config.ways_of(["x.b"], (64, 64))["replicas"] == NEAREST
    assert config.ways_of(["x.d"], (64, 64))["replicas"] == NEAREST
    bitdp = QSDPConfig.preset("bitdp")
    bitdp = replace(bitdp, replicas=bitdp.gradients)
    ways = bitdp.ways_of(["transformer.wte.weight"], (1024, 192))
    assert ways["replicas"] == ways["gradients"] != bitdp.replicas


def test_what_is_kept_has_fixed_sizes_and_small_errors() -> None:
    rice = Quantizer(4, rounding="nearest", scaling="symmetric", coding="rice")
    with pytest.raises(ValueError, match=r"Feedback\(memory=...\) has coding='rice'"):
        Feedback(NEAREST, memory=rice)
    with pytest.raises(ValueError, match="has scaling='l2'"):
        Differences(Quantizer(4, 1024, "nearest", scaling="l2"))


def test_json_round_trip() -> None:
    """Every field, nested ones included; absent fields take their defaults."""
    learned = Learned(
        Quantizer(3, 64, "nearest", scale_dtype="bfloat16"), LevelSchedule(3, 7, "gradient")
    )
    for config in (
        QSDPConfig(
            learned,
            Quantizer(2, 64, "nearest", levels=(0.0, 0.25, 0.75, 1.0)),
            {"*.b": Ways(None, Quantizer(4)), "*.c": "w2g32", "*.d": None},
            ranks_per_node=2,
            inside_node=Quantizer(8),
            verify=True,
        ),
        QSDPConfig(Differences(NEAREST, kept=None), Feedback(learned), replicas=FED_BACK),
        QSDPConfig(KEPT, FED_BACK, seed=7, min_numel=3),
        QSDPConfig(None, Feedback(NEAREST, 0.5, NEAREST), warmup=Warmup(3, NEAREST)),
        QSDPConfig(None, FED_BACK, warmup=Warmup(3)),
        QSDPConfig(None, None),
    ):
        assert QSDPConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert QSDPConfig.from_json({}) == QSDPConfig()
    assert QSDPConfig.from_json({"preset": "w4g32"}) == QSDPConfig.preset("w4g32")
    changed = QSDPConfig.from_json({"preset": "w4g32", "exceptions": {"*.wte.*": "w6g4"}})
    assert changed == QSDPConfig.preset("w4g32").with_exceptions({"*.wte.*": "w6g4"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weight": None}, "unknown field 'weight' of QSDPConfig"),
        ({"weights": {"bit": 4}}, "unknown field 'bit' of weights"),
        ({"weights": "w4"}, "weights must be a mapping"),
        ({"weights": {"bits": 9}}, r"Quantizer\(bits=...\) must be"),
        ({"preset": "w9g9"}, "unknown preset"),
        ({"weights": {"differences": {}, "keep": None}}, "unknown field 'keep' of weights: beside"),
        ({"weights": {"differences": {}, "kept": {}}}, "must have rounding='nearest', got 'shift'"),
        ({"weights": {"differences": {}, "kept": 8}}, "weights.kept must be a mapping"),
        ({"weights": {"learned": {}}}, 'must have rounding="nearest" and levels=None'),
        ({"weights": {"feedback": {}}}, r"QSDPConfig\(weights=...\) must be a qsdp.Quantizer"),
        (
            {"weights": {"learned": {"rounding": "nearest"}, "schedule": {"every": 0}}},
            "must be an integer of at least 1, got 0",
        ),
        (
            {"weights": {"learned": {"rounding": "nearest"}, "schedule": {"method": "x"}}},
            "must be one of kmeans, gradient, got 'x'",
        ),
        ({"gradients": {"feedback": 4}}, "gradients.feedback must be a mapping"),
        ({"gradients": {"feedback": {}, "decay": 2}}, "must be from 0 to 1, got 2"),
        ({"gradients": {"feedback": {}, "decay": "1"}}, "must be a number, got '1'"),
        ({"gradients": {"feedback": {}, "memory": {}}}, "must have rounding='nearest'"),
        ({"gradients": {"feedback": {}, "kept": {}}}, "goes 'decay' and 'memory'"),
        ({"warmup": {"step": 3}}, "warmup must have the fields steps and gradients"),
        ({"warmup": {"steps": 0}}, "must be an integer of at least 1, got 0"),
        ({"exceptions": {"*": {"weights": 4}}}, "must have the fields weights and gradients"),
        (
            {"exceptions": {"*": {"weights": 4, "gradients": None}}},
            r"'\*'\].weights must be a mapping",
        ),
    ],
)
def test_bad_json_is_named(content: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        QSDPConfig.from_json(content)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("exceptions", ["w4g4", {"*": 4}, {3: "w4g4"}, 7, [("*",)]])
def test_bad_exceptions_are_named(exceptions: object) -> None:
    with pytest.raises(TypeError, match=r"QSDPConfig\(exceptions=...\) must be a mapping"):
        QSDPConfig(exceptions=exceptions)  # type: ignore[arg-type]


def test_learned_levels_need_nearest() -> None:
    with pytest.raises(ValueError, match='must have rounding="nearest" and levels=None'):
        Learned(Quantizer(4))
    with pytest.raises(ValueError, match=r"wrap the quantizer: qsdp.Learned"):
        Quantizer(4, rounding="nearest", levels="learned")  # type: ignore[arg-type]
