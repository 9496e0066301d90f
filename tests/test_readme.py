"""README's tables come from the files of runs, and from nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_report import write_run

from benchmarks import readme_tables
from benchmarks.network import tables
from qsdp.bench.measure import Row
from qsdp.bench.output import format_rows

ROOT = Path(__file__).parent.parent


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with a copy of README, and tiny results."""
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    for name in readme_tables.DEMO_RUNS:
        write_run(tmp_path / "runs" / "demo" / name, comm=name)
    results = tmp_path / "benchmarks" / "quality" / "results"
    results.mkdir(parents=True)
    numbers = {"bits": 5.0, "change_percent": 1.5, "change_error": None, "seeds": [1]}
    rows = [{"case": name, "kept_bytes": 1.008, **numbers} for name in readme_tables.PRESETS]
    rows[0] |= {"change_percent": -1.25, "change_error": 0.5, "seeds": [1, 2], "kept_bytes": 0.0}
    (results / "memory.json").write_text(json.dumps({"rows": rows}))
    for name in ("tuned-lr", "tuned-875k", "memory-wikipedia"):
        (results / f"{name}.json").write_text(json.dumps({"rows": rows[1:]}))
    kernels = tmp_path / "benchmarks" / "results" / "kernels-cpu.txt"
    kernels.parent.mkdir()
    kernels.write_text(kernels_report())
    cells = [
        {"variant": "w8g8", "bandwidth_gbps": 1.0, "speedup_over_fp32": 2.25},
        {"variant": "w8g8", "bandwidth_gbps": 0.1, "speedup_over_fp32": None},
        {"variant": "w4g4", "bandwidth_gbps": 0.1, "speedup_over_fp32": 8.84},
    ]
    (kernels.parent / "network.json").write_text(json.dumps({"layouts": [{"cells": cells}]}))
    return tmp_path


def kernels_report() -> str:
    wanted = {(r.op, b, f) for r in readme_tables.KERNELS for b in r.bits for f in r.formats}
    rows = [
        Row(op, bits, form, dtype, threads, 1.0, 1.0, threads + ratio, peer, "cpu")
        for op, bits, form in sorted(wanted)
        for dtype, peer, ratio in (
            ("float32", None, bits / 10),
            ("float32", "fbgemm", 9.0),
            ("bfloat16", None, -1.0),
        )
        for threads in (1, 2)
    ]
    return f"values   4 MiB, normal, block 1024; more\n\n{format_rows(rows)}\n\npass  1.00\n"


def test_tables_are_those_of_the_files_and_a_second_run_changes_nothing(root: Path) -> None:
    readme = root / "README.md"
    before = readme.read_text()
    assert readme_tables.main(root) == 0
    after = readme.read_text()
    assert readme_tables.main(root) == 0
    assert readme.read_text() == after != before
    lines = [" ".join(line.split()) for line in after.splitlines()]
    for name in readme_tables.DEMO_RUNS:
        assert f"{name} 40 12.35 13.58 1 kB 4.00x 500 300 100 100" in lines
    w8g8 = "none | 2.2x faster | not run | -1.25 % ± 0.50 % (2 seeds) |"
    w8g8 += " not run | not run | not run |"
    w4g4 = "1.01 | not run | 8.8x faster |" + 4 * " +1.50 % (1 seed) |"
    assert f"| `w8g8` | 5.00 | {w8g8}" in lines and f"| `w4g4` | 5.00 | {w4g4}" in lines
    head = "4 MiB of float32, block 1024, against a copy of the same tensor"
    assert f"| {head} | 1 thread | 2 threads |" in lines
    assert "| encode 8 bit, nearest and shift | 1.8x | 2.8x |" in lines
    assert "| encode 3, 5, 6, 7 bit, nearest | 1.3x | 2.3x |" in lines  # the slowest
    # Nothing but the tables has changed.
    for name in readme_tables.TABLES:
        before, after = (readme_tables.replaced(text, name, "") for text in (before, after))
    assert before == after


@pytest.mark.parametrize(
    ("name", "path", "content"),
    [
        ("demo", "runs/demo/w4g4/result.json", None),
        ("loss", "benchmarks/quality/results/memory.json", '{"rows": []}'),
        ("loss", "benchmarks/quality/results/memory.json", "[]"),
        ("loss", "benchmarks/quality/results/memory-wikipedia.json", None),
        ("loss", "benchmarks/results/network.json", None),
        ("kernels", "benchmarks/results/kernels-cpu.txt", "op  bits  rounding  dtype\n"),
        ("kernels", "benchmarks/results/kernels-cpu.txt", None),
    ],
)
def test_a_table_without_its_files_stays(
    root: Path, capsys: pytest.CaptureFixture[str], name: str, path: str, content: str | None
) -> None:
    (root / path).unlink() if content is None else (root / path).write_text(content)
    before = (root / "README.md").read_text()
    assert readme_tables.main(root) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"README's table {name} stays as it is: ")
    after = (root / "README.md").read_text()
    for other in readme_tables.TABLES:
        if other != name:
            before, after = (readme_tables.replaced(text, other, "") for text in (before, after))
    assert before == after


def test_the_page_of_networks_has_the_tables_of_its_results(tmp_path: Path) -> None:
    """As committed, and again after they were lost."""
    for path in ("docs/networks.md", "benchmarks/results/network.json"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text((ROOT / path).read_text())
    page = tmp_path / "docs" / "networks.md"
    committed = page.read_text()
    emptied = committed
    for name in tables.TABLES:
        emptied = readme_tables.replaced(emptied, name, "", "docs/networks.md")
    page.write_text(emptied)
    assert tables.main(tmp_path) == 0
    assert page.read_text() == committed != emptied


def test_readme_without_a_marker_is_an_error() -> None:
    with pytest.raises(ValueError, match="<!-- /loss --> once"):
        readme_tables.replaced("<!-- loss -->\n", "loss", "")
