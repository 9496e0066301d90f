"""Dither, symmetric scaling, bfloat16 scales and the transform: bounds and exact statements."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import qsdp
from qsdp import Quantizer
from qsdp.kernels import blocks, cpu, reference
from qsdp.kernels.compare import dtype_name, with_bits
from qsdp.kernels.transform import SIZE, hadamard, inverse_hadamard
from qsdp.quantizer import every_format, format_name
from qsdp.rows import decode_rows, encode_rows, sum_rows
from qsdp.wire import VALUE_DTYPES, Segment, map_bytes, tensor_layout, wire_layout
from tests.test_quantizer import WORST_STEPS, quantize_with

BLOCK = 64
EVERY = (with_bits(form, bits, BLOCK) for bits in (1, 2, 3, 4, 8) for form in every_format())
FORMATS = list(dict.fromkeys(EVERY))  # at a width that it can have, each once
STEPPED = [form for form in FORMATS if form.scaling != "mean"]  # errors are within a step
MEAN = [form for form in FORMATS if form.scaling == "mean"]
# One draw for every value or block, whose outcomes can be gone through.
RANDOM = [f for f in every_format(3, BLOCK) if f.rounding != "nearest" and f.transform is None]


def name(quantizer: Quantizer) -> str:
    return f"{quantizer.bits} {format_name(quantizer)}"


def round_trip(quantizer: Quantizer, x: torch.Tensor, key: int = 0) -> torch.Tensor:
    layout = tensor_layout(x.numel(), quantizer, x.dtype)
    wire = torch.full((1, layout.row_bytes), 0xA5, dtype=torch.uint8)
    reference.encode(x[None], layout, wire, key=key)
    out = torch.empty(1, x.numel())
    reference.decode(wire, layout, out)
    return out[0]


def widest_step(quantizer: Quantizer) -> float:
    """The widest distance of neighbouring points on the grid, in ``quantizer.steps``."""
    if quantizer.levels is None:
        return 1.0
    return max(b - a for a, b in pairwise(quantizer.levels))


def step_bounds(quantizer: Quantizer, y: torch.Tensor) -> torch.Tensor:
    """The widest step that a block of transformed values may have, for each value."""
    blocks = torch.nn.functional.pad(y, (0, -y.numel() % BLOCK)).unflatten(0, (-1, BLOCK)).clone()
    if y.numel() % BLOCK:
        blocks[-1, y.numel() % BLOCK :] = y[-1]
    lo, hi = blocks.amin(-1), blocks.amax(-1)
    if quantizer.symmetric:
        hi = torch.maximum(lo.abs(), hi.abs())
        hi = blocks.norm(dim=-1) if quantizer.scaling == "l2" else hi
        lo = -hi
    step = (hi - lo) / quantizer.steps
    if quantizer.scale_dtype == "bfloat16":
        below = 0 if quantizer.symmetric else lo.abs() / (128 * quantizer.steps)
        step = (step + below) * (129 / 128)
    return step.repeat_interleave(BLOCK)[: y.numel()]


@pytest.mark.parametrize("quantizer", STEPPED, ids=name)
def test_error_is_within_the_step(quantizer: Quantizer) -> None:
    """Half a step, or one for stochastic; in the transformed domain."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) + 0.3
    forward = (lambda v: hadamard(v[None])[0]) if quantizer.transform else (lambda v: v)
    y, decoded = forward(x), forward(round_trip(quantizer, x))
    # Positions on the grid have 16 fractional bits.
    share = WORST_STEPS.get(quantizer.rounding, 1.0) * widest_step(quantizer) + 2.0**-16
    slack = 1e-5 * y.abs().max()
    assert ((decoded - y).abs() <= share * step_bounds(quantizer, y) + slack).all()


