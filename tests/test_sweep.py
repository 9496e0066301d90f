"""`qsdp sweep`: what it runs, what it skips, and its arithmetic; no training."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("rich", reason="needs pip install 'qsdp[train]'")

from qsdp import QSDPConfig
from qsdp.cli import main
from qsdp.sweep import command
from qsdp.sweep.spec import read_sweep
from qsdp.sweep.table import summarise
from qsdp.trainer.checkpoint import DESCRIPTION, FORMAT, Description

SPEC = {
    "train": {"steps": 3, "compile": False, "data": ["a.txt", "b.txt"]},
    "seeds": [1, 2],
    "cases": {
        "w32g32": "w32g32",
        "four": {"comm": {"preset": "w4g4"}, "reference": 1.05},
        "once": {"comm": "w8g8", "seeds": [2], "train": {"steps": 5}, "against": "four"},
    },
}


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("to be")
    path = tmp_path / "sweep-spec.json"
    path.write_text(json.dumps(SPEC))
    return path


def finish(folder: Path, loss: float, ratio: float = 8.0) -> None:
    """What a run of the sweep leaves."""
    begin(folder)
    result = {"valid_loss_decoded": loss, "valid_loss_master": loss + 0.1, "ratio": ratio}
    (folder / "result.json").write_text(json.dumps(result | {"steps": 3}))


def begin(folder: Path) -> None:
    """What it has when it begins: its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep = read_sweep(Path("sweep-spec.json"))
    (case,) = [case for case in sweep.cases if case.name == folder.parent.name]
    config = sweep.config(case, int(folder.name.removeprefix("seed-")), folder)
    (folder / "config.json").write_text(json.dumps(config.to_json()))


def save(folder: Path) -> None:
    """A checkpoint, as far as it is looked at before a run goes on."""
    path = folder / "checkpoints" / "step-00000002"
    path.mkdir(parents=True)
    described = {"format": 3, "step": 2, "elapsed_s": 1.0, "config": {}, "parameters": {}}
    described |= {"tokenizer": "", "data_states": [], "num_ranks": 1, "files": {}}
    (path / "checkpoint.json").write_text(json.dumps(described))


