"""The wire format is fixed: golden bytes, sizes by formula, nothing between two parameters."""

from __future__ import annotations

import pytest
import torch

from qsdp import Quantizer
from qsdp.kernels import reference
from qsdp.kernels.packing import pack, unpack
from qsdp.wire import Segment, code_bytes, damaged_rows, planes, seal, wire_layout

ONE, ZERO = bytes.fromhex("0000803f"), bytes(4)


def test_golden_bytes_of_three_bits() -> None:
    """Values 0 to 7 at 3 bits: scale 1, offset 0, a 2-bit plane, then a 1-bit plane."""
    wire = Quantizer(3, 32, "nearest").encode(torch.arange(8.0))
    assert bytes(wire.tolist()) == ONE + ZERO + bytes([0xE4, 0xE4, 0xF0]) + bytes(5)


def test_golden_bytes_of_seven_bits() -> None:
    """0 and 127 = 0b1111111: 4-bit, 2-bit, 1-bit planes, the second value in the higher bits."""
    wire = Quantizer(7, 32, "nearest").encode(torch.tensor([0.0, 127.0]))
    assert bytes(wire.tolist()) == ONE + ZERO + bytes([0xF0, 0x0C, 0x02]) + bytes(5)


def test_golden_bytes_of_a_row_with_full_precision_parts() -> None:
    """All scales first, then raw segments, then codes; a new segment starts a new block."""
    segments = (Segment(2, 8, 32), Segment(1), Segment(3, 4, 32), Segment(0, 8, 32))
    layout = wire_layout(segments, torch.float32)
    values = torch.tensor([[0.0, 255.0, 1.0, 15.0, 0.0, 5.0]])
    wire = torch.full((1, layout.row_bytes), 0xAA, dtype=torch.uint8)
    reference.encode(values, layout, wire, key=0)
    expected = (ONE + ZERO) * 2 + ONE + bytes([0x00, 0xFF]) + bytes([0x0F, 0x05])
    assert bytes(wire[0].tolist()) == expected
    back = torch.empty_like(values)
    reference.decode(wire, layout, back)
    assert torch.equal(back, values)


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_are_packed_densely(bits: int) -> None:
    assert sum(width for width, _ in planes(bits)) == bits
    assert code_bytes(1024, bits) == 128 * bits
    for numel in (1, 7, 33):
        assert code_bytes(numel, bits) - bits * numel / 8 < len(planes(bits))
    code = torch.randint(0, 2**bits, (3, 77), dtype=torch.uint8)
    assert torch.equal(unpack(pack(code, bits), bits, 77), code)


@pytest.mark.parametrize("bits", range(2, 9))
def test_wire_bytes_follow_the_formula(bits: int) -> None:
    """8 bytes a block beside the codes: 0.8 % at 8 bits and block 1024, rounded up to 8."""
    for numel in (1, 1000, 1024, 10**6):
        blocks = -(-numel // 1024)
        codes = (numel // 1024) * 128 * bits + code_bytes(numel % 1024, bits)
        exact = 8 * blocks + codes
        assert exact <= Quantizer(bits).wire_bytes(numel) < exact + 8
    assert Quantizer(8).wire_bytes(10**7) / 10**7 < 1.01


def test_a_segment_is_encoded_as_if_it_were_alone() -> None:
    """No block straddles two parameters: neighbours do not change a segment's scales or codes."""
    quantizer = Quantizer(8, 64, "nearest")
    small, large = torch.randn(100) * 1e-3, torch.randn(100) * 1e3
    layout = wire_layout((quantizer.segment(100), quantizer.segment(100)), torch.float32)
    wire = torch.empty(1, layout.row_bytes, dtype=torch.uint8)
    reference.encode(torch.cat((small, large))[None], layout, wire, key=0)
    back = torch.empty(1, 200)
    reference.decode(wire, layout, back)
    for part, values in zip(back[0].split(100), (small, large), strict=True):
        assert torch.equal(part, quantizer.decode(quantizer.encode(values), 100))
    assert ((back[0, :100] - small).abs().max() < 1e-4).item()


def test_decode_sum_adds_rows_in_order_and_rounds_once() -> None:
    segments = (Segment(300, 8, 64, "stochastic"), Segment(5))
    layout = wire_layout(segments, torch.bfloat16)
    values = torch.randn(3, 305).bfloat16()
    wire = torch.empty(3, layout.row_bytes, dtype=torch.uint8)
    reference.encode(values, layout, wire, key=3)
    rows = torch.empty(3, 305)
    reference.decode(wire, layout, rows)
    out = torch.empty(305, dtype=torch.bfloat16)
    reference.decode_sum(wire, layout, out, multiply=0.5, divide=3.0)
    assert torch.equal(out, (((rows[0] + rows[1]) + rows[2]) * 0.5 / 3.0).bfloat16())
    assert torch.equal(rows[:, 300:], values[:, 300:].float()), "raw segments are exact"


def test_rows_draw_different_random_bits() -> None:
    layout = Quantizer(4, 1024, "stochastic").layout(1024)
    values = torch.randn(1024).expand(2, -1).contiguous()
    wire = torch.empty(2, layout.row_bytes, dtype=torch.uint8)
    reference.encode(values, layout, wire, key=1)
    assert not torch.equal(wire[0], wire[1])
    second = torch.empty(1, layout.row_bytes, dtype=torch.uint8)
    reference.encode(values[:1], layout, second, key=1, first_row=1)
    assert torch.equal(second[0], wire[1]), "a row's draws follow its index, not its neighbours"


def test_every_damaged_byte_is_found() -> None:
    """Any flipped bit of a row, its checksum included, and exchanged words."""
    layout = wire_layout((Segment(40, 4, 32), Segment(3)), torch.float32, checksum=True)
    plain = wire_layout((Segment(40, 4, 32), Segment(3)), torch.float32)
    assert layout.row_bytes == plain.row_bytes + 8
    values = torch.randn(2, 43)
    wire = torch.empty(2, layout.row_bytes, dtype=torch.uint8)
    reference.encode(values, layout, wire, key=0)
    seal(wire)
    assert damaged_rows(wire) == []
    for place in range(layout.row_bytes):
        for bit in range(8):
            bad = wire.clone()
            bad[1, place] ^= 1 << bit
            assert damaged_rows(bad) == [1]
    words = wire.view(torch.int64).clone()
    words[0, [0, 1]] = words[0, [1, 0]]
    assert damaged_rows(words.view(torch.uint8)) == [0]
