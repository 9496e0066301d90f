"""The quantizer's contract: derived error bounds, exhaustive unbiasedness, edge cases."""

from __future__ import annotations

import pytest
import torch

from qsdp import Quantizer
from qsdp.kernels import reference
from qsdp.kernels.philox import derive_key, philox4x32

ROUNDINGS = ("nearest", "stochastic", "shift")
BITS = tuple(range(2, 9))
SIZES = (0, 1, 31, 1023, 1024, 1025, 5000)


def error_bound(x: torch.Tensor, bits: int, rounding: str) -> torch.Tensor:
    """Largest |decoded - x| of a block, from the arithmetic of reference.py with eps = 2^-24.

    Position on the grid: difference, range, division and product each err by eps relatively, over
    at most L steps, and q is rounded to 2^-16 of a step: (4 L eps + 2^-17) steps. Scale: 2 eps, and
    its product with a code: 3 L eps steps. Sums with the offset: 3 eps of the largest value.
    """
    eps, top = 2.0**-24, 2**bits - 1
    lo, hi = x.min().double(), x.max().double()
    step = (hi - lo) / top
    own = 1.0 if rounding == "stochastic" else 0.5
    largest = torch.maximum(lo.abs(), hi.abs()) + step
    return step * (own + 7 * top * eps + 2.0**-17) + 3 * eps * largest + top * 2.0**-148


def decoded(x: torch.Tensor, quantizer: Quantizer, key: int = 0) -> torch.Tensor:
    return quantizer.decode(quantizer.encode(x, key=key), x.numel())


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", BITS)
def test_error_stays_under_the_derived_bound(bits: int, rounding: str) -> None:
    """Half a step for nearest and shift, one step for stochastic, plus float32 roundings."""
    generator = torch.Generator().manual_seed(bits)
    for scale, centre in ((1.0, 0.0), (1e-3, 5.0), (1e-30, 0.0), (1e30, 1e31), (3e-42, 0.0)):
        x = torch.randn(1500, generator=generator) * scale + centre
        y = decoded(x, Quantizer(bits, 1024, rounding), key=bits)
        for block, back in zip(x.split(1024), y.split(1024), strict=True):
            error = (back.double() - block.double()).abs().max()
            assert error <= error_bound(block, bits, rounding), (scale, centre)


@pytest.mark.parametrize("bits", (2, 3, 8))
def test_rounding_is_unbiased_over_all_random_bits(bits: int) -> None:
    """Over all 65,536 outcomes the codes sum to the grid position exactly (Hermite's identity).

    So the mean of the decoded values is the position itself, which nearest rounding to 2^-16 of a
    step puts within 2^-17 steps of the value. Sweeps outcomes instead of sampling them.
    """
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(32, generator=generator)
    segment = Quantizer(bits, 32, "stochastic").segment(32)
    every = torch.arange(65536)
    rows = x.expand(65536, 32)
    scale, offset, code = reference.quantize_blocks_with(
        rows, segment, every[:, None].expand(-1, 32)
    )
    top = 2**bits - 1
    q = torch.round((x - x.min()) * (torch.full((1,), 65536.0 * top) / (x.max() - x.min())))
    assert torch.equal(code.long().sum(0), q.clamp(max=65536 * top).long())

    shifted = Quantizer(bits, 32, "shift").segment(32)
    scale, offset, code_of_shift = reference.quantize_blocks_with(rows, shifted, every)
    assert torch.equal(code_of_shift, code), "shift moves every value by the same draw"
    mean_offset = offset.double().mean()
    assert (mean_offset - x.min().double()).abs() <= 2.0**-24 * (x.abs().max() + scale[0])
    values = reference.dequantize_blocks(scale, offset, code_of_shift, shifted).double()
    assert ((values - x.double()).abs() <= error_bound(x, bits, "shift")).all()
    bias = (values.mean(0) - x.double()).abs()
    eps = 2.0**-24 * (x.abs().max().double() + scale[0])
    assert (bias <= scale[0] * (2.0**-17 + 7 * top * 2.0**-24) + 3 * eps).all()


