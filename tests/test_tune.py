"""Widths for parameters: the knapsack against brute force, and the command end to end."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="needs pip install 'qsdp[train]'")

from qsdp import Learned, QSDPConfig, Quantizer, Ways
from qsdp.cli import main
from qsdp.trainer import checkpoint
from qsdp.trainer.comm import comm_config
from qsdp.trainer.command import parse
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.data import vocabulary_digest
from qsdp.trainer.model import build_model
from qsdp.trainer.text import read_text
from qsdp.trainer.tokenizer import load_tokenizer, train_tokenizer
from qsdp.tune.allocate import (
    WIDTHS,
    Item,
    average_bits,
    total_harm,
    within_budget,
    within_harm,
)
from qsdp.tune.choose import _base, _config, _follows
from qsdp.tune.measure import relative_error


def make_items(seed: int, count: int, *, numel: int | None = None) -> list[Item]:
    """Harms that fall about fourfold a bit, some of them not convex."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for index in range(count):
        size = numel or int(torch.randint(10, 500, (), generator=generator))
        top = float(torch.rand((), generator=generator)) * 10
        noise = (0.5 + torch.rand(len(WIDTHS), generator=generator)).tolist()
        harm = {w: top * 4.0 ** (2 - w) * n for w, n in zip(WIDTHS, noise, strict=True)}
        items.append(Item(f"p{index}", size, harm))
    return items


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bits", [2.0, 3.0, 4.3, 7.5, 8.0])
def test_budget_is_kept_and_nearly_best(seed: int, bits: float) -> None:
    """Against every choice, with equal sizes: never worse than the best of half a bit less."""
    items = make_items(seed, 4, numel=100)
    found = within_budget(items, bits)
    assert average_bits(items, found) <= bits + 1e-9
    assert total_harm(items, found) <= total_harm(items, dict.fromkeys(found, int(bits))) + 1e-12
    best = min(
        total_harm(items, widths)
        for choice in product(WIDTHS, repeat=len(items))
        if average_bits(items, widths := dict(zip(found, choice, strict=True)))
        <= max(2.0, bits - 0.5)
    )
    assert total_harm(items, found) <= best + 1e-12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", [0.4, 1.3, 2.6, 5.0])