@pytest.mark.parametrize("quantizer", RANDOM, ids=name)
def test_unbiased_over_all_outcomes(quantizer: Quantizer) -> None:
    """The mean over the 65,536 outcomes of r is the value, up to the grid's 16 fractional bits."""
    x = torch.tensor([-1.3, -0.71, 0.0, 1e-3, 0.4, 2.2])[None].expand(65536, 6)
    r = torch.arange(65536)
    if quantizer.rounding != "shift":  # which draws for blocks
        r = r[:, None].expand(-1, 6)
    scale, offset, code = quantize_with(x, quantizer, r)
    if quantizer.symmetric:
        offset = -(scale.abs() * (quantizer.steps / 2))
    decoded = blocks.dequantize_blocks(scale, offset, code, quantizer, r)
    mean = decoded.double().mean(0)
    assert (mean - x[0]).abs().max() <= scale[0] / 65536 + 1e-6
    worst = WORST_STEPS.get(quantizer.rounding, 1.0)
    assert ((decoded - x).abs() <= scale[0] * worst * (1 + 1e-4) + 1e-6).all()


@pytest.mark.parametrize("quantizer", [q for q in FORMATS if q.symmetric], ids=name)
def test_zeros_stay_zero(quantizer: Quantizer) -> None:
    """In blocks of zeros always; between other values where zero lies on the grid that is sent."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(2))
    x[128:] = 0.0
    x[::3] = 0.0
    decoded = round_trip(quantizer, x)
    assert (decoded[128:] == 0).all()
    moved = quantizer.rounding == "dither" or quantizer.levels or quantizer.transform
    if not moved and quantizer.scaling != "mean":
        assert (decoded[::3] == 0).all()


@pytest.mark.parametrize("quantizer", FORMATS, ids=name)
def test_finite_values_give_finite_values(quantizer: Quantizer) -> None:
    """Denormals, tiny ranges far from zero, and, where no transform can overflow, the largest."""
    top = torch.finfo(torch.float32).max
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(64, generator=generator)
    parts = [noise * 1e-45, noise * 1e-38, 2.0**-45 + noise * 2.0**-66, noise * 2.0**100]
    parts += [torch.full((64,), -1.7), torch.full((64,), 2.0**-149)]
    if quantizer.transform is None:
        parts += [noise.sign() * top, torch.full((64,), top), torch.full((64,), -top)]
    x = torch.cat(parts)
    decoded = round_trip(quantizer, x)
    assert decoded.isfinite().all()
    largest = x.unflatten(0, (-1, 64)).abs().amax(-1).double()
    error = (decoded - x).double().unflatten(0, (-1, 64)).abs().amax(-1)
    # A step is at most 2 * largest / steps, and with bfloat16 a little more; the inverse transform
    # adds up 32 errors, of values that are no larger.
    share = 2.1 if quantizer.transform is None else 2.1 * SIZE
    share *= 64**0.5 if quantizer.scaling == "l2" else 1.0
    steps = 1 / widest_step(quantizer) if quantizer.levels else max(2**quantizer.bits - 2, 1)
    assert (error <= share * largest / steps + 1e-40).all()


@pytest.mark.parametrize("quantizer", FORMATS, ids=name)
def test_non_finite_blocks_decode_to_nan(quantizer: Quantizer) -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(4))
    x[3], x[70], x[140] = torch.nan, torch.inf, -torch.inf
    decoded = round_trip(quantizer, x)
    nan = decoded.isnan()
    assert nan[:192].all() and not nan[192:].any()


@pytest.mark.parametrize("quantizer", MEAN, ids=name)
@pytest.mark.parametrize("numel", [1, 63, 64, 1000])
def test_mean_scaling_is_a_contraction(quantizer: Quantizer, numel: int) -> None:
    """Values become plus or minus their block's mean magnitude a, so |x - C(x)|^2 = |x|^2 - n a^2.

    A scale is off by less than 2^-22, or, in bfloat16, up by less than 2^-7: of n a^2 less than the
    square of that is lost.
    """
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-9, 9, (numel,)).float()
    decoded = round_trip(quantizer, x)
    if quantizer.transform:
        x, decoded = hadamard(x[None])[0], hadamard(decoded[None])[0]
    off = 2.0**-7 if quantizer.scale_dtype == "bfloat16" else 2.0**-22
    for values, back in zip(x.double().split(BLOCK), decoded.double().split(BLOCK), strict=True):
        a, floors = values.abs().mean(), values.abs().max() * 2.0**-20
        slack = 1e-5 * values.abs().max() if quantizer.transform else 0.0
        assert (back.abs() >= a - floors - slack).all()
        assert (back.abs() <= a * (1 + off) + floors + slack).all()
        assert ((back > 0) == (values >= 0))[back.abs() > slack].all()
        exact = (values**2).sum() - len(values) * a**2
        lost = len(values) * (a * off + floors + slack) ** 2 + slack * values.abs().sum()
        assert ((values - back) ** 2).sum() <= exact * (1 + 1e-12) + lost


def test_mean_scaling_does_not_depend_on_the_order() -> None:
    """The mean is a sum of integers: every order of a block's values gives the same scale."""
    quantizer = Quantizer(1, 128, "nearest", scaling="mean")
    x = torch.randn(128, generator=torch.Generator().manual_seed(9)).exp() ** 3
    orders = torch.stack([x[torch.randperm(128)] for _ in range(50)])
    assert len(blocks.block_grid(orders, quantizer).scale.unique()) == 1


