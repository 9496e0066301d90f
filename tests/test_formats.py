"""Dither, symmetric scaling, bfloat16 scales and the transform: bounds and exact statements."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from qsdp import Quantizer
from qsdp.kernels import reference
from qsdp.kernels.transform import SIZE, hadamard, inverse_hadamard
from qsdp.wire import Segment, wire_layout

FORMATS = [
    Quantizer(bits, 64, rounding, scaling=scaling, scale_dtype=scale_dtype, transform=transform)
    for bits, rounding, scaling, scale_dtype, transform in product(
        (2, 3, 4, 8),
        ("nearest", "stochastic", "dither"),
        ("minmax", "symmetric"),
        ("float32", "bfloat16"),
        (None, "hadamard"),
    )
]


def name(quantizer: Quantizer) -> str:
    q = quantizer
    return f"{q.bits}-{q.rounding}-{q.scaling}-{q.scale_dtype}-{q.transform}"


def round_trip(quantizer: Quantizer, x: torch.Tensor, key: int = 0) -> torch.Tensor:
    layout = quantizer.layout(x.numel(), x.dtype)
    wire = torch.full((1, layout.row_bytes), 0xA5, dtype=torch.uint8)
    reference.encode(x[None], layout, wire, key=key)
    out = torch.empty(1, x.numel())
    reference.decode(wire, layout, out)
    return out[0]


def step_bounds(quantizer: Quantizer, y: torch.Tensor) -> torch.Tensor:
    """The widest step that a block of transformed values may have, for each value."""
    blocks = torch.nn.functional.pad(y, (0, -y.numel() % 64)).unflatten(0, (-1, 64)).clone()
    if y.numel() % 64:
        blocks[-1, y.numel() % 64 :] = y[-1]
    lo, hi = blocks.amin(-1), blocks.amax(-1)
    if quantizer.scaling == "symmetric":
        hi = torch.maximum(lo.abs(), hi.abs())
        lo = -hi
    top = 2**quantizer.bits - (2 if quantizer.scaling == "symmetric" else 1)
    step = (hi - lo) / top
    if quantizer.scale_dtype == "bfloat16":
        step = (step + (lo.abs() / (128 * top) if quantizer.scaling == "minmax" else 0)) * (
            129 / 128
        )
    return step.repeat_interleave(64)[: y.numel()]


@pytest.mark.parametrize("quantizer", FORMATS, ids=name)
def test_error_is_within_the_step(quantizer: Quantizer) -> None:
    """Half a step for nearest and dither, a step for stochastic; in the transformed domain."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) + 0.3
    forward = (lambda v: hadamard(v[None])[0]) if quantizer.transform else (lambda v: v)
    y, decoded = forward(x), forward(round_trip(quantizer, x))
    share = 1.0 if quantizer.rounding == "stochastic" else 0.5
    slack = 1e-5 * y.abs().max()
    assert ((decoded - y).abs() <= share * step_bounds(quantizer, y) + slack).all()


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scaling", ["minmax", "symmetric"])
@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_unbiased_over_all_outcomes(rounding: str, scaling: str, scale_dtype: str) -> None:
    """The mean over the 65,536 outcomes of r is the value, up to the grid's 16 fractional bits."""
    segment = Segment(6, 3, 64, rounding, None, scaling, scale_dtype)
    x = torch.tensor([-1.3, -0.71, 0.0, 1e-3, 0.4, 2.2])[None].expand(65536, 6)
    r = torch.arange(65536)[:, None].expand(-1, 6)
    scale, offset, code = reference.quantize_blocks_with(x, segment, r)
    if scaling == "symmetric":
        offset = -(scale.abs() * (reference.grid_steps(segment) / 2))
    decoded = reference.dequantize_blocks(scale, offset, code, segment, r)
    mean = decoded.double().mean(0)
    assert (mean - x[0]).abs().max() <= scale[0] / 65536 + 1e-6
    if rounding == "dither":
        assert ((decoded - x).abs() <= scale[0] / 2 * (1 + 1e-4) + 1e-6).all()