def test_runs_what_is_missing(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Seed by seed; a finished run is kept, one with a checkpoint resumed, and errors end it."""
    out, seen = tmp_path / "out", []

    def fake_run(arguments: list[str], **_: object) -> SimpleNamespace:
        flags = dict(zip(arguments[4::1], arguments[5::1], strict=False))
        folder = Path(flags["--folder"])
        seen.append((folder.parent.name, flags["--seed"], arguments))
        if len(seen) == 3:
            return SimpleNamespace(returncode=1)
        finish(folder, 2.0)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", fake_run)
    finish(out / "w32g32" / "seed-1", 1.9, ratio=1.0)
    checkpoint = out / "once" / "seed-2" / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent.parent / "config.json").write_text("{}")
    described = Description(2, 1.0, {}, {}, "", [], 2)._asdict() | {"format": FORMAT, "files": {}}
    (checkpoint / DESCRIPTION).write_text(json.dumps(described))
    assert main(["sweep", str(spec), "--out", str(out)]) == 1
    assert [run[:2] for run in seen] == [("four", "1"), ("w32g32", "2"), ("four", "2")]
    assert "the same command goes on" in capfd.readouterr().err
    assert main(["sweep", str(spec), "--out", str(out)]) == 0
    assert [run[:2] for run in seen[3:]] == [("four", "2"), ("once", "2")]
    four, once = seen[0][2], seen[-1][2]
    assert json.loads((out / "four" / "four.json").read_text()) == {"preset": "w4g4"}
    assert four[four.index("--data") + 1 : four.index("--data") + 3] == [
        str(tmp_path / name) for name in ("a.txt", "b.txt")
    ]
    assert "--no-compile" in four and "--overwrite" in four and "--resume" not in four
    assert once[once.index("--steps") + 1] == "5" and "--resume" in once
    printed = capfd.readouterr().out
    assert "+5.00 %" in printed and "four" in printed
    assert (out / "sweep.png").stat().st_size > 5000
    assert len(json.loads((out / "sweep.json").read_text())) == 3
    assert main(["sweep", str(spec), "--out", str(out), "--report", "--json"]) == 0
    assert [row["case"] for row in json.loads(capfd.readouterr().out)] == [*SPEC["cases"]]


def test_only_some_cases_and_seeds(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def fake_run(arguments: list[str], **_: object) -> SimpleNamespace:
        folder = Path(arguments[arguments.index("--folder") + 1])
        seen.append((folder.parent.name, folder.name))
        finish(folder, 2.0)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", fake_run)
    arguments = ["sweep", str(spec), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--seeds", "2", "--only", "four", "w32g32"]) == 0
    assert seen == [("w32g32", "seed-2"), ("four", "seed-2")]
    assert main([*arguments, "--seeds", "3"]) != 0
    assert main([*arguments, "--only", "five"]) != 0
    printed = capsys.readouterr().err
    assert "no case runs with seed 3" in printed and "no case 'five'" in printed
    assert len(seen) == 2


def test_changes_are_paired_by_seed(spec: Path) -> None:
    """A shift that all seeds share is no change, and its spread no error."""
    losses = {
        "w32g32": {1: 2.0, 2: 3.0},
        "four": {1: 2.0 + math.log(1.02), 2: 3.0 + math.log(1.04)},
        "once": {2: 3.0},
    }
    results = {
        case: {
            seed: {
                "valid_loss_decoded": loss,
                "valid_loss_master": loss + (0.5 if case != "once" else -0.5),
                "ratio": 4.0,
                "steps": 3,
            }
            for seed, loss in seeds.items()
        }
        for case, seeds in losses.items()
    }
    rows = {row["case"]: row for row in summarise(read_sweep(spec), results)}
    assert rows["w32g32"]["change_percent"] == 0 and rows["w32g32"]["change_error"] == 0
    assert rows["four"]["change_percent"] == pytest.approx(3.0)
    assert rows["four"]["change_error"] == pytest.approx(1.0)
    assert rows["four"]["bits"] == 8.0 and rows["four"]["reference_percent"] == pytest.approx(5.0)
    assert rows["once"]["better"] == "master" and rows["once"]["change_error"] is None
    # Both by their better weights, at seed 2: 2.5 against 3.0 + log 1.04.
    assert rows["once"]["against_percent"] == pytest.approx(100 * math.expm1(-0.5 - math.log(1.04)))
    assert rows["four"]["against_percent"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "holds no JSON"),
        ('{"seeds": [1]}', "train"),
        ('{"train": {}, "seeds": [], "cases": {"a": "w4g4"}}', "seeds must be a list"),
        ('{"train": {}, "seeds": [1], "cases": {"a/b": "w4g4"}}', "without '/'"),
        ('{"train": {}, "seeds": [1], "cases": {"a": {"bits": 4}}}', "unknown field 'bits'"),
        (
            '{"train": {}, "seeds": [1], "cases": {"a": {"comm": "w4g4", "against": "b"}}}',
            "must be another case",
        ),
    ],
)
def test_bad_specs_are_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "spec.json"
    path.write_text(content)
    assert main(["sweep", str(path), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["paper-grid", "techniques"])
def test_sweeps_of_the_repository_are_configurations(name: str) -> None:
    folder = Path(__file__).parent.parent / "benchmarks" / "quality"
    for case in read_sweep(folder / f"{name}.json").cases:
        if isinstance(case.comm, str):
            QSDPConfig.preset(case.comm)
        else:
            QSDPConfig.from_json(case.comm)


def test_unknown_case_and_nothing_to_report(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(spec), "--out", str(tmp_path), "--only", "five"]) == 1
    assert "no case 'five'" in capsys.readouterr().err
    assert main(["sweep", str(spec), "--out", str(tmp_path), "--report"]) == 1
    assert "no finished run" in capsys.readouterr().err
    assert command.run_folder(tmp_path, read_sweep(spec).cases[0], 3).name == "seed-3"


def test_a_changed_file_does_not_show_old_results(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that was run with other settings is named, with what differs."""
    out = tmp_path / "out"
    finish(out / "w32g32" / "seed-1", 1.9)
    (out / "w32g32" / "seed-1" / "config.json").write_text(json.dumps({"steps": 4}))
    assert main(["sweep", str(spec), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert "was run with --steps 4" in error and "says 3 now" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        '{"train": {}, "seeds": 3, "cases": {"a": "w4g4"}}',
        '{"train": {}, "seeds": "12", "cases": {"a": "w4g4"}}',
        '{"train": {}, "seeds": [1, 1], "cases": {"a": "w4g4"}}',
        '{"train": {}, "seeds": [1], "cases": ["a"]}',
        '{"train": null, "seeds": [1], "cases": {"a": "w4g4"}}',
        '{"train": [], "seeds": [1], "cases": {"a": "w4g4"}}',
        '{"train": {}, "seeds": [1], "cases": {"a": {"comm": 8}}}',
        '{"train": {"stepz": 3}, "seeds": [1], "cases": {"a": "w4g4"}}',
        '{"train": {}, "seeds": [1], "cases": {"a": {"comm": "w4g4", "seeds": 2}}}',
        '{"train": {}, "seeds": [1], "cases": {"a": "w9g9"}}',
        b"\xff\xfe{}",
    ],
)
def test_wrong_types_are_one_line(
    content: str | bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "spec.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["sweep", str(path), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert str(path) in error and error.count("\n") == 1
