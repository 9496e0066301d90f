"""The planner: bytes of any configuration, names of variants, predictions, the command."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from qsdp.cli import main
from qsdp.config import QSDPConfig
from qsdp.fsdp import apply_qsdp, comm_stats, observe_comms
from qsdp.plan.benchmark import predict_benchmark
from qsdp.plan.cluster import DIFFERENCES, Cluster
from qsdp.plan.clusters import PUBLISHED, case
from qsdp.plan.command import plan
from qsdp.plan.model import Prediction, Work, predict
from qsdp.plan.sizes import gpt2
from qsdp.plan.variant import Variant, parse_variant
from qsdp.quantizer import Quantizer
from qsdp.ways import Differences, quantizer_of
from qsdp.wire import Segment, wire_layout

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
NETWORK = RESULTS / "network.json"
LAYERS, WIDTH, VOCAB, SEQUENCE = 3, 96, 1001, 128
RATE = 1000.0
MODEL = gpt2(LAYERS, WIDTH, vocab=VOCAB, sequence=SEQUENCE)


def step(
    variant: Variant | QSDPConfig, nodes: int = 2, ranks_per_node: int = 1, **work: bool
) -> Prediction:
    """Of the small model, without latencies and overlap."""
    if isinstance(variant, QSDPConfig):
        variant = Variant("test", variant, two_level=True)
    rates = dict.fromkeys(("bandwidth_gbps", "intra_gbps", "tflops", "codec_gbps"), RATE)
    cluster = Cluster("test", nodes, ranks_per_node, latency_us=0.0, intra_latency_us=0.0,
                      overlap=False, **rates)  # fmt: skip
    return predict(MODEL, cluster, Work(tokens=1.0, **work), variant)


def row_bytes(
    num_ranks: int,
    vectors: list[int],
    matrices: list[tuple[int, int, Quantizer | None]],
    zeros: bool,
    checksum: bool = False,
    mark: bool = False,
) -> int:
    """Bytes of a rank's row: vectors are raw, matrices have rows, columns and a quantizer.

    With ``zeros``, of gradients, which carry maps of zeros where a format has no code for them.
    """
    segments = [Segment(-(-size // num_ranks)) for size in vectors]
    segments += [Segment(-(-rows // num_ranks) * columns, q) for rows, columns, q in matrices]
    layout = wire_layout(tuple(segments), torch.float32, checksum, mark, zeros)
    return layout.row_bytes


def block_bytes(
    num_ranks: int, quantizer: Quantizer | None, zeros: bool = False, **more: bool
) -> int:
    """Of one block of the model, written down by hand."""
    d, vectors = WIDTH, [1, 1, 3, 1, 1, 1, 4, 1]
    shapes = ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))
    matrices = [(*s, quantizer) for s in shapes]
    return row_bytes(num_ranks, [n * d for n in vectors], matrices, zeros, **more)


def root_bytes(
    num_ranks: int,
    embedding: Quantizer | None,
    positions: Quantizer | None,
    zeros: bool = False,
    **more: bool,
) -> int:
    """Of the embeddings and the last norm."""
    matrices = [(VOCAB, WIDTH, embedding), (SEQUENCE, WIDTH, positions)]
    return row_bytes(num_ranks, [WIDTH, WIDTH], matrices, zeros, **more)


@pytest.mark.parametrize("num_ranks", [2, 5, 8])
@pytest.mark.parametrize("quantizer", [Quantizer(8), Quantizer(3, 128, "dither")])
def test_bytes_are_the_wires(num_ranks: int, quantizer: Quantizer) -> None:
    """Blocks are gathered twice and reduced once, the root once each."""
    for verify in (False, True):
        found = step(QSDPConfig(quantizer, quantizer, verify=verify), num_ranks)
        rows = root_bytes(num_ranks, quantizer, quantizer, checksum=verify)
        rows += root_bytes(num_ranks, quantizer, quantizer, zeros=True, checksum=verify)
        rows += 2 * LAYERS * block_bytes(num_ranks, quantizer, checksum=verify)
        rows += LAYERS * block_bytes(num_ranks, quantizer, zeros=True, checksum=verify)
        assert found.between_nodes == (num_ranks - 1) * rows


SENT = {
    "w8g8": QSDPConfig(),
    "exceptions": QSDPConfig.preset("w4g4").with_exceptions({"*.wte.*": "w6g4", "*.mlp.*": None}),
    "gradients alone": QSDPConfig.preset("w32g5"),
    "two levels": QSDPConfig(ranks_per_node=2, inside_node=Quantizer(4), verify=True),
    "sdp4bit": QSDPConfig.preset("sdp4bit").on_nodes_of(2),
    "one bit": replace(QSDPConfig.preset("bitdp"), warmup=None),
    "one bit, two levels": replace(QSDPConfig.preset("w1g1"), ranks_per_node=2),
}


def _bytes_sent(rank: int) -> dict[str, int]:
    """What a rank sent between nodes in a step of a GPT-2 of the small model's shape."""
    from torch.distributed.fsdp import fully_shard
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": LAYERS, "n_embd": WIDTH, "n_positions": SEQUENCE, "vocab_size": VOCAB}
    model = GPT2LMHeadModel(GPT2Config(**shape, n_head=2))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(MODEL.names)
    for block in (*model.transformer.h, model):
        fully_shard(block)
    tokens, sent = torch.arange(32).view(1, 32), {}
    for name, config in SENT.items():
        apply_qsdp(model, config)
        observe_comms(model)
        for _ in range(2):  # differences begin with the weights themselves
            comm_stats(model, reset=True)
            model(input_ids=tokens, labels=tokens).loss.backward()
        sent[name] = comm_stats(model).inter_node_sent
    return sent


