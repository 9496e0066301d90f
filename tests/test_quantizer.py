"""The quantizer's contract: derived error bounds, exhaustive unbiasedness, edge cases."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, fields

import pytest
import torch

import qsdp
from qsdp import Quantizer
from qsdp.kernels import blocks
from qsdp.kernels.compare import PLAIN, dtype_name, with_bits
from qsdp.kernels.philox import derive_key, philox4x32
from qsdp.quantizer import CHOICES, every_format, format_name

UNIFORM = [form for form in PLAIN if form.levels is None]
BITS = tuple(range(1, 9))
SIZES = (0, 1, 31, 1023, 1024, 1025, 5000)

# The largest error in steps. A rounding that is not here goes up or down, and stays under one.
WORST_STEPS = {"nearest": 0.5, "shift": 0.5, "dither": 0.5}


def error_bound(x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """Largest |decoded - x| of a block, from the arithmetic of reference.py with eps = 2^-24.

    Position on the grid: difference, range, division and product each err by eps relatively, over
    at most L steps, and q is rounded to 2^-16 of a step: (4 L eps + 2^-17) steps. Scale: 2 eps, and
    its product with a code: 3 L eps steps. Sums with the offset: 3 eps of the largest value. Dither
    adds a fraction to the code: one L eps more.
    """
    eps, top = 2.0**-24, quantizer.steps
    lo, hi = x.min().double(), x.max().double()
    step = (hi - lo) / top
    own = WORST_STEPS.get(quantizer.rounding, 1.0)
    roundings = 8 if quantizer.rounding == "dither" else 7
    largest = torch.maximum(lo.abs(), hi.abs()) + step
    return step * (own + roundings * top * eps + 2.0**-17) + 3 * eps * largest + top * 2.0**-148


def decoded(x: torch.Tensor, quantizer: Quantizer, key: int = 0) -> torch.Tensor:
    return qsdp.decode(qsdp.encode(x, quantizer, key=key), x.numel(), quantizer)


def quantize_with(
    x: torch.Tensor, quantizer: Quantizer, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale, offset and codes of blocks for given random bits."""
    return blocks.quantize_on(blocks.block_grid(x, quantizer), x, quantizer, r)


def test_every_format_is_every_quantizer() -> None:
    """All that a Quantizer allows, once each, and nothing else: fields in every combination."""
    found = every_format(3, 64)
    assert len(set(found)) == len(found)
    assert len(set(map(format_name, found))) == len(found)
    assert {(form.bits, form.block_size) for form in found} == {(3, 64), (1, 64)}
    assert {form.scaling for form in found if form.bits == 1} == {"mean"}
    allowed = 0
    levels = next(form.levels for form in found if form.levels)
    for values in itertools.product(*CHOICES.values(), (None, levels)):
        try:
            bits = 1 if "mean" in values else 3
            form = Quantizer(bits, 64, **dict(zip((*CHOICES, "levels"), values, strict=True)))
        except ValueError:
            continue
        allowed += 1
        assert form in found
    assert allowed == len(found)
    named = {*CHOICES, "bits", "block_size", "levels", "coding"}
    assert named == {f.name for f in fields(Quantizer)}
    plain = {*CHOICES["rounding"], "nearest levels"}
    assert {format_name(form) for form in PLAIN} == plain
    assert {format_name(form) for form in found[: len(PLAIN)]} == plain, "plain formats come first"


@pytest.mark.parametrize("form", UNIFORM, ids=format_name)
@pytest.mark.parametrize("bits", BITS)
def test_error_stays_under_the_derived_bound(bits: int, form: Quantizer) -> None:
    """Half a step, or one step for stochastic, plus float32 roundings."""
    quantizer = with_bits(form, bits)
    generator = torch.Generator().manual_seed(bits)
    for scale, centre in ((1.0, 0.0), (1e-3, 5.0), (1e-30, 0.0), (1e30, 1e31), (3e-42, 0.0)):
        x = torch.randn(1500, generator=generator) * scale + centre
        y = decoded(x, quantizer, key=bits)
        for block, back in zip(x.split(1024), y.split(1024), strict=True):
            error = (back.double() - block.double()).abs().max()
            assert error <= error_bound(block, quantizer), (scale, centre)


