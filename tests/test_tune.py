"""Widths for parameters: the knapsack against brute force, and the command end to end."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'qsdp[train]'")

from qsdp import Learned, QSDPConfig, Quantizer, Ways
from qsdp.cli import main
from qsdp.tune.allocate import (
    WIDTHS,
    Item,
    average_bits,
    total_harm,
    within_budget,
    within_harm,
)
from qsdp.tune.choose import _base, _config, _follows
from qsdp.tune.measure import relative_error


def make_items(seed: int, count: int, *, numel: int | None = None) -> list[Item]:
    """Harms that fall about fourfold a bit, some of them not convex."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for index in range(count):
        size = numel or int(torch.randint(10, 500, (), generator=generator))
        top = float(torch.rand((), generator=generator)) * 10
        noise = (0.5 + torch.rand(len(WIDTHS), generator=generator)).tolist()
        harm = {w: top * 4.0 ** (2 - w) * n for w, n in zip(WIDTHS, noise, strict=True)}
        items.append(Item(f"p{index}", size, harm))
    return items


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bits", [2.0, 3.0, 4.3, 7.5, 8.0])
def test_budget_is_kept_and_nearly_best(seed: int, bits: float) -> None:
    """Against every choice, with equal sizes: never worse than the best of half a bit less."""
    items = make_items(seed, 4, numel=100)
    found = within_budget(items, bits)
    assert average_bits(items, found) <= bits + 1e-9
    assert total_harm(items, found) <= total_harm(items, dict.fromkeys(found, int(bits))) + 1e-12
    best = min(
        total_harm(items, widths)
        for choice in product(WIDTHS, repeat=len(items))
        if average_bits(items, widths := dict(zip(found, choice, strict=True)))
        <= max(2.0, bits - 0.5)
    )
    assert total_harm(items, found) <= best + 1e-12


def test_base_must_send_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", str(tmp_path), "--out", str(tmp_path / "out.json"), "--base", "w4g4"]
    assert main(arguments) != 0
    assert "--base must send weights as values" in capsys.readouterr().err


def test_chosen_widths_become_exceptions() -> None:
    """In front of those of the base, each as the base sends it but for its bits."""
    learned = Learned(Quantizer(4, rounding="nearest"))
    base = QSDPConfig(weights=learned, gradients=None, exceptions={"*.b": None}, seed=3)
    found = QSDPConfig.from_json(_config(base, {"weights": {"x.a": 7}}))
    wide = Learned(Quantizer(7, rounding="nearest"))
    assert found.exceptions == (("x.a", Ways(wide, None)), ("*.b", Ways(None, None)))
    assert (found.weights, found.gradients, found.seed) == (learned, None, 3)
    matrix, vector = (torch.nn.Parameter(torch.empty(shape)) for shape in ((64, 64), (4096,)))
    assert _follows(base, "x.a", matrix)
    assert not _follows(base, "x.b", matrix) and not _follows(base, "x.a", vector)
    default = _base(None)
    assert default.weights == Quantizer(4, rounding="nearest")
    assert default.gradients == QSDPConfig.preset("w4g4").gradients


def test_sensitive_parameters_get_more_bits() -> None:
    harm = {w: 4.0 ** (2 - w) for w in WIDTHS}
    items = [Item("deaf", 100, harm), Item("keen", 100, {w: 1e4 * h for w, h in harm.items()})]
    widths = within_budget(items, 4)
    assert widths["keen"] > 4 > widths["deaf"]
    assert average_bits(items, widths) == 4


def test_harm_is_kept_with_few_bits() -> None:
    items = make_items(7, 6)
    for harm in (100.0, 1.0, 0.01):
        widths = within_harm(items, harm)
        assert total_harm(items, widths) <= harm or set(widths.values()) == {8}
    assert average_bits(items, within_harm(items, 1.0)) < average_bits(
        items, within_harm(items, 0.01)
    )
    with pytest.raises(ValueError, match="--bits must be at least 2, got 1.5"):
        within_budget(items, 1.5)


def test_relative_error_falls_fourfold_a_bit() -> None:
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    errors = [relative_error(x, Quantizer(bits)) for bits in WIDTHS]
    for wide, narrow in zip(errors[1:], errors, strict=False):
        assert 3.5 < narrow / wide < 6
    assert relative_error(torch.zeros(64), Quantizer(4)) == 0
