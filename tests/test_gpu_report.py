"""`benchmarks/gpu_report.sh` end to end on the CPU: the same entry points as on a GPU, in small."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as report
from benchmarks.gpu.bandwidth import BITS
from benchmarks.gpu.cases import checked_cases, preset_cases, preset_formats
from benchmarks.gpu.checks import Checks, require
from benchmarks.gpu.processes import run_limited
from benchmarks.gpu.sanitizer import main as sanitizer

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(300)
def test_the_report_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable}
    done = subprocess.run(
        [
            "bash",
            str(ROOT / "benchmarks" / "gpu_report.sh"),
            "--device",
            "cpu",
            "--parts",
            "1,2,3,5,6,7",
        ],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=290,
    )
    text = (out / "report.txt").read_text()
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert done.stderr == ""
    assert "15 of 15 cases equal the reference" in text
    assert "decode_sum" in text and "copy GB/s" in text
    assert "host busy ms" in text and "ok      w4g4: trace" in text
    assert "skipped: NCCL" in text and "skipped: these programs" in text
    assert "ok      w4g4: loss" in text and "last 20" in text
    summary = (out / "summary.txt").read_text()
    assert done.stdout.endswith(summary) and summary.count(" ok ") == 4
    names = {path.name for path in out.iterdir()}
    assert names == {"report.txt", "summary.txt"} | {
        f"trace-{name}.json.gz" for name in ("stock", "w8g8", "w4g4")
    }


def test_a_part_that_fails_or_hangs_loses_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (
        report.Part(1, "fails", "cases", 60.0, small=("--processes", "0")),
        report.Part(2, "hangs", "loss", 0.5),
        report.Part(3, "late", "loss", 60.0),
    )
    monkeypatch.setattr(report, "PARTS", parts)
    monkeypatch.setattr(report, "LEAST", 0.0)
    argv = ["--out", str(tmp_path), "--device", "cpu", "--parts", "1,2,3"]
    monkeypatch.setattr(report, "_run", in_order([("FAILED, status 1", 1.0), ("timed out", 2.0)]))
    assert report.main(argv) == 1
    summary = (tmp_path / "summary.txt").read_text().splitlines()
    assert [line.split()[1] for line in summary[2:]] == ["fails", "hangs", "late"]
    assert "FAILED, status 1" in summary[2] and "timed out" in summary[3] and " ok " in summary[4]
    assert capsys.readouterr().out.count("part  what") == 3


def in_order(ends: list[tuple[str, float]]) -> object:
    """What runs a module: first the machine, then these, then all well."""
    waiting = [("ok", 0.0), *ends]

    def run(*_: object) -> report.Ended:
        return report.Ended(*(waiting.pop(0) if waiting else ("ok", 0.0)))

    return run


def test_no_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_run", in_order([]))
    argv = ["--out", str(tmp_path), "--device", "cpu", "--seconds", "1", "--parts", "8"]
    assert report.main(argv) == 1
    assert "no time left" in (tmp_path / "summary.txt").read_text()


@pytest.mark.parametrize("text", ["0", "1,9", "one", ""])
def test_unknown_parts(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(["--out", str(tmp_path), "--parts", text])
    assert "parts are numbers from 1 to 8" in capsys.readouterr().err


def test_a_process_is_stopped_with_what_it_started() -> None:
    """And says where it was."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    lines: list[str] = []
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
    ended = run_limited([sys.executable, "-c", code], 3.0, environment, lines.append)
    assert ended.status == "timed out after 3 s" and ended.seconds < 10
    child = int(next(line for line in lines if line.startswith("child")).split()[1])
    assert any("line 4" in line for line in lines)
    for _ in range(50):
        if not running(child):
            return
        time.sleep(0.1)
    raise AssertionError("the child still runs")


def running(pid: int) -> bool:
    """A process that was killed and not yet waited for is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_statuses() -> None:
    for code, status in ((0, "ok"), (3, "FAILED, status 3")):
        command = [sys.executable, "-c", f"raise SystemExit({code})"]
        assert run_limited(command, 30.0, os.environ, print).status == status


def test_checks_do_not_stop_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks()
    assert not checks.run("first", lambda: require(False, "the reason"))
    assert checks.run("second", lambda: "a fact")
    assert checks.status == 1 and checks.failed == ["first"]
    printed = capsys.readouterr().out
    assert "the reason" in printed and "second: a fact" in printed


def test_cases_cover_the_presets_and_the_check() -> None:
    names = set(preset_formats())
    assert {"w8", "g8", "kept", "w4", "g4", "w2", "g2"} <= names
    assert len(list(preset_cases(large=False))) == 3 * len(names)
    assert len(list(preset_cases(large=True))) == 4 * len(names)
    assert set(preset_formats(BITS)) <= names
    cases = list(checked_cases())
    assert len({case.name for case in cases}) == len(cases) > 150


def test_the_kernels_that_are_watched_run() -> None:
    assert sanitizer(["--kernels", "0.01", "--device", "cpu"]) == 0
