"""research/widths: budgets are true, dither is unbiased, feedback loses nothing, one knapsack."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'qsdp[train]'")

from qsdp import Quantizer, wire_bytes
from qsdp.kernels.coded import FIXED, encode_block
from research.widths import codec, recipe, recipe_table, reductions, schemes
from research.widths.feedback import FINE, RATES, Sender, cases
from research.widths.schemes import Scheme
from research.widths.streams import rice_bytes

NUMEL = 4096


def gradients(seed: int, ranks: int = 3) -> torch.Tensor:
    """Heavy-tailed, in stretches of different size, alike on all ranks but for their own noise."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(NUMEL // 64, generator=generator).exp().repeat_interleave(64)
    common = torch.randn(NUMEL, generator=generator)
    return size * (common + torch.randn(ranks, NUMEL, generator=generator)) * 1e-3


@pytest.mark.parametrize("top", [7, 127, 32767])
@pytest.mark.parametrize("numel", [64, 1024])
def test_rice_bytes_are_those_of_the_encoder(top: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel + top)
    limit, modes = numel * (2 * top).bit_length() // 8, set()
    for scale in (0.001, 0.02, 0.3, 1.0, 5.0, 50.0, 3000.0):
        sizes = torch.tensor([0.0, 1.0, 3.0])[:, None]
        k = torch.randn(3, numel, generator=generator) * scale * sizes
        k = k.round().clamp(-top, top).int()
        for block, found in zip(k.tolist(), rice_bytes(k, top).tolist(), strict=True):
            mode, stream = encode_block(block, top, "rice", limit)
            modes.add(mode)
            assert found == 2 + (limit if mode == FIXED else len(stream))
    assert len(modes) >= 2


EVERY = [(rate, case) for rate in (*RATES, *FINE) for case in cases(rate)]


@pytest.mark.parametrize(("rate", "case"), EVERY)
def test_what_is_sent_fits_the_budget_and_feedback_telescopes(rate: float, case: str) -> None:
    """All that was sent, and what is kept, are all gradients; and no scheme leaves much unused."""
    scheme, feedback = cases(rate)[case]
    sender = Sender(scheme, rate + (8.0 if rate in FINE else 0.0), feedback, torch.Generator())
    total, sent = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(4):
        rows = gradients(step)
        total += rows.mean(0)
        sent += sender.mean(rows)
    assert 0.5 * rate < sender.most <= sender._bits
    if feedback:
        assert isinstance(sender.residual, torch.Tensor)
        kept = sender.residual.mean(0)
        torch.testing.assert_close(sent + kept, total, rtol=1e-4, atol=1e-6)
        assert kept.abs().max() > 1e-4
    else:
        assert sender.residual == 0.0


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("budget", [2.5, 3.2, 9.0])
def test_largest_gains_are_what_the_knapsack_takes(least: int, budget: float) -> None:
    """With a value more in no block the knapsack is not needed: its choice has the same error."""
    rows = codec.blocks_of(codec.rotate(gradients(5, ranks=1)[0]), 128)
    rms, most = rows.square().mean(1).sqrt(), rows.abs().amax(1)
    found = codec.chosen_widths(rms, most, 128, budget, least, 0.0)
    # A last block that is not full by one value goes through the knapsack.
    exact = codec.chosen_widths(rms, most, 128, budget, least, 0.0, numel=NUMEL - 1)
    step = (2 * most[:, None] / (2.0 ** torch.arange(9) - 1).clamp(min=1)).square()
    errors = [float(step[torch.arange(len(rows)), widths].sum()) for widths in (found, exact)]
    assert errors[0] <= errors[1] * (1 + 1e-6)
    assert float(found.sum()) <= (budget - (16 + 4) / 128) * len(rows)
    assert int(found.min()) >= least and int(found.max()) <= 8


def test_a_budget_below_the_least_bits_is_refused() -> None:
    ones = torch.ones(4)
    with pytest.raises(ValueError, match="at least"):
        codec.chosen_widths(ones, ones, 128, 1.1, 1, 0.0)