def test_transform_is_a_rotation() -> None:
    """Its inverse is exact on small integers, and lengths shrink by the square root of 32."""
    x = torch.randint(-99, 99, (3, 1000), generator=torch.Generator().manual_seed(5)).float()
    y = hadamard(x)
    assert torch.equal(inverse_hadamard(y), x)
    assert torch.equal(y[:, 992:], x[:, 992:])  # the remainder is left alone
    lengths = x[:, :992].norm(dim=1) / y[:, :992].norm(dim=1)
    assert torch.allclose(lengths, torch.full((3,), SIZE**0.5))


def test_transform_tames_outliers() -> None:
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(6))
    x[::1000] *= 30
    plain, rotated = (
        (round_trip(Quantizer(4, 128, "dither", transform=transform), x) - x).norm() / x.norm()
        for transform in (None, "hadamard")
    )
    assert rotated < 0.7 * plain


def test_sum_of_rows_is_transformed_once() -> None:
    """decode_sum equals the sum of decoded rows, up to float32."""
    layout = tensor_layout(500, Quantizer(4, 64, "dither", transform="hadamard"))
    rows = torch.randn(3, 500, generator=torch.Generator().manual_seed(7))
    wire = torch.empty(3, layout.row_bytes, dtype=torch.uint8)
    reference.encode(rows, layout, wire, key=1)
    values, total = torch.empty(3, 500), torch.empty(500)
    reference.decode(wire, layout, values)
    reference.decode_sum(wire, layout, total, divide=3.0)
    assert torch.allclose(total, values.mean(0), atol=1e-6)


def test_scales_take_the_bytes_that_are_promised() -> None:
    one_bit = Quantizer(1, 128, "nearest", scaling="mean", scale_dtype="bfloat16")
    assert qsdp.wire_bytes(128 * 64, one_bit) * 8 == 1.125 * 128 * 64
    wide = replace(one_bit, block_size=1024)
    assert qsdp.wire_bytes(1024 * 64, wide) * 8 == 1.015625 * 1024 * 64
    for scaling, scale_dtype, size in (
        ("minmax", "float32", 8),
        ("minmax", "bfloat16", 4),
        ("symmetric", "float32", 4),
        ("symmetric", "bfloat16", 2),
    ):
        quantizer = Quantizer(4, 128, "nearest", scaling=scaling, scale_dtype=scale_dtype)
        assert qsdp.wire_bytes(128 * 64, quantizer) == 64 * (size + 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"scaling": "max"},
            r"Quantizer\(scaling=...\) must be one of minmax, symmetric, l2, mean, got 'max'",
        ),
        ({"scale_dtype": "half"}, "must be one of float32, bfloat16, got 'half'"),
        ({"transform": "dct"}, "must be one of None, hadamard, got 'dct'"),
        ({"rounding": "shift", "scaling": "symmetric"}, "moves the offset"),
        ({"rounding": "shift", "scale_dtype": "bfloat16"}, 'take rounding="dither"'),
        ({"bits": 1, "rounding": "nearest", "scaling": "symmetric"}, "needs 2 bits or more"),
        ({"bits": 2, "rounding": "nearest", "scaling": "mean"}, "needs bits=1, .* got bits=2"),
        ({"bits": 1, "rounding": "dither", "scaling": "mean"}, "got bits=1, rounding='dither'"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantizer(**fields)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["normal", "sparse", "one"])
