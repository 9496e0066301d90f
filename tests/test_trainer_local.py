"""`qsdp train --sync-every`: its flags, and a run that resumes inside a round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qsdp.trainer.command import parse
from qsdp.trainer.metrics import step_medians

ROOT = Path(__file__).parent.parent
SMALL = {
    "nproc": 2, "replicate": 2, "sync-every": 5, "sync-bits": 4, "outer-lr": 0.7,
    "sync-fragments": 2, "sync-overlap": 2, "steps": 14, "warmup-steps": 2, "layers": 1,
    "width": 32, "heads": 2, "vocab-size": 300, "sequence-length": 32, "eval-windows": 8,
    "final-eval-windows": 8, "eval-every": 6, "device": "cpu", "checkpoint-every": 7,
    "keep-checkpoints": 9,
}  # fmt: skip


def run(folder: Path, *flags: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    settings = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "qsdp", "train", "--folder", str(folder), *settings, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.ranks
@pytest.mark.timeout(420)
def test_a_run_resumes_inside_a_round(tmp_path: Path) -> None:
    """From step 7 of rounds of 5, with a fragment under way: the same losses, bit for bit."""
    text = tmp_path / "text.txt"
    words = [f"word{number * number % 97}" for number in range(9000)]
    text.write_text("\n".join(" ".join(words[i : i + 12]) for i in range(0, len(words), 12)))
    whole = run(tmp_path / "whole", "--data", str(text))
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000007"
    again = run(tmp_path / "again", "--data", str(text), "--resume", str(checkpoint))
    assert again["valid_loss_master"] == whole["valid_loss_master"]
    lines = {}
    for name in ("whole", "again"):
        records = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        lines[name] = [
            (r["step"], r.get("loss"), r.get("grad_norm"), r.get("valid_loss")) for r in records
        ]
    assert lines["again"] == [line for line in lines["whole"] if line[0] > 7]
    steps = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in steps if "grad_norm" in line]
    assert [r["step"] for r in found if r["synchronised"]] == [3, 5, 8, 10, 12, 14]
    assert {r["sync_interval"] for r in found[:-1]} == {5, 4}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--sync-bits 4", "--sync-bits needs --sync-every"),
        ("--sync-every 5", "--sync-every needs --replicate"),
        ("--replicate 2 --sync-every 0", "--sync-every must be at least 1, got 0"),
        ("--replicate 2 --sync-every 5 --sync-bits 9", "--sync-bits must be 1 to 8, or 32, got 9"),
        ("--replicate 2 --sync-every 5 --sync-overlap 5", "at least 0 and below --sync-every 5"),
        ("--replicate 2 --sync-every 5 --outer-momentum 0.5", "--outer-momentum needs --outer-lr"),
        ("--replicate 2 --sync-every 5 --sync-power 1", "--sync-power needs --sync-alpha"),
        ("--replicate 2 --sync-every 5 --sync-alpha -1", "--sync-alpha must be at least 0"),
        ("--replicate 2 --sync-every 5 --outer-lr 0", "--outer-lr must be above 0, got 0"),
        ("--replicate 2 --sync-every 5 --comm auto", "--comm auto decides for gradients"),
        ("--replicate 2 --sync-every 5 --no-quantize-replicas", "--no-quantize-replicas is about"),
    ],
)
def test_flags_that_do_not_fit_are_named(argv: str, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(argv.split())
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_bytes_a_step_are_means_over_whole_rounds() -> None:
    """Of rounds of 4 steps; the first one, with its warm-up, does not count."""
    names = ("step_s", "compute_s", "encode_s", "decode_s", "network_s", "tokens_per_s")
    records = []
    for step in range(1, 15):
        ends = step % 4 == 0
        sent = 100 * ends if step > 4 else 9999
        counts = {"sent": sent, "stock_sent": 1000, "synchronised": ends}
        records.append({"step": step, "loss": 1.0, **dict.fromkeys(names, 1.0), **counts})
    assert step_medians(records)["sent"] == 25
    assert step_medians(records)["stock_sent"] == 1000
