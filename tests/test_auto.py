"""``"auto"``: what is measured in which time, what is chosen, and what a run stores of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from auto_cases import CASES, alone
from ranks import check_case, run_cases, run_ranks

import qsdp
from qsdp.auto.choose import Candidate, choose
from qsdp.auto.decision import Decision, Link
from qsdp.plan.measured import Curve
from qsdp.plan.transfers import GROWTH, SMALLEST, measure_curve

# ---- what is measured


class Simulated:
    """A link and its clock: transfers take what the link says, and nothing else takes time."""

    def __init__(self, latency_s: float, seconds_per_byte: float) -> None:
        self.now, self._latency_s, self._per_byte = 0.0, latency_s, seconds_per_byte
        self.sizes: list[int] = []

    def prepare(self, size: int) -> Callable[[], float]:
        def transfer() -> float:
            self.sizes.append(size)
            took = self._latency_s + size * self._per_byte
            self.now += took
            return took

        return transfer

    def curve(self, largest: int, budget_s: float) -> Curve:
        def slowest(values: Sequence[float]) -> list[float]:
            return list(values)

        def seconds(run: Callable[[], object]) -> float:
            took = run()
            assert isinstance(took, float)
            return took

        return measure_curve(
            self.prepare, largest, budget_s, seconds=seconds, slowest=slowest, now=lambda: self.now
        )


@pytest.mark.parametrize("mbit_per_s", [20, 50, 100, 500, 1e4, 1e6])
@pytest.mark.parametrize("latency_s", [1e-5, 1e-3])
def test_measuring_keeps_to_its_budget(mbit_per_s: float, latency_s: float) -> None:
    """Sizes grow until the next would not fit; the link is found whatever it is."""
    link, budget_s = Simulated(latency_s, 8e-6 / mbit_per_s), 0.2
    curve = link.curve(1 << 22, budget_s)
    assert link.now <= budget_s
    sizes = [size for size, _ in curve.points]
    assert sizes == [SMALLEST * GROWTH**power for power in range(len(sizes))] and len(sizes) > 1
    assert curve.latency_s == pytest.approx(latency_s + SMALLEST * 8e-6 / mbit_per_s)
    assert curve.seconds_per_byte == pytest.approx(8e-6 / mbit_per_s)
    if mbit_per_s >= 1e4:  # there is time for all of it, several times
        assert sizes[-1] == 1 << 22 and link.sizes.count(1 << 22) > 1


def test_two_sizes_are_measured_however_long_they_take() -> None:
    link = Simulated(1.0, 0.0)
    assert [size for size, _ in link.curve(1 << 22, 0.1).points] == [SMALLEST, SMALLEST * GROWTH]
    assert link.sizes == [SMALLEST, SMALLEST, SMALLEST * GROWTH]


def test_nothing_larger_than_what_is_sent_is_measured() -> None:
    sizes = [size for size, _ in Simulated(1e-6, 1e-12).curve(100_000, 10.0).points]
    assert sizes == [SMALLEST, SMALLEST * GROWTH, 100_000]


def test_a_curve_goes_straight_between_sizes_and_beyond() -> None:
    curve = Curve(((100, 1.0), (200, 2.0), (1000, 4.0)))
    found = [curve.seconds(size) for size in (0, 100, 150, 600, 1000, 1900)]
    assert found == pytest.approx([1.0, 1.0, 1.5, 3.0, 4.0, 7.0])
    assert Curve(((100, 2.0), (400, 2.0))).seconds_per_byte == 2.0 / 400


# ---- what is chosen


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"stock": 1.0, "unquantized": 0.96, "w8g8": 0.96, "w4g4": 0.96}, "stock"),
        ({"stock": 1.0, "unquantized": 0.9, "w8g8": 0.87, "w4g4": 0.86}, "unquantized"),
        ({"stock": 1.0, "unquantized": 0.9, "w8g8": 0.5, "w4g4": 0.48}, "w8g8"),
        ({"stock": 1.0, "unquantized": 0.9, "w8g8": 0.5, "w4g4": 0.1}, "w4g4"),
        ({"stock": 1.0, "unquantized": 1.9, "w8g8": 1.5, "w4g4": 0.9}, "w4g4"),
        ({"stock": 1.0, "unquantized": 1.0, "w8g8": 0.5, "w8g8-flat": 0.4}, "w8g8-flat"),
    ],
)
def test_fewer_bits_must_pay(seconds: dict[str, float], chosen: str) -> None:
    config = qsdp.QSDPConfig()
    ways = [Candidate(n, n.removesuffix("-flat"), config, "flat" not in n) for n in seconds]
    assert choose(ways, seconds).name == chosen


def test_the_line() -> None:
    link = Link(96.42, 0.212, between_nodes=True)
    predicted = {"stock": 8.912, "w8g8": 1.384, "w4g4": 0.0512}
    decision = Decision("w4g4", qsdp.QSDPConfig.preset("w4g4"), predicted, link, 22_400_000, 1.31)
    assert str(decision) == (
        "auto chose w4g4: measured 96.4 Mbit/s and 0.21 ms between nodes in 1.3 s; predicted "
        "communication of a step: w4g4 51.2 ms, w8g8 1.38 s, stock 8.91 s; it keeps 22.4 MB on "
        "every rank"
    )
    json.dumps(decision.to_json())


# ---- on ranks


@pytest.fixture(scope="module")
def results() -> list[dict[str, str | None]]:
    return run_ranks(run_cases, 4, CASES, tuple(CASES))


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_on_ranks(results: list[dict[str, str | None]], name: str) -> None:
    check_case(results, name)


@pytest.mark.ranks
def test_one_rank_sends_nothing() -> None:
    ((name, lines),) = run_ranks(alone, 1)
    assert name == "stock"
    assert lines == [
        "qsdp: auto chose full precision, FSDP2's own collectives: every FSDP group has one rank, "
        "so nothing is sent"
    ]


# ---- what a run stores


@pytest.mark.parametrize("level", ["stock", "unquantized", "w8g8", "w4g4"])
def test_a_run_decides_once(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run that is resumed has what was decided, with ``--comm auto`` once more or not."""
    pytest.importorskip("transformers", reason="needs pip install 'qsdp[train]'")
    from qsdp.auto.choose import LEVELS
    from qsdp.trainer import auto
    from qsdp.trainer.comm import comm_config
    from qsdp.trainer.config import TrainConfig

    kept = {"*.wte.*": None}
    config = LEVELS[level]
    if level != "stock":
        config = replace(config.with_exceptions(kept), ranks_per_node=2)
    asked: list[dict[str, Any]] = []

    def decide(model: object, **settings: Any) -> Decision:
        asked.append(settings)
        return Decision(level, config, {}, None, 0, 0.0)

    monkeypatch.setattr(qsdp, "decide", decide)
    monkeypatch.setattr(auto, "require_kept", lambda model, config: None)
    monkeypatch.setattr(auto, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 2))
    monkeypatch.chdir(tmp_path)
    before = TrainConfig(comm="auto", keep_full_precision=tuple(kept), micro_batch_size=2)
    before.run_folder.mkdir(parents=True)
    model: Any = None
    after = auto.decide_communication(model, before, None)
    assert asked == [
        {"exceptions": kept, "ranks_per_node": None, "micro_batches": 2, "sync_every": False}
    ]
    assert after.run_folder == before.run_folder and after.comm_name == f"auto-{level}"
    assert comm_config(after) == replace(config.with_exceptions({}), seed=before.seed) or (
        level == "stock"
    )
    assert TrainConfig.from_json(json.loads(json.dumps(after.to_json()))) == after
    assert json.loads((after.run_folder / auto.DECISION).read_text())["name"] == level

    saved = SimpleNamespace(config=after.to_json())
    monkeypatch.setattr(auto, "read_description", lambda path: saved)
    for resumed in (before, after):
        assert auto.decide_communication(model, resumed, tmp_path).comm == after.comm
    assert len(asked) == 1
    saved.config["comm"] = "w8g8"  # by hand: nothing was decided
    auto.decide_communication(model, before, tmp_path)
    assert len(asked) == 2
