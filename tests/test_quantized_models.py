"""`qsdp train --fake-quantize`: what it trains, resumes, sends and writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import exported_loss, finish, start
from test_trainer_shapes import SHORT, resumed_equals, tensors
from transformers import AutoModelForCausalLM, AutoTokenizer

from qsdp.cli import main
from qsdp.trainer.comm import comm_config, remembers_alike
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.model import new_model
from qsdp.trainer.quantized import (
    on_the_wire,
    pack_codes,
    quantize_layers,
    steps_fit,
    travels_exactly,
)

TINY = {"layers": 2, "width": 64, "heads": 2, "vocab_size": 300, "sequence_length": 32}
LAYERS = 2 * 7  # a Llama block has four matrices of attention and three of its feed-forward layer


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fake-quantize", "1"], "--fake-quantize must be from 2 to 8, or left out, got 1"),
        (["--fake-quantize-block", "32"], "--fake-quantize-block and -start need --fake-quantize"),
        (["--fake-quantize-start", "3"], "--fake-quantize-block and -start need --fake-quantize"),
        (
            ["--fake-quantize", "4", "--steps", "9", "--fake-quantize-start", "10"],
            "--fake-quantize-start must be from 0 to --steps 9, got 10",
        ),
        (
            ["--fake-quantize", "4", "--model", "m", "--lora", "8"],
            "does not go with --lora, whose base is frozen: give --lora a --model that was",
        ),
        (["--fake-quantize", "4", "--fake-quantize-block", "33"], "a multiple of 32 up to"),
        (["--architecture", "gpt2", "--model", "m"], "--architecture is of the preset's model"),
    ],
)
def test_bad_use_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "--folder", str(tmp_path / "run"), *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_what_is_quantized() -> None:
    """The linear layers of the blocks but those kept; a head tied to the embedding never is."""
    config = TrainConfig(**TINY, fake_quantize=4)
    handle = quantize_layers(new_model(config, 300, 0), config)
    assert handle is not None and len(handle.names) == LAYERS
    assert not any("lm_head" in name for name in handle.names)
    config = TrainConfig(**TINY, fake_quantize=4, keep_full_precision=("*.down_proj.*",))
    handle = quantize_layers(new_model(config, 300, 0), config)
    assert handle is not None and len(handle.names) == LAYERS - 2
    config = TrainConfig(**TINY)
    assert quantize_layers(new_model(config, 300, 0), config) is None


def test_models_that_do_not_fit_name_the_flag() -> None:
    config = TrainConfig(**TINY, fake_quantize=4, architecture="gpt2")
    with pytest.raises(ValueError, match="--fake-quantize 4 quantizes linear layers, and GPT2LM"):
        quantize_layers(new_model(config, 300, 0), config)
    config = TrainConfig(**TINY, fake_quantize=4, fake_quantize_block=48 * 32)
    with pytest.raises(ValueError, match="--fake-quantize 4: .* which blocks of 1536 do not"):
        quantize_layers(new_model(config, 300, 0), config)


def test_where_weights_travel_as_they_are() -> None:
    """In blocks of 2 to 7 bits from the first step on; gradients keep what --comm says."""
    for fields, exactly in (
        ({"fake_quantize": 4, "fake_quantize_block": 32}, True),
        ({"fake_quantize": 8, "fake_quantize_block": 32}, False),
        ({"fake_quantize": 4}, False),
        ({"fake_quantize": 4, "fake_quantize_block": 32, "fake_quantize_start": 2}, False),
        ({}, False),
    ):
        config = TrainConfig(**TINY, comm="w8g4", **fields)
        assert travels_exactly(config) == exactly
        handle = quantize_layers(new_model(config, 300, 0), config)
        before = comm_config(config)
        after = on_the_wire(before, config, handle)
        assert (after != before) == exactly and after.gradients == before.gradients
        if exactly:
            assert len(after.exceptions) == LAYERS


def test_a_checkpoint_with_other_bits_does_not_remember_alike() -> None:
    saved = TrainConfig(fake_quantize=4).to_json()
    assert remembers_alike(saved, TrainConfig(fake_quantize=4))
    assert not remembers_alike(saved, TrainConfig(fake_quantize=3))
    del saved["fake_quantize"]  # of a checkpoint that is older than the flag
    assert remembers_alike(saved, TrainConfig())


def unpacked(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Codes of rows, bit by bit as the format says: code i from bit ``i * bits`` on."""
    rows = []
    for row in packed.tolist():
        stream = sum((word % (1 << 32)) << (32 * place) for place, word in enumerate(row))
        mask, zero = (1 << bits) - 1, 1 << (bits - 1)
        rows.append([((stream >> (i * bits)) & mask) - zero for i in range(columns)])
    return torch.tensor(rows, dtype=torch.int8)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [1, 31, 96])
