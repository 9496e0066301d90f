"""The Triton kernels give the bytes of the reference, and compile for NVIDIA GPUs.

Without a GPU they run in Triton's interpreter, on the CPU, and are compiled to machine code for
sm_80 and sm_90 without being run. With one, the same tests run the compiled kernels:
TRITON_INTERPRET=1 forces the interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qsdp import Quantizer
from qsdp.kernels.compare import (
    PLAIN,
    compare,
    dtype_name,
    example_values,
    mismatches,
    with_bits,
)
from qsdp.quantizer import MAX_BITS, MIN_BITS, every_format, format_name, uneven_levels
from qsdp.wire import VALUE_DTYPES, Segment, WireLayout, tensor_layout, wire_layout

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
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


def name(quantizer: Quantizer) -> str:
    return f"{quantizer.bits} {format_name(quantizer)}"


def assert_equal(layout: WireLayout, num_rows: int = 2) -> None:
    values = example_values(num_rows, layout.numel, layout.dtype)
    assert mismatches(triton_gpu, layout, values, DEVICE) == []


# Interpreting is slow: widths take turns over the formats, and plain formats over the widths.
WIDTHS = range(MIN_BITS, MAX_BITS + 1)
EVERY_FORMAT = [with_bits(f, WIDTHS[i % len(WIDTHS)]) for i, f in enumerate(every_format())]
EVERY_WIDTH = [with_bits(PLAIN[(w + i) % len(PLAIN)], w) for w in WIDTHS for i in (0, 2)]


@pytest.mark.parametrize("form", EVERY_WIDTH, ids=name)
def test_every_width_gives_the_reference_bytes(form: Quantizer) -> None:
    """Special values, a short last block and full precision included; the dtypes take turns."""
    quantizer = with_bits(form, form.bits, 128)
    dtype = VALUE_DTYPES[EVERY_WIDTH.index(form) % 3]
    assert_equal(wire_layout((Segment(700, quantizer), Segment(77), Segment(97, quantizer)), dtype))


@pytest.mark.parametrize("form", EVERY_FORMAT, ids=name)
def test_every_format_gives_the_reference_bytes(form: Quantizer) -> None:
    """Every kind of special value fills blocks of 32 on its own; among the longer blocks are short
    ones, remainders that the transform leaves alone, and scales that need padding.
    """
    dtype = VALUE_DTYPES[EVERY_FORMAT.index(form) % 3]
    small, longer = (with_bits(form, form.bits, block_size) for block_size in (32, 96))
    layout = wire_layout((Segment(990, small), Segment(7), Segment(250, longer)), dtype)
    values = example_values(2, 4000, dtype)
    special = torch.arange(4000) // 100 % 4 == 1
    values = torch.cat((values[:, special], values), dim=1)[:, : layout.numel].contiguous()
    values[:, 864:896] = torch.finfo(dtype).max  # a block
    assert mismatches(triton_gpu, layout, values, DEVICE) == []


@pytest.mark.parametrize("block_size", [32, 64, 96, 1024, 1536, 4096, 8192])
def test_block_sizes(block_size: int) -> None:
    """Powers of two and others, several blocks a program, blocks that do not fit in registers.

    With what differs from value to value: random bits, in both directions, and the transform.
    """
    numel = 3 * block_size + 45 if block_size < 4096 else block_size + 1003
    quantizer = Quantizer(5, block_size, "dither", transform="hadamard")
    layout = tensor_layout(numel, quantizer, BFLOAT16)
    # Not the special values: one NaN would make a large block a block of zeros.
    values = torch.randn(1, numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert mismatches(triton_gpu, layout, values, DEVICE) == []


def test_values_below_the_grid() -> None:
    """A symmetric grid with a denormal bfloat16 scale may begin above the lowest value, here by a
    thousandth of a step: without a bound a few of the 4096 draws would give a code of -1.
    """
    steps_to_zero, smallest, scale = 127, 2.0**-149, 2.0**-133
    quantizer = Quantizer(8, 4096, "dither", scaling="symmetric", scale_dtype="bfloat16")
    layout = tensor_layout(4096, quantizer)
    values = torch.full((1, 4096), -(steps_to_zero * scale + 60 * smallest))
    assert mismatches(triton_gpu, layout, values, DEVICE) == []


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=dtype_name)
def test_formats_mix_in_one_layout(dtype: torch.dtype) -> None:
    """Widths, block sizes, roundings and level tables differ between segments; some are empty."""
    shift = Quantizer(3, 64, "shift")
    uneven = Quantizer(4, 32, "nearest", uneven_levels(4))
    uniform = Quantizer(4, 32, "nearest", tuple(i / 15 for i in range(16)))
    segments = (
        Segment(5),
        Segment(300, shift),
        Segment(0, shift),
        Segment(1500),
        Segment(65, uneven),
        Segment(40, uniform),
        Segment(300, shift),
        Segment(1, Quantizer(8, rounding="nearest")),
    )
    layout = wire_layout(segments, dtype)
    assert len(triton_gpu.launches(layout, DEVICE)) == 3  # one a format
    assert_equal(layout, 3)


@pytest.mark.parametrize("segments", [(Segment(1), Segment(2049)), (Segment(0),), ()])
def test_nothing_to_quantize(segments: tuple[Segment, ...]) -> None:
    assert_equal(wire_layout(segments, FLOAT32))


def test_a_parameter_group_is_one_launch() -> None:
    segments = (Segment(2048, Quantizer()), Segment(64), Segment(4000, Quantizer()))
    (launch,) = triton_gpu.launches(wire_layout(segments, FLOAT32), DEVICE)
    assert launch.num_raw == 1
    assert len(launch.table) == 1 + 2 + 4


def test_decoding_kernels_are_shared_where_the_rounding_does_not_matter() -> None:
    nearest, stochastic, dither = (
        triton_gpu.launches(tensor_layout(9, Quantizer(4, 64, rounding)), DEVICE)[0]
        for rounding in ("nearest", "stochastic", "dither")
    )
    assert nearest.decode_format == stochastic.decode_format != dither.decode_format


def test_launches_are_planned_once() -> None:
    layout = tensor_layout(2048, Quantizer())
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
    """All bits, formats and dtypes, as `qsdp check` does."""
    assert compare(triton_gpu, DEVICE).differences == []