@pytest.mark.ranks
def test_bytes_are_those_that_ranks_send() -> None:
    pytest.importorskip("transformers", reason="needs pip install 'qsdp[train]'")
    sent = run_ranks(_bytes_sent, 4)
    for name, config in SENT.items():
        nodes, per_node = (2, 2) if config.ranks_per_node else (4, 1)
        predicted = nodes * step(config, nodes, per_node).between_nodes
        assert predicted == sum(rank[name] for rank in sent), name


@pytest.mark.parametrize("base", ["w8g8", "w4g4", "w8g32"])
def test_an_exception_changes_the_bytes_by_its_layout(base: str) -> None:
    """Of the embedding, which is tied to the head, in the root unit, which is gathered once."""
    config, other, num_ranks = QSDPConfig.preset(base), QSDPConfig.preset("w6g4"), 4
    changed = 0
    pairs = ((config.weights, other.weights), (config.gradients, other.gradients))
    for zeros, (ours, others) in enumerate(pairs):
        plain, excepted = quantizer_of(ours), quantizer_of(others)
        changed += root_bytes(num_ranks, excepted, plain, bool(zeros))
        if plain is None:  # FSDP2's own, without padding
            changed -= 4 * sum(-(-n // num_ranks) * WIDTH for n in (VOCAB, SEQUENCE))
            changed -= 4 * 2 * -(-WIDTH // num_ranks)
        else:
            changed -= root_bytes(num_ranks, plain, plain, bool(zeros))
    assert changed != 0
    before = step(config, num_ranks).between_nodes
    for pattern in ("*.wte.*", "lm_head.*"):
        after = step(config.with_exceptions({pattern: "w6g4"}), num_ranks).between_nodes
        assert after - before == (num_ranks - 1) * changed


def test_two_levels_send_each_row_once_out_of_a_node() -> None:
    """Three nodes of four ranks: reductions shrink to a quarter, gathers are rings if flat."""
    config = QSDPConfig()
    weights, gradients = quantizer_of(config.weights), quantizer_of(config.gradients)
    gathered = root_bytes(12, weights, weights) + 2 * LAYERS * block_bytes(12, weights)
    reduced = root_bytes(12, gradients, gradients, zeros=True)
    reduced += LAYERS * block_bytes(12, gradients, zeros=True)
    flat = step(parse_variant("w8g8-flat"), 3, 4).between_nodes
    assert flat == 11 * gathered + 4 * 8 * reduced
    two_level = step(parse_variant("w8g8"), 3, 4).between_nodes
    assert two_level == 4 * 2 * (gathered + reduced)
    inside = QSDPConfig(ranks_per_node=4, inside_node=Quantizer(4))
    assert step(inside, 3, 4).between_nodes == two_level
    one_node = step(inside, 1, 4)
    assert one_node.between_nodes == 0 and one_node.network_s > 0


def test_bytes_inside_a_node_take_its_link() -> None:
    """A rank sends each of three others a row for each of two nodes."""
    config, quantizer = QSDPConfig(ranks_per_node=4), Quantizer(8, 128)
    own, eight = (
        step(replace(config, inside_node=inside), 2, 4).network_s for inside in (None, quantizer)
    )
    saved = root_bytes(8, None, None) - root_bytes(8, quantizer, quantizer, zeros=True)
    saved += LAYERS * (block_bytes(8, None) - block_bytes(8, quantizer, zeros=True))
    assert (own - eight) / 8e-9 * RATE == pytest.approx(3 * 2 * saved)


def test_differences_are_gathered_once() -> None:
    """As values are that stay gathered until backward; the codec has more to do."""
    quantizer = Quantizer(4, 256, "nearest")
    values = QSDPConfig(quantizer, None)
    differences = step(replace(values, weights=Differences(quantizer)), 4)
    again, kept = step(values, 4), step(values, 4, reshard=False)
    assert again.between_nodes - kept.between_nodes == 3 * LAYERS * block_bytes(4, quantizer)
    # Rows of differences hold a mark. A row of each unit, the root among them, goes to 3 nodes.
    rows = root_bytes(4, quantizer, quantizer) + LAYERS * block_bytes(4, quantizer)
    marked = root_bytes(4, quantizer, quantizer, mark=True)
    marked += LAYERS * block_bytes(4, quantizer, mark=True)
    assert differences.between_nodes - kept.between_nodes == 3 * (marked - rows)
    coded = DIFFERENCES.own + 4 * DIFFERENCES.every
    assert differences.codec_s / kept.codec_s == pytest.approx(coded / (1 + 4))


def test_bfloat16_halves_what_is_not_quantized_and_the_codec() -> None:
    full, half = step(parse_variant("stock-fp32")), step(parse_variant("stock-bf16"))
    assert full.between_nodes == 2 * half.between_nodes and full.wire_bits == 64
    full, half = step(parse_variant("w8g8-flat")), step(parse_variant("w8g8-flat-bf16"))
    assert full.codec_s == pytest.approx(2 * half.codec_s)
    assert half.between_nodes < full.between_nodes


def test_transport_without_quantizing_moves_stocks_bytes() -> None:
    stock, ours = step(parse_variant("stock-fp32"), 4), step(parse_variant("qsdp-fp32"), 4)
    assert ours.codec_s > 0 == stock.codec_s
    padding = ours.between_nodes - stock.between_nodes
    assert 0 <= padding < 3 * 128 * (2 + 3 * LAYERS)
    assert step(parse_variant("w32g32"), 4) == stock


def test_names_of_variants() -> None:
    half, full = torch.bfloat16, torch.float32
    expected = {
        "stock-fp32": (None, full, full, False),
        "stock-bf16": (None, half, half, False),
        "stock-w32g16": (None, full, half, False),
        "qsdp-fp32": (QSDPConfig(exceptions={"*": None}), full, full, True),
        "w8g8": (QSDPConfig.preset("w8g8"), full, full, True),
        "w4g32-flat": (QSDPConfig.preset("w4g32"), full, full, False),
        "w4g4-bf16": (QSDPConfig.preset("w4g4"), half, half, True),
        "w2g3-flat-bf16": (QSDPConfig.preset("w2g3"), half, half, False),
    }
    for name, fields in expected.items():
        variant = parse_variant(name)
        assert variant == Variant(name, *fields)
        comm = json.loads(variant.comm)
        assert comm.pop("name") == name
        assert QSDPConfig.from_json(comm) == (variant.config or QSDPConfig(None, None))


@pytest.mark.parametrize(
    "name", ["fp8", "w9g9", "stock-w8g8", "stock-fp32-flat", "w8g8-bf16-flat", "qsdp-fp32-bf16", ""]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"there are stock-fp32.*presets are w\{bits\}g\{bits\}"):
        parse_variant(name)


def test_nodes_of_a_variant() -> None:
    preset, flat = parse_variant("w8g8"), parse_variant("w8g8-flat")
    assert preset.config_on(2, 4).ranks_per_node == 4
    for variant, nodes, per_node in ((preset, 1, 4), (preset, 4, 1), (flat, 2, 4)):
        flat_config = replace(QSDPConfig.preset("w8g8"), ranks_per_node=1)
        assert variant.config_on(nodes, per_node) == flat_config
    written = Variant("mine", QSDPConfig(ranks_per_node=4), two_level=True)
    assert written.config_on(2, 4).ranks_per_node == 4
    with pytest.raises(ValueError, match="mine has ranks_per_node=4 and the nodes have 8"):
        written.config_on(2, 8)


def test_configurations_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"preset": "w4g4", "exceptions": {"*.wte.*": "w6g4"}, "verify": True}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    expected = QSDPConfig.from_json(content)
    assert parse_variant(str(path)) == Variant("mine", expected, two_level=True)
    assert parse_variant(f"{path}-bf16").is_bf16
    path.write_text(json.dumps(content | {"ranks_per_node": 1}))
    assert not parse_variant(str(path)).two_level
    path.write_text(json.dumps(content | {"ranks_per_node": 8}))
    assert parse_variant(str(path)).two_level
    arguments = ["--configs", "stock-bf16", str(path), "w4g4", "--bandwidth", "10"]
    assert main(["plan", "--json", *arguments]) == 0
    stock, mine, preset = json.loads(capsys.readouterr().out)
    assert (mine["config"], mine["collectives"]) == ("mine", "two-level")
    assert preset["between_nodes"] < mine["between_nodes"] < stock["between_nodes"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "mine.json"),
        ("[]", "mine.json"),
        ('{"weight": null}', "unknown field 'weight'"),
        ('{"weights": {"bits": 9}}', "bits"),
        ('{"exceptions": {"*.wtf.*": null}}', "'*.wtf.*' matches no parameter"),
        ('{"replicas": {"bits": 8}}', "replicas"),
        ('{"ranks_per_node": 3}', "ranks_per_node=3 and the nodes have 8"),
    ],
)
def test_bad_files_are_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    assert main(["plan", "--configs", "stock-bf16", str(path)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "variant", "gbps", "speedup"), [case for case in PUBLISHED if "h800" not in case[0]]
)
def test_published_clusters(name: str, variant: str, gbps: float, speedup: float) -> None:
    """Within 11 %; for SDP4Bit's fast cluster, which is not predicted, see its document."""
    (found,) = [
        answer
        for answer in plan(case(name))
        if (answer.bandwidth_gbps, answer.variant.name) == (gbps, variant)
    ]
    assert found.speedup == pytest.approx(speedup, rel=0.11)


