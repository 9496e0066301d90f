"""benchmarks/quality: many sweeps beside other work, and what is made of their results."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from threading import Timer
from types import ModuleType

import pytest

from qsdp.sweep.spec import read_sweep

QUALITY = Path(__file__).parent.parent / "benchmarks" / "quality"
COUNT = """
import pathlib, sys, time
for n in range(40):
    pathlib.Path(sys.argv[1]).write_text(str(n))
    time.sleep(0.05)
"""
# The counter as a child of a child in a session of its own, as a rank is one.
TREE = "import subprocess, sys; subprocess.run(sys.argv[1:], start_new_session=True)"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quality_{name}", QUALITY / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counting(path: Path) -> list[str]:
    return [sys.executable, "-c", TREE, sys.executable, "-c", COUNT, str(path)]


def test_the_plan_names_sweeps_and_cases_that_there_are(tmp_path: Path) -> None:
    plan = json.loads((QUALITY / "evidence.json").read_text())
    commands = script("evidence").commands(QUALITY / "evidence.json", tmp_path)
    assert len(commands) == len(plan)
    for entry, command in zip(plan, commands, strict=True):
        cases = [case.name for case in read_sweep(QUALITY / entry["sweep"]).cases]
        assert set(entry.get("only", [])) <= set(cases)
        assert str(tmp_path / entry["out"]) in command


@pytest.mark.parametrize("entry", [{"sweep": "a.json"}, {"sweep": "a", "out": "b", "seed": 1}])
def test_a_plan_with_wrong_fields(entry: dict, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match="plan.json: a sweep has the fields only, out, seeds"):
        script("evidence").commands(tmp_path / "plan.json", tmp_path)


def test_a_plan_whose_seeds_are_no_list(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"sweep": "memory.json", "out": "x", "seeds": 1}]))
    with pytest.raises(ValueError, match="seeds is a list; got 1"):
        script("evidence").commands(plan, tmp_path)


def test_stands_still_while_a_file_exists(tmp_path: Path) -> None:
    """All of a tree, what leads a session of its own included, and to the end afterwards."""
    count, pause = tmp_path / "count", tmp_path / "pause"
    seen: list[str] = []
    timers = [
        Timer(1.0, pause.touch),
        Timer(2.5, lambda: seen.append(count.read_text())),
        Timer(3.5, lambda: seen.append(count.read_text())),
        Timer(3.6, pause.unlink),
    ]
    for timer in timers:
        timer.start()
    assert script("evidence").attend(counting(count), None, pause) == 0
    for timer in timers:
        timer.join()
    assert seen[0] == seen[1] != "39" and count.read_text() == "39"


def test_ends_at_the_deadline_even_when_it_stands_still(tmp_path: Path) -> None:
    count, pause = tmp_path / "count", tmp_path / "pause"
    pause.touch()
    until = datetime.now() + timedelta(seconds=2)
    assert script("evidence").attend(counting(count), until, pause) == 1
    last = count.read_text() if count.exists() else ""
    time.sleep(0.3)
    assert (count.read_text() if count.exists() else "") == last != "39"


def test_ended_by_a_signal_it_ends_what_it_started(tmp_path: Path) -> None:
    plan, count = tmp_path / "plan.json", tmp_path / "count"
    plan.write_text("[]")
    setup = f"import sys; sys.path.insert(0, {str(QUALITY)!r}); import evidence; "
    setup += f"evidence.commands = lambda *a: [{counting(count)!r}]; sys.exit(evidence.main())"
    driver = subprocess.Popen(
        [sys.executable, "-c", setup, "--plan", str(plan), "--out", str(tmp_path)]
    )
    deadline = time.monotonic() + 30
    while not count.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    driver.terminate()
    assert driver.wait(timeout=30) == 143
    last = count.read_text()
    time.sleep(0.3)
    assert count.read_text() == last != "39"


def finish(folder: Path, loss: float, gap: float = 0.0) -> None:
    """A run as `qsdp train` leaves it, whose training loss is worse by ``gap`` throughout."""
    folder.mkdir(parents=True)
    result = {"valid_loss_decoded": loss, "valid_loss_master": loss, "ratio": 2.0, "steps": 200}
    result |= {"parameters": 9, "tokens": 9, "num_ranks": 2}
    (folder / "result.json").write_text(json.dumps(result))
    lines = [json.dumps({"step": n, "loss": 3 + gap}) for n in range(1, 201)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps({"valid_loss": 3})]))


def test_compared_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences, errors, memory and curves as by hand; a seed that one lacks counts for none."""
    compare = script("compare")
    spec = {"train": {}, "seeds": [1, 2, 3], "cases": {"w32g32": "w32g32", "w4g4": "w4g4"}}
    (tmp_path / "sweep.json").write_text(json.dumps(spec))
    for seed, gap in ((1, 0.01), (2, 0.03)):
        finish(tmp_path / "w32g32" / f"seed-{seed}", 3.0 + seed)
        finish(tmp_path / "w4g4" / f"seed-{seed}", 3.0 + seed + gap, gap)
    finish(tmp_path / "w4g4" / "seed-3", 9.0)
    arguments = [str(tmp_path / "sweep.json"), str(tmp_path), "--name", "it", "--out"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments, str(tmp_path)])
    assert compare.main() == 0
    content = json.loads((tmp_path / "it.json").read_text())
    base, row = content["rows"]
    changes = [100 * math.expm1(gap) for gap in (0.01, 0.03)]
    assert row["change_percent"] == pytest.approx(sum(changes) / 2)
    assert row["change_error"] == pytest.approx((changes[1] - changes[0]) / 2)
    # 8 bits, and two float32 for each block of 1,024
    assert row["kept_bytes"] == pytest.approx(1 + 8 / 1024, rel=1e-3) and base["kept_bytes"] == 0
    for point in content["curves"]["w4g4"]:
        assert point["gap_percent"] == pytest.approx(row["change_percent"])
    assert [point["step"] for point in content["curves"]["w4g4"]] == [100, 200]
    table = (tmp_path / "it.txt").read_text().splitlines()
    assert "few" in next(line for line in table if line.startswith("w4g4"))
    assert (tmp_path / "it-front.png").stat().st_size and (tmp_path / "it-curve.png").is_file()


def test_the_front_asks_for_what_is_shown() -> None:
    """A cheaper case takes another's place unless it is shown to be worse, and never an equal."""
    compare = script("compare")
    results = {
        case: {seed: {"valid_loss_decoded": loss} for seed, loss in enumerate(losses, 1)}
        for case, losses in (
            ("dear", (3.0, 3.0, 3.0)),
            ("noisy", (2.9, 3.2, 3.1)),
            ("worse", (3.10, 3.11, 3.12)),
            ("few", (3.0, 3.0)),
        )
    }
    dear, noisy, worse, few = (
        {"case": case, "kept_bytes": kept, "bits": 3.0, "better": "decoded"}
        for case, kept in (("dear", 1.0), ("noisy", 0.5), ("worse", 0.5), ("few", 0.5))
    )
    assert compare.beats(noisy, dear, results) and not compare.beats(worse, dear, results)
    assert not compare.beats(few, dear, results)
    assert not compare.beats(dear, noisy, results) and not compare.beats(dear, dear, results)


def test_a_curve_with_a_step_missing_is_refused(tmp_path: Path) -> None:
    finish(tmp_path / "run", 3.0)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    (tmp_path / "run" / "metrics.jsonl").write_text(text.replace('"step": 5,', '"step": 6,'))
    with pytest.raises(ValueError, match="does not have every step"):
        script("compare").training_losses(tmp_path / "run")
