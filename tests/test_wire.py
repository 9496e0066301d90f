"""The wire format is fixed: golden bytes, sizes by formula, nothing between two parameters."""

from __future__ import annotations

import pytest
import torch

import qsdp
from qsdp import Quantizer
from qsdp.kernels import reference
from qsdp.kernels.changes import digest
from qsdp.kernels.compare import dtype_name, same_bits
from qsdp.kernels.reference import pack, unpack
from qsdp.quantizer import every_format, format_name
from qsdp.rows import (
    add_changes,
    check_rows,
    decode_rows,
    encode_changes,
    encode_rows,
    finish_row,
    sum_rows,
    take_rows,
)
from qsdp.wire import (
    VALUE_DTYPES,
    Segment,
    WireLayout,
    code_bytes,
    damaged_rows,
    planes,
    row_checksums,
    seal,
    tensor_layout,
    wire_layout,
)

ONE, ZERO = bytes.fromhex("0000803f"), bytes(4)


def test_golden_bytes_of_three_bits() -> None:
    """Values 0 to 7 at 3 bits: scale 1, offset 0, a 2-bit plane, then a 1-bit plane."""
    wire = qsdp.encode(torch.arange(8.0), Quantizer(3, 32, "nearest"))
    assert bytes(wire.tolist()) == ONE + ZERO + bytes([0xE4, 0xE4, 0xF0]) + bytes(5)


def test_golden_bytes_of_seven_bits() -> None:
    """0 and 127 = 0b1111111: 4-bit, 2-bit, 1-bit planes, the second value in the higher bits."""
    wire = qsdp.encode(torch.tensor([0.0, 127.0]), Quantizer(7, 32, "nearest"))
    assert bytes(wire.tolist()) == ONE + ZERO + bytes([0xF0, 0x0C, 0x02]) + bytes(5)


def test_golden_bytes_of_a_row_with_full_precision_parts() -> None:
    """All scales first, then raw segments, then codes; a new segment starts a new block."""
    eight, four = Quantizer(8, 32, "nearest"), Quantizer(4, 32, "nearest")
    segments = (Segment(2, eight), Segment(1), Segment(3, four), Segment(0, eight))
    layout = wire_layout(segments, torch.float32, mark=True)
    values = torch.tensor([[0.0, 255.0, 1.0, 15.0, 0.0, 5.0]])
    wire = torch.full((1, layout.row_bytes), 0xAA, dtype=torch.uint8)
    reference.encode(values, layout, wire, key=0)
    expected = (ONE + ZERO) * 2 + ONE + bytes([0x00, 0xFF]) + bytes([0x0F, 0x05])
    expected += bytes(128 - len(expected))  # the mark is the last 8 of them
    assert bytes(wire[0].tolist()) == expected
    back = torch.empty_like(values)
    reference.decode(wire, layout, back)
    assert torch.equal(back, values)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_packed_densely(bits: int) -> None:
    assert sum(width for width, _ in planes(bits)) == bits
    assert code_bytes(1024, bits) == 128 * bits
    for numel in (1, 7, 33):
        assert code_bytes(numel, bits) - bits * numel / 8 < len(planes(bits))
    code = torch.randint(0, 2**bits, (3, 77), dtype=torch.uint8)
    assert torch.equal(unpack(pack(code, bits), bits, 77), code)


