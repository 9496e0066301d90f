"""What ranks remember, without ranks: kept weights of two ranks in one process, and residuals."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from qsdp import Differences, Quantizer
from qsdp.kernels.compare import PLAIN, dtype_name, same_bits, with_bits
from qsdp.memory import WHOLE as WHOLE_MARK
from qsdp.memory import KeptWeights
from qsdp.quantizer import every_format, format_name
from qsdp.residuals import Residuals
from qsdp.rows import decode_rows
from qsdp.watch import Watch
from qsdp.ways import kept_layout, row_layout
from qsdp.wire import Segment, WireLayout, wire_layout
from tests.test_quantizer import WORST_STEPS

CPU = torch.device("cpu")
EIGHT, FOUR = Quantizer(8, 32, "nearest"), Quantizer(4, 32, "shift")
FOR_DIFFERENCES = [form for form in every_format(4, 32) if form.scaling != "l2"]
NEAREST = [form for form in every_format(8, 32) if form.rounding == "nearest"]
# Kept in 8 bits, kept as it is gathered, not kept at all; short last blocks, an empty shard.
IN_CODES, WHOLE, AS_IS = slice(0, 200), slice(200, 270), slice(270, 303)
NUMEL = 303


class TwoRanks:
    """Two ranks' memories, and what a gather does with them."""

    def __init__(
        self,
        differences: Quantizer = FOUR,
        dtype: torch.dtype = torch.float32,
        kept_in: Quantizer = EIGHT,
        on_host: bool = True,
    ) -> None:
        way, plain = Differences(differences, kept_in), Differences(differences, None)
        sizes, ways = (200, 0, 70, 33), (way, way, plain, None)
        self.travel = row_layout(sizes, ways, "weights", dtype, verify=False)
        layout = kept_layout(sizes, ways, dtype, verify=False)
        formats = [way and way.quantizer for way in ways]
        self.kept = [KeptWeights(layout, formats, range(2), own, CPU) for own in range(2)]
        for kept in self.kept:
            kept.on_host = on_host
        self.reductions = 0
        self.whole = [False, False]
        self.due: list[list[bool] | None] = [None, None]

    def start(self, masters: torch.Tensor) -> torch.Tensor:
        """The first gather, in full precision: (2, NUMEL) weights, the same on both."""
        both = [masters.clone() for _ in self.kept]
        for kept, rows in zip(self.kept, both, strict=True):
            assert not kept.started
            kept.start(rows)
            assert kept.started
        return self._same(both)

    def gather(
        self,
        masters: torch.Tensor,
        *,
        trained: bool = True,
        looks: tuple[bool, bool] = (True, True),
    ) -> torch.Tensor:
        """Masters (2, NUMEL) of both ranks to weights, the same on both.

        ``looks`` says which ranks' hosts look at the marks.
        """
        self.reductions += trained
        wire = torch.empty(2, self.travel.row_bytes, dtype=torch.uint8)
        marks = torch.zeros(2, dtype=torch.int64)
        for rank, kept in enumerate(self.kept):
            self.due[rank] = kept.due()
            marks[rank] = kept.outgoing(
                masters[rank], self.travel, wire[rank], 0, self.reductions, looks[rank]
            )
        assert torch.equal(self.travel.marks(wire), marks)
        self.whole = [bool(mark & WHOLE_MARK) for mark in marks.tolist()]
        both = [torch.empty_like(masters) for _ in self.kept]
        for kept, rows in zip(self.kept, both, strict=True):
            kept.arrived(wire, self.travel, rows, ())
        renewals = [
            kept.to_renew(marks, look, due)
            for kept, look, due in zip(self.kept, looks, self.due, strict=True)
        ]
        assert renewals[0] == renewals[1], "ranks would wait for each other"
        self.renewed = renewals[0]
        if self.renewed is not None:
            own = [k.own_row(self.renewed, masters[k.own]) for k in self.kept]
            for kept in self.kept:
                kept.refill(torch.stack(own))
            for kept, rows in zip(self.kept, both, strict=True):
                kept.read(rows)
        return self._same(both)

    def share(self) -> None:
        """Each rank's own row to the other."""
        for kept in self.kept:
            other = self.kept[1 - kept.own]
            kept.wire[other.own] = other.wire[other.own]

    def _same(self, both: list[torch.Tensor]) -> torch.Tensor:
        assert same_bits(*both)
        assert torch.equal(self.kept[0].wire, self.kept[1].wire)
        read = torch.empty_like(both[0])
        for kept in self.kept:
            kept.read(read)
            assert same_bits(read, both[0]), "the backward sees other weights"
        return both[0]


