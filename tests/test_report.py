"""`qsdp report` on synthetic runs, and the files that it reads."""

import json
import math

import numpy as np
import pytest
from rich.console import Console

from qsdp.cli import main
from qsdp.trainer import plots
from qsdp.trainer.metrics import (
    Metrics,
    format_bytes,
    format_time,
    read_metrics,
    step_medians,
    step_parts,
)
from qsdp.trainer.plots import smoothed
from qsdp.trainer.report import comparison, read_run, read_runs


def step_record(step, *, sent=1000, step_s=0.5, loss=None):
    return {
        "step": step, "loss": 8 / math.sqrt(step) if loss is None else loss, "lr": 1e-3,
        "grad_norm": 1.0, "tokens_per_s": 100.0, "step_s": step_s, "compute_s": step_s - 0.2,
        "encode_s": 0.05, "decode_s": 0.05, "network_s": 0.1, "sent": sent,
        "stock_sent": 4000, "elapsed_s": step * step_s,
    }  # fmt: skip


def write_run(folder, *, comm="w8g8", steps=40, finished=True, sent=1000):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"comm": comm, "steps": 40}))
    lines = [step_record(step, sent=sent) for step in range(1, steps + 1)]
    if steps >= 20:
        lines.insert(20, {"step": 20, "valid_loss": 2.0, "valid_perplexity": math.exp(2.0),
                          "elapsed_s": 10.0})  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        result = {"valid_perplexity_decoded": 12.345, "valid_perplexity_master": 13.579}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_report_prints_a_table_and_writes_plots(tmp_path, capsys):
    runs = [
        write_run(tmp_path / "full", comm="w32g32", sent=4000),
        write_run(tmp_path / "eight"),
        write_run(tmp_path / "halfway", steps=25, finished=False),
        write_run(tmp_path / "just-started", steps=0, finished=False),
    ]
    assert main(["report", *map(str, runs)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "full 40 12.35 13.58 4 kB 1.00x 500 300 100 100" in lines
    assert "eight 40 12.35 13.58 1 kB 4.00x 500 300 100 100" in lines
    assert "halfway 25/40 7.39 - 1 kB 4.00x 500 300 100 100" in lines
    assert "just-started 0/40 - -" in lines
    assert lines.count("(unfinished)") == 2
    for name in ("loss_steps.png", "loss_time.png", "bytes.png", "step_time.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert any(line.endswith(name) for line in lines)


def test_table_of_the_demo_fits_a_screen(tmp_path):
    """80 columns, nothing cut off."""
    runs = tuple(write_run(tmp_path / comm, comm=comm) for comm in ("w32g32", "w8g8", "w4g4"))
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    console.print(comparison(read_runs(runs)))
    assert "…" not in console.export_text()


def test_report_as_json(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    assert main(["report", str(run), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["name"] == "a" and entry["finished"] and entry["ratio"] == 4.0
    assert entry["perplexity_master"] == 13.579
    assert not (tmp_path / "bytes.png").exists()


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = (write_run(tmp_path / "x" / "w8g8"), write_run(tmp_path / "y" / "w8g8"))
    assert [report.name for report in read_runs(runs)] == [str(run) for run in runs]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "is no run folder of qsdp train: it has no config.json"),
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "{}", "holds a damaged run: it lacks 'steps'"),
        ("result.json", "[]", "result.json is damaged: it holds no JSON object"),
        ("metrics.jsonl", '{"step": 1}\noops\n{"step": 2}\n', "metrics.jsonl is damaged in line 2"),
    ],
)
def test_unreadable_run_is_one_line(tmp_path, capsys, file, content, message):
    run = write_run(tmp_path / "a")
    (run / file).unlink()
    if content is not None:
        (run / file).write_text(content)
    assert main(["report", str(run)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_last_line_that_a_crash_cut_is_left_out(tmp_path):
    run = write_run(tmp_path / "a")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    assert read_run(run, "a").steps == 40


def test_resumed_metrics_drop_what_came_after_the_checkpoint(tmp_path, capsys):
    """The steps that a resumed run repeats are in the file once."""
    run = write_run(tmp_path / "a")
    metrics = Metrics(run, total_steps=40, resume_step=15, log_every=5)
    metrics.step(step_record(16, loss=1.0))
    metrics.step(step_record(20, loss=1.0))
    metrics.close()
    steps = [record["step"] for record in read_metrics(run / "metrics.jsonl")]
    assert steps == [*range(1, 17), 20]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 20/40  loss 1.000  100 tokens/s  1 kB sent a step")


def test_medians_leave_out_the_first_steps():
    records = [step_record(1, step_s=9.0)] + [step_record(s, step_s=0.5) for s in range(2, 5)]
    records.append({"step": 4, "valid_loss": 1.0})
    assert step_medians(records)["step_s"] == 0.5
    assert step_medians(records[:1])["step_s"] == 9.0
    assert step_medians([]) == {}


@pytest.fixture
def uneven(tmp_path):
    """Runs whose parts of a step vary against each other, validated at the same steps."""
    runs = []
    for name in ("a", "b", "c"):
        runs.append(write_run(tmp_path / name))
        records = read_metrics(runs[-1] / "metrics.jsonl")
        for record in records[::2]:
            record |= {"step_s": 0.9, "compute_s": 0.1, "network_s": 0.7}
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (runs[-1] / "metrics.jsonl").write_text(lines)
    return read_runs(tuple(runs))


def test_parts_of_a_step_add_up_to_its_label(uneven):
    """The medians of parts do not; the share of each in all steps does."""
    for report in uneven:
        parts = step_parts(report.records)
        assert sum(parts.values()) == pytest.approx(report.medians["step_s"])
        assert parts["encode_s"] == parts["decode_s"] < parts["compute_s"] < parts["network_s"]
    axes = plots._step_time(uneven).axes[0]
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == pytest.approx([report.medians["step_s"] * 1e3 for report in uneven])
    labels = [text.get_text() for text in axes.texts]
    assert labels == [f"{end:.0f} ms" for end in ends]


def test_markers_of_one_step_are_all_seen(uneven):
    """Hollow, each of another shape, and in the legend as on the axes."""
    axes = plots._loss(uneven, "step", "step").axes[0]
    drawn = [line for line in axes.lines if line.get_marker() not in ("None", None, "")]
    assert len({line.get_marker() for line in drawn}) == len(uneven)
    assert all(line.get_fillstyle() == "none" for line in drawn)
    keys = [line.get_marker() for line in axes.get_legend().get_lines()]
    assert keys == [line.get_marker() for line in drawn if len(line.get_xdata())]


def test_smoothing_is_a_mean_over_neighbours():
    assert smoothed(np.array([1.0, 2.0, 6.0, 3.0]), window=3).tolist() == [1.5, 3.0, 11 / 3, 4.5]
    assert smoothed(np.array([1.0, 2.0]), window=1).tolist() == [1.0, 2.0]


def test_numbers_for_readers():
    assert [format_bytes(n) for n in (0, 999, 1000, 999_600, 23_281_664, 5e12)] == [
        "0 B", "999 B", "1 kB", "1 MB", "23.3 MB", "5 TB",
    ]  # fmt: skip
    assert [format_time(s) for s in (5, 61, 3661)] == ["0:05", "1:01", "1:01:01"]
