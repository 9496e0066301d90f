"""The Triton kernels give the bytes of the reference, and compile for NVIDIA GPUs.

Without a GPU they run in Triton's interpreter, on the CPU, and are compiled to machine code for
sm_80 and sm_90 without being run. With one, the same tests run the compiled kernels:
TRITON_INTERPRET=1 forces the interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qsdp import check
from qsdp.wire import Segment, WireLayout, wire_layout

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
with pytest.MonkeyPatch.context() as patch:
    if not ON_GPU:  # read where Triton's functions and ours are decorated
        patch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.7.1")
    from qsdp.kernels import triton_gpu

# The interpreter computes both sides of a selection, NaN and all.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks again at the first launch."""
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def segment(
    numel: int,
    bits: int,
    block_size: int = 1024,
    rounding: str = "nearest",
    scaling: str = "minmax",
    scale_dtype: str = "float32",
    transform: str | None = None,
) -> Segment:
    levels = check.example_levels(bits) if rounding == "levels" else None
    rounding = "nearest" if levels else rounding
    return Segment(numel, bits, block_size, rounding, levels, scaling, scale_dtype, transform)


def assert_equal(layout: WireLayout, num_rows: int = 2) -> None:
    values = check.example_values(num_rows, layout.numel, layout.dtype)
    assert check.mismatches(triton_gpu, layout, values, DEVICE) == []


@pytest.mark.parametrize("rounding", check.ROUNDINGS)
@pytest.mark.parametrize("bits", check.BITS)
def test_every_format_gives_the_reference_bytes(bits: int, rounding: str) -> None:
    """Special values, a short last block and full precision included; the dtypes take turns."""
    dtype = (FLOAT32, BFLOAT16, FLOAT16)[(bits + len(rounding)) % 3]
    segments = (segment(700, bits, 128, rounding), Segment(77), segment(97, bits, 128, rounding))
    assert_equal(wire_layout(segments, dtype))


# Any two of the last four fields meet in every way that a Quantizer allows.
FORMATS = [
    (2, "nearest", "symmetric", "bfloat16", None),
    (5, "nearest", "minmax", "float32", "hadamard"),
    (3, "stochastic", "minmax", "bfloat16", None),
    (6, "stochastic", "symmetric", "float32", "hadamard"),
    (4, "dither", "minmax", "float32", None),
    (8, "dither", "symmetric", "bfloat16", "hadamard"),
    (7, "dither", "minmax", "bfloat16", "hadamard"),
    (8, "dither", "symmetric", "float32", None),
    (4, "levels", "minmax", "bfloat16", "hadamard"),
    (3, "levels", "symmetric", "float32", None),
    (8, "shift", "minmax", "float32", "hadamard"),
]


@pytest.mark.parametrize("fields", FORMATS, ids=lambda fields: "-".join(map(str, fields)))
def test_scalings_scales_and_transforms(fields: tuple[int, str, str, str, str | None]) -> None:
    """Every kind of special value fills blocks of 32 on its own; among the longer blocks are short
    ones, remainders that the transform leaves alone, and scales that need padding.
    """
    bits, *rest = fields
    dtype = (FLOAT32, BFLOAT16, FLOAT16)[FORMATS.index(fields) % 3]
    segments = (segment(990, bits, 32, *rest), Segment(7), segment(250, bits, 96, *rest))
    layout = wire_layout(segments, dtype)
    values = check.example_values(2, 4000, dtype)
    special = torch.arange(4000) // 100 % 4 == 1
    values = torch.cat((values[:, special], values), dim=1)[:, : layout.numel].contiguous()
    values[:, 864:896] = torch.finfo(dtype).max  # a block
    assert check.mismatches(triton_gpu, layout, values, DEVICE) == []