def test_shift_halves_the_mean_squared_error_of_stochastic() -> None:
    """s^2/12 for shift whatever the value; s^2 f(1-f), which averages to s^2/6, for stochastic."""
    x = torch.linspace(0, 1, 4096).repeat(1)
    step = 1 / 15
    segment = Quantizer(4, 4096, "shift").segment(4096)
    r = torch.arange(0, 65536, 64)
    rows = x.expand(len(r), -1)
    scale, offset, code = reference.quantize_blocks_with(rows, segment, r)
    shift = reference.dequantize_blocks(scale, offset, code, segment)
    scale, offset, code = reference.quantize_blocks_with(
        rows, Quantizer(4, 4096, "stochastic").segment(4096), r[:, None].expand(-1, 4096)
    )
    stochastic = reference.dequantize_blocks(scale, offset, code, segment)
    assert ((shift - x) ** 2).mean().item() == pytest.approx(step**2 / 12, rel=0.01)
    assert ((stochastic - x) ** 2).mean().item() == pytest.approx(step**2 / 6, rel=0.01)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_constant_blocks_decode_exactly(rounding: str) -> None:
    for value in (0.0, -0.0, 1.0, -3.3e38, 1e-45, torch.finfo(torch.float32).max):
        x = torch.full((100,), value)
        assert torch.equal(decoded(x, Quantizer(2, 32, rounding)), x)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
def test_nan_and_infinity_make_their_block_nan_and_no_other(rounding: str, bad: float) -> None:
    x = torch.randn(96)
    x[40] = bad
    y = decoded(x, Quantizer(8, 32, rounding))
    assert y[32:64].isnan().all()
    assert y[:32].isfinite().all() and y[64:].isfinite().all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_range_that_overflows_float32_stays_finite_and_bounded(rounding: str) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([-largest, -1e38, 0.0, 1.0, 2e38, largest])
    y = decoded(x, Quantizer(8, 32, rounding))
    assert y.isfinite().all()
    assert ((y.double() - x.double()).abs() <= error_bound(x, 8, rounding)).all()


@pytest.mark.parametrize("bits", BITS)
def test_values_on_the_grid_come_back_exactly(bits: int) -> None:
    """Codes of integers 0 to 2^bits - 1 are those integers: packing loses nothing, any size."""
    for numel in SIZES[1:]:
        x = torch.randint(0, 2**bits, (numel,)).float()
        x[:1], x[-1:] = 0, 2**bits - 1
        for start in range(0, numel, 1024):  # every block spans the grid
            block = x[start : start + 1024]
            block[0] = 0
            block[-1] = 2**bits - 1
        for rounding in ("nearest", "stochastic"):
            y = decoded(x, Quantizer(bits, 1024, rounding))
            full = numel - (1 if numel % 1024 == 1 else 0)
            assert torch.equal(y[:full], x[:full])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_input_is_quantized_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(3000).to(dtype)
    quantizer = Quantizer(8, 1024, "shift")
    assert torch.equal(quantizer.encode(x), quantizer.encode(x.float()))
    y = quantizer.decode(quantizer.encode(x), 3000, dtype=dtype)
    assert y.dtype == dtype
    assert torch.equal(y, quantizer.decode(quantizer.encode(x), 3000).to(dtype))


@pytest.mark.parametrize("rounding", ("shift", "stochastic"))
def test_draws_depend_on_key_and_content_alone(rounding: str) -> None:
    """Same values and key: same bytes; another key or one changed value: other draws."""
    x = torch.randn(2048)
    quantizer = Quantizer(4, 1024, rounding)
    state = torch.random.get_rng_state()
    first = quantizer.encode(x, key=7)
    assert torch.equal(first, quantizer.encode(x.clone(), key=7))
    assert not torch.equal(first, quantizer.encode(x, key=8))
    middle = x[:1024].argsort()[500]
    changed = x.clone()
    changed[middle] *= 1.0001  # not an extreme: the grid stays, the draw moves
    second = quantizer.encode(changed, key=7)
    offsets = slice(4, 8) if rounding == "shift" else slice(16, 16 + 512)
    assert not torch.equal(first[offsets], second[offsets])
    assert torch.equal(first[16 + 512 :], second[16 + 512 :]), "the other block is untouched"
    assert torch.equal(state, torch.random.get_rng_state()), "no generator is touched"


