"""`qsdp plan --sync-every`: bytes of the layouts over the link, once a round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsdp.plan import command
from qsdp.plan.clusters import case
from qsdp.plan.local import predict_local, sync_row_bytes
from qsdp.plan.model import predict

SITES = replace(case("cloud").cluster, nodes=2, bandwidth_gbps=0.05, latency_us=20000.0)


def test_a_round_adds_one_synchronisation() -> None:
    chosen = case("cloud")
    variant = chosen.variants[0]
    alone = predict(chosen.model, replace(SITES, nodes=1), chosen.work, variant)
    row = sync_row_bytes(chosen.model, 8, 2, 4)
    # Half of a rank's shard, at 4.25 bits a value, and vectors in full precision.
    assert row == pytest.approx(chosen.model.numel / 8 / 2 * 4.25 / 8, rel=0.02)
    for interval in (1, 10, 100):
        found = predict_local(chosen.model, SITES, chosen.work, variant, interval, 4)
        sync_s = 8 * 2 * 8 * row / 0.05e9
        assert found.step_s == pytest.approx(alone.step_s + sync_s / interval, rel=0.01)
        assert found.between_nodes == round(2 * 8 * row / interval)
        assert found.compute_s == alone.compute_s
    four, raw = (
        predict_local(chosen.model, SITES, chosen.work, variant, 10, bits) for bits in (4, 32)
    )
    assert raw.between_nodes == pytest.approx(four.between_nodes * 32 / 4.25, rel=0.02)
    assert raw.codec_s == alone.codec_s < four.codec_s


def test_local_steps_are_listed_and_never_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    local = ["--nodes", "2", "--bandwidth", "0.05", "--sync-every", "10", "100"]
    assert command.run([*local, "--configs", "stock-bf16", "w4g4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if "bits every" in line]
    assert len(found) == 2 and not any("recommended" in line for line in found)
    assert sum("recommended" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--sync-bits 8", "--sync-bits needs --sync-every"),
        ("--sync-every 10 --sync-bits 9", "--sync-bits must be 1 to 8, or 32, got 9"),
        ("--sync-every 0", "--sync-every must be at least 1, got 0"),
        ("--nodes 1 --sync-every 10", "--sync-every needs --nodes of at least 2"),
    ],
)
def test_flags_that_do_not_fit(argv: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        command.run(argv.split())