def test_rates_may_begin_at_nothing_and_be_fractions(seed: int, bits: float) -> None:
    """As for blocks whose scales count: against every choice of one bit a value less."""
    generator = torch.Generator().manual_seed(seed)
    rates = (0.0, 1.125, 2.125, 3.125, 4.125, 6.125)
    items = []
    for index in range(4):
        length = float(torch.rand((), generator=generator)) * 10
        # One bit is worse than none, as it is for heavy tails.
        harms = [length, *(6 * length * 4.0 ** -int(rate) for rate in rates[1:])]
        items.append(Item(f"b{index}", 128, dict(zip(rates, harms, strict=True))))
    found = within_budget(items, bits)
    assert average_bits(items, found) <= bits + 1e-9
    assert 1.125 not in found.values()
    for less in (1.0, bits):  # the best of less bits, and nothing at all
        best = min(
            total_harm(items, widths)
            for choice in product(rates, repeat=len(items))
            if average_bits(items, widths := dict(zip(found, choice, strict=True)))
            <= max(0.0, bits - less)
        )
        assert total_harm(items, found) <= best + 1e-12
    with pytest.raises(ValueError, match="at least 0, got -1"):
        within_budget(items, -1)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("w4g4", "--base must send weights as values"),
        ("bitdp", "--base bitdp: gradients travel as signs, which have no other width"),
    ],
)
def test_base_must_send_values(
    base: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", str(tmp_path), "--out", str(tmp_path / "out.json"), "--base", base]
    assert main(arguments) != 0
    assert message in capsys.readouterr().err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What `qsdp train` leaves of one untrained step of a small model."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the old king {i} and the young queen {i % 7}.\n" for i in range(300)))
    folder = tmp_path / "run"
    config = TrainConfig(
        folder=folder, data=(text,), layers=1, width=32, heads=2, vocab_size=300,
        sequence_length=16, batch_size=4,
    )  # fmt: skip
    tokenizer = load_tokenizer(train_tokenizer(read_text(config), 300, folder / "data"))
    model = build_model(config, tokenizer)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    digest = vocabulary_digest(tokenizer)
    description = checkpoint.Description(1, 1.0, config.to_json(), shapes, digest, [{}], 1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        checkpoint.save_checkpoint(folder / "checkpoints", model, optimizer, description, keep=1)
    finally:
        dist.destroy_process_group()
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return folder


def test_writes_a_file_that_train_takes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a folder that is made for it, under a name that a shell must quote."""
    out = tmp_path / "new folder" / "deeper" / "bits.json"
    assert main(["tune", str(run), "--out", str(out), "--batches", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"qsdp train --comm {shlex.quote(str(out))}" in printed
    config = QSDPConfig.from_json(json.loads(out.read_text()))
    assert "transformer.wte.weight" in dict(config.exceptions)
    assert comm_config(parse(["--comm", str(out)])).exceptions == config.exceptions


def _damage(run: Path, pattern: str) -> None:
    (file,) = (run / "checkpoints").rglob(pattern)
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("damage", "flags", "message"),
    [
        (lambda run: _damage(run, "*.safetensors"), [], "bytes, "),
        (lambda run: _damage(run, "checkpoint.json"), [], "checkpoint.json is damaged"),
        (lambda run: next(run.rglob("*.safetensors")).unlink(), [], "safetensors is missing"),
        (lambda run: shutil.rmtree(run / "checkpoints"), [], "holds no checkpoint"),
        (lambda run: (run / "config.json").unlink(), [], "is no run folder of qsdp train"),
        (lambda run: shutil.rmtree(run), [], "there is no run folder"),
        (None, ["--out", "."], "--out . is a folder"),
        (None, ["--out", "text.txt/x.json"], "--out text.txt/x.json: text.txt cannot be made"),
        (None, ["--bits", "1.5"], "--bits must be between 2 and 8, got 1.5"),
        (None, ["--bits", "nan"], "--bits must be between 2 and 8, got nan"),
        (None, ["--batches", "0"], "--batches must be at least 1, got 0"),
        (None, ["--max-loss", "-1"], "--max-loss must be at least 0, got -1"),
        (None, ["--base", "w32g32"], "--base w32g32 quantizes nothing"),
        (None, ["--base", "w5g55"], "--base w5g55: unknown preset 'w5g55'"),
        (None, ["--base", "nothere.json"], "--base: there is no file nothere.json"),
    ],
)
def test_what_cannot_be_tuned_is_one_line_before_anything_is_measured(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None] | None,
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qsdp.tune.choose.weight_items", None)
    if damage is not None:
        damage(run)
    assert main(["tune", str(run), "--out", "out.json", *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_chosen_widths_become_exceptions() -> None:
    """In front of those of the base, each as the base sends it but for its bits."""
    learned = Learned(Quantizer(4, rounding="nearest"))
    base = QSDPConfig(weights=learned, gradients=None, exceptions={"*.b": None}, seed=3)
    found = QSDPConfig.from_json(_config(base, {"weights": {"x.a": 7}}))
    wide = Learned(Quantizer(7, rounding="nearest"))
    assert found.exceptions == (("x.a", Ways(wide, None)), ("*.b", Ways(None, None)))
    assert (found.weights, found.gradients, found.seed) == (learned, None, 3)
    matrix, vector = (torch.nn.Parameter(torch.empty(shape)) for shape in ((64, 64), (4096,)))
    assert _follows(base, "x.a", matrix)
    assert not _follows(base, "x.b", matrix) and not _follows(base, "x.a", vector)
    default = _base(None)
    assert default.weights == Quantizer(4, rounding="nearest")
    assert default.gradients == QSDPConfig.preset("w4g4").gradients


def test_sensitive_parameters_get_more_bits() -> None:
    harm = {w: 4.0 ** (2 - w) for w in WIDTHS}
    items = [Item("deaf", 100, harm), Item("keen", 100, {w: 1e4 * h for w, h in harm.items()})]
    widths = within_budget(items, 4)
    assert widths["keen"] > 4 > widths["deaf"]
    assert average_bits(items, widths) == 4


def test_harm_is_kept_with_few_bits() -> None:
    items = make_items(7, 6)
    for harm in (100.0, 1.0, 0.01):
        widths = within_harm(items, harm)
        assert total_harm(items, widths) <= harm or set(widths.values()) == {8}
    assert average_bits(items, within_harm(items, 1.0)) < average_bits(
        items, within_harm(items, 0.01)
    )
    with pytest.raises(ValueError, match="--bits must be at least 2, got 1.5"):
        within_budget(items, 1.5)


def test_relative_error_falls_fourfold_a_bit() -> None:
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    errors = [relative_error(x, Quantizer(bits)) for bits in WIDTHS]
    for wide, narrow in zip(errors[1:], errors, strict=False):
        assert 3.5 < narrow / wide < 6
    assert relative_error(torch.zeros(64), Quantizer(4)) == 0