def test_benchmark() -> None:
    """Bytes as they were counted; steps of the cells that did not calibrate."""
    errors = []
    for layout, cell, prediction in predict_benchmark(json.loads(NETWORK.read_text())):
        assert prediction.between_nodes * layout["hosts"] == cell["between_nodes"], cell["variant"]
        if cell["bandwidth_gbps"] is not None:
            errors.append(abs(prediction.step_s / cell["step_s"] - 1))
    assert len(errors) > 40
    assert statistics.median(errors) < 0.10
    # The benchmark ran on a busy machine: single cells had up to half more computation.
    assert sum(error > 0.20 for error in errors) <= 0.1 * len(errors), errors


def test_predicts_4_to_16_ranks_and_a_limit_makes_no_step_faster() -> None:
    """Bytes to the byte. 16 ranks on 2 cores wait for each other, which slow links partly hide."""
    errors = []
    for layout, cell, prediction in predict_benchmark(
        json.loads((RESULTS / "network-ranks.json").read_text())
    ):
        assert prediction.between_nodes * layout["hosts"] == cell["between_nodes"], cell["variant"]
        if cell["bandwidth_gbps"] is not None:
            errors.append(prediction.step_s / cell["step_s"] - 1)
    assert len(errors) == 72
    assert statistics.median(map(abs, errors)) < 0.10
    assert min(errors) > -0.15 and max(errors) < 0.30