@pytest.mark.parametrize("block_size", [32, 64, 96, 1024, 1536, 4096, 8192])
def test_block_sizes(block_size: int) -> None:
    """Powers of two and others, several blocks a program, blocks that do not fit in registers.

    With what differs from value to value: random bits, in both directions, and the transform.
    """
    numel = 3 * block_size + 45 if block_size < 4096 else block_size + 1003
    layout = wire_layout((segment(numel, 5, block_size, "dither", transform="hadamard"),), BFLOAT16)
    # Not the special values: one NaN would make a large block a block of zeros.
    values = torch.randn(1, numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert check.mismatches(triton_gpu, layout, values, DEVICE) == []


def test_values_below_the_grid() -> None:
    """A symmetric grid with a denormal bfloat16 scale may begin above the lowest value, here by a
    thousandth of a step: without a bound a few of the 4096 draws would give a code of -1.
    """
    steps_to_zero, smallest, scale = 127, 2.0**-149, 2.0**-133
    layout = wire_layout((segment(4096, 8, 4096, "dither", "symmetric", "bfloat16"),), FLOAT32)
    values = torch.full((1, 4096), -(steps_to_zero * scale + 60 * smallest))
    assert check.mismatches(triton_gpu, layout, values, DEVICE) == []


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16])
def test_formats_mix_in_one_layout(dtype: torch.dtype) -> None:
    """Widths, block sizes, roundings and level tables differ between segments; some are empty."""
    segments = (
        Segment(5),
        segment(300, 3, 64, "shift"),
        segment(0, 3, 64, "shift"),
        Segment(1500),
        segment(65, 4, 32, "levels"),
        Segment(40, 4, 32, "nearest", tuple(i / 15 for i in range(16))),
        segment(300, 3, 64, "shift"),
        segment(1, 8),
    )
    layout = wire_layout(segments, dtype)
    assert len(triton_gpu.launches(layout, DEVICE)) == 3  # one a format
    assert_equal(layout, 3)


@pytest.mark.parametrize("segments", [(Segment(1), Segment(2049)), (Segment(0),), ()])
def test_nothing_to_quantize(segments: tuple[Segment, ...]) -> None:
    assert_equal(wire_layout(segments, FLOAT32))


def test_a_parameter_group_is_one_launch() -> None:
    segments = [segment(2048, 8, rounding="shift"), Segment(64), segment(4000, 8, rounding="shift")]
    (launch,) = triton_gpu.launches(wire_layout(tuple(segments), FLOAT32), DEVICE)
    assert launch.num_raw == 1
    assert len(launch.table) == 1 + 2 + 4


def test_decoding_kernels_are_shared_where_the_rounding_does_not_matter() -> None:
    nearest, stochastic, dither = (
        triton_gpu.launches(wire_layout((segment(9, 4, 64, rounding),), FLOAT32), DEVICE)[0]
        for rounding in ("nearest", "stochastic", "dither")
    )
    assert nearest.decode_format == stochastic.decode_format != dither.decode_format


@pytest.mark.parametrize("field", ["rounding", "scaling", "scale_dtype", "transform"])
def test_what_the_kernels_do_not_know_raises(field: str) -> None:
    """A format that only the reference has must never give wrong bytes."""
    layout = wire_layout((replace(segment(64, 8), **{field: "new"}),), FLOAT32)
    with pytest.raises(NotImplementedError, match=f"Triton kernels know {field} .*, not 'new'"):
        triton_gpu.launches(layout, DEVICE)


def test_launches_are_planned_once() -> None:
    layout = wire_layout((segment(2048, 8),), FLOAT32)
    assert triton_gpu.launches(layout, DEVICE) is triton_gpu.launches(layout, DEVICE)


@pytest.mark.parametrize("architecture", [80, 90])
def test_compiles_for(architecture: int, tmp_path: Path) -> None:
    """To machine code, with vector loads and stores, one rounding an operation, no flush to zero.

    In a process of its own, because in this one Triton interprets.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_triton", str(architecture)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        env=environment,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_compiled_kernels_give_the_reference_bytes() -> None:
    """All bits, roundings and dtypes, as `qsdp check` does."""
    assert check.compare(triton_gpu, DEVICE).differences == []