def test_packed_codes_come_back(bits: int, columns: int) -> None:
    codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (5, columns), dtype=torch.int8)
    codes[0, 0], codes[1, 0] = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, -(-columns * bits // 32)) and packed.dtype == torch.int32
    assert torch.equal(unpacked(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_codes_are_those_of_compressed_tensors(bits: int) -> None:
    pytest.importorskip("compressed_tensors", reason="pip install 'qsdp[quantized]'")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (7, 93), dtype=torch.int8)
    assert torch.equal(pack_codes(codes, bits), pack_to_int32(codes, bits))


def check_codes(run: Path, bits: int) -> None:
    """Codes times steps are the exported weights, bit for bit, in a fraction of the bytes."""
    plain = load_file(run / "model" / "model.safetensors")
    coded = load_file(run / f"model-int{bits}" / "model.safetensors")
    about = json.loads((run / f"model-int{bits}" / "config.json").read_text())
    groups = about["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert groups["num_bits"] == bits and groups["symmetric"]
    names = [name.removesuffix("_packed") for name in coded if name.endswith("_packed")]
    assert len(names) == LAYERS
    for name in names:
        shape = coded[f"{name}_shape"].tolist()
        codes = unpacked(coded[f"{name}_packed"], bits, shape[1])
        steps = coded[f"{name}_scale"]
        steps = steps.repeat_interleave(shape[1] // steps.shape[1], 1)
        assert torch.equal(codes * steps, plain[name]), name
        assert name not in coded
    rest = set(plain) - set(names)
    assert all(torch.equal(plain[name], coded[name]) for name in rest)


def check_reload(run: Path, bits: int) -> None:
    """transformers reads either folder, and gives the same logits."""
    pytest.importorskip("compressed_tensors", reason="pip install 'qsdp[quantized]'")
    plain = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    coded = AutoModelForCausalLM.from_pretrained(run / f"model-int{bits}").eval()
    ids = torch.arange(60).view(2, 30)
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, coded(ids).logits)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """Two runs of two ranks: learned steps from step 2 on, and blocks that travel as they are."""
    folder = tmp_path_factory.mktemp("runs")
    for name, fields in (
        ("learned", {"fake_quantize": 4, "fake_quantize_start": 2, "comm": "w8g8"}),
        ("blocks", {"fake_quantize": 3, "fake_quantize_block": 32, "comm": "w32g32"}),
    ):
        file = {**TINY, **SHORT, "nproc": 2, "data": [str(text_file)], **fields}
        (folder / f"{name}.json").write_text(json.dumps(file))
        process = start(folder / name, "--config", str(folder / f"{name}.json"))
        status, out, err = finish(process, timeout=100)
        assert status == 0, out + err
        (folder / f"{name}.out").write_text(out)
    return folder


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "bits"), [("learned", 4), ("blocks", 3)])
def test_a_run_exports_what_it_measured(runs: Path, name: str, bits: int) -> None:
    run = runs / name
    result = json.loads((run / "result.json").read_text())
    assert result["exported"] == "decoded" and result["fake_quantize"] == bits
    assert result["valid_loss_decoded"] != result["valid_loss_master"]
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    loss = exported_loss(model, tokenizer, run)
    assert loss == pytest.approx(result["valid_loss_decoded"], rel=1e-6)
    check_codes(run, bits)


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "bits"), [("learned", 4), ("blocks", 3)])
def test_transformers_reads_the_codes(runs: Path, name: str, bits: int) -> None:
    check_reload(runs / name, bits)


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["learned", "blocks"])
def test_a_run_resumes_bit_for_bit(runs: Path, name: str, tmp_path: Path) -> None:
    """At the switch with learned steps; and where weights travel in their own bits."""
    resumed_equals(runs / name, tmp_path / "resumed")
    ours, theirs = (
        load_file(next(folder.glob("model-int*")) / "model.safetensors")
        for folder in (runs / name, tmp_path / "resumed")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_bytes_of_weights_that_travel_as_they_are(runs: Path) -> None:
    """3 bits and a bfloat16 step for 32 values: 3.5 bits of a layer in each of two gathers."""
    assert "linear layers in 3 bits, sent as they are" in (runs / "blocks.out").read_text()
    assert "sent as they are" not in (runs / "learned.out").read_text()
    result = json.loads((runs / "blocks" / "result.json").read_text())
    coded = load_file(runs / "blocks" / "model-int3" / "model.safetensors")
    layers = sum(int(value.prod()) for name, value in coded.items() if name.endswith("_shape"))
    rest = result["parameters"] - layers  # gathered once a step, and in full precision
    expected = (3 * layers + 2 * rest) / ((1 + 2 * 3.5 / 32) * layers + 2 * rest)
    assert result["ratio"] == pytest.approx(expected, rel=0.02)


def test_which_steps_a_checkpoint_holds() -> None:
    saved = TrainConfig(fake_quantize=4, fake_quantize_start=3).to_json()
    config = TrainConfig(fake_quantize=4)
    assert steps_fit(saved, 3, config) and not steps_fit(saved, 2, config)
    assert not steps_fit(saved, 3, TrainConfig(fake_quantize=3))
    assert not steps_fit({}, 3, config)  # older than the flag


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_resume_in_other_bits_on_one_rank(runs: Path, tmp_path: Path) -> None:
    """Steps are taken anew from the masters, which stay as they were; the run says what changed,
    and codes of the other bits do not stay beside the new model."""
    shutil.copytree(runs / "learned", tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()  # as if it had ended before its results
    masters: dict[str, list[torch.Tensor]] = {}
    for part in tensors(runs / "learned", 4):
        for name, shard in part.items():
            masters.setdefault(name, []).append(shard)
    flags = ["--nproc", "1", "--fake-quantize", "3", "--resume"]
    status, out, err = finish(start(tmp_path / "run", *flags), timeout=100)
    assert status == 0, out + err
    assert "warning: --fake-quantize was 4" in out and "is 3 now" in out
    assert [path.name for path in (tmp_path / "run").glob("model-*")] == ["model-int3"]
    coded = load_file(tmp_path / "run" / "model-int3" / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    master = torch.cat(masters[f"model.{name}.parametrizations.weight.original"])
    steps = coded[f"{name}.weight_scale"].flatten()
    assert torch.allclose(steps, 2 * master.abs().mean(1) / 3**0.5, rtol=1e-5)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_quantization_after_training(text_file: Path, tmp_path: Path) -> None:
    """Switched on at the last step it leaves training as it was, and measures both weights."""
    shared = {**TINY, **SHORT, "nproc": 1, "data": [str(text_file)], "architecture": "llama",
              "export": "none"}  # fmt: skip
    found = {}
    for name, fields in (("plain", {}), ("after", {"fake_quantize": 2, "fake_quantize_start": 4})):
        (tmp_path / f"{name}.json").write_text(json.dumps({**shared, **fields}))
        process = start(tmp_path / name, "--config", str(tmp_path / f"{name}.json"))
        status, out, err = finish(process, timeout=100)
        assert status == 0, out + err
        found[name] = json.loads((tmp_path / name / "result.json").read_text())
    # The norm that clips gradients sums the steps' zeros, too, in another order.
    plain_loss = found["plain"]["valid_loss_master"]
    assert found["after"]["valid_loss_master"] == pytest.approx(plain_loss, rel=1e-6)
    assert found["after"]["valid_loss_decoded"] > found["plain"]["valid_loss_decoded"]
    (plain,), (after,) = tensors(tmp_path / "plain", 4), tensors(tmp_path / "after", 4)
    name = "model.model.layers.0.mlp.up_proj"
    original = after[f"{name}.parametrizations.weight.original"]
    assert torch.allclose(plain[f"{name}.weight"], original, atol=1e-5)