@pytest.mark.parametrize("quantizer", [q for q in FORMATS if q.scaling == "symmetric"], ids=name)
def test_zeros_stay_zero(quantizer: Quantizer) -> None:
    """Between other values where nothing is drawn for them, and in blocks of zeros always."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(2))
    x[128:] = 0.0
    x[::3] = 0.0
    decoded = round_trip(quantizer, x)
    assert (decoded[128:] == 0).all()
    if quantizer.rounding != "dither" and quantizer.transform is None:
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
    assert (error <= share * largest / (2**quantizer.bits - 2) + 1e-40).all()


@pytest.mark.parametrize("quantizer", FORMATS, ids=name)
def test_non_finite_blocks_decode_to_nan(quantizer: Quantizer) -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(4))
    x[3], x[70], x[140] = torch.nan, torch.inf, -torch.inf
    decoded = round_trip(quantizer, x)
    nan = decoded.isnan()
    if quantizer.transform is None:
        assert nan[:192].all()
    assert nan[[3, 70, 140]].all() and not nan[192:].any()


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
    layout = wire_layout(
        (Quantizer(4, 64, "dither", transform="hadamard").segment(500),), torch.float32
    )
    rows = torch.randn(3, 500, generator=torch.Generator().manual_seed(7))
    wire = torch.empty(3, layout.row_bytes, dtype=torch.uint8)
    reference.encode(rows, layout, wire, key=1)
    values, total = torch.empty(3, 500), torch.empty(500)
    reference.decode(wire, layout, values)
    reference.decode_sum(wire, layout, total, divide=3.0)
    assert torch.allclose(total, values.mean(0), atol=1e-6)


def test_scales_take_the_bytes_that_are_promised() -> None:
    for scaling, scale_dtype, size in (
        ("minmax", "float32", 8),
        ("minmax", "bfloat16", 4),
        ("symmetric", "float32", 4),
        ("symmetric", "bfloat16", 2),
    ):
        quantizer = Quantizer(4, 128, "nearest", scaling=scaling, scale_dtype=scale_dtype)
        assert quantizer.wire_bytes(128 * 64) == 64 * (size + 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"scaling": "max"},
            r"Quantizer\(scaling=...\) must be one of minmax, symmetric, norm, got 'max'",
        ),
        ({"scale_dtype": "half"}, "must be one of float32, bfloat16, got 'half'"),
        ({"transform": "dct"}, "must be one of None, hadamard, got 'dct'"),
        ({"rounding": "shift", "scaling": "symmetric"}, "moves the offset"),
        ({"rounding": "shift", "scale_dtype": "bfloat16"}, 'take rounding="dither"'),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantizer(**fields)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["normal", "sparse", "one"])
def test_qsgd_bounds(bits: int, kind: str) -> None:
    """QSGD's variance and sparsity, exact over all outcomes, for both of its scalings.

    With s steps to a side and the 2-norm, E|Q(x) - x|^2 <= min(n / s^2, sqrt(n) / s) |x|^2 and
    E|Q(x)|_0 <= s (s + sqrt(n)). With the max-norm, no more than n / (4 s^2) max(x)^2.
    """
    numel, s = 512, 2 ** (bits - 1) - 1
    x = torch.randn(1, numel, generator=torch.Generator().manual_seed(bits)).double()
    if kind == "sparse":
        x[:, ::7] *= 0
        x[:, ::50] *= 20
    if kind == "one":
        x[:, 1:] = 0
    norm, length = x.norm(), x.square().sum()
    for scaling, size in (("norm", norm), ("symmetric", x.abs().max())):
        segment = Segment(numel, bits, 512, "stochastic", None, scaling)
        grid = reference.block_grid(x.float(), segment)
        scale = float(grid.scale)
        assert scale == pytest.approx(float(size) / s, rel=1e-6)
        q = torch.round((x * grid.p - grid.base) * grid.inverse).clamp(0, 65536 * 2 * s)
        up = (q % 65536) / 65536  # the chance of the higher code
        variance = float((scale**2 * up * (1 - up)).sum())
        if scaling == "norm":
            assert variance <= min(numel / s**2, numel**0.5 / s) * float(length)
            nonzero = torch.where((q / 65536).floor() == s, up, torch.where(
                (q / 65536).floor() == s - 1, 1 - up, 1.0))  # fmt: skip
            assert float(nonzero.sum()) <= s * (s + numel**0.5) * (1 + 1e-6)
        else:
            assert variance <= numel / (4 * s**2) * float(size) ** 2 * (1 + 1e-6)


def test_norm_scaling_end_to_end() -> None:
    """Unbiased, zero stays zero, huge values make the block NaN instead of silently wrong."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(8))
    x[::2] = 0
    quantizer = Quantizer(8, 64, "stochastic", scaling="norm")
    draws = torch.stack([round_trip(quantizer, x, key=key) for key in range(400)])
    step = float(x.norm()) / 127
    assert (draws[:, ::2] == 0).all()
    assert ((draws.mean(0) - x).abs() <= 5 * step / 2 / 20).all()  # 20: the root of 400 draws
    assert torch.equal(quantizer.decode(quantizer.encode(x), 64), round_trip(quantizer, x))
    assert round_trip(quantizer, x * 2.0**126).isnan().all()
