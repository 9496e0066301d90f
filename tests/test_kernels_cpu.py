"""The native CPU kernels give the bytes of the reference, and touch no byte that is not theirs."""

from __future__ import annotations

import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qsdp import Quantizer, kernels
from qsdp.kernels import build, cpu, reference
from qsdp.kernels.compare import PLAIN, dtype_name, example_values, with_bits
from qsdp.quantizer import MAX_BITS, MIN_BITS, every_format, format_name
from qsdp.wire import VALUE_DTYPES, Segment, tensor_layout, wire_layout
from tests.fuzz_kernels import KINDS, Case, differences, random_case, supported_isas

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable())

ISAS = supported_isas() if cpu.available() else []
BITS = range(MIN_BITS, MAX_BITS + 1)
LARGE = 1 << 19  # values: enough for several threads, and for stores past the cache as float32


def case(segments: tuple[Segment, ...], **options: object) -> Case:
    defaults = {"dtype": torch.float32, "out_dtype": torch.float32, "num_rows": 2, "first_row": 3}
    defaults |= {"key": 0x0123456789ABCDEF, "kinds": ("normal",) * len(segments), "seed": 7}
    return Case(segments=segments, **(defaults | options))


def check_format(quantizer: Quantizer, isa: str, dtypes: Iterable[tuple[torch.dtype, ...]]) -> None:
    """Special values, short last blocks, full precision between."""
    small = replace(quantizer, block_size=64)
    segments = (Segment(3210, quantizer), Segment(77), Segment(197, small))
    for dtype, out_dtype in dtypes:
        kinds = ("one special", "normal", "any bits")
        options = {"dtype": dtype, "out_dtype": out_dtype, "kinds": kinds, "isa": isa}
        assert differences(case(segments, **options)) == []


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", every_format(), ids=format_name)
def test_every_format(form: Quantizer, isa: str) -> None:
    """In every pair of dtypes, which the widths share."""
    turn = every_format().index(form)
    for place, pair in enumerate(product(VALUE_DTYPES, VALUE_DTYPES)):
        check_format(with_bits(form, BITS[(place + turn) % len(BITS)]), isa, [pair])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", PLAIN, ids=format_name)