UNBIASED: dict[str, Scheme] = {
    "fixed": schemes.fixed(2, 128),
    "stochastic, correlated": schemes.fixed(2, 128, subtract=False, together=True),
    "widths, correlated": schemes.widths(128, 1, together=True),
    "widths, shared": schemes.widths(128, 1, shared=True),
    "one step": schemes.dithered_steps(1024),
    "one step, correlated": schemes.dithered_steps(1024, together=True),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_dithered_schemes_are_unbiased(name: str) -> None:
    """Of every rank: the mean error of 200 draws is what chance leaves of it."""
    rows, draws = gradients(1, ranks=2)[:, :512], 200
    generator = torch.Generator().manual_seed(2)
    errors = torch.stack(
        [UNBIASED[name](rows, 2.2, generator)[0] - rows for _ in range(draws)]
    ).double()
    expected = errors.square().sum(0).sum() / draws
    assert errors.mean(0).square().sum() * draws < 1.25 * expected
    assert expected > 0


def test_a_scheme_that_leaves_blocks_out_is_not_unbiased() -> None:
    """That the test above can fail."""
    rows, draws = gradients(1, ranks=2)[:, :512], 50
    scheme, generator = schemes.widths(128, 0), torch.Generator().manual_seed(2)
    errors = torch.stack([scheme(rows, 1.0, generator)[0] - rows for _ in range(draws)])
    assert errors.mean(0).square().sum() * draws > 5 * errors.square().sum() / draws


@pytest.mark.parametrize("scheme", [schemes.fixed, schemes.dithered_steps])
def test_correlated_dither_cancels_where_ranks_agree(scheme: object) -> None:
    """Not where they differ by much more than a step, and the errors of one rank stay the same."""
    arguments = (2, 128) if scheme is schemes.fixed else (1024,)
    same = gradients(3, ranks=1).expand(4, -1).contiguous()
    found = {}
    for together in (False, True):
        own = scheme(*arguments, together=together)  # type: ignore[operator]
        decoded, _ = own(same, 2.2, torch.Generator().manual_seed(4))
        found[together] = [
            float((part - same[0]).square().sum()) for part in (decoded.mean(0), decoded[0])
        ]
    assert found[True][0] < 0.45 * found[False][0]
    assert found[True][1] == pytest.approx(found[False][1], rel=0.1)


@pytest.mark.parametrize("least", [0, 1])
def test_widths_of_blocks_against_every_choice(least: int) -> None:
    """Never worse than the best of all choices that take one bit a value less."""
    blocks, block = 3, 128
    rows = gradients(5)[0].view(-1, block)[:blocks]
    rms, most = rows.square().mean(1).sqrt(), rows.abs().amax(1)

    def harm(widths: torch.Tensor) -> float:
        step = 2 * most / (2.0**widths - 1).clamp(min=1)
        return float(torch.where(widths > 0, step.square() / 12, rms.square()).sum())

    def bits(widths: torch.Tensor) -> float:
        scales = codec.SCALE_BITS / block * (widths > 0)
        return float((widths + scales + codec.WIDTH_BITS / block).mean())

    every = [torch.tensor(w) for w in product(range(least, 9), repeat=blocks)]
    for budget in (2.2, 3.0, 4.5):
        chosen = codec.chosen_widths(rms, most, block, budget, least, 0.0)
        assert bits(chosen) <= budget + 1e-9
        assert harm(chosen) <= min(harm(w) for w in every if bits(w) <= budget - 1) + 1e-15
    with pytest.raises(ValueError, match="at least"):
        codec.chosen_widths(rms, most, block, least * 1.125, least, 0.0)


def test_library_formats_are_counted_as_they_travel() -> None:
    """Rice codes of the same values: fewer bytes and the same result."""
    rows, sizes = gradients(6), [1024, 3072]
    form = Quantizer(6, 1024, "nearest", scaling="symmetric")
    fixed, rice = (
        reductions.library(coded, sizes)(rows, 0.0, torch.Generator())
        for coded in (form, replace(form, coding="rice"))
    )
    assert fixed[1] == 8 * sum(wire_bytes(size, form) for size in sizes) / NUMEL > rice[1] > 2
    assert torch.equal(fixed[0], rice[0])
    assert 0 < reductions.error(fixed[0].mean(0), rows) < 0.01


def test_a_ring_encodes_partial_sums_again() -> None:
    """Twice as many hops, more than twice the error; one rank's hop encodes nothing."""
    form = Quantizer(4, 128, "dither", transform="hadamard")
    scheme, rows = reductions.library(form, [NUMEL]), gradients(7, ranks=8)
    errors = [reductions.ring(scheme, rows[:ranks], 0.0, torch.Generator()) for ranks in (1, 4, 8)]
    assert errors[0] == 0.0
    once = reductions.error(scheme(rows, 0.0, torch.Generator())[0].mean(0), rows)
    assert errors[2] > 2 * errors[1] > 0 and errors[2] > 3 * once


@pytest.mark.parametrize("case", [case for case in recipe.cases() if case != "full"])
def test_what_the_recipe_sends_takes_the_bits_of_its_name(case: str) -> None:
    """Matrices keep their shapes, and no case but those of grids spends more than it says."""
    send = recipe.cases()[case]
    assert send is not None
    grads = [x.view(64, 64) for x in gradients(6, ranks=2)]
    decoded, bits = send(grads, torch.Generator().manual_seed(1))
    assert [x.shape for x in decoded] == [x.shape for x in grads]
    name = case.split()[0]
    if name == "coded,":
        assert bits < 0.5 + int(case.split()[1][0]), "less than in fixed widths"
    else:
        assert float(name) - 0.1 < bits <= float(name) + 1e-9
    for x, y in zip(grads, decoded, strict=True):
        assert float((x - y).norm()) < 3 * float(x.norm())


def test_the_table_pairs_runs_by_seed() -> None:
    """A seed that the other case lacks does not count."""
    run = {"model": "141k", "optimizer": "muon", "lr": 0.016, "steps": 9}
    losses = {"full": (3.0, 4.0), "2.125 fixed": (3.2, 4.2), "2.125 chosen": (3.1, 4.4, 9.9)}
    found = [
        run | {"case": case, "seed": seed, "loss": loss, "bits": 32.0 if case == "full" else 2.125}
        for case, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]
    lines = recipe_table.format_found(found).splitlines()
    (chosen,) = (line for line in lines if "2.125 chosen" in line)
    assert "+0.2500 ± 0.1500" in chosen and "+0.0500 ± 0.1500" in chosen
