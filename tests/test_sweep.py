"""`qsdp sweep`: what it runs, what it skips, and its arithmetic; no training."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("rich", reason="needs pip install 'qsdp[train]'")

from matplotlib.figure import Figure

from qsdp import QSDPConfig
from qsdp.cli import main
from qsdp.sweep import command
from qsdp.sweep.plot import draw
from qsdp.sweep.spec import read_sweep
from qsdp.sweep.table import summarise
from qsdp.trainer.checkpoint import FORMAT
from qsdp.trainer.command import parse
from qsdp.trainer.lock import hold

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
    described = {"format": FORMAT, "step": 2, "elapsed_s": 1.0, "config": {}, "parameters": {}}
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
    begin(out / "once" / "seed-2")
    save(out / "once" / "seed-2")
    assert main(["sweep", str(spec), "--out", str(out)]) == 1
    assert [run[:2] for run in seen] == [("four", "1"), ("w32g32", "2"), ("four", "2")]
    assert "the same command goes on" in capfd.readouterr().err
    assert main(["sweep", str(spec), "--out", str(out)]) == 0
    assert [run[:2] for run in seen[3:]] == [("four", "2"), ("once", "2")]
    four, once = seen[0][2], seen[-1][2]
    assert json.loads((out / "four" / "four.json").read_text()) == {"preset": "w4g4"}
    assert four[four.index("--data") + 1 : four.index("--data") + 3] == ["a.txt", "b.txt"]
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


def row(change: float | None, error: float | None, reference: float | None = None) -> dict:
    values = {"change_percent": change, "change_error": error, "reference_percent": reference}
    return {"case": "a", "bits": 4.0, **values}


@pytest.mark.parametrize(
    ("rows", "legend", "ticks"),
    [
        ([row(0, 0.0), row(1, 0.5)], ["several seeds, with standard error"], None),
        ([row(0, None), row(1, None)], ["one seed"], None),
        (
            [row(0, 0.0), row(1, None, 300.0), row(None, None)],
            ["one seed", "published, another model", "several seeds, with standard error"],
            {0, 1, 2, 5, 10, 100, 200},
        ),
        ([row(None, None)], None, None),
    ],
)
def test_plot_promises_what_it_shows(
    rows: list, legend: list | None, ticks: set | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error bar where there are several seeds; ticks as far as values go, published ones, too;
    nothing where nothing can be compared."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    assert draw(rows, Path("sweep.png")) == (legend is not None)
    if legend is not None:
        (figure,) = drawn
        (shown,) = figure.legends
        assert sorted(text.get_text() for text in shown.get_texts()) == legend
        assert ticks is None or ticks <= set(figure.axes[0].get_xticks())


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


def sweep_text(train: str = "{}", seeds: str = "[1]", cases: str = '{"a": "w4g4"}') -> str:
    return f'{{"train": {train}, "seeds": {seeds}, "cases": {cases}}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "holds no JSON"),
        (b'{"caf\xe9": 1}', "must be UTF-8 text: byte 5"),
        ("[]", "must be an object, got []"),
        ('{"seeds": [1]}', "train is missing; needed are train, seeds, cases"),
        ('{"trian": {}}', "unknown field 'trian'; did you mean train?"),
        (sweep_text(train="null"), "train must be an object of flags of qsdp train, got null"),
        (sweep_text(train='["steps"]'), 'train must be an object of flags of qsdp train, got ["s'),
        (sweep_text(train='{"stepz": 4}'), "train: unknown field 'stepz'; did you mean steps?"),
        (sweep_text(train='{"steps": "4"}'), '--steps must be an integer, got "4"'),
        (sweep_text(train='{"steps": true}'), "--steps must be an integer, got true"),
        (sweep_text(train='{"steps": null}'), "--steps must be an integer, got null"),
        (sweep_text(train='{"lr": "1e-3"}'), '--lr must be a number, got "1e-3"'),
        (sweep_text(train='{"compile": 1}'), "--compile must be true or false, got 1"),
        (sweep_text(train='{"data": [1]}'), "--data must be a list of texts, got [1]"),
        (sweep_text(train='{"precision": "fp8"}'), "--precision must be one of fp32, bf16, got"),
        (sweep_text(train='{"micro_batch_size": ""}'), "an integer, or null, got"),
        (sweep_text(train='{"steps": 0}'), "case 'a': --steps must be at least 1, got 0"),
        (sweep_text(train='{"seed": 1}'), "train: seed is set by the sweep itself"),
        (sweep_text(seeds="[]"), "seeds must be a list of different integers, such as [1, 2, 3]"),
        (sweep_text(seeds="5"), "seeds must be a list of different integers"),
        (sweep_text(seeds='"12"'), 'such as [1, 2, 3], got "12"'),
        (sweep_text(seeds="[1, 1]"), "a list of different integers"),
        (sweep_text(seeds="[true]"), "a list of different integers"),
        (sweep_text(seeds="[-1]"), "a list of different integers"),
        (sweep_text(cases='["w8g8"]'), "cases must be an object of at least one case, by name"),
        (sweep_text(cases="{}"), "cases must be an object of at least one case, by name, got {}"),
        (sweep_text(cases='{"a/b": "w4g4"}'), "case 'a/b' is to be the name of a folder"),
        (sweep_text(cases='{"": "w4g4"}'), "case '' is to be the name of a folder"),
        (sweep_text(cases='{"a": "w4g4", "a": "w8g8"}'), "'a' stands there twice"),
        (sweep_text(cases='{"a": 8}'), "case 'a' must be a preset or an object with comm, got 8"),
        (sweep_text(cases='{"a": {"bits": 4}}'), "case 'a': unknown field 'bits'; allowed are"),
        (sweep_text(cases='{"a": {"seeds": [1]}}'), "case 'a': comm is missing"),
        (sweep_text(cases='{"a": {"comm": 8}}'), "case 'a': comm must be the name of a preset or"),
        (sweep_text(cases='{"a": "w9g9"}'), "case 'a': --comm: unknown preset 'w9g9'"),
        (sweep_text(cases='{"a": {"comm": {"bit": 8}}}'), "case 'a': --comm a: unknown field 'bi"),
        (sweep_text(cases='{"a": "nothere.json"}'), "--comm: there is no file nothere.json"),
        (sweep_text(cases='{"a": {"comm": "w4g4", "seeds": 3}}'), "case 'a': seeds must be a list"),
        (sweep_text(cases='{"a": {"comm": "w4g4", "seeds": "12"}}'), "case 'a': seeds must be a"),
        (sweep_text(cases='{"a": {"comm": "w4g4", "train": 1}}'), "case 'a': train must be an obj"),
        (sweep_text(cases='{"a": {"comm": "w4g4", "reference": NaN}}'), "reference must be a numb"),
        (sweep_text(cases='{"a": {"comm": "w4g4", "against": ["a"]}}'), "against must be the name"),
        (sweep_text(cases='{"a": {"comm": "w4g4", "against": "b"}}'), "must be another case of"),
    ],
)  # fmt: skip
def test_bad_specs_are_one_line(
    content: str | bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the file, the field, what it holds and what is allowed; nothing is written."""
    path, out = tmp_path / "spec.json", tmp_path / "out"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["sweep", str(path), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert message in error and str(path) in error and error.count("\n") == 1
    assert not out.exists()


SWEEPS = ("paper-grid", "techniques", "memory", "memory-875k", "memory-wikipedia", "two-bits")
SWEEPS += ("bitdp", "sdp4bit")


@pytest.mark.parametrize("name", SWEEPS)
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


@pytest.mark.parametrize("report", [[], ["--report"]])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": SPEC["train"] | {"steps": 4}}, "--steps 3 and {spec} says 4 now"),
        ({"train": SPEC["train"] | {"final_eval_windows": 9}}, "--final-eval-windows 512"),
        ({"train": {"steps": 3, "data": ["a.txt"]}}, "--data ['a.txt', 'b.txt']"),
        ({"cases": {"w32g32": "w8g8"}}, "--comm w32g32 and {spec} says w8g8 now"),
        ({"train": SPEC["train"] | {"log_every": 7, "eval_every": 1}}, None),
    ],
)
def test_a_changed_file_does_not_show_old_results(
    spec: Path, capsys: pytest.CaptureFixture[str], change: dict, message: str | None, report: list
) -> None:
    """A folder that was run with other settings is named, with what differs."""
    finish(Path("out") / "w32g32" / "seed-1", 1.9)
    spec.write_text(json.dumps(SPEC | {"seeds": [1], "cases": {"w32g32": "w32g32"}} | change))
    arguments = ["sweep", str(spec), "--out", "out", *report]
    assert main(arguments) == (0 if message is None else 1)
    error = capsys.readouterr().err
    if message is not None:
        assert "out/w32g32/seed-1 was run with " + message.format(spec=spec) in error
        assert error.count("\n") == 1