@pytest.mark.parametrize("bits", range(1, 9))
def test_wire_bytes_follow_the_formula(bits: int) -> None:
    """8 bytes a block beside the codes: 0.8 % at 8 bits and block 1024, rounded up to 8."""
    for numel in (1, 1000, 1024, 10**6):
        blocks = -(-numel // 1024)
        codes = (numel // 1024) * 128 * bits + code_bytes(numel % 1024, bits)
        exact = 8 * blocks + codes
        assert exact <= qsdp.wire_bytes(numel, Quantizer(bits)) < exact + 8
    assert qsdp.wire_bytes(10**7, Quantizer(8)) / 10**7 < 1.01


def test_a_segment_is_encoded_as_if_it_were_alone() -> None:
    """No block straddles two parameters: neighbours do not change a segment's scales or codes."""
    quantizer = Quantizer(8, 64, "nearest")
    small, large = torch.randn(100) * 1e-3, torch.randn(100) * 1e3
    layout = wire_layout((Segment(100, quantizer),) * 2, torch.float32)
    wire = torch.empty(1, layout.row_bytes, dtype=torch.uint8)
    reference.encode(torch.cat((small, large))[None], layout, wire, key=0)
    back = torch.empty(1, 200)
    reference.decode(wire, layout, back)
    for part, values in zip(back[0].split(100), (small, large), strict=True):
        assert torch.equal(part, qsdp.decode(qsdp.encode(values, quantizer), 100, quantizer))
    assert ((back[0, :100] - small).abs().max() < 1e-4).item()


def test_decode_sum_adds_rows_in_order_and_rounds_once() -> None:
    segments = (Segment(300, Quantizer(8, 64, "stochastic")), Segment(5))
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
    layout = tensor_layout(1024, Quantizer(4, 1024, "stochastic"))
    values = torch.randn(1024).expand(2, -1).contiguous()
    wire = torch.empty(2, layout.row_bytes, dtype=torch.uint8)
    reference.encode(values, layout, wire, key=1)
    assert not torch.equal(wire[0], wire[1])
    second = torch.empty(1, layout.row_bytes, dtype=torch.uint8)
    reference.encode(values[:1], layout, second, key=1, first_row=1)
    assert torch.equal(second[0], wire[1]), "a row's draws follow its index, not its neighbours"


def test_every_damaged_byte_is_found() -> None:
    """Any flipped bit of a row, its checksum included, and exchanged words."""
    segments = (Segment(40, Quantizer(4, 32, "nearest")), Segment(3))
    layout = wire_layout(segments, torch.float32, checksum=True)
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


@pytest.mark.parametrize("form", every_format(3, 64), ids=format_name)
def test_parts_of_a_row_follow_each_other(form: Quantizer) -> None:
    """Scales of all segments, full precision, codes, padding: no byte is shared, none is lost."""
    segments = (Segment(5), Segment(130, form), Segment(0, form), Segment(64, form), Segment(3))
    layout = wire_layout(segments, torch.bfloat16)
    quantized = [span for span in layout.spans if span.segment.quantizer is not None]
    raw = [span for span in layout.spans if span.segment.quantizer is None]
    parts = [(span.meta_offset, span.segment.meta_bytes) for span in quantized]
    parts += [(span.data_offset, layout.raw_bytes(span)) for span in raw]
    parts += [(span.data_offset, span.segment.code_bytes) for span in quantized]
    at = 0
    for start, size in parts:
        assert start == at
        at += size
    assert at == layout.payload_bytes <= layout.row_bytes < at + 128
    assert layout.row_bytes % 128 == 0
    assert layout.segments == segments and layout.quantized
    values = torch.arange(layout.numel)
    cut = torch.cat([values[span.values] for span in layout.spans])
    assert torch.equal(cut, values)
    assert not wire_layout((Segment(5), Segment(0)), torch.float32).quantized


@pytest.mark.parametrize("checksum", (False, True))
@pytest.mark.parametrize("mark", (False, True))
@pytest.mark.parametrize("numel", (0, 1, 110, 112, 120, 128, 1000))
def test_rows_that_travel_are_whole_lines(numel: int, mark: bool, checksum: bool) -> None:
    """Multiples of 128 bytes, mark and checksum included; single tensors fill up to 8 alone."""
    eight = Quantizer(8, 1024)
    layout = wire_layout((Segment(numel, eight),), torch.float32, checksum, mark)
    end = 8 * mark + 8 * checksum
    if not numel:
        assert layout.row_bytes == end
        return
    assert layout.row_bytes == -(-(layout.payload_bytes + end) // 128) * 128
    assert tensor_layout(numel, eight).row_bytes == -(-layout.payload_bytes // 8) * 8


def test_rows_are_sealed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows.py adds to a backend: checksums, where the layout has them, and who is blamed."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    segments = (Segment(100, Quantizer(4, 32, "nearest")), Segment(3))
    layout = wire_layout(segments, torch.float32, checksum=True)
    plain = wire_layout(segments, torch.float32)
    values = torch.randn(3, 103)
    wire, unsealed = (take_rows(3, each, values.device) for each in (layout, plain))
    encode_rows(values, layout, wire, key=3)
    encode_rows(values, plain, unsealed, key=3)
    assert torch.equal(wire[:, : plain.payload_bytes], unsealed[:, : plain.payload_bytes])
    assert torch.equal(wire[:, -8:].view(torch.int64)[:, 0], row_checksums(wire))

    back, total = torch.empty_like(values), torch.empty(103)
    decode_rows(wire, layout, back, senders=(7, 8, 9))
    sum_rows(wire, layout, total, senders=(7, 8, 9), divide=3.0)
    assert torch.equal(total, (back[0] + back[1] + back[2]) / 3.0)
    wire[2, 11] ^= 4
    wire[0, 0] ^= 1
    size = layout.row_bytes
    message = rf"rank 5 received damaged bytes from rank 7, 9 \({size} bytes .*verify=True\) found"
    for receive in (
        lambda: decode_rows(wire, layout, back, senders=(7, 8, 9)),
        lambda: sum_rows(wire, layout, total, senders=(7, 8, 9)),
        lambda: check_rows(wire, layout, (7, 8, 9)),
    ):
        with pytest.raises(RuntimeError, match=message):
            receive()
    decode_rows(wire, layout, back)  # a row of one's own is not in question
    check_rows(unsealed, plain, (7, 8, 9))


@pytest.mark.parametrize("checksum", (False, True))
def test_marks_travel_beside_the_values(checksum: bool) -> None:
    """The row's last eight bytes, or the last before the checksum, which covers them."""
    segments = (Segment(100, Quantizer(4, 32, "nearest")), Segment(3))
    layout = wire_layout(segments, torch.float32, checksum, mark=True)
    plain = wire_layout(segments, torch.float32)
    values = torch.randn(2, 103)
    wire, without = (take_rows(2, each, values.device) for each in (layout, plain))
    encode_rows(values, plain, without, key=0)
    for mark, expected in ((0, 0), (3, 3), (torch.tensor(1), 1)):
        encode_rows(values, layout, wire, key=0)
        for row in wire:
            finish_row(row, layout, mark)
        assert layout.marks(wire).tolist() == [expected] * 2
        assert torch.equal(wire[:, : plain.payload_bytes], without[:, : plain.payload_bytes])
    encode_rows(values[:1], layout, wire[:1], key=0)
    assert layout.marks(wire).tolist() == [0, 1], "each row has its own"
    if checksum:
        layout.marks(wire)[0] = 1
        assert damaged_rows(wire) == [0]
    back, expected = torch.empty_like(values), torch.empty_like(values)
    decode_rows(wire, layout, back)
    decode_rows(without, plain, expected)
    assert torch.equal(back, expected)


def write_marks(wire: torch.Tensor, layout: WireLayout, marks: torch.Tensor) -> None:
    layout.marks(wire).copy_(marks)
    if layout.checksum:
        seal(wire)


def of_changes(form: Quantizer, numel: int, dtype: torch.dtype = torch.float32) -> WireLayout:
    return wire_layout((Segment(numel, form), Segment(5)), dtype, mark=True)


@pytest.mark.parametrize("form", every_format(4, 32), ids=format_name)
def test_changes_are_added_to_what_is_kept(form: Quantizer) -> None:
    """Decode, add, encode, decode; a block without a finite number counts as zero."""
    layout, kept_layout = of_changes(Quantizer(6, 96, "dither"), 70), of_changes(form, 70)
    first, change = torch.randn(2, 75), torch.randn(2, 75)
    first[0, 40] = torch.nan
    kept, wire = take_rows(2, kept_layout, first.device), take_rows(2, layout, first.device)
    encode_rows(first, kept_layout, kept, key=0)
    kept_layout.marks(kept).fill_(7)
    encode_rows(change, layout, wire, key=1, sender=4)
    known, expected = torch.empty_like(first), torch.empty_like(first)
    decode_rows(kept, kept_layout, known)
    assert known[0, 32:64].isnan().all()
    decode_rows(wire, layout, expected, own=4)
    expected[:, :70] += known[:, :70].nan_to_num(0.0)
    rows = torch.empty_like(first)
    reference.add_changes(wire, layout, kept.clone(), kept_layout, rows, first_sender=4)
    assert not same_bits(rows, expected), "the second row is of another sender"
    encode_rows(change[1:], layout, wire[1:], key=1, sender=6)
    add_changes(wire, layout, kept, kept_layout, rows, range(4, 8, 2), ())
    assert torch.equal(rows[:, 70:], change[:, 70:]), "full precision is taken as it is"
    decode_rows(wire[1:], layout, expected[1:], own=6)
    expected[1, :70] += known[1, :70]
    encoded = torch.empty_like(kept)
    encode_rows(expected, kept_layout, encoded, key=0)
    kept_layout.marks(encoded).fill_(7)
    assert torch.equal(kept, encoded), "and nothing behind it has changed"
    decode_rows(kept, kept_layout, known)
    assert rows.isfinite().all() and same_bits(rows, known)


@pytest.mark.parametrize("form", every_format(4, 32), ids=format_name)
def test_blocks_to_which_nothing_is_added_keep_their_bytes(form: Quantizer) -> None:
    """Scale, offset and codes: bit for bit what they were, for zeros of either sign."""
    layout, kept_layout = of_changes(Quantizer(8, 32, "nearest"), 100), of_changes(form, 100)
    first, change = torch.randn(2, 105), torch.randn(2, 105)
    first[0, 40] = torch.nan
    kept, wire = take_rows(2, kept_layout, first.device), take_rows(2, layout, first.device)
    encode_rows(first, kept_layout, kept, key=0)
    before = kept.clone()
    change[0, 32:64], change[0, 96:100], change[1, 96:100] = 0.0, -0.0, 0.0
    change[1, 32:63], change[1, 63] = 0.0, torch.nan
    encode_rows(change, layout, wire, key=0)
    known, rows = torch.empty_like(change), torch.empty_like(change)
    decode_rows(before, kept_layout, known)
    add_changes(wire, layout, kept, kept_layout, rows, range(2), ())
    (span, _) = kept_layout.spans
    codes, size = kept_layout.codes(before, span), code_bytes(32, 4)
    for row, block in ((0, 1), (0, 3), (1, 3)):
        start, end = (min(n * size, span.segment.code_bytes) for n in (block, block + 1))
        assert torch.equal(kept_layout.codes(kept, span)[row, start:end], codes[row, start:end])
        meta = (kept_layout.meta(each, span)[row, block] for each in (before, kept))
        assert torch.equal(*(numbers.view(torch.uint8) for numbers in meta))

        part = slice(32 * block, min(32 * (block + 1), 100))
        assert same_bits(rows[row, part], known[row, part])
    assert rows[1, 32:64].isnan().all(), "a NaN is something"
    assert torch.equal(rows[:, 100:], change[:, 100:])


@pytest.mark.parametrize("form", every_format(4, 32), ids=format_name)
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=dtype_name)
def test_what_values_differ_by_is_encoded(dtype: torch.dtype, form: Quantizer) -> None:
    """What is sent, what it amounts to, and what tells the values from others."""
    kept_layout = wire_layout((Segment(70, form), Segment(5), Segment(40, form)), dtype, mark=True)
    travel = Quantizer(7, 64, "stochastic")
    layout = wire_layout((Segment(70, travel), Segment(5), Segment(40, travel)), dtype)
    old, values = torch.randn(1, 115).to(dtype), torch.randn(115).to(dtype)
    old[0, 40] = torch.nan
    kept, (wire, expected) = take_rows(1, kept_layout, old.device), take_rows(2, layout, old.device)
    encode_rows(old, kept_layout, kept, key=0)
    known = torch.empty_like(old)
    decode_rows(kept, kept_layout, known)
    assert known[0, 32:64].isnan().all()
    values[:2], values[100] = torch.tensor([0.0, torch.nan]), torch.inf
    stats = torch.full((3, 4), 7.0, dtype=torch.float64)

    def encode() -> torch.Tensor:
        encode_changes(values, layout, wire, kept[0], kept_layout, stats, key=9, sender=3)
        change = values - known[0].nan_to_num(0.0)
        change[70:75] = values[70:75]
        encode_rows(change[None], layout, expected[None], key=9, first_row=3, sender=3)
        assert torch.equal(wire, expected)
        digests = [float(digest(values[span.values])) for span in layout.spans]
        assert stats[:, 2].tolist() == digests
        return change

    encode()
    assert stats[:, 3].tolist() == [1, 0, 1]
    assert stats[0, :2].isnan().all() and stats[1, :2].tolist() == [0, 0]
    assert stats[2, :2].tolist() == [torch.inf] * 2
    values[1], values[100] = 1.0, 2.0
    change = encode()
    assert not stats[:, 3].any()
    for span, (moved, norm, _, _) in zip(layout.spans, stats.tolist(), strict=True):
        if span.value_offset != 70:
            squares = [float(x[span.values].double().square().sum()) for x in (change, values)]
            assert [moved, norm] == pytest.approx(squares, rel=1e-4)


def test_digests_tell_values_from_others() -> None:
    """One value that differs in one bit, values that changed places, and other signs of zero."""
    values = torch.randn(3000)
    seen = {float(digest(values))}
    for index in range(0, 3000, 7):
        for bit in (0, 13, 31):
            other = values.clone()
            other.view(torch.int32)[index] ^= -(2**31) if bit == 31 else 1 << bit
            seen.add(float(digest(other)))
    assert len(seen) == 1 + 3 * len(range(0, 3000, 7))
    assert float(digest(values.flip(0))) not in seen
    assert float(digest(-values)) not in seen
    assert float(digest(torch.zeros(8))) != float(digest(-torch.zeros(8)))
    assert float(digest(torch.zeros(0))) == 0.0
    strange = torch.tensor([0x7FC00000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert strange.isnan().all() and float(digest(strange)) == float(
        digest(torch.full((3,), torch.nan))
    )


@pytest.mark.parametrize("zeros", (False, True))
def test_rows_in_two_dimensions(zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked, sealed, checked and blamed as the same rows in one, in row-major order."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    segments = (Segment(100, Quantizer(4, 32, "dither")), Segment(3))
    layout = wire_layout(segments, torch.float32, checksum=True, mark=True, zeros=zeros)
    values = torch.randn(6, 103)
    values[2:4, :64] = 0.0
    expected = take_rows(6, layout, values.device)
    marks = torch.arange(6)
    encode_rows(values, layout, expected, key=3)
    write_marks(expected, layout, marks)
    wire = torch.empty(3, 2, layout.row_bytes + 16, dtype=torch.uint8).transpose(0, 1)
    wire = wire[..., 8:-8]
    scattered = torch.empty(3, 2, 109).transpose(0, 1)[..., 6:]
    scattered.copy_(values.view(2, 3, 103))
    encode_rows(scattered, layout, wire, key=3)
    write_marks(wire, layout, marks.view(2, 3))
    assert torch.equal(wire.flatten(0, 1), expected)
    assert torch.equal(layout.marks(wire), marks.view(2, 3))
    back = torch.empty_like(values)
    decode_rows(expected, layout, back)
    decode_rows(wire, layout, scattered, senders=tuple(range(10, 16)))
    assert torch.equal(scattered.flatten(0, 1), back)
    wire[1, 0, 5] ^= 1
    with pytest.raises(RuntimeError, match=r"damaged bytes from rank 13 "):
        check_rows(wire, layout, tuple(range(10, 16)))
    assert damaged_rows(wire) == [3]
