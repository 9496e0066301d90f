"""Fake quantization beside mixed precision, replicas with steps of their own, and adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import qat_together_cases
import torch
from ranks import check_case, run_cases, run_ranks
from test_quantized_models import TINY
from test_trainer import finish, start
from test_trainer_shapes import SHORT, resumed_equals
from transformers import AutoModelForCausalLM

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