def test_overlap_hides_the_smaller_part() -> None:
    chosen = case("cloud")
    for variant in chosen.variants:
        serial, overlapped = (
            predict(chosen.model, replace(chosen.cluster, overlap=each), chosen.work, variant)
            for each in (False, True)
        )
        assert serial.step_s == pytest.approx(sum(serial[1:4]))
        assert max(serial[1:3]) <= overlapped.step_s < serial.step_s


def test_thousands_of_ranks_take_no_time() -> None:
    chosen = case("cloud")
    cluster = replace(chosen.cluster, nodes=512, bandwidth_gbps=100.0)
    begin = time.perf_counter()
    for variant in chosen.variants:
        assert predict(chosen.model, cluster, chosen.work, variant).step_s > 0
    assert time.perf_counter() - begin < 1


def test_command_prints_what_it_promises(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", "--cluster", "qsdp-paper", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"bandwidth_gbps", "config", "step_s", "speedup", "wire_bits"} <= set(rows[0])
    assert all(math.isfinite(row["step_s"]) for row in rows)
    plot = tmp_path / "plan.png"
    arguments = ["--parameters", "13e9", "--layers", "40", "--nodes", "64", "--plot", str(plot)]
    assert main(["plan", *arguments]) == 0
    assert "recommended" in capsys.readouterr().out and plot.stat().st_size > 5000
    assert main(["plan", "--survey", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) > 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "moon"], "--cluster must be one of cloud"),
        (["--configs", "w9g9"], "w9g9"),
        (["--configs", "missing.json"], "missing.json"),
        (["--parameters", "1e9"], "--layers"),
        (["--codec-gbps", "0"], "--codec-gbps must be above 0"),
    ],
)
def test_bad_use_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