def random_masters(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, NUMEL, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error_bounds(
    masters: torch.Tensor, differences: Quantizer, largest_step: float
) -> tuple[float, float]:
    """The largest error of a weight kept in 8 bits, and of one kept as it is gathered.

    A change is a step of at most d and the error E of before, so a block's changes span at most
    2 (d + E), and differences of S steps lose ``share`` of one: c = 2 share / S of d + E. Eight
    bits lose half a step k of theirs: E <= k/2 + c (d + E), and without them E <= c (d + E).
    """
    share = WORST_STEPS.get(differences.rounding, 1.0)
    if differences.levels is not None:
        share *= max(b - a for a, b in pairwise(differences.levels))
    c = 2 * share / differences.steps
    # One step more at either end, by which a decoded block may be wider than its values.
    half = float(masters.abs().max()) * (1 + 2 / 255) / 255
    plain = c * largest_step / (1 - c)
    return (half / (1 - c) + plain) * 1.001, plain * 1.001 + 1e-6


@pytest.mark.parametrize("form", PLAIN, ids=format_name)
def test_errors_do_not_add_up(form: Quantizer) -> None:
    """Over many steps both ranks hold the same bits, as close to the masters as at the start."""
    ranks, masters = TwoRanks(with_bits(form, 4, 32)), random_masters()
    ranks.start(masters)
    generator, step = torch.Generator().manual_seed(1), 0.02
    for _ in range(150):
        masters = masters + (2 * torch.rand(2, NUMEL, generator=generator) - 1) * step
        weights = ranks.gather(masters)
        assert ranks.whole == [False, False]
        in_codes, plain = error_bounds(masters, ranks.travel.segments[0].format, step)
        error = (weights - masters).abs()
        assert error[:, IN_CODES].max() <= in_codes
        assert error[:, WHOLE].max() <= plain
        assert torch.equal(weights[:, AS_IS], masters[:, AS_IS])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=dtype_name)
@pytest.mark.parametrize("form", FOR_DIFFERENCES, ids=format_name)
def test_what_has_not_changed_stays_bit_for_bit(form: Quantizer, dtype: torch.dtype) -> None:
    """Differences of zero travel, also from one rank while the other's row changes.

    Formats in which weights are kept take turns: some lose something each time they are encoded.
    """
    kept_in = NEAREST[every_format(4, 32).index(form) % len(NEAREST)]
    ranks, masters = TwoRanks(form, dtype, kept_in), random_masters(2, dtype)
    ranks.start(masters)
    for _ in range(3):
        masters = masters * 1.01
        before = ranks.gather(masters)
        for _ in range(2):
            for kept in ranks.kept:
                row = torch.empty(ranks.travel.row_bytes, dtype=torch.uint8)
                rest = masters[kept.own], ranks.travel, row, 0, ranks.reductions, False
                assert not kept.outgoing(*rest)
                change = torch.empty_like(masters[:1])
                decode_rows(row[None], ranks.travel, change)
                assert not change[0, : AS_IS.start].any()
                assert torch.equal(change[0, AS_IS], masters[kept.own, AS_IS])
            assert same_bits(ranks.gather(masters), before)
        alone = masters.clone()
        alone[0] += 0.01
        after = ranks.gather(alone)
        assert same_bits(after[1], before[1])
        assert not torch.equal(after[0], before[0])
        masters = alone


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=dtype_name)
def test_what_travels_as_it_is_arrives_as_it_was_sent(dtype: torch.dtype) -> None:
    """Whatever its bits, beside differences that change, and beside differences of zero."""
    ranks, masters = TwoRanks(dtype=dtype), random_masters(3, dtype)
    before = ranks.start(masters)
    assert torch.equal(before[:, AS_IS], masters[:, AS_IS])
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, torch.finfo(dtype).max, 1e-40])
    for seed in range(3):
        masters[:, : AS_IS.start] = before[:, : AS_IS.start]  # no error to make up for
        masters[:, AS_IS] = random_masters(seed + 10, dtype)[:, AS_IS]
        masters[seed % 2, AS_IS.start : AS_IS.start + 6] = special
        weights = ranks.gather(masters)
        assert same_bits(weights[:, AS_IS], masters[:, AS_IS])
        assert same_bits(weights[:, : AS_IS.start], before[:, : AS_IS.start])
        masters[:, : AS_IS.start] *= 1.01
        before = ranks.gather(masters)
        assert same_bits(before[:, AS_IS], masters[:, AS_IS])


