"""`qsdp bench train` and `link`, and the network benchmark, whose hosts are gone afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs pip install 'qsdp[train]'")

from benchmarks.network import hosts, report
from benchmarks.network.__main__ import main as network_main
from qsdp.cli import main

ROOT = Path(__file__).parent.parent
SHAPE = ["--layers", "1", "--width", "64", "--heads", "2", "--sequence-length", "32"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )


@pytest.fixture
def two_hosts() -> Iterator[hosts.Hosts]:
    """Hosts that a test enters itself, where this machine can make any."""
    made = hosts.Hosts(2)
    try:
        with made:
            pass
    except RuntimeError as error:
        pytest.skip(f"no hosts here: {error}")
    return made


@pytest.mark.ranks
def test_train_compares_stock_and_qsdp() -> None:
    variants = ["--variants", "stock-fp32", "w8g8", "w4g4-bf16"]
    done = run(
        "qsdp", "bench", "train", "--nproc", "2", *SHAPE, *variants, "--steps", "2", "--json"
    )
    assert done.returncode == 0, done.stderr
    rows = {row["variant"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["stock-fp32", "w8g8", "w4g4-bf16"]
    assert rows["stock-fp32"]["speedup_over_fp32"] == 1
    assert rows["w8g8"]["speedup_over_bf16"] is None
    assert 3.5 < rows["stock-fp32"]["sent"] / rows["w8g8"]["sent"] < 4


@pytest.mark.ranks
def test_link_measures_each_pair() -> None:
    done = run("qsdp", "bench", "link", "--nproc", "2", "--mib", "1", "--json")
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
    ],
)
def test_bad_use_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "fast"], "unknown variant 'fast'"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--batch-size", "3"], "--batch-size must be a multiple of"),
        ([], "only root may do"),
    ],
)
def test_bad_use_of_the_network_benchmark_is_one_line(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hosts, "_tool", lambda name: name)
    assert network_main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_hosts_are_gone_after_a_failure(two_hosts: hosts.Hosts) -> None:
    """Their processes, too; and inside they reach each other."""
    with pytest.raises(ZeroDivisionError), two_hosts as made:
        made.limit(0.1)
        sleeper = subprocess.Popen(made.inside(1, ["sleep", "100"]))
        greeting = "import socket; socket.create_server(('10.77.0.1', 5000)).close()"
        subprocess.run(made.inside(0, [sys.executable, "-c", greeting]), check=True)
        raise ZeroDivisionError
    assert sleeper.wait(timeout=10) != 0
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert made.name(0) not in listed and made.name(1) not in listed


@pytest.mark.ranks
@pytest.mark.usefixtures("two_hosts")
def test_network_counts_what_the_kernel_counts(tmp_path: Path) -> None:
    """And the ranks on its hosts find the benchmark and the files that it was given."""
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"preset": "w8g8", "verify": True}))
    variants = ["--variants", "stock-fp32", str(mine)]
    limits = ["--layout", "2x1", "--gbps", "1", "--no-bars", "--steps", "2"]
    done = run("benchmarks.network", *SHAPE, *variants, *limits, "--json")
    assert done.returncode == 0, done.stderr
    (layout,) = json.loads(done.stdout)["layouts"]
    assert [cell["variant"] for cell in layout["cells"]] == ["stock-fp32", "mine"]
    for cell in layout["cells"]:  # headers are many, where messages are as small as here
        assert 0.98 < cell["on_interface"] / cell["between_nodes"] < 1.1, cell
    assert layout["cells"][1]["speedup_over_fp32"] > 0


def test_ticks_of_the_plot_name_every_speed_that_has_room() -> None:
    assert report._ticks([0.4961, 0.5, 0.1, 10.0, 0.5]) == [0.1, 0.5, 10.0]
    assert report._ticks([0.1, 0.2, 0.9044]) == [0.1, 0.2, 0.9044]
    assert report._ticks([]) == []