def test_a_file_for_comm_that_changed_is_another_case(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its content counts: not its order, nor that a run was cut off before its end."""
    folder = Path("out") / "four" / "seed-1"
    fields = {"verify": True, "preset": "w4g4"}
    for comm in (fields, dict(reversed(fields.items())), fields | {"min_numel": 9}):
        cases = {"four": {"comm": comm, "seeds": [1]}}
        spec.write_text(json.dumps(SPEC | {"cases": cases}))
        if not folder.exists():
            begin(folder)
            save(folder)
        status = main(["sweep", str(spec), "--out", "out", "--report"])
        error = capsys.readouterr().err
        assert status == 1 and ("was run with" in error) == ("min_numel" in comm), error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", "{", "result.json is damaged"),
        ("result.json", '{"ratio": 1}', "result.json is damaged: valid_loss_decoded is None"),
        ("config.json", None, "config.json is missing beside the results"),
    ],
)
def test_a_damaged_run_is_named(
    spec: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, message: str
) -> None:
    folder = Path("out") / "four" / "seed-1"
    finish(folder, 2.0)
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    assert main(["sweep", str(spec), "--out", "out", "--report"]) == 1
    error = capsys.readouterr().err
    assert message in error and str(folder) in error and error.count("\n") == 1


def test_all_runs_are_checked_before_the_first_starts(
    spec: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `qsdp train` would refuse in the last case, and a checkpoint that it cannot read."""
    monkeypatch.setattr(subprocess, "run", None)
    last = {"comm": "w8g8", "train": {"nproc": 3}}
    spec.write_text(json.dumps(SPEC | {"cases": {"good": "w32g32", "last": last}}))
    assert main(["sweep", str(spec), "--out", "out"]) == 1
    error = capsys.readouterr().err
    assert "case 'last': --batch-size must be a multiple of" in error and error.count("\n") == 1
    spec.write_text(json.dumps(SPEC))
    folder = Path("out") / "once" / "seed-2"
    begin(folder)
    save(folder)
    (folder / "checkpoints" / "step-00000002" / "checkpoint.json").write_text("{")
    assert main(["sweep", str(spec), "--out", "out"]) == 1
    assert "checkpoint.json is damaged" in capsys.readouterr().err


def test_two_sweeps_do_not_share_a_folder(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hold(Path("out")):
        assert main(["sweep", str(spec), "--out", "out"]) == 1
    assert "out is in use by process" in capsys.readouterr().err


def test_a_run_gets_the_settings_that_are_compared(spec: Path) -> None:
    """What the flags of the command say is what `Sweep.config` says."""
    train = {
        "preset": "gpt2-125m", "micro_batch_size": 2, "valid": "b.txt", "data": "a.txt",
        "sync_every_micro_batch": True, "prefetch": False, "lr": 1, "keep_full_precision": ["*.x"],
    }  # fmt: skip
    case = {"comm": {"preset": "w4g4"}, "train": {"steps": 7}}
    spec.write_text(json.dumps({"train": train, "seeds": [3], "cases": {"four": case}}))
    sweep = read_sweep(spec)
    folder = command.run_folder(Path("out"), sweep.cases[0], 3)
    arguments = command._command(sweep, sweep.cases[0], 3, Path("out"))
    parsed = replace(parse(arguments[arguments.index("train") + 1 :]), overwrite=False)
    assert parsed == sweep.config(sweep.cases[0], 3, folder)