@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
def test_what_is_not_finite_is_seen_and_forgotten_once_mended(bad: float) -> None:
    """Block by block, at every gather as long as it is there, and on both ranks."""
    ranks, masters = TwoRanks(), random_masters(4)
    ranks.start(masters)
    broken = masters.clone()
    broken[0, [40, 215]] = bad
    for add in (0.0, 0.0, 1e-3):
        broken = broken + add
        weights = ranks.gather(broken)
        assert weights[0, 32:64].isnan().all() and not weights[0, 215].isfinite()
        assert weights[0, :32].isfinite().all() and weights[0, 64:200].isfinite().all()
        assert weights[1].isfinite().all()
    weights = ranks.gather(masters)
    assert weights.isfinite().all()
    for _ in range(3):
        masters = masters * 1.001
        weights = ranks.gather(masters)
    in_codes, plain = error_bounds(masters, FOUR, 0.005)
    error = (weights - masters).abs()
    assert error[:, IN_CODES].max() <= in_codes
    assert error[:, WHOLE].max() <= plain


def test_a_row_that_no_optimizer_changed_travels_whole() -> None:
    """After it, weights are those of a start; the other rank's row stays as it is."""
    ranks, masters = TwoRanks(), random_masters(5)
    ranks.start(masters)
    for _ in range(3):
        masters = masters * 1.01
        before = ranks.gather(masters)
        assert ranks.whole == [False, False], "a step of training"
    loaded = masters.clone()
    loaded[0] = random_masters(6)[0] * 3
    weights = ranks.gather(loaded)
    assert ranks.whole == [True, False]
    assert torch.equal(weights[0], TwoRanks().start(loaded)[0])
    assert torch.equal(weights[1], before[1])
    averaged = loaded * 1.05
    ranks.gather(averaged, trained=False)
    assert ranks.whole == [True, True], "it changed, and no gradient was reduced"
    ranks.gather(averaged * 1.0001, trained=False)
    assert ranks.whole == [False, False], "so little that four bits are enough"
    ranks.gather(averaged * 1.02)
    assert ranks.whole == [False, False]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=dtype_name)
def test_a_restart_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    ranks, masters = TwoRanks(dtype=dtype), random_masters(7, dtype)
    ranks.start(masters)
    for _ in range(4):
        masters = masters * 1.01
        ranks.gather(masters)
    resumed = TwoRanks(dtype=dtype)
    resumed.reductions = ranks.reductions
    for old, new in zip(ranks.kept, resumed.kept, strict=True):
        state = old.state()
        new.restart(state["kept"], state["digests"], state["pace"])
        for part in state.values():
            part.zero_()  # copies were taken
        assert new.started
    resumed.share()
    assert torch.equal(resumed.kept[0].wire, ranks.kept[0].wire)
    assert same_bits(resumed.gather(masters), ranks.gather(masters)), "nothing has changed"
    # The first is no larger than steps may be, but for those before; the fourth for any.
    for factor, whole in ((1.06, True), (1.01, False), (1.02, False), (4.0, True), (0.99, False)):
        masters = masters * factor
        assert same_bits(resumed.gather(masters), ranks.gather(masters))
        assert resumed.whole == ranks.whole == [whole, whole], factor
        assert torch.equal(resumed.kept[0].wire, ranks.kept[0].wire)


