"""`qsdp train --config FILE`: a whole run as one file; and the boards that get its metrics."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qsdp.cli import main
from qsdp.trainer.boards import open_boards
from qsdp.trainer.command import parse
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.metrics import Metrics

YAML = """
preset: gpt2-125m
lr: 1e-4            # a text in YAML 1.1
batch-size: 64
data: [a.txt, b.txt]
prefetch: no
comm: {preset: w8g4, min_numel: 10}
"""


def test_a_file_is_over_the_preset_and_under_the_flags(tmp_path: Path) -> None:
    (tmp_path / "four.yaml").write_text(YAML)
    config = parse(["--config", str(tmp_path / "four.yaml"), "--batch-size", "32", "--steps", "7"])
    assert (config.width, config.lr, config.batch_size, config.steps) == (768, 1e-4, 32, 7)
    assert config.data == (Path("a.txt"), Path("b.txt")) and not config.prefetch
    assert config.comm_name == "four"
    assert json.loads(config.comm) == {"name": "four", "preset": "w8g4", "min_numel": 10}
    same = {"preset": "gpt2-125m", "lr": 1e-4, "batch_size": 64, "data": ["a.txt", "b.txt"],
            "prefetch": False, "comm": {"preset": "w8g4", "min_numel": 10}}  # fmt: skip
    (tmp_path / "four.json").write_text(json.dumps(same))
    flags = ["--batch-size", "32", "--steps", "7"]
    assert parse(["--config", str(tmp_path / "four.json"), *flags]) == config


def test_what_a_run_wrote_repeats_it(tmp_path: Path) -> None:
    config = TrainConfig(comm='{"name": "a", "preset": "w4g4"}', data=(Path("a"),), lr=0.5, lora=8,
                         model=Path("m"), folder=tmp_path)  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    again = parse(["--config", str(tmp_path / "config.json"), "--folder", "other"])
    assert again == replace(config, folder=Path("other"))


def test_resume_finds_the_run_that_the_file_names(tmp_path: Path) -> None:
    """The run's own settings first, then the file's, then the flags."""
    (tmp_path / "config.json").write_text(json.dumps(TrainConfig(width=96, lr=0.5).to_json()))
    file = tmp_path / "run.yml"
    file.write_text(f"folder: {tmp_path}\nlr: 0.25\nsteps: 9\n")
    config = parse(["--config", str(file), "--resume", "--steps", "5"])
    assert (config.width, config.lr, config.steps, config.resume) == (96, 0.25, 5, "latest")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "stepz: 3", "a.yaml: unknown field 'stepz'; did you mean steps?"),
        ("a.yaml", "steps: many", 'a.yaml: steps must be an integer, got "many"'),
        ("a.yaml", "batch-size: 2.5", "a.yaml: batch_size must be an integer, got 2.5"),
        ("a.yaml", "steps: 2026-12-02", 'a.yaml: steps must be an integer, got "2026-12-02"'),
        ("a.yaml", "data: a.txt", 'a.yaml: data must be a list of texts, got "a.txt"'),
        ("a.yaml", "export: al", "a.yaml: export must be one of best, decoded, master, none"),
        ("a.yaml", "lr: 0", "a.yaml: --lr must be a positive number, got 0"),
        ("a.yaml", "lr: 1\nlr: 2", "a.yaml: lr stands there twice"),
        ("a.yaml", "batch-size: 8\nbatch_size: 8", "a.yaml: batch_size stands there twice"),
        ("a.yaml", "a: [1\n", "a.yaml: no YAML, line 2: expected ','"),
        ("a.yaml", "!!python/name:os.system", "a.yaml: no YAML, line 1: could not determine a con"),
        ("a.yaml", "", "a.yaml: it must hold flags of qsdp train"),
        ("a.yaml", "config: b.yaml", "a.yaml: config names no other file"),
        ("a.json", '{"lr": 1, "lr": 2}', "a.json: lr stands there twice"),
        ("a.json", "{", "a.json: no JSON: "),
        ("a.json", '{"comm": {"bits": 3}}', "--comm a: unknown field 'bits'"),
        ("a.toml", "", "--config: the file must end with .json, .yaml or .yml, got"),
    ],
)
def test_mistakes_in_a_file_are_one_line_with_file_and_key(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    folder = str(tmp_path / "run")
    assert main(["train", "--config", str(tmp_path / name), "--folder", folder]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("wandb", "peft", "yaml"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.yaml").write_text("steps: 3")
    for flags, message in (
        (["--config", "nowhere.yaml"], "--config: there is no file nowhere.yaml"),
        (["--config", str(tmp_path / "a.yaml")], "needs yaml, not installed here: pip install pyy"),
        (["--wandb", "project"], "--wandb needs wandb, not installed here: pip install wandb"),
        (["--model", ".", "--lora", "8"], "needs peft, not installed here: pip install 'qsdp[lora"),
    ):
        assert main(["train", *flags]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


# ---- boards


class FakeRun:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.id = settings, settings["id"] or "fresh"
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.lines.append((step, numbers))

    def finish(self) -> None:
        self.finished = True


def test_metrics_go_to_tensorboard_and_to_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and validations; one run there for a folder, however often it is resumed."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs: list[FakeRun] = []

    def init(**settings: Any) -> FakeRun:
        runs.append(FakeRun(settings))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    config = TrainConfig(wandb="plays", folder=tmp_path, lr=0.25)
    step = {"step": 1, "loss": 2.0, "tokens_per_s": 1.0, "sent": 10, "elapsed_s": 0.1}
    for resumed in (0, 1):
        boards = open_boards(config, tmp_path, resumed)
        metrics = Metrics(tmp_path, total_steps=2, resume_step=resumed, log_every=1, boards=boards)
        metrics.step(step | {"step": resumed + 1})
        if resumed:
            metrics.validation(
                {"step": 2, "valid_loss": 1.0, "valid_perplexity": 2.7, "elapsed_s": 1}
            )
        metrics.close()
    first, second = runs
    assert first.settings["project"] == "plays" and first.settings["config"]["lr"] == 0.25
    assert first.settings["id"] is None and second.settings["id"] == "fresh"
    assert first.lines == [(1, {"loss": 2.0, "tokens_per_s": 1.0, "sent": 10})]
    assert second.lines[1] == (2, {"valid_loss": 1.0, "valid_perplexity": 2.7})
    assert first.finished and second.finished
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("loss")] == [(1, 2.0), (2, 2.0)]
    assert [e.step for e in board.Scalars("valid_loss")] == [2]


def test_what_wandb_refuses_is_told_with_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: Any) -> None:
        raise Exception("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    with pytest.raises(RuntimeError, match="--wandb plays: no API key"):
        open_boards(TrainConfig(wandb="plays"), tmp_path, 0)
