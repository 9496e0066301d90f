"""Coded rows: what rows.py and quantizers say of them, and their way between ranks."""

from __future__ import annotations

import coded_cases as cases
import pytest
import torch
from ranks import check_case, run_cases, run_ranks

import qsdp
from qsdp import Differences, Learned, QSDPConfig, Quantizer
from qsdp.rows import compact_rows, encode_rows, expand_rows
from qsdp.wire import Segment, wire_layout

Results = list[dict[str, str | None]]
RICE = Quantizer(4, 128, "nearest", scaling="symmetric", coding="rice")


@pytest.fixture(scope="module")
def three_ranks() -> Results:
    return run_ranks(run_cases, 3, cases.ALL, tuple(cases.ALL))


@pytest.fixture(scope="module")
def four_ranks() -> Results:
    return run_ranks(run_cases, 4, cases.FOUR, tuple(cases.FOUR))


@pytest.mark.ranks
@pytest.mark.parametrize("name", cases.ALL)
def test_on_three_ranks(three_ranks: Results, name: str) -> None:
    check_case(three_ranks, name)


@pytest.mark.ranks
@pytest.mark.parametrize("name", cases.FOUR)
def test_on_four_ranks(four_ranks: Results, name: str) -> None:
    check_case(four_ranks, name)


@pytest.mark.parametrize("numel", (0, 1, 127, 1000))
def test_tensors_are_coded_and_decoded(numel: int) -> None:
    plain = Quantizer(4, 128, "nearest", scaling="symmetric")
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1)) ** 3
    wire = qsdp.encode(x, RICE)
    assert wire.numel() <= qsdp.wire_bytes(numel, RICE)
    if numel == 1000:
        assert wire.numel() < qsdp.encode(x, plain).numel()
    assert torch.equal(
        qsdp.decode(wire, numel, RICE), qsdp.decode(qsdp.encode(x, plain), numel, plain)
    )
    if numel:
        with pytest.raises(RuntimeError, match="are not .* values at bits=4, coding='rice'"):
            qsdp.decode(wire[:-1], numel, RICE)


def test_damaged_rows_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their lengths at once; other damage by the checksum of the row, where it has one."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    layout = wire_layout((Segment(1000, RICE),), torch.float32, checksum=True)
    wire = torch.zeros(2, layout.row_bytes, dtype=torch.uint8)
    encode_rows(torch.randn(2, 1000) ** 3, layout, wire, key=0)
    parts, back = compact_rows(wire, layout), torch.zeros_like(wire)
    expand_rows(parts, layout, [*back], (3, 4))
    assert torch.equal(back, wire)
    parts[1][-20] ^= 255
    expand_rows(parts, layout, [*back], (3, 4))
    with pytest.raises(RuntimeError, match="rank 5 received damaged bytes from rank 4"):
        qsdp.rows.check_rows(back, layout, (3, 4))
    parts[1] = parts[1][:-1].contiguous()
    with pytest.raises(RuntimeError, match="rank 5 received damaged rows from rank 4: their"):
        expand_rows(parts, layout, [*back], (3, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantizer(coding="huffman"), "coding=...\\) must be one of fixed, elias, rice"),
        (lambda: Quantizer(4, coding="rice"), "for grids around zero, and this one has scaling="),
        (
            lambda: Quantizer(2, 32, "nearest", (0, 0.2, 0.5, 1), "symmetric", coding="elias"),
            "and levels: set",
        ),
        (lambda: Quantizer(2, 32, "nearest", (0, 0.2, 0.5, 1), "l2"), "for the uniform grid"),
        (lambda: Quantizer(4, 32, "shift", scaling="l2"), 'take rounding="dither"'),
        (lambda: Learned(RICE), 'must have coding="fixed" and scaling='),
        (lambda: Differences(RICE, kept=RICE), "stays where it is and must have coding='fixed'"),
        (
            lambda: QSDPConfig(inside_node=RICE, ranks_per_node=2),
            'rows are coded between nodes alone: set coding="fixed" there',
        ),
    ],
)
def test_what_does_not_go_together_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()  # type: ignore[operator]
    assert "\n" not in str(error.value)


def test_codings_are_told_and_saved() -> None:
    config = QSDPConfig(gradients=RICE, weights=None)
    assert QSDPConfig.from_json(config.to_json()) == config
    assert qsdp.quantizer.format_name(RICE) == "nearest symmetric rice"
