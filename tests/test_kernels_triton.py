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
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks again at the first launch."""
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def segment(numel: int, bits: int, block_size: int = 1024, rounding: str = "nearest") -> Segment:
    if rounding == "levels":
        return Segment(numel, bits, block_size, "nearest", check.example_levels(bits))
    return Segment(numel, bits, block_size, rounding)


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


@pytest.mark.parametrize("block_size", [32, 64, 96, 1024, 1536, 4096, 8192])
def test_block_sizes(block_size: int) -> None:
    """Powers of two and others, several blocks a program, blocks that do not fit in registers."""
    numel = 3 * block_size + 45 if block_size < 4096 else block_size + 1003
    assert_equal(wire_layout((segment(numel, 5, block_size, "stochastic"),), BFLOAT16), 1)


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
