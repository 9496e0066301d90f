"""`qsdp domains`: its data, its runs without a look at the target, its table."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from qsdp.cli import main
from qsdp.domains import data
from qsdp.domains.data import Domain
from qsdp.domains.table import summarise, text_of
from qsdp.domains.train import ERM, Settings, hold_out, leave_out

QUICK = Settings(steps=8, switch=4, batch=4, lr=1e-2, check_every=2, gamma=0.5, samples=2)
FLAGS = ["--steps", "8", "--switch", "4", "--batch", "4", "--check-every", "2", "--samples", "1",
         "--bits", "7", "2", "--seeds", "1", "2"]  # fmt: skip


def made(count: int = 20, seed: int = 0, *unused: object) -> list[Domain]:
    """Three domains of stripes: class 0 lies, class 1 stands."""
    generator = torch.Generator().manual_seed(seed)
    domains = []
    for name, strength in (("a", 1.0), ("b", 0.8), ("c", 0.6)):
        labels = torch.arange(count) % 2
        images = 0.3 * torch.rand(count, 1, 8, 8, generator=generator)
        images[labels == 0, :, 3] += strength
        images[labels == 1, :, :, 3] += strength
        domains.append(Domain(name, images, labels))
    return domains


def test_what_is_held_out_is_not_trained_on() -> None:
    domains = made(25)[:2]
    numbered = [Domain(d.name, torch.arange(25.0) + 100 * i, d.labels)
                for i, d in enumerate(domains)]  # fmt: skip
    sources = hold_out(numbered, seed=3)
    train = torch.cat([images for images, _ in sources.train])
    assert len(sources.images) == 10 and len(train) == 40
    assert not set(train.tolist()) & set(sources.images.tolist())
    assert [len(images) for images, _ in sources.train] == [20, 20]


def test_the_target_is_not_looked_at() -> None:
    """With other images and labels in the target all that is chosen stays the same."""
    domains = made()
    first = leave_out(domains, "c", 1, [7, 2], QUICK)
    away = domains[2]
    other = [*domains[:2], Domain("c", 1 - away.images, 1 - away.labels)]
    second = leave_out(other, "c", 1, [7, 2], QUICK)
    assert [o.bits for o in first] == [ERM, 7, 2]
    for one, two in zip(first, second, strict=True):
        assert (one.valid, one.step, one.flatness) == (two.valid, two.step, two.flatness)
        assert one.step in (6, 8) and one.logits.shape == (20, 2)
        assert not torch.equal(one.logits, two.logits)
    again = leave_out(domains, "c", 1, [2], QUICK)
    assert torch.equal(again[0].logits, first[0].logits), "cases do not touch each other"
    assert torch.equal(again[1].logits, first[2].logits)
    assert not torch.equal(first[0].logits, first[2].logits)


def test_stripes_are_learned() -> None:
    settings = QUICK._replace(steps=120, switch=60, check_every=20, samples=0)
    for outcome in leave_out(made(), "c", 1, [6], settings):
        assert outcome.valid == outcome.target == 1.0 and outcome.flatness is None


def run_of(valid: float, target: float, logits: list[list[float]]) -> dict[str, object]:
    return {"valid": valid, "target": target, "flatness": 0.5, "logits": torch.tensor(logits)}


def test_the_table_by_hand() -> None:
    """Differences of a seed are averaged over targets first; the ensemble adds up logits."""
    yes, no, strong = [[2.0, 0.0]], [[0.0, 1.0]], [[0.0, 3.0]]
    runs = {
        ("a", 1): {ERM: run_of(0.9, 0.5, yes), 7: run_of(0.8, 0.6, yes), 2: run_of(0.7, 1, yes)},
        ("b", 1): {ERM: run_of(0.9, 0.5, yes), 7: run_of(0.8, 0.8, yes), 2: run_of(0.7, 1, yes)},
        ("a", 2): {ERM: run_of(0.9, 0.5, no), 7: run_of(0.8, 0.5, strong), 2: run_of(0.9, 1, no)},
        ("b", 2): {ERM: run_of(0.9, 0.5, no), 7: run_of(0.8, 0.5, no), 2: run_of(0.7, 1, no)},
    }
    labels = {name: torch.tensor([0]) for name in "ab"}
    erm, seven, two, chosen = summarise(runs, labels, [7, 2])
    assert [row.name for row in (erm, seven, two, chosen)] == ["ERM", "7 bits", "2 bits", "chosen"]
    assert (erm.valid, erm.target, erm.difference) == pytest.approx((90, 50, 0))
    # Seeds: (10 + 30) / 2 = 20 and 0.
    assert seven.difference == pytest.approx(10)
    assert seven.error == pytest.approx(math.sqrt(200) / math.sqrt(2))
    assert (seven.flatness, seven.flatness_error) == (0.5, 0.0)
    assert erm.ensemble == 100 and seven.ensemble == 50
    # 2 bits are the better ones on the sources once.
    assert chosen.target == pytest.approx(100 * (0.6 + 0.8 + 1 + 0.5) / 4)
    text = text_of([erm, seven, two, chosen], runs)
    assert "ERM" in text and "+10.00" in text and "by target" in text
    alone = {pair: run for pair, run in runs.items() if pair[1] == 1}
    assert summarise(alone, labels, [7])[1].error is None


def test_a_command_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(data.SETS, "glyphs", made)
    out = tmp_path / "out"
    arguments = ["domains", "--out", str(out), *FLAGS]
    assert main([*arguments, "--targets", "b"]) == 0
    assert capsys.readouterr().out.count("left out, seed") == 2
    before = (out / "b-seed-1.safetensors").read_bytes()
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "[4/4] c left out, seed 2" in printed and "b left out" not in printed
    assert (out / "b-seed-1.safetensors").read_bytes() == before
    assert (out / "domains.png").stat().st_size > 1000
    assert (out / "domains.txt").read_text() in printed
    assert main([*arguments, "--report", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["ERM", "7 bits", "2 bits", "chosen"]

    assert main([*arguments, "--lr", "0.5"]) == 1
    assert "was run with --lr 0.003, got 0.5: give the same, or another" in one_line(capsys)
    (out / "b-seed-1.safetensors").write_bytes(before[:100])
    assert main(arguments) == 1
    assert "b-seed-1.safetensors is damaged" in one_line(capsys)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--images", "4"], "--images must be at least 5, got 4"),
        (["--switch", "800"], "--switch must be from 0 to below --steps 800, got 800"),
        (["--bits", "9"], "--bits must be different numbers from 2 to 8, got 9"),
        (["--bits", "4", "4"], "--bits must be different numbers from 2 to 8, got 4 4"),
        (["--seeds", "1", "1"], "--seeds must be different numbers"),
        (["--gamma", "0"], "--gamma must be a positive number, got 0"),
        (["--samples", "-1"], "--samples must be at least 0, got -1"),
        (["--folder", "x"], "--folder is of --data fashion; leave it out"),
        (
            ["--data", "fashion", "--folder", "x"],
            "x/train-images-idx3-ubyte.gz is missing: install",
        ),
        (["--targets", "bb"], "--targets: glyphs has no domain 'bb'"),
        (["--report"], "holds no runs of qsdp domains"),
    ],
)
def test_bad_use_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.setitem(data.SETS, "glyphs", made)
    assert main(["domains", "--out", str(tmp_path / "out"), *flags]) == 1
    assert message in one_line(capsys)
    assert not (tmp_path / "out").exists()


def write_idx(path: Path, values: np.ndarray) -> None:
    head = struct.pack(f">i{values.ndim}i", 0x0800 + values.ndim, *values.shape)
    path.write_bytes(gzip.compress(head + values.tobytes()))


def test_fashion_in_angles(tmp_path: Path) -> None:
    """Other images in each domain; those of angle 0 as they are, the others turned."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 28, 28)).astype(np.uint8)
    pixels[:, 0, 0] = np.arange(60)  # a number of its own for each image
    kinds = (np.arange(60) % 10).astype(np.uint8)
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", pixels)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", kinds)
    domains = data.fashion(10, 0, tmp_path)
    assert [d.name for d in domains][:2] == ["0 degrees", "15 degrees"] and len(domains) == 6
    upright = (domains[0].images[:, 0] * 255).round()
    numbers = upright[:, 0, 0].long()
    assert torch.equal(upright, torch.from_numpy(pixels).float()[numbers])
    assert torch.equal(domains[0].labels, numbers % 10)
    turned = data._turned(torch.ones(1, 1, 29, 29).tril(), 90)
    assert torch.allclose(turned[0, 0], torch.ones(29, 29).tril().rot90(1), atol=1e-4)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte.gz is damaged"):
        data.fashion(10, 0, tmp_path)


def test_glyphs() -> None:
    for package in data.FONT_PACKAGES:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'qsdp[domains]'")
    domains = data.glyphs(40, 0)
    assert [d.name for d in domains] == ["sans", "serif", "mono", "drawn", "handwritten"]
    for domain in domains:
        assert domain.images.shape == (40, 1, 16, 16) and domain.images.min() >= 0
        assert domain.images.max() <= 1 and domain.images.flatten(1).std(1).min() > 0.05
        assert set(domain.labels.tolist()) <= set(range(10))
    again = data.glyphs(40, 0)
    assert all(torch.equal(a.images, b.images) for a, b in zip(domains, again, strict=True))


def test_a_missing_font_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"sans needs font-roboto, .* 'qsdp\[domains\]'"):
        data.glyphs(5, 0)
