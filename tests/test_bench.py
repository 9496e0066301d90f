"""The benchmark gives complete rows, never a speed for wrong kernels; `qsdp check` tells them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qsdp import bench, check
from qsdp.bench import bars, kernels, output
from qsdp.bench.measure import Row, Settings, measure
from qsdp.bench.timing import median_seconds
from qsdp.kernels import reference
from qsdp.wire import WireLayout

CPU = torch.device("cpu")
TINY = ["--mib", "0.02", "--threads", "1", "--bits", "8", "4", "--dtypes", "float32", "--quick"]
KEYS = {
    "op",
    "bits",
    "rounding",
    "levels",
    "dtype",
    "threads",
    "gbps",
    "copy_gbps",
    "ratio",
    "peer",
}


class WrongCodes:
    """The reference, but for one bit of one byte."""

    NAME = "wrong"
    decode = staticmethod(reference.decode)
    decode_sum = staticmethod(reference.decode_sum)

    @staticmethod
    def encode(
        values: torch.Tensor,
        layout: WireLayout,
        wire: torch.Tensor,
        *,
        key: int,
        first_row: int = 0,
    ) -> None:
        reference.encode(values, layout, wire, key=key, first_row=first_row)
        wire[:, layout.payload_bytes - 1 :][:, :1] ^= 1


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in this process, with a small comparison: the whole one takes seconds."""
    for name, value in kernels.ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(check, "BITS", (4,))
    monkeypatch.setattr(kernels, "LARGE", 5000)


def test_json_rows_have_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert kernels.main([*TINY, "--device", "cpu", "--json"]) == 0
    torch.set_num_threads(threads)
    rows = json.loads(capsys.readouterr().out)
    assert all(row.keys() >= KEYS for row in rows)
    assert all(row["gbps"] > 0 and row["copy_gbps"] > 0 for row in rows)
    ours = {
        (row["op"], row["bits"], row["rounding"], row["levels"])
        for row in rows
        if row["peer"] is None
    }
    for bits in (4, 8):
        for rounding in ("nearest", "stochastic", "shift"):
            assert ("encode", bits, rounding, None) in ours
        assert ("encode", bits, "nearest", 1 << bits) in ours
        for op in ("decode", "decode_sum"):
            assert (op, bits, None, None) in ours
    for op in ("encode", "decode", "decode_sum"):
        assert any(row["op"] == op and row["peer"] == "fbgemm" for row in rows)


def test_report_file_says_when_where_and_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "report.txt"
    arguments = [*TINY[:4], "--bits", "8", "--quick", "--bars", "--out", str(path)]
    assert bench.main(["kernels", *arguments, "--device", "cpu"]) == 0
    report = path.read_text()
    assert report == capsys.readouterr().out
    for word in ("date", "machine", "torch", "command", "copy_", "fbgemm", "shift", ">= 1.2"):
        assert word in report


def test_wrong_kernels_get_no_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "backend_for", lambda device: WrongCodes)
    path = tmp_path / "report.txt"
    assert kernels.main([*TINY, "--device", "cpu", "--out", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and not path.exists()
    assert "encode" in printed.err and "differ" in printed.err


def test_a_new_process_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started without the allocator's settings, it starts itself again with them."""
    started = []

    class Done:
        returncode = 7

    def start(command: list[str], env: dict[str, str]) -> Done:
        started.append((command, env))
        return Done()

    monkeypatch.delenv("MALLOC_TOP_PAD_")
    monkeypatch.setattr(kernels.platform, "system", lambda: "Linux")
    monkeypatch.setattr(kernels.subprocess, "run", start)
    assert kernels.main([*TINY, "--device", "cpu"]) == 7
    ((command, environment),) = started
    assert command[-len(TINY) - 2 :] == [*TINY, "--device", "cpu"]
    assert kernels.ALLOCATOR.items() <= environment.items()


def test_low_precision_rows() -> None:
    """Values of 16 bits are measured too; the peers take float32 alone."""
    settings = Settings(CPU, 0.01, (1,), (5,), (torch.bfloat16,), repetitions=1)
    threads = torch.get_num_threads()
    rows = list(measure(settings, reference))
    torch.set_num_threads(threads)
    assert {row.dtype for row in rows} == {"bfloat16"}
    assert {row.op for row in rows} == {"encode", "decode", "decode_sum", "accumulate"}
    assert {row.peer for row in rows} == {None}


def test_every_candidate_runs_at_least_three_times() -> None:
    counts = {"slow": 0, "fast": 0}

    def run(name: str) -> None:
        counts[name] += 1

    runs = {name: lambda name=name: run(name) for name in counts}
    seconds = median_seconds(runs, CPU, repetitions=9, budget=-1.0)
    assert counts == {"slow": 3, "fast": 3}
    assert seconds.keys() == counts.keys()


def row(op: str, gbps: float, peer: str | None = None, **changed: object) -> Row:
    fields = {
        "op": op,
        "bits": 8,
        "rounding": "nearest" if op == "encode" else None,
        "levels": None,
        "dtype": "float32",
        "threads": 1,
        "gbps": gbps,
        "copy_gbps": 10.0,
        "ratio": gbps / 10.0,
        "peer": peer,
        "device": "cpu",
    }
    return Row(**(fields | changed))  # type: ignore[arg-type]


def test_bars_judge_the_worst_row() -> None:
    rows = [
        row("encode", 13.0),
        row("encode", 11.0, rounding="shift"),
        row("decode", 12.5),
        row("encode", 10.0, "fbgemm"),
        row("encode", 1.0, "torchao"),
        row("decode", 1.0, "torchao"),
    ]
    found = {verdict.text: verdict for verdict in bars.verdicts(rows)}
    nearest = found["encode 8 bit nearest, shift, against a copy"]
    assert nearest.measured == pytest.approx(1.1) and not nearest.passed
    assert found["decode 8 and 4 bit, against a copy"].passed
    assert found["encode 8 bit, against fbgemm"].measured == pytest.approx(1.3)
    assert found["decode_sum 8 bit, against fbgemm and add"].measured is None
    both = 2.0 / (1 / 13.0 + 1 / 12.5)
    assert found["encode + decode 8 bit, against torchao"].measured == pytest.approx(both)
    text = bars.format_verdicts(list(found.values()))
    assert "FAIL    1.10 >= 1.2" in text and "none" in text


def test_table_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    text = output.format_table([row("encode", 12.0), row("encode", 3.0, "fbgemm")])
    assert [line.split()[0] for line in text.splitlines()] == ["op", "encode", "encode"]


def test_check_says_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "FSDP2 hooks  there" in printed and "CPU" in printed


def test_check_fails_on_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "backend_for", lambda device: WrongCodes)
    assert check.main([]) == 1
    printed = capsys.readouterr().out
    assert "DIFFERS" in printed and "encode: 4 bits, shift, float16" in printed


def test_example_values_hold_what_is_hard() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = check.example_values(2, 3500, dtype)
        assert values.isnan().any() and values.isinf().any()
        assert (values.abs() == torch.finfo(dtype).max).any()
        zeros = values == 0
        assert (zeros & values.signbit()).any() and (zeros & ~values.signbit()).any()
        assert ((values != 0) & (values.abs() < torch.finfo(dtype).tiny)).any()


def test_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["disks"]) == 2
    assert "usage" in capsys.readouterr().err
    assert bench.main(["--help"]) == 0