@pytest.mark.parametrize("bits", (1, 2, 3, 8))
def test_rounding_is_unbiased_over_all_random_bits(bits: int) -> None:
    """Over all 65,536 outcomes the codes sum to the grid position exactly (Hermite's identity).

    So the mean of the decoded values is the position itself, which nearest rounding to 2^-16 of a
    step puts within 2^-17 steps of the value. Sweeps outcomes instead of sampling them.
    """
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(32, generator=generator)
    stochastic = Quantizer(bits, 32, "stochastic")
    every = torch.arange(65536)
    rows = x.expand(65536, 32)
    scale, offset, code = quantize_with(rows, stochastic, every[:, None].expand(-1, 32))
    top = 2**bits - 1
    q = torch.round((x - x.min()) * (torch.full((1,), 65536.0 * top) / (x.max() - x.min())))
    assert torch.equal(code.long().sum(0), q.clamp(max=65536 * top).long())

    shifted = Quantizer(bits, 32, "shift")
    scale, offset, code_of_shift = quantize_with(rows, shifted, every)
    assert torch.equal(code_of_shift, code), "shift moves every value by the same draw"
    mean_offset = offset.double().mean()
    assert (mean_offset - x.min().double()).abs() <= 2.0**-24 * (x.abs().max() + scale[0])
    values = blocks.dequantize_blocks(scale, offset, code_of_shift, shifted).double()
    assert ((values - x.double()).abs() <= error_bound(x, shifted)).all()
    bias = (values.mean(0) - x.double()).abs()
    eps = 2.0**-24 * (x.abs().max().double() + scale[0])
    assert (bias <= scale[0] * (2.0**-17 + 7 * top * 2.0**-24) + 3 * eps).all()


def test_shift_halves_the_mean_squared_error_of_stochastic() -> None:
    """s^2/12 for shift whatever the value; s^2 f(1-f), which averages to s^2/6, for stochastic."""
    x = torch.linspace(0, 1, 4096).repeat(1)
    step = 1 / 15
    r = torch.arange(0, 65536, 64)
    rows = x.expand(len(r), -1)
    by_shift, by_value = (Quantizer(4, 4096, rounding) for rounding in ("shift", "stochastic"))
    shift = blocks.dequantize_blocks(*quantize_with(rows, by_shift, r), by_shift)
    each = r[:, None].expand(-1, 4096)
    stochastic = blocks.dequantize_blocks(*quantize_with(rows, by_value, each), by_value)
    assert ((shift - x) ** 2).mean().item() == pytest.approx(step**2 / 12, rel=0.01)
    assert ((stochastic - x) ** 2).mean().item() == pytest.approx(step**2 / 6, rel=0.01)


@pytest.mark.parametrize("form", PLAIN, ids=format_name)
def test_constant_blocks_decode_exactly(form: Quantizer) -> None:
    for value in (0.0, -0.0, 1.0, -3.3e38, 1e-45, torch.finfo(torch.float32).max):
        x = torch.full((100,), value)
        assert torch.equal(decoded(x, with_bits(form, 2, 32)), x)


@pytest.mark.parametrize("form", every_format(8, 32), ids=format_name)
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
def test_nan_and_infinity_make_their_block_nan_and_no_other(form: Quantizer, bad: float) -> None:
    x = torch.randn(96)
    x[40] = bad
    y = decoded(x, form)
    assert y[32:64].isnan().all()
    assert y[:32].isfinite().all() and y[64:].isfinite().all()


@pytest.mark.parametrize("form", UNIFORM, ids=format_name)
def test_a_range_that_overflows_float32_stays_finite_and_bounded(form: Quantizer) -> None:
    largest = torch.finfo(torch.float32).max
    quantizer = with_bits(form, 8, 32)
    x = torch.tensor([-largest, -1e38, 0.0, 1.0, 2e38, largest])
    y = decoded(x, quantizer)
    assert y.isfinite().all()
    assert ((y.double() - x.double()).abs() <= error_bound(x, quantizer)).all()


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


@pytest.mark.parametrize("form", every_format(8), ids=format_name)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=dtype_name)
def test_half_precision_input_is_quantized_in_float32(dtype: torch.dtype, form: Quantizer) -> None:
    x = torch.randn(3000).to(dtype)
    wire = qsdp.encode(x, form)
    assert torch.equal(wire, qsdp.encode(x.float(), form))
    y = qsdp.decode(wire, 3000, form, dtype=dtype)
    assert y.dtype == dtype
    assert torch.equal(y, qsdp.decode(wire, 3000, form).to(dtype))


