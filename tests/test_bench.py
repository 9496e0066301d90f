"""Benchmarks of kernels give complete rows, and never a speed for wrong ones; `qsdp check` tells.

`qsdp bench kernels` and `python -m benchmarks.kernel_peers` share one loop of measuring.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from benchmarks.kernel_peers import __main__ as kernel_peers
from benchmarks.kernel_peers import bars
from qsdp import bench, check, cli
from qsdp.bench import kernels
from qsdp.bench.measure import OPS, Row, Settings, measure, measured_formats
from qsdp.bench.timing import median_seconds
from qsdp.kernels import compare, reference
from qsdp.quantizer import every_format
from qsdp.wire import VALUE_DTYPES, WireLayout

CPU = torch.device("cpu")
TINY = ["--mib", "0.02", "--threads", "1", "--dtypes", "float32", "--quick", "--device", "cpu"]


class WrongCodes:
    """The reference, but for one bit of one byte."""

    NAME = "wrong"
    decode = staticmethod(reference.decode)
    decode_sum = staticmethod(reference.decode_sum)
    encode_changes = staticmethod(reference.encode_changes)
    add_changes = staticmethod(reference.add_changes)

    @staticmethod
    def encode(
        values: torch.Tensor,
        layout: WireLayout,
        wire: torch.Tensor,
        *,
        key: int,
        first_row: int = 0,
        sender: int = 0,
    ) -> None:
        reference.encode(values, layout, wire, key=key, first_row=first_row, sender=sender)
        wire[..., layout.payload_bytes - 1 :][..., :1] ^= 1


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in this process, with a small comparison: the whole one takes seconds."""
    for name, value in kernel_peers.ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    for name in ("MIN_BITS", "MAX_BITS"):
        monkeypatch.setattr(compare, name, 4)
    monkeypatch.setattr(compare, "every_format", lambda: compare.PLAIN)
    monkeypatch.setattr(kernels, "LARGE", 5000)
    # A benchmark leaves its last thread count behind.
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


def test_json_rows_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([*TINY, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row.keys() == {field.name for field in fields(Row)} for row in rows)
    assert all(row["gbps"] > 0 and row["copy_gbps"] > 0 and row["peer"] is None for row in rows)
    formats = {
        op: {row["format"] for row in rows if (row["op"], row["bits"]) == (op, 8)} for op in OPS
    }
    coded = {f"stochastic symmetric {coding} block 512" for coding in ("elias", "rice")}
    assert formats["decode"] - coded == formats["decode_sum"] < formats["encode"]
    assert coded <= formats["encode"] and coded <= formats["decode"]
    assert formats["encode"] > {"nearest", "stochastic", "shift", "dither", "nearest levels"}
    assert "dither bfloat16 hadamard block 128" in formats["decode"]
    assert formats["encode_changes"] == formats["add_changes"] == {"nearest"}
    assert {row["bits"] for row in rows} == {8, 4}


def test_every_choice_of_a_format_is_measured() -> None:
    found = [form for bits in (1, 4) for form in measured_formats("encode", bits, torch.float32)]
    for name in vars(found[0]).keys() - {"bits", "block_size", "coding"}:
        assert {getattr(form, name) for form in found} == {
            getattr(form, name) for bits in (1, 4) for form in every_format(bits)
        }


def test_peers_stand_beside_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_peers.main([*TINY, "--bits", "8", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    for op in ("encode", "decode", "decode_sum"):
        for bits in (8, 4):
            peers = {row["peer"] for row in rows if (row["op"], row["bits"]) == (op, bits)}
            assert peers >= {None, "fbgemm"}
    assert {row["bits"] for row in rows if row["peer"] == "cast to bfloat16"} == {16}


def test_report_file_says_when_where_and_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "report.txt"
    assert kernel_peers.main([*TINY, "--bits", "8", "--bars", "--out", str(path)]) == 0
    report = path.read_text()
    assert report == capsys.readouterr().out
    for word in ("date", "machine", "torch", "command", "copy_", "fbgemm", "shift", ">= 1.2"):
        assert word in report


def test_wrong_kernels_get_no_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "backend_for", lambda device: WrongCodes)
    path = tmp_path / "report.txt"
    assert kernels.main([*TINY, "--out", str(path)]) == 1
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
    monkeypatch.setattr(kernel_peers.platform, "system", lambda: "Linux")
    monkeypatch.setattr(kernel_peers.subprocess, "run", start)
    assert kernel_peers.main(TINY) == 7
    ((command, environment),) = started
    assert command[-len(TINY) :] == TINY
    assert kernel_peers.ALLOCATOR.items() <= environment.items()


def test_low_precision_rows() -> None:
    """Values of 16 bits are measured too; the peers take float32 alone."""
    settings = Settings(CPU, 0.01, (1,), (5,), (torch.bfloat16,), repetitions=1)
    peers = kernel_peers.candidates(settings, compiled=False)
    rows = list(measure(settings, reference, peers))
    assert {row.dtype for row in rows} == {"bfloat16"}
    assert {row.op for row in rows} == set(OPS)
    assert {row.peer for row in rows} == {None}


def test_every_candidate_runs_at_least_three_times() -> None:
    counts = {"slow": 0, "fast": 0}

    def run(name: str) -> None:
        counts[name] += 1

    runs = {name: lambda name=name: run(name) for name in counts}
    seconds = median_seconds(runs, CPU, repetitions=9, budget=-1.0)
    assert counts == {"slow": 3, "fast": 3}
    assert seconds.keys() == counts.keys()


def row(op: str, gbps: float, peer: str | None = None, form: str = "nearest") -> Row:
    return Row(op, 8, form, "float32", 1, gbps, 10.0, gbps / 10.0, peer, "cpu")


def test_bars_judge_the_worst_row() -> None:
    rows = [
        row("encode", 13.0),
        row("encode", 11.0, form="shift"),
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


def test_check_says_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "CPU" in printed
    assert "FSDP2 hooks  as expected" in printed


def test_check_fails_on_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qsdp.kernels.backend_for", lambda device: WrongCodes)
    assert check.main([]) == 1
    printed = capsys.readouterr().out
    assert "DIFFERS" in printed and "encode: 4 bits, stochastic, bfloat16" in printed


def test_example_values_hold_what_is_hard() -> None:
    for dtype in VALUE_DTYPES:
        values = compare.example_values(2, 3500, dtype)
        assert values.isnan().any() and values.isinf().any()
        assert (values.abs() == torch.finfo(dtype).max).any()
        zeros = values == 0
        assert (zeros & values.signbit()).any() and (zeros & ~values.signbit()).any()
        assert ((values != 0) & (values.abs() < torch.finfo(dtype).tiny)).any()


def test_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["disks"]) == 2
    assert "usage" in capsys.readouterr().err
    assert bench.run(["--help"]) == 0


def test_what_proves_our_claims_is_in_the_repository(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "network"]) == 1
    error = capsys.readouterr().err
    assert "python -m benchmarks.network" in error and error.count("\n") == 1