def test_kept_weights_of_an_inference_serve_training() -> None:
    masters = random_masters(8)
    with torch.inference_mode():
        ranks = TwoRanks()
        first = ranks.start(masters)
        assert same_bits(ranks.gather(masters, trained=False), first)
    uninterrupted = TwoRanks()
    uninterrupted.start(masters)
    for _ in range(3):
        masters = masters * 1.01
        assert same_bits(ranks.gather(masters), uninterrupted.gather(masters))
    with torch.inference_mode():
        ranks.gather(masters * 1.01)
    state = ranks.kept[0].state()
    ranks.kept[0].restart(state["kept"], state["digests"], state["pace"])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=dtype_name)
def test_what_the_device_decides_is_what_the_host_decides(dtype: torch.dtype) -> None:
    """Steps, idle gathers, changes that are none of training, numbers that are not finite."""
    host, device = TwoRanks(dtype=dtype), TwoRanks(dtype=dtype, on_host=False)
    masters = random_masters(9, dtype)
    assert same_bits(host.start(masters), device.start(masters))
    broken = masters.clone()
    broken[1, [3, 250, 290]] = torch.nan
    series = [(masters * f, True) for f in (1.01, 1.02, 1.02, 1.09, 1.5)]
    series += [(masters * f, False) for f in (1.5, 1.0, 1.0001)]
    series += [(broken, True), (masters, True), (masters * 0, False), (masters * 1e-3, True)]
    for step, (values, trained) in enumerate(series):
        assert same_bits(
            host.gather(values, trained=trained), device.gather(values, trained=trained)
        ), step
        assert (host.whole, host.renewed) == (device.whole, device.renewed), step
        for one, other in zip(host.kept, device.kept, strict=True):
            assert torch.allclose(one.pace, other.pace, rtol=1e-9), step
    assert any(device.whole) or device.renewed is None


@pytest.mark.parametrize("looks", ((False, False), (True, False)))
def test_hosts_that_do_not_look_learn_one_gather_later(looks: tuple[bool, bool]) -> None:
    """The rows travel whole then, on both ranks, whichever of them has noticed something."""
    ranks, masters = TwoRanks(on_host=False), random_masters(10)
    ranks.start(masters)
    ranks.gather(masters * 1.01, looks=looks)
    loaded = masters.clone()
    loaded[1] = random_masters(11)[1] * 3
    ranks.gather(loaded, looks=looks)
    assert ranks.whole == [False, True] and ranks.renewed is None
    saved = [kept.state() for kept in ranks.kept]
    weights = ranks.gather(loaded, looks=looks, trained=False)
    assert ranks.whole == [False, False] and ranks.renewed == [False, True]
    assert torch.equal(weights[1], TwoRanks().start(loaded)[1])
    ranks.gather(loaded, looks=looks, trained=False)
    assert ranks.renewed is None
    # Whoever was saved in between continues with the same weights.
    resumed = TwoRanks()
    resumed.reductions = ranks.reductions
    for kept, state in zip(resumed.kept, saved, strict=True):
        kept.restart(state["kept"], state["digests"], state["pace"])
    resumed.share()
    assert torch.equal(resumed.gather(loaded, trained=False)[1], weights[1])


class Weights:
    """Counts changes, as a parameter group does."""

    def __init__(self) -> None:
        self.params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]

    @property
    def weight_versions(self) -> tuple[int, ...]:
        return tuple(param._version for param in self.params)


def test_the_watch_notices_what_is_no_step() -> None:
    weights, others = Weights(), Weights()
    watch = Watch(weights)
    optimizer = torch.optim.AdamW(weights.params)
    assert watch.notices(), "nothing is known at first"

    def step(of: torch.optim.Optimizer = optimizer) -> None:
        for param in of.param_groups[0]["params"]:
            param.grad = torch.ones(3)
        of.step()

    for _ in range(3):
        step()
        step(torch.optim.SGD(others.params, lr=0.1))
        assert not watch.notices()
    assert not watch.notices(), "gathered twice"
    with torch.no_grad():
        weights.params[1].mul_(2)
    assert watch.notices() and not watch.notices()
    with torch.no_grad():
        weights.params[0].copy_(torch.zeros(3))
    step()
    assert watch.notices(), "loaded, then trained"
    step()
    assert not watch.notices()
    weights.params[0].data.mul_(3)  # swapped for an average
    with torch.no_grad():
        assert watch.notices() and not watch.notices()
    assert watch.notices(), "back in training"
    torch.nn.init.zeros_(weights.params[0])
    assert watch.notices()