def test_empty_tensor_takes_no_bytes() -> None:
    quantizer = Quantizer()
    assert quantizer.wire_bytes(0) == 0
    assert quantizer.decode(quantizer.encode(torch.empty(0)), 0).shape == (0,)


def test_input_may_be_of_any_shape_and_stride() -> None:
    x = torch.randn(40, 50).t()
    quantizer = Quantizer(8, 64, "nearest")
    assert torch.equal(quantizer.encode(x), quantizer.encode(x.contiguous().flatten()))


def test_levels_choose_the_nearest() -> None:
    levels = (0.0, 0.1, 0.4, 1.0)
    quantizer = Quantizer(2, 32, "nearest", levels=levels)
    x = torch.tensor([0.0, 0.04, 0.06, 0.2, 0.3, 0.69, 0.71, 1.0]) * 10 - 5
    expected = torch.tensor([0.0, 0.0, 0.1, 0.1, 0.4, 0.4, 1.0, 1.0]) * 10 - 5
    torch.testing.assert_close(decoded(x, quantizer), expected, rtol=0, atol=1e-5)
    x = torch.randn(1024)
    y = decoded(x, Quantizer(2, 1024, "nearest", levels=levels))
    grid = x.min() + (x.max() - x.min()) * torch.tensor(levels)
    best = (x[:, None] - grid).abs().min(1).values
    assert ((y - x).abs() <= best + (x.max() - x.min()) * 2.0**-16).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"bits": 1}, "bits=...) must be an integer from 2 to 8, got 1"),
        ({"bits": 9}, "got 9"),
        ({"bits": 4.0}, "got 4.0"),
        ({"bits": True}, "got True"),
        ({"block_size": 100}, "multiple of 32 from 32 to 65536, got 100"),
        ({"block_size": 0}, "got 0"),
        ({"block_size": 1 << 20}, "got 1048576"),
        ({"rounding": "up"}, "must be one of nearest, stochastic, shift, dither, got 'up'"),
        ({"levels": (0.0, 1.0)}, 'set rounding="nearest"'),
        ({"bits": 2, "rounding": "nearest", "levels": (0.0, 1.0)}, "4 increasing numbers"),
        ({"bits": 2, "rounding": "nearest", "levels": (0, 0.5, 0.5, 1)}, "increasing"),
    ),
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        Quantizer(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bad_tensors_are_named() -> None:
    with pytest.raises(TypeError, match="takes float32, bfloat16, float16, got torch.float64"):
        Quantizer().encode(torch.randn(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="10 values at bits=8, block_size=1024 are 24 bytes"):
        Quantizer().decode(torch.zeros(3, dtype=torch.uint8), 10)
    with pytest.raises(TypeError, match="takes uint8 wire"):
        Quantizer().decode(torch.zeros(24), 10)


def test_philox_matches_its_published_vectors() -> None:
    """Known answers of Random123 for philox4x32-10."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    known = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((ones,) * 4, (ones, ones)): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (pi, (0xA4093822, 0x299F31D0)): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for (counter, key), words in known.items():
        assert philox4x32(counter, key) == words
        tensors = tuple(torch.tensor([word]) for word in counter)
        assert [int(word) for word in philox4x32(tensors, key)] == list(words)


def test_derived_keys_differ() -> None:
    keys = {derive_key(seed, a, b) for seed in range(4) for a in range(4) for b in range(4)}
    assert len(keys) == 64
    assert all(0 <= key < 2**64 for key in keys)