@pytest.mark.parametrize("bits", BITS)
def test_every_width(bits: int, form: Quantizer, isa: str) -> None:
    """In every dtype, in and out."""
    turned = (*VALUE_DTYPES[1:], VALUE_DTYPES[0])
    check_format(with_bits(form, bits), isa, zip(VALUE_DTYPES, turned, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_value(kind: str, isa: str) -> None:
    """In every format, at widths that take turns."""
    turn = KINDS.index(kind)
    formats = [
        with_bits(form, BITS[(place + turn) % len(BITS)], 256)
        for place, form in enumerate(every_format())
    ]
    for start in range(0, len(formats), len(BITS)):
        segments = tuple(Segment(1500, form) for form in formats[start : start + len(BITS)])
        assert differences(case(segments, kinds=(kind,) * len(segments), isa=isa)) == []


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("misalignment", [1, 2, 4, 8, 31, 32, 37])
def test_every_alignment(misalignment: int, isa: str) -> None:
    shift, nearest = Quantizer(4, 1024, "shift"), Quantizer(8, 1024, "nearest")
    segments = (Segment(2500, shift), Segment(33), Segment(2500, nearest))
    for dtype in VALUE_DTYPES:
        for which in range(3):
            offsets = tuple(misalignment if which == i else 0 for i in range(3))
            options = {"dtype": dtype, "misalignments": offsets, "isa": isa}
            assert differences(case(segments, **options)) == []


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_large_inputs_are_shared_between_threads(num_threads: int, isa: str) -> None:
    """Several threads, stores past the cache, a large block, sums of four rows."""
    segments = (
        Segment(LARGE + 5, Quantizer(8, 1024, "stochastic")),
        Segment(LARGE // 2, Quantizer(4, 65536, "shift")),
        Segment(1001),
    )
    options = {"num_rows": 4, "num_threads": num_threads, "divide": 4.0, "isa": isa}
    assert differences(case(segments, **options)) == []


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("block_size", [32, 96, 1024])
def test_maps_are_shared_between_threads(block_size: int, num_threads: int, isa: str) -> None:
    """Bytes of a map whose blocks are of two threads; holes that begin anywhere."""
    form = Quantizer(4, block_size, "dither")
    options = {"num_rows": 3, "num_threads": num_threads, "zeros": True, "isa": isa}
    for numel in (16384, 30000, 33333):
        for kind in ("holes", "zeros"):
            segments = (Segment(7, form), Segment(numel, form), Segment(33))
            kinds = ("zeros", kind, "normal")
            assert differences(case(segments, kinds=kinds, **options)) == []


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_rows", [1, 2, 4, 6])
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=dtype_name)
def test_rows_may_lie_anywhere(dtype: torch.dtype, num_rows: int, isa: str) -> None:
    """In two leading dimensions, with gaps; draws and senders count in row-major order."""
    segments = (Segment(9000, Quantizer(4, 128, "dither")), Segment(33))
    segments += (Segment(20000, Quantizer(3, 256, "stochastic")),)
    options = {"num_rows": num_rows, "dtype": dtype, "scattered": True, "isa": isa}
    for num_threads in (1, 3):
        assert differences(case(segments, num_threads=num_threads, **options)) == []


def test_sums_of_a_difference_do_not_depend_on_threads() -> None:
    """To the last bit: whoever decides by them decides the same."""
    form = Quantizer(8, 1024, "nearest")
    segments = (Segment(100_003, form), Segment(5), Segment(70_000, replace(form, block_size=96)))
    layout = wire_layout(segments, torch.float32)
    other = Quantizer(4, 128, "nearest")
    changes = tuple(Segment(s.numel, s.quantizer and other) for s in segments)
    travel = wire_layout(changes, torch.float32)
    values = torch.randn(layout.numel)
    wire = torch.empty(1, travel.row_bytes, dtype=torch.uint8)
    before = torch.empty(1, layout.row_bytes, dtype=torch.uint8)
    cpu.encode((values * 1.01)[None], layout, before, key=0)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            stats = torch.empty(3, 4, dtype=torch.float64)
            cpu.encode_changes(values, travel, wire[0], before[0], layout, stats, key=0)
            results.append(stats)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(stats, results[0]) for stats in results)
    assert results[0][0, 0] > 0


@pytest.mark.parametrize("segments", [(), (Segment(0),), (Segment(0, Quantizer(4)), Segment(0))])
def test_empty_layouts(segments: tuple[Segment, ...]) -> None:
    assert differences(case(segments)) == []


def test_rows_do_not_depend_on_where_they_are_encoded() -> None:
    """Row r of a call that begins at row 5 is row 5 + r of one that begins at 0."""
    layout = tensor_layout(2000, Quantizer(3, 256, "stochastic"))
    values = example_values(8, layout.numel, torch.float32)
    wire = torch.empty((8, layout.row_bytes), dtype=torch.uint8)
    cpu.encode(values, layout, wire, key=9)
    part = torch.empty((3, layout.row_bytes), dtype=torch.uint8)
    cpu.encode(values[5:].contiguous(), layout, part, key=9, first_row=5)
    assert torch.equal(part, wire[5:])


@given(seed=st.integers(0, 2**63), isa=st.sampled_from(ISAS or ["baseline"]))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_cases(seed: int, isa: str) -> None:
    """What `make fuzz` runs longer and under AddressSanitizer."""
    assert differences(random_case(Random(seed), [isa])) == []


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="set_isa takes avx512, avx2 or baseline"):
        cpu.set_isa("sse9")
    assert cpu.isa() == ISAS[0]


@pytest.fixture
def fresh_choice() -> object:
    """Forget the library and the choice before and after."""
    forget = (cpu._load, kernels._cpu_backend)
    for function in forget:
        function.cache_clear()
    yield None
    for function in forget:
        function.cache_clear()


def test_without_the_library_the_reference_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_choice: object
) -> None:
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "missing.so")
    with pytest.warns(UserWarning, match="were not built; install a C\\+\\+ compiler"):
        assert kernels.backend_for(torch.device("cpu")) is reference
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.backend_for(torch.device("cpu")) is reference


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF truncated"])
def test_a_broken_library_is_named(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_choice: object
) -> None:
    library = tmp_path / "broken.so"
    library.write_bytes(content)
    monkeypatch.setattr(cpu, "LIBRARY", library)
    assert not cpu.available()
    assert "do not load" in cpu.why_unavailable()


def test_a_library_of_another_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, fresh_choice: object
) -> None:
    monkeypatch.setattr(cpu, "ABI", cpu.ABI + 1)
    assert "of another version" in cpu.why_unavailable()


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OSError):
        build.compile_library(tmp_path / "_cpu.so")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
def test_a_wheel_carries_the_library(tmp_path: Path) -> None:
    """Built for a platform and for every Python 3."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "-w", str(tmp_path), str(root)], capture_output=True, text=True, timeout=280
    )
    if "No module named 'setuptools'" in done.stderr or "BackendUnavailable" in done.stderr:
        pytest.skip("setuptools is not installed here")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name and "any" not in wheel.name
    assert "qsdp/kernels/_cpu.so" in zipfile.ZipFile(wheel).namelist()