def test_qsgd_bounds(bits: int, kind: str) -> None:
    """QSGD's variance with max-norm scaling, exact over all outcomes: symmetric and stochastic.

    With s steps to a side, E|Q(x) - x|^2 <= n / (4 s^2) max(x)^2.
    """
    numel, s = 512, 2 ** (bits - 1) - 1
    x = torch.randn(1, numel, generator=torch.Generator().manual_seed(bits)).double()
    if kind == "sparse":
        x[:, ::7] *= 0
        x[:, ::50] *= 20
    if kind == "one":
        x[:, 1:] = 0
    largest = float(x.abs().max())
    quantizer = Quantizer(bits, 512, "stochastic", scaling="symmetric")
    grid = blocks.block_grid(x.float(), quantizer)
    scale = float(grid.scale)
    assert scale == pytest.approx(largest / s, rel=1e-6)
    q = torch.round((x * grid.p - grid.base) * grid.inverse).clamp(0, 65536 * 2 * s)
    up = (q % 65536) / 65536  # the chance of the higher code
    variance = float((scale**2 * up * (1 - up)).sum())
    assert variance <= numel / (4 * s**2) * largest**2 * (1 + 1e-6)


def test_equal_blocks_of_many_ranks_are_dithered_differently() -> None:
    """Their errors average: the mean over 64 ranks errs as much less as its square root says."""
    quantizer = Quantizer(3, 128, "dither", scale_dtype="bfloat16", transform="hadamard")
    values = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    layout = wire_layout((Segment(4096, quantizer),), torch.float32)
    wire = torch.empty(64, layout.row_bytes, dtype=torch.uint8)
    for rank in range(64):
        encode_rows(values, layout, wire[rank : rank + 1], key=0, sender=rank)
    mean, one = torch.empty(4096), torch.empty(1, 4096)
    sum_rows(wire, layout, mean, divide=64.0)
    decode_rows(wire[3:4], layout, one, own=3)
    assert (mean - values[0]).norm() < 0.2 * (one - values).norm()


