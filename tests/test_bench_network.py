"""`qsdp bench train`, `link` and `network`: what they print, and that hosts are gone afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs pip install 'qsdp[train]'")

from qsdp.bench import hosts
from qsdp.bench.variants import parse_variant
from qsdp.cli import main

NETWORK = Path(__file__).parent.parent / "benchmarks" / "results" / "network.json"
CAN_MAKE_HOSTS = (
    sys.platform == "linux"
    and os.geteuid() == 0
    and all(shutil.which(tool, path="/usr/sbin:/sbin:/usr/bin:/bin") for tool in ("ip", "tc"))
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    return subprocess.run(
        [sys.executable, "-m", "qsdp", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.ranks
def test_train_compares_stock_and_qsdp() -> None:
    shape = ["--layers", "1", "--width", "64", "--heads", "2", "--sequence-length", "32"]
    variants = ["--variants", "stock-fp32", "w8g8", "w4g4-bf16"]
    done = run("train", "--nproc", "2", *shape, *variants, "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["variant"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["stock-fp32", "w8g8", "w4g4-bf16"]
    assert rows["stock-fp32"]["speedup_over_fp32"] == 1
    assert rows["w8g8"]["speedup_over_bf16"] is None
    assert 3.5 < rows["stock-fp32"]["sent"] / rows["w8g8"]["sent"] < 4


@pytest.mark.ranks
def test_link_measures_each_pair() -> None:
    done = run("link", "--nproc", "2", "--mib", "1", "--json")
    assert done.returncode == 0, done.stderr
    (link,) = json.loads(done.stdout)
    assert (link["kind"], link["source"], link["target"]) == ("intra", 0, 1)
    assert link["latency_us"] > 0 and link["gbps"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--nproc", "2", "--variants", "w9g9"], "unknown variant 'w9g9'"),
        (["train", "--nproc", "2", "--steps", "0"], "--steps is too small: 0"),
        (["link", "--nproc", "2", "--mib", "0"], "--mib must be above 0"),
        (["network", "--variants", "fast"], "unknown variant 'fast'"),
    ],
)
def test_bad_use_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_without_root_there_is_a_clear_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["bench", "network"]) == 1
    error = capsys.readouterr().err
    assert "root" in error and error.count("\n") == 1


@pytest.mark.skipif(not CAN_MAKE_HOSTS, reason="needs root, ip and tc")
def test_hosts_are_gone_after_a_failure() -> None:
    """Their processes, too; and inside they reach each other."""
    try:
        made = hosts.Hosts(2)
        made.__enter__()
    except RuntimeError as error:
        pytest.skip(f"this kernel makes no hosts: {error}")
    with pytest.raises(ZeroDivisionError):
        try:
            made.limit(0.1)
            sleeper = subprocess.Popen(made.inside(1, ["sleep", "100"]))
            greeting = "import socket; socket.create_server(('10.77.0.1', 5000)).close()"
            subprocess.run(made.inside(0, [sys.executable, "-c", greeting]), check=True)
            raise ZeroDivisionError
        finally:
            made.__exit__(None, None, None)
    assert sleeper.wait(timeout=10) != 0
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert made.name(0) not in listed and made.name(1) not in listed


def test_variants_name_what_they_change() -> None:
    assert parse_variant("stock-bf16").settings["precision"] == "bf16"
    assert parse_variant("w4g4-flat").two_level is False and parse_variant("w4g4").two_level
    assert parse_variant("w8g8-bf16").settings["comm"] == "w8g8"


def test_committed_benchmark_counts_what_the_kernel_counts() -> None:
    """Bytes on the interface are qsdp's within 2 %, and two levels halve what crosses."""
    found = json.loads(NETWORK.read_text())
    shaped = [
        cell
        for layout in found["layouts"]
        for cell in layout["cells"]
        if cell["bandwidth_gbps"] is not None
    ]
    assert len(shaped) > 40
    for cell in shaped:
        assert 1.0 <= cell["on_interface"] / cell["between_nodes"] < 1.02, cell
    cells = {(c["variant"], c["bandwidth_gbps"]): c for c in found["layouts"][1]["cells"]}
    assert cells["w8g8-flat", 0.1]["between_nodes"] == pytest.approx(
        2 * cells["w8g8", 0.1]["between_nodes"], rel=0.01
    )