SIZES = {"a": 40, "b": 70, "c": 5}


def layout_of(names: tuple[str | None, ...], scale: int = 1) -> WireLayout:
    """What is reduced together; a parameter without feedback has 16 values."""
    sizes = (SIZES[name] * scale if name is not None else 16 for name in names)
    return wire_layout(tuple(Segment(size, FOUR) for size in sizes), torch.float32)


SETS: tuple[tuple[str | None, ...], ...] = (
    ("a", "b"),
    ("a", "b"),
    ("a",),
    ("b", "c"),
    ("a",),
    ("a", None, "b"),
    ("a", None, "b"),
    ("c", "b"),
    ("a", "b"),
    (None, "a"),
    (None, None),
    ("a", None, "b"),
    ("a", "b", "c"),
)


def reduce(residuals: Residuals, names: tuple[str | None, ...], seed: int) -> None:
    """One reduction that loses something, in a row for each of two ranks."""
    flat = residuals.together(names, layout_of(names), 2, CPU)
    flat += torch.randn(flat.shape, generator=torch.Generator().manual_seed(seed))


def test_residuals_are_of_parameters_whatever_is_reduced_together() -> None:
    """Every set of parameters finds what the last one left, and nothing in parts without a name."""
    residuals, expected = Residuals(), dict.fromkeys(SIZES, 0.0)
    for seed, names in enumerate(SETS):
        layout = layout_of(names)
        flat = residuals.together(names, layout, 2, CPU)
        assert flat.shape == (2, layout.numel) and flat.dtype == torch.float32
        for name, span in zip(names, layout.spans, strict=True):
            wanted = 0.0 if name is None else expected[name]
            assert (flat[:, span.values] == wanted).all(), (seed, name)
        flat += torch.randn(flat.shape, generator=torch.Generator().manual_seed(seed))
        for name, span in zip(names, layout.spans, strict=True):
            if name is not None:
                expected[name] = flat[:, span.values].clone()
    state = residuals.state()
    assert state.keys() == SIZES.keys()
    for name, part in state.items():
        assert torch.equal(part, expected[name])


def test_residuals_of_another_size_start_from_zero() -> None:
    """As after a change of the number of ranks: what was lost was lost elsewhere."""
    residuals = Residuals()
    reduce(residuals, ("a", "b"), 0)
    kept = residuals.state()["b"]
    assert not residuals.together(("a",), layout_of(("a",), 2), 2, CPU).any()
    assert torch.equal(residuals.together(("b",), layout_of(("b",)), 2, CPU), kept)
    assert not residuals.together(("b",), layout_of(("b",)), 3, CPU).any()


def test_states_of_residuals_are_copies() -> None:
    residuals, other = Residuals(), Residuals()
    for seed, names in enumerate(SETS):
        reduce(residuals, names, seed)
    state = residuals.state()
    saved = {name: part.clone() for name, part in state.items()}
    other.load(state)
    reduce(residuals, ("a", "b", "c"), 99)
    assert all(torch.equal(state[name], saved[name]) for name in SIZES), "state() is a copy"
    reduce(other, ("a", "b", "c"), 99)
    assert all(torch.equal(state[name], saved[name]) for name in SIZES), "load() takes a copy"
    for name, part in residuals.state().items():
        assert torch.equal(other.state()[name], part), "it goes on as if uninterrupted"
    loaded = {"a": saved["a"].clone()}
    other.load(loaded)
    loaded["a"].zero_()
    names = ("c", "a")
    flat = other.together(names, layout_of(names), 2, CPU)
    assert torch.equal(flat[:, SIZES["c"] :], saved["a"])
    assert not flat[:, : SIZES["c"]].any(), "a parameter that the state lacks starts from zero"


def test_residuals_of_an_inference_serve_training() -> None:
    residuals = Residuals()
    with torch.inference_mode():
        residuals.together(("a", "b"), layout_of(("a", "b")), 2, CPU)
    reduce(residuals, ("a", "b"), 0)
    assert residuals.state()["a"].any()
    with torch.inference_mode():
        state = residuals.state()
        residuals.load(state)
    reduce(residuals, ("b",), 1)
