"""Codes in numbers of variable length: golden numbers, exact round trips, lengths, damage."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from qsdp.kernels import coded, cpu, cpu_coded
from qsdp.kernels.coded import DENSE, FIXED, SPARSE, decode_block, elias, encode_block, rice
from qsdp.wire import Segment, code_bytes
from tests.coded_rows import (
    CODINGS,
    check_damaged,
    check_row,
    form,
    layout_of,
    random_row,
    row_of,
)

native = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable())


def test_golden_elias_numbers() -> None:
    """QSGD's E(k), as the paper and systems.md have them; at most 1 + 2.5 log2(k) bits."""
    golden = {1: "0", 2: "100", 3: "110", 4: "101000", 8: "1110000", 16: "10100100000"}
    assert {n: elias(n) for n in golden} == golden
    sizes = torch.tensor([len(elias(n)) for n in range(2, 2**17, 97)])
    assert (sizes <= 1 + 2.5 * torch.arange(2, 2**17, 97).log2()).all()


def test_golden_rice_numbers() -> None:
    assert [rice(n, 0) for n in range(3)] == ["0", "10", "110"]
    assert [rice(n, 2) for n in (0, 1, 2, 7)] == ["000", "010", "001", "1011"]


def test_golden_stream_of_forty_values() -> None:
    """Fixed for good: the numbers, their order, the order of bits in a byte, the padding."""
    values = [0, 0, 1, 0, -3, 0, 0, 0, 2, 0, 0, -1, 0, 0, 0, 0, 0, 7, 0, 0]
    values += [0, 0, 0, 1, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    expected = {"elias": (DENSE, "842286040720200188"), "rice": (SPARSE, "024467b1f22ba2c9")}
    for coding in CODINGS:
        mode, stream = encode_block(values, 7, coding, 20)
        assert (mode, stream.hex()) == expected[coding]
        assert decode_block(mode, stream, 40, 7, coding) == values


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("top", (1, 2, 3))
def test_every_short_sequence_returns(coding: str, top: int) -> None:
    """All sequences of up to four integers, in whichever mode is shorter, and in both."""
    for numel in range(5):
        for values in itertools.product(range(-top, top + 1), repeat=numel):
            mode, stream = encode_block(values, top, coding, 1000)
            assert decode_block(mode, stream, numel, top, coding) == list(values)
            assert mode != FIXED and (mode == DENSE or 4 * sum(map(bool, values)) <= 3 * numel)


@native
@pytest.mark.parametrize("isa", ("avx512", "avx2", "baseline"))
def test_backends_agree_on_sound_and_damaged_rows(isa: str) -> None:
    try:
        cpu.set_isa(isa)
    except ValueError as error:
        pytest.skip(str(error))
    chance = random.Random(7)
    try:
        for _ in range(150):
            check_row(*random_row(chance), chance)
    finally:
        cpu.set_isa(None)


@native
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_blocks_that_are_read_together_stop_at_their_own_damage(coding: str, bits: int) -> None:
    """Nine blocks of one segment, dense or sparse: four are read at a time, one is left over."""
    top, chance = (1 << (bits - 1)) - 1, random.Random(bits)
    generator = torch.Generator().manual_seed(bits)
    layout = layout_of(Segment(9 * 96 - 5, form(coding, bits, 96)))
    for spread in (0.1, 0.3, 1.0):
        values = torch.randn(9 * 96 - 5, generator=generator) * top * spread
        row = row_of(layout, [values.round().clamp(-top, top).long()])
        sound = torch.zeros(layout.capacity, dtype=torch.uint8)
        sound = sound[: cpu_coded.compact(row, layout, sound)]
        for _ in range(40):
            check_damaged(layout, sound.clone(), chance)


@native
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("threads", (1, 2, 3))
def test_threads_write_the_same_row(coding: str, threads: int) -> None:
    segment = Segment(70_001, form(coding, 3, 128))
    layout = layout_of(segment, Segment(5), Segment(129, form(coding, 8, 96)))
    sizes = (70_001, 129)
    integers = [torch.randint(-3, 4, (n,)) * (torch.rand(n) < 0.4) for n in sizes]
    row = row_of(layout, integers)
    ours, theirs = (torch.zeros(layout.capacity, dtype=torch.uint8) for _ in range(2))
    length = coded.compact(row, layout, ours)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert cpu_coded.compact(row, layout, theirs) == length
        assert torch.equal(ours[:length], theirs[:length])
        back = torch.zeros_like(row)
        assert cpu_coded.expand(ours[:length].clone(), layout, back) and torch.equal(back, row)
    finally:
        torch.set_num_threads(before)


@native
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("coding", CODINGS)
def test_large_blocks_and_what_no_backend_writes(coding: str, bits: int) -> None:
    """65,536 values a block: more bytes than a header can count; codes above the grid."""
    layout = layout_of(Segment(65536 + 777, form(coding, bits, 65536)))
    top, chance = 2 ** (bits - 1) - 1, random.Random(bits)
    numel = layout.numel
    spread = torch.randint(-top, top + 1, (numel,))
    few = torch.zeros(numel, dtype=torch.long)
    few[-1], few[0], few[65530] = top, -1, 1
    for values in (spread, few, few * 0, spread.clamp(0, 1), few * 0 + top, few * 0 - top):
        check_row(layout, row_of(layout, [values]), chance)
    noise = torch.randint(0, 256, (layout.row_bytes,), dtype=torch.uint8)
    if code_bytes(777, bits) * 8 == 777 * bits:
        check_row(layout, noise, chance)


def test_zeros_cost_nothing_but_their_header() -> None:
    layout = layout_of(Segment(4096, form("rice", 4, 512)))
    row = row_of(layout, [torch.zeros(4096, dtype=torch.long)])
    length = coded.compact(row, layout, torch.zeros(layout.capacity, dtype=torch.uint8))
    assert length == 8 + layout.row_bytes - 2048 + 2 * 8


def test_mean_length_of_dense_elias_is_the_formula() -> None:
    """Over all 65,536 outcomes of r: sum of (1 - f) c(l) + f c(l + 1), where a value lies at l + f
    and c(k) = |E(k + 1)| + [k > 0]."""
    positions = torch.tensor([0, 1, 40_000, 65_535, 65_536, 2 * 65_536 + 77, 6 * 65_536 + 9])
    r = torch.arange(65_536)[:, None]
    magnitudes = (positions + r) >> 16
    cost = torch.tensor([len(elias(k + 1)) + (k > 0) for k in range(8)], dtype=torch.float64)
    low, f = positions >> 16, (positions & 65_535) / 65_536
    expected = ((1 - f) * cost[low] + f * cost[low + 1]).sum()
    assert cost[magnitudes].sum(1).mean() == expected
    for row in magnitudes[::8191].tolist():
        mode, stream = encode_block(row, 7, "elias", 1000)
        assert mode == SPARSE or len(stream) == -(-int(cost[row].sum()) // 8)


@pytest.mark.parametrize(
    ("block_size", "bits", "tail", "published"),
    [
        (512, 2, False, (0.38, 0.28)),
        (1024, 6, False, (2.72, 2.40)),
        (1024, 6, True, (2.39, 2.13)),
    ],
)
def test_bits_a_value_with_the_two_norm(
    block_size: int, bits: int, tail: bool, published: tuple[float, float]
) -> None:
    """The table of systems.md, section 3: integers of QSGD's quantizer, without scales."""
    x = sample(40, block_size, tail)
    found = bits_a_value(x / x.norm(dim=1, keepdim=True), bits)
    assert found == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize(
    ("bits", "tail", "published"),
    [(4, False, (3.97, 3.37)), (4, True, (2.18, 1.94)), (8, False, (8.0, 7.41))],
)
def test_bits_a_value_with_the_largest_value(
    bits: int, tail: bool, published: tuple[float, float]
) -> None:
    """The same, of max-norm scaling; Elias at 8 bits takes 11, so a block stays fixed."""
    x = sample(40, 1024, tail)
    found = bits_a_value(x / x.abs().amax(1, keepdim=True), bits)
    assert found == pytest.approx(published, abs=0.12)


def sample(rows: int, numel: int, tail: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, numel, generator=generator)
    if tail:  # Student's t with three degrees of freedom
        x /= torch.randn(3, rows, numel, generator=generator).square().mean(0).sqrt()
    return x


def bits_a_value(shares: torch.Tensor, bits: int) -> tuple[float, ...]:
    """Of both codings, of integers to which shares of the scale are rounded stochastically."""
    top = 2 ** (bits - 1) - 1
    noise = torch.rand(shares.shape, generator=torch.Generator().manual_seed(4))
    integers = (shares * top + noise).floor().long()
    found = []
    for coding in CODINGS:
        limit = code_bytes(shares.shape[1], bits)
        blocks = (encode_block(row, top, coding, limit) for row in integers.tolist())
        sizes = [limit if mode == FIXED else len(stream) for mode, stream in blocks]
        found.append(8 * sum(sizes) / shares.numel())
    return tuple(found)


def test_sparse_mode_is_within_the_papers_bound() -> None:
    """(3 + 3/2 log2(2 (s^2 + n) / (s (s + sqrt n)))) s (s + sqrt n) bits, of several shapes."""
    n, s = 512, 1
    nonzero = s * (s + n**0.5)
    bound = (3 + 1.5 * torch.tensor(2 * (s * s + n) / nonzero).log2().item()) * nonzero
    for power in (0.0, 0.5, 1.0, 2.0, 3.0):
        x = sample(400, n, False)
        x = x.sign() * x.abs() ** power
        shares = x / x.norm(dim=1, keepdim=True)
        integers = (shares * s + torch.rand(x.shape)).floor().long()
        sizes = torch.tensor([len(sparse_bits(row)) for row in integers.tolist()]).double()
        assert sizes.mean() + 4 * sizes.std() / 20 <= bound


def sparse_bits(values: list[int]) -> str:
    places = [i for i, k in enumerate(values) if k]
    gaps = [b - a for a, b in itertools.pairwise([-1, *places])]
    return "".join(
        elias(gap) + "0" + elias(abs(values[i])) for gap, i in zip(gaps, places, strict=True)
    )


def test_modes_are_those_of_the_note() -> None:
    assert (FIXED, DENSE, SPARSE) == (0, 1, 2)
    assert encode_block([0] * 64, 7, "rice", 32) == (SPARSE, b"")
    assert encode_block([8], 7, "rice", 32) == (FIXED, b""), "no backend writes it"
    assert encode_block([7, -7] * 16, 7, "elias", 16) == (FIXED, b"")
