"""The benchmark of what a collective costs the host runs, and takes off what it says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import host_time


@pytest.mark.ranks
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host-time.txt"
    argv = ["--steps", "4", "--configurations", "stock", "w4g4", "--out", str(out)]
    assert host_time.main(argv) == 0
    assert capsys.readouterr().out.endswith(out.read_text())
    rows = [line.split() for line in out.read_text().splitlines()[-3:]]
    assert [row[:2] for row in rows] == [["stock", "-"], ["w4g4", "with"], ["w4g4", "without"]]
    assert float(rows[1][2]) >= float(rows[2][2]) > 0


def test_what_is_inside_is_taken_off_once() -> None:
    meter = host_time.Meter()
    inner = meter.count(lambda: time.sleep(0.02), "kernels")
    outer = meter.count(lambda: time.sleep(0.02), "transfers")

    class Comm:
        def __call__(self) -> None:
            outer()
            inner()
            time.sleep(0.02)

    comm = Comm()
    meter.watch(comm, lambda: "call")
    comm()
    ((with_kernels, without),) = meter.calls["call"]
    assert with_kernels.wall >= 0.04 and 0.02 <= without.wall <= with_kernels.wall - 0.02
    assert without.busy < 0.02
    nested = meter.count(inner, "transfers")
    before = meter.kernels
    nested()
    assert meter.kernels == before and meter.transfers.wall >= 0.04
