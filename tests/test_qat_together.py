"""Fake quantization beside mixed precision, replicas with steps of their own, and adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import qat_together_cases
import torch
from ranks import check_case, run_cases, run_ranks
from safetensors.torch import load_file
from test_quantized_models import TINY
from test_trainer import finish, start
from test_trainer_shapes import SHORT, resumed_equals
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel

Results = list[dict[str, str | None]]


TWO = [name for name in qat_together_cases.CASES if name not in qat_together_cases.FOUR]


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(run_cases, 2, qat_together_cases.CASES, tuple(TWO))


@pytest.mark.ranks
@pytest.mark.parametrize("name", TWO)
def test_on_two_ranks(two_ranks: Results, name: str) -> None:
    check_case(two_ranks, name)


@pytest.fixture(scope="module")
def four_ranks() -> Results:
    return run_ranks(run_cases, 4, qat_together_cases.CASES, qat_together_cases.FOUR)


@pytest.mark.ranks
@pytest.mark.parametrize("name", qat_together_cases.FOUR)
def test_on_two_replicas_of_two_ranks(four_ranks: Results, name: str) -> None:
    check_case(four_ranks, name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    run_ranks(qat_together_cases.write_models, 2, folder)
    return folder


def check_logits(folder: Path, model: str) -> None:
    again = AutoModelForCausalLM.from_pretrained(folder / model).eval()
    assert again.dtype == torch.bfloat16
    with torch.no_grad():
        logits = again(qat_together_cases.IDS).logits
    assert torch.equal(logits, torch.load(folder / "logits.pt"))


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", qat_together_cases.MODELS)
def test_a_bfloat16_model_comes_back(models: Path, name: str) -> None:
    """Whatever its steps and whatever it travelled in, it has the logits that training saw."""
    check_logits(models / name, "model")


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["learned", "blocks"])
def test_codes_of_a_bfloat16_model_are_the_model(models: Path, name: str) -> None:
    pytest.importorskip("compressed_tensors", reason="pip install 'qsdp[quantized]'")
    bits = qat_together_cases.MODELS[name]["fake_quantize"]
    check_logits(models / name, f"model-int{bits}")


def torchao_model(folder: Path, bits: int, kind: str) -> PreTrainedModel:
    """As docs/quantization_aware.md makes it: torchao's tensors around the codes and steps."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from torchao import quantization

    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    coded = load_file(folder / f"model-int{bits}" / "model.safetensors")
    for name, layer in model.named_modules():
        if f"{name}.weight_packed" not in coded:
            continue
        packed, steps, shape = (
            coded[f"{name}.weight_{part}"] for part in ("packed", "scale", "shape")
        )
        codes = unpack_from_int32(packed, bits, torch.Size(shape.tolist()))
        block = [1, codes.shape[1] // steps.shape[1]]
        if kind == "Int8Tensor":
            weight = quantization.Int8Tensor(codes, steps, block, steps.dtype)
        else:
            zeros, width = torch.zeros_like(steps, dtype=torch.int8), getattr(torch, f"int{bits}")
            weight = quantization.IntxUnpackedToInt8Tensor(
                codes, steps, zeros, width, block, steps.dtype, None
            )
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return model


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("learned", "IntxUnpackedToInt8Tensor"),
        ("blocks", "IntxUnpackedToInt8Tensor"),
        ("seven bits", "IntxUnpackedToInt8Tensor"),
        ("differences", "Int8Tensor"),
    ],
)
def test_torchao_computes_with_the_codes(models: Path, name: str, kind: str) -> None:
    """The same logits, bit for bit where torchao multiplies by weights; its integer kernel
    multiplies by codes first, and rounds elsewhere."""
    pytest.importorskip("torchao", reason="pip install torchao")
    pytest.importorskip("compressed_tensors", reason="pip install 'qsdp[quantized]'")
    bits = qat_together_cases.MODELS[name]["fake_quantize"]
    model = torchao_model(models / name, bits, kind)
    assert type(model.model.layers[1].mlp.up_proj.weight).__name__ == kind
    with torch.no_grad():
        logits = model(qat_together_cases.IDS).logits
    expected = torch.load(models / name / "logits.pt")
    if kind == "Int8Tensor":
        # bfloat16 rounds by 2^-9, once more in each of the layers on the way.
        assert (logits - expected).abs().max() < 2**-5 * expected.abs().max()
    else:
        assert torch.equal(logits, expected)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_adapters_fit_the_codes_as_they_fit_the_floats(models: Path) -> None:
    """What --lora trains on the floats of a run: peft puts it on the codes with the same logits."""
    pytest.importorskip("compressed_tensors", reason="pip install 'qsdp[quantized]'")
    peft = pytest.importorskip("peft", reason="pip install 'qsdp[lora]'")
    found = []
    # Unpacked when it is read and not at the first use, which is too late for peft.
    unpacked = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    for folder, how in (("model", {}), ("model-int4", unpacked)):
        base = AutoModelForCausalLM.from_pretrained(models / "learned" / folder, **how)
        config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=4)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(base, config).eval()
        for adapter, value in adapted.named_parameters():
            if "lora_" in adapter:
                nn.init.normal_(value, std=0.1)
        with torch.no_grad():
            found.append(adapted(qat_together_cases.IDS).logits)
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.load(models / "learned" / "logits.pt"))


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_replicas_in_bfloat16_resume_inside_a_round(text_file: Path, tmp_path: Path) -> None:
    """Steps learned since step 1, outer steps after rounds of 3; resumed at step 2, bit for bit."""
    file = {**TINY, **SHORT, "nproc": 2, "data": [str(text_file)], "replicate": 2, "comm": "w32g32",
            "sync_every": 3, "outer_lr": 0.7, "fake_quantize": 4, "fake_quantize_start": 1,
            "precision": "bf16"}  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(file))
    run = tmp_path / "run"
    status, out, err = finish(start(run, "--config", str(tmp_path / "run.json")), timeout=200)
    assert status == 0, out + err
    resumed_equals(run, tmp_path / "resumed")
    result = json.loads((run / "result.json").read_text())
    assert result["exported"] == "decoded"
    again = AutoModelForCausalLM.from_pretrained(run / "model")
    assert again.dtype == torch.bfloat16
    rows = again.model.layers[1].mlp.up_proj.weight.detach()
    assert max(len(row.unique()) for row in rows) <= 16