@pytest.mark.parametrize("form", every_format(), ids=format_name)
def test_what_is_finite_in_float16_stays_finite(form: Quantizer) -> None:
    """Near the largest number too, where an error of half a step would go past it."""
    values = torch.full((2, 4096), 6e4).half()
    values[:, ::3], values[:, ::7] = -65504.0, 65504.0
    layout = wire_layout((Segment(4096, with_bits(form, 2, 128)),), torch.float16)
    for backend in (reference, cpu):
        wire = torch.empty(2, layout.row_bytes, dtype=torch.uint8)
        backend.encode(values, layout, wire, key=0)
        decoded, mean = torch.empty_like(values), torch.empty_like(values[0])
        backend.decode(wire, layout, decoded)
        backend.decode_sum(wire, layout, mean, divide=2.0)
        assert decoded.isfinite().all() and mean.isfinite().all()
        values[0, 5] = torch.inf
        backend.encode(values, layout, wire, key=0)
        backend.decode(wire, layout, decoded)
        assert decoded[0, :128].isnan().all(), "an infinity is seen"
        values[0, 5] = 6e4


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=dtype_name)
def test_full_precision_moves_bits(dtype: torch.dtype) -> None:
    """Every pattern of 16 bits, those of NaN too: they may be a payload that somebody packed."""
    patterns = torch.arange(1 << 16, dtype=torch.int32)
    words = (patterns << 16 | 0x1234) if dtype == torch.float32 else patterns.to(torch.int16)
    values = words.view(dtype)[None]
    layout = wire_layout((Segment(100), Segment((1 << 16) - 100)), dtype)
    for backend in (reference, cpu):
        wire = torch.empty(1, layout.row_bytes, dtype=torch.uint8)
        backend.encode(values, layout, wire, key=0)
        decoded = torch.zeros_like(values)
        backend.decode(wire, layout, decoded)
        assert torch.equal(decoded.view(words.dtype), words[None])


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=dtype_name)
def test_maps_of_zeros(dtype: torch.dtype) -> None:
    """Groups of 32 zeros have their bits, and come back as zeros, whatever the format does."""
    generator = torch.Generator().manual_seed(0)
    for numel in (1, 32, 33, 255, 257, 3001):
        values = torch.randn(3, numel, generator=generator).to(dtype)
        groups = (torch.rand(3, -(-numel // 32), generator=generator) < 0.5).repeat_interleave(
            32, dim=1
        )[:, :numel]
        values[groups] = -0.0
        segment = Segment(numel, Quantizer(2, 96, "dither", transform="hadamard"))
        layout = wire_layout((Segment(7), segment), dtype, checksum=True, zeros=True)
        rows = torch.cat((torch.ones(3, 7, dtype=dtype), values), dim=1)
        wire = torch.empty(3, layout.row_bytes, dtype=torch.uint8)
        encode_rows(rows, layout, wire, key=0)
        ((_, maps),) = layout.maps(wire)
        assert maps.shape == (3, map_bytes(numel)) and layout.zero_maps[0] is None
        for row, bits in zip(groups[:, ::32], maps, strict=True):
            found = [bool(bits[i // 8] >> i % 8 & 1) for i in range(8 * len(bits))]
            assert found == row.tolist() + [False] * (len(found) - len(row))
        decoded, total = torch.full((3, numel + 7), -1.0), torch.full((numel + 7,), -1.0)
        decode_rows(wire, layout, decoded)
        sum_rows(wire, layout, total)
        zeros = decoded[:, 7:][groups]
        assert not zeros.any() and not zeros.signbit().any(), "zeros, and these positive"
        assert not total[7:][groups.all(0)].any()
        used = ~groups.all(0)
        assert not used.any() or total[7:][used].any()
        wire[:, layout.zero_maps[1]] = 0xFF
        for backend in (reference, cpu):
            backend.decode(wire, layout, decoded.fill_(-1.0))
            assert not decoded[:, 7:].any() and decoded[:, :7].all(), "as the map says"


def test_two_norm_is_that_of_the_values() -> None:
    """Of any size, within the cut to 23 bits; at least the largest value, and at most 2^126."""
    x = torch.randn(20, 512, generator=torch.Generator().manual_seed(9)) ** 3
    for factor in (1.0, 2.0**-100, 2.0**-135, 2.0**100, 2.0**-60):
        scaled = x * factor
        most = scaled.abs().amax(-1)
        found, exact = blocks.two_norm(scaled, most), scaled.double().norm(dim=-1)
        assert (found >= most).all()
        assert ((found.double() - exact).abs() <= 2.0**-20 * exact + 2.0**-148).all()
    edges = torch.tensor([[0.0, 0.0], [2.0**126, 2.0**126], [3e38, -3e38], [2.0**-149, 0.0]])
    most = edges.abs().amax(-1)
    assert torch.equal(blocks.two_norm(edges, most), torch.maximum(most, most.clamp(max=2.0**126)))


def test_two_norm_is_the_papers_quantizer() -> None:
    """QSGD: unbiased, variance at most min(n / s^2, sqrt(n) / s) |v|^2, and few codes not zero."""
    n, s = 512, 1
    x = torch.randn(n, generator=torch.Generator().manual_seed(10))
    quantizer = Quantizer(2, n, "stochastic", scaling="l2")
    draws = torch.stack([round_trip(quantizer, x, key) for key in range(400)]).double()
    errors = (draws - x).square().sum(1)
    bound = min(n / s**2, n**0.5 / s) * x.square().sum()
    assert errors.mean() + 4 * errors.std() / 20 <= bound * (1 + 2.0**-15)
    nonzero = draws.ne(0).sum(1).double()
    assert nonzero.mean() <= s * (s + n**0.5)
    share = x.double().abs() / x.double().norm()
    spread = (share * (1 - share)).sqrt() * x.norm() / 20
    assert ((draws.mean(0) - x).abs() <= 5 * spread + 1e-3).all()