@pytest.mark.parametrize("rounding", ("shift", "stochastic"))
def test_draws_depend_on_key_and_content_alone(rounding: str) -> None:
    """Same values and key: same bytes; another key or one changed value: other draws."""
    x = torch.randn(2048)
    quantizer = Quantizer(4, 1024, rounding)
    state = torch.random.get_rng_state()
    first = qsdp.encode(x, quantizer, key=7)
    assert torch.equal(first, qsdp.encode(x.clone(), quantizer, key=7))
    assert not torch.equal(first, qsdp.encode(x, quantizer, key=8))
    middle = x[:1024].argsort()[500]
    changed = x.clone()
    changed[middle] *= 1.0001  # not an extreme: the grid stays, the draw moves
    second = qsdp.encode(changed, quantizer, key=7)
    offsets = slice(4, 8) if rounding == "shift" else slice(16, 16 + 512)
    assert not torch.equal(first[offsets], second[offsets])
    assert torch.equal(first[16 + 512 :], second[16 + 512 :]), "the other block is untouched"
    assert torch.equal(state, torch.random.get_rng_state()), "no generator is touched"


@pytest.mark.parametrize("form", every_format(4), ids=format_name)
def test_equal_values_give_equal_bytes(form: Quantizer) -> None:
    """With one key; and with any, where the decoder repeats the draws or there are none."""
    x = torch.randn(2048)
    first = qsdp.encode(x, form, key=7)
    assert torch.equal(first, qsdp.encode(x.clone(), form, key=7))
    if form.rounding in ("nearest", "dither"):
        assert torch.equal(first, qsdp.encode(x, form, key=8))


def test_empty_tensor_takes_no_bytes() -> None:
    quantizer = Quantizer()
    assert qsdp.wire_bytes(0, quantizer) == 0
    assert qsdp.decode(qsdp.encode(torch.empty(0), quantizer), 0, quantizer).shape == (0,)


def test_input_may_be_of_any_shape_and_stride() -> None:
    x = torch.randn(40, 50).t()
    quantizer = Quantizer(8, 64, "nearest")
    assert torch.equal(qsdp.encode(x, quantizer), qsdp.encode(x.contiguous().flatten(), quantizer))


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
        ({"bits": 0}, "bits=...) must be an integer from 1 to 8, got 0"),
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
        ({"rounding": "nearest", "levels": "learned"}, "wrap the quantizer: qsdp.Learned"),
    ),
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        Quantizer(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bad_tensors_are_named() -> None:
    with pytest.raises(TypeError, match="takes float32, bfloat16 or float16, got torch.float64"):
        qsdp.encode(torch.randn(4, dtype=torch.float64), Quantizer())
    with pytest.raises(ValueError, match="10 values at bits=8, block_size=1024 are 24 bytes"):
        qsdp.decode(torch.zeros(3, dtype=torch.uint8), 10, Quantizer())
    with pytest.raises(TypeError, match="takes uint8 wire"):
        qsdp.decode(torch.zeros(24), 10, Quantizer())
    with pytest.raises(TypeError, match="got torch.uint8 and dtype=torch.float64"):
        qsdp.decode(torch.zeros(24, dtype=torch.uint8), 10, Quantizer(), dtype=torch.float64)


@pytest.mark.parametrize("form", every_format(2, 32), ids=format_name)
def test_a_quantizer_comes_back_from_json(form: Quantizer) -> None:
    values = json.loads(json.dumps(asdict(form)))
    assert Quantizer.from_json(values, "weights") == form


def test_bad_json_is_named() -> None:
    assert Quantizer.from_json({"bits": 3}, "weights") == Quantizer(3)
    with pytest.raises(TypeError, match="weights must be a mapping of Quantizer's fields, got 4"):
        Quantizer.from_json(4, "weights")
    with pytest.raises(ValueError, match="unknown field 'bit' of weights: a Quantizer has .*'bits"):
        Quantizer.from_json({"bit": 4}, "weights")


def test_philox_matches_its_published_vectors() -> None:
    """Known answers of Random123, of 7 rounds and of 10."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    zeros, all_ones, of_pi = (
        ((0,) * 4, (0, 0)),
        ((ones,) * 4, (ones, ones)),
        (pi, (0xA4093822, 0x299F31D0)),
    )
    known = {
        (*zeros, 7): (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
        (*all_ones, 7): (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
        (*of_pi, 7): (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        (*zeros, 10): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (*all_ones, 10): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (*of_pi, 10): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for (counter, key, rounds), words in known.items():
        assert philox4x32(counter, key, rounds) == words
        tensors = tuple(torch.tensor([word]) for word in counter)
        assert [int(word) for word in philox4x32(tensors, key, rounds)] == list(words)


def test_derived_keys_differ() -> None:
    keys = {derive_key(seed, a, b) for seed in range(4) for a in range(4) for b in range(4)}
    assert len(keys) == 64
    assert all(0 <= key < 2**64 for key in keys)
