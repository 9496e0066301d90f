"""The Triton kernels give the bytes of the reference, and compile for NVIDIA GPUs.

Without a GPU they run in Triton's interpreter, on the CPU, and are compiled to machine code for
sm_90 without being run. With one, the same tests run the compiled kernels:
TRITON_INTERPRET=1 forces the interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qsdp import Quantizer, kernels, rows
from qsdp.kernels import reference
from qsdp.kernels.compare import (
    KEY,
    PLAIN,
    change_mismatches,
    compare,
    dtype_name,
    example_values,
    mismatches,
    same_bits,
    same_stats,
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
    from qsdp.kernels import triton_gpu, triton_plan

# The interpreter computes both sides of a selection, NaN and all.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks again at the first launch."""
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def name(quantizer: Quantizer) -> str:
    return f"{quantizer.bits} {format_name(quantizer)}"


def noise(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Where everything must be written."""
    return torch.full_like(like, 5, dtype=dtype, device=DEVICE)


def few_mismatches(layout: WireLayout, values: torch.Tensor, dtype: torch.dtype) -> list[str]:
    """What :func:`mismatches` compares, each in one way: interpreting is slow."""
    found, rows = [], values.to(DEVICE)
    wire = torch.zeros(len(values), layout.row_bytes, dtype=torch.uint8)
    reference.encode(values, layout, wire, key=KEY, first_row=1, sender=2)
    got = noise(wire)
    triton_gpu.encode(rows, layout, got, key=KEY, first_row=1, sender=2)
    found += ["encode"] * (not torch.equal(got.cpu(), wire))
    for operation, factors in (("decode", {"first_sender": 2}), ("decode_sum", {"divide": 3.0})):
        expected = torch.zeros_like(values, dtype=dtype)
        decoded = noise(values, dtype)
        if operation == "decode_sum":
            expected, decoded = expected[0], decoded[0]
        getattr(reference, operation)(wire, layout, expected, **factors)
        getattr(triton_gpu, operation)(wire.to(DEVICE), layout, decoded, **factors)
        found += [operation] * (not same_bits(decoded.cpu(), expected))
    return found + update_mismatches(layout, values)


def update_mismatches(layout: WireLayout, values: torch.Tensor) -> list[str]:
    """Of what is kept in the layout's formats: accumulate, where half is zero, and difference."""
    found = []
    layout = wire_layout(layout.segments, layout.dtype, mark=True)  # without maps
    kept = torch.zeros(len(values), layout.row_bytes, dtype=torch.uint8)
    reference.encode(values, layout, kept, key=0)
    row = values[0] * 1.01
    change, expected = noise(row), torch.zeros_like(row)
    stats = torch.zeros(len(layout.spans), 4).double()
    counts = noise(stats)
    reference.difference(row, layout, kept[0], expected, stats)
    triton_gpu.difference(row.to(DEVICE), layout, kept[0].to(DEVICE), change, counts)
    equal = same_bits(change.cpu(), expected) and same_stats(counts.cpu(), stats)
    found += ["difference"] * (not equal)
    added = values.flip(1).clone()
    added[:, : layout.numel // 2] *= 0.0
    rows, wire = added.to(DEVICE, copy=True), kept.to(DEVICE, copy=True)
    reference.accumulate(added, layout, kept)
    triton_gpu.accumulate(rows, layout, wire)
    equal = torch.equal(wire.cpu(), kept) and same_bits(rows.cpu(), added)
    return found + ["accumulate"] * (not equal)


def assert_equal(layout: WireLayout, num_rows: int = 2) -> None:
    values = example_values(num_rows, layout.numel, layout.dtype)
    assert few_mismatches(layout, values, layout.dtype) == []


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
    assert few_mismatches(layout, values, VALUE_DTYPES[(EVERY_FORMAT.index(form) + 1) % 3]) == []


@pytest.mark.parametrize("block_size", [32, 64, 96, 1024, 1536, 4096, 8192])
def test_block_sizes(block_size: int) -> None:
    """Powers of two and others, several blocks a program, blocks that do not fit in registers.

    With what differs from value to value: random bits, in both directions, and the transform.
    """
    numel = 3 * block_size + 45 if block_size < 4096 else block_size + 1003
    quantizer = Quantizer(5, block_size, "dither", transform="hadamard")
    layout = wire_layout((Segment(numel, quantizer),), BFLOAT16, zeros=True)
    # Not the special values: one NaN would make a large block a block of zeros.
    values = torch.randn(1, numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[:, 32:96] = -0.0  # and in the last group
    values[:, numel // 32 * 32 :] = 0.0
    assert few_mismatches(layout, values, BFLOAT16) == []


def test_values_below_the_grid() -> None:
    """A symmetric grid with a denormal bfloat16 scale may begin above the lowest value, here by a
    thousandth of a step: without a bound a few of the 4096 draws would give a code of -1.
    """
    steps_to_zero, smallest, scale = 127, 2.0**-149, 2.0**-133
    quantizer = Quantizer(8, 4096, "dither", scaling="symmetric", scale_dtype="bfloat16")
    layout = tensor_layout(4096, quantizer)
    values = torch.full((1, 4096), -(steps_to_zero * scale + 60 * smallest))
    assert few_mismatches(layout, values, FLOAT32) == []


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
    assert len(triton_plan.plan_for(layout, DEVICE).launches) == 3  # one a format
    assert_equal(layout, 3)


def of_changes(
    change: Quantizer | None, kept: Quantizer | None, numel: int = 700
) -> tuple[WireLayout, WireLayout]:
    """Layouts of two segments in these formats, with full precision and nothing between them."""
    layouts = []
    for form in (change, kept):
        segments = (Segment(numel, form), Segment(77), Segment(0, form), Segment(97, form))
        layouts.append(wire_layout(segments, FLOAT32, checksum=form is change, mark=True))
    return layouts[0], layouts[1]


def in_one_pass(layout: WireLayout, kept_layout: WireLayout) -> bool:
    return triton_plan.pair_plan_for(layout, kept_layout, DEVICE) is not None


PLAIN_KEPT = Quantizer(8, rounding="nearest")
ROTATED = Quantizer(4, 128, "dither", scale_dtype="bfloat16", transform="hadamard")
SIGNS = Quantizer(1, 128, "nearest", scaling="mean", scale_dtype="bfloat16")
# Changes, and what they are added to: widths with all planes, roundings, scalings, block sizes.
CHANGES = [
    (Quantizer(2, rounding="nearest"), PLAIN_KEPT),
    (Quantizer(3, 128, "nearest"), Quantizer(6, 128, "nearest")),
    (Quantizer(4, 32, "shift"), Quantizer(5, 32, "nearest", scaling="symmetric")),
    (Quantizer(8, 96, "stochastic"), Quantizer(4, 96, "nearest", uneven_levels(4))),
    (Quantizer(5, 96, "dither"), Quantizer(5, 96, "dither", transform="hadamard")),
    (ROTATED, PLAIN_KEPT),
    (SIGNS, Quantizer(6, 64, "nearest", scale_dtype="bfloat16")),
    (Quantizer(4, 2048, "nearest", uneven_levels(4)), with_bits(PLAIN_KEPT, 7, 2048)),
    (replace(ROTATED, bits=8, block_size=4096), with_bits(PLAIN_KEPT, 8, 4096)),
]


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("change, kept", CHANGES, ids=lambda form: f"{name(form)}")
def test_changes_in_one_pass(change: Quantizer, kept: Quantizer, dtype: torch.dtype) -> None:
    """Bytes, values and counts are those of the reference, of two rows whose senders differ:
    special values, short last blocks, full precision, blocks to which zeros are added.
    """
    layouts = of_changes(change, kept, 700 if change.block_size <= 1024 else 5000)
    layout, kept_layout = (wire_layout(a.segments, dtype, mark=True) for a in layouts)
    assert in_one_pass(layout, kept_layout)
    values = example_values(2, layout.numel, dtype)
    assert change_mismatches(triton_gpu, layout, kept_layout, values, DEVICE) == []


def test_formats_of_changes_and_of_what_is_kept_mix() -> None:
    """A launch for each pair of formats; rows are read and written with gaps between them."""
    four, small, eight = Quantizer(4), Quantizer(3, 64, "shift"), PLAIN_KEPT
    segments = ((1500, four), (40, None), (300, small), (0, four), (65, four), (300, small))
    layout, kept_layout = (
        wire_layout(tuple(Segment(n, form) for n, form in parts), BFLOAT16, mark=True)
        for parts in (segments, [(n, form and eight) for n, form in segments])
    )
    plan = triton_plan.pair_plan_for(layout, kept_layout, DEVICE)
    assert plan is not None and [pair.changes.num_raw for pair in plan.pairs] == [1, 0]
    values = example_values(3, layout.numel, BFLOAT16)
    assert change_mismatches(triton_gpu, layout, kept_layout, values, DEVICE) == []


def test_idle_blocks_keep_their_bytes() -> None:
    """Whatever lies there, and whether or not encoding it again would give the same."""
    layout, kept_layout = of_changes(Quantizer(4, 64, "nearest"), Quantizer(6, 64, "nearest"))
    values = torch.randn(2, layout.numel, generator=torch.Generator().manual_seed(0))
    kept, wire = (
        noise(torch.empty(2, kept_layout.row_bytes), torch.uint8),
        noise(torch.empty(2, layout.row_bytes), torch.uint8),
    )
    triton_gpu.encode(values.to(DEVICE), kept_layout, kept, key=0)
    changes = values.to(DEVICE, copy=True) * 0.1
    changes[:, :640] *= 0.0  # ten blocks of the first segment
    triton_gpu.encode(changes, layout, wire, key=1)
    before, out = kept.clone(), noise(values)
    triton_gpu.add_changes(wire, layout, kept, kept_layout, out)
    span = kept_layout.spans[0]
    assert torch.equal(
        kept_layout.codes(kept, span)[:, :480], kept_layout.codes(before, span)[:, :480]
    )
    meta, meta_before = (kept_layout.meta(rows, span) for rows in (kept, before))
    assert torch.equal(meta[:, :10], meta_before[:, :10])
    assert not torch.equal(meta[:, 10:], meta_before[:, 10:])


@pytest.mark.parametrize(
    "change, kept, expected",
    [
        (Quantizer(4), PLAIN_KEPT, True),  # the presets' of 4 bits and less
        (Quantizer(4, 128), with_bits(PLAIN_KEPT, 6, 128), True),
        (Quantizer(4, 128), PLAIN_KEPT, True),  # the same 1024 values a program
        (Quantizer(4, 4096), with_bits(PLAIN_KEPT, 8, 4096), True),
        (Quantizer(4, 2048), PLAIN_KEPT, False),  # of other values a program
        (Quantizer(4, 192), with_bits(PLAIN_KEPT, 8, 96), False),  # in other lanes
        (Quantizer(4, 8192), with_bits(PLAIN_KEPT, 8, 8192), False),  # larger than a tile
        (Quantizer(4), None, False),  # kept as it is gathered
        (None, PLAIN_KEPT, False),
        (None, None, True),
        (Quantizer(4), replace(PLAIN_KEPT, scaling="l2"), False),  # which has no kernel
    ],
)
def test_which_changes_take_one_pass(
    change: Quantizer | None, kept: Quantizer | None, expected: bool
) -> None:
    """Not where changes have maps of zeros either."""
    layout, kept_layout = of_changes(change, kept)
    assert in_one_pass(layout, kept_layout) == expected
    assert triton_plan.pair_plan_for(layout, kept_layout, DEVICE) is triton_plan.pair_plan_for(
        layout, kept_layout, DEVICE
    )
    if change is not None:
        zeros = wire_layout(layout.segments, FLOAT32, zeros=True)
        assert any(zeros.zero_maps) and not in_one_pass(zeros, kept_layout)


def test_one_pass_takes_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it needs no memory for changes; where layouts differ too much, there are steps."""

    def fail(*args: object) -> None:
        raise AssertionError("a step of its own")

    for step in ("encode_rows", "decode_rows", "accumulate_rows", "subtract_row"):
        monkeypatch.setattr(triton_gpu, step, fail)
    for change, steps in ((Quantizer(4), False), (Quantizer(4, 2048), True)):
        layout, kept_layout = of_changes(change, PLAIN_KEPT, 100)
        wire = torch.zeros(1, layout.row_bytes, dtype=torch.uint8, device=DEVICE)
        kept = torch.zeros(1, kept_layout.row_bytes, dtype=torch.uint8, device=DEVICE)
        values = torch.zeros(1, layout.numel, device=DEVICE)
        stats = torch.zeros(4, 4, dtype=torch.float64, device=DEVICE)
        sender = (values[0], layout, wire[0], kept[0], kept_layout, stats)
        with pytest.raises(AssertionError, match="a step") if steps else nullcontext():
            triton_gpu.encode_changes(*sender, key=0)
        with pytest.raises(AssertionError, match="a step") if steps else nullcontext():
            triton_gpu.add_changes(wire, layout, kept, kept_layout, values)


@pytest.mark.parametrize("segments", [(Segment(1), Segment(2049)), (Segment(0),), ()])
def test_nothing_to_quantize(segments: tuple[Segment, ...]) -> None:
    for mark in (False, True):  # which is cleared, whatever there is to encode
        assert_equal(wire_layout(segments, FLOAT32, mark=mark))
    layout = wire_layout(segments, FLOAT32, mark=True)
    values = example_values(2, layout.numel, FLOAT32)
    assert change_mismatches(triton_gpu, layout, layout, values, DEVICE) == []


@pytest.mark.parametrize("form", [Quantizer(4, 64, "dither"), Quantizer(3, 96, "stochastic")])
def test_scattered_rows_maps_and_sums_of_many_rows(form: Quantizer) -> None:
    """All that `qsdp check` compares: rows in two dimensions, mark and checksum behind the maps,
    sums of rows that are loaded together and of those that are left over.
    """
    segments = (Segment(1100, form), Segment(9), Segment(300, form))
    layout = wire_layout(segments, FLOAT32, checksum=True, mark=True, zeros=True)
    values = example_values(6, layout.numel, FLOAT32)
    values[:, 128:256] = 0.0
    assert mismatches(triton_gpu, layout, values, DEVICE) == []


def test_a_parameter_group_is_one_launch() -> None:
    """Programs count on through segments, full precision first."""
    segments = (Segment(2048, Quantizer()), Segment(64), Segment(4000, Quantizer()))
    (launch,) = triton_plan.plan_for(wire_layout(segments, FLOAT32), DEVICE).launches
    assert (launch.num_raw, launch.num_programs) == (1, 1 + 2 + 4)
    assert launch.programs.tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert launch.spans[:, 0].tolist() == [0, 1, 3]


def test_decoding_kernels_are_shared_where_the_rounding_does_not_matter() -> None:
    nearest, stochastic, dither = (
        triton_plan.decode_format(triton_plan.format_of(Quantizer(4, 64, rounding)))
        for rounding in ("nearest", "stochastic", "dither")
    )
    assert nearest == stochastic != dither


def test_launches_are_planned_once() -> None:
    layout = tensor_layout(2048, Quantizer())
    assert triton_plan.plan_for(layout, DEVICE) is triton_plan.plan_for(layout, DEVICE)


def test_tables_of_large_units_are_small() -> None:
    """A transformer block of 856 million values has a table of 3 MB."""
    sizes = (8192 * 28672, 8192 * 28672, 28672 * 8192, 8192 * 8192, 8192 * 8192, 8192 * 1024)
    segments = tuple(Segment(n, Quantizer()) for n in (*sizes, 8192 * 1024, 8192, 8192))
    layout = wire_layout(segments, BFLOAT16)
    (launch,) = triton_plan.plan_for(layout, torch.device("cpu")).launches
    assert launch.num_programs == len(launch.programs) == layout.numel // 1024
    assert launch.programs.dtype == torch.int32 and len(launch.spans) == len(segments)


def test_warm_up_can_be_called_anywhere() -> None:
    """What it compiles is what is used: tests/compile_triton.py."""
    layout = wire_layout((Segment(100, Quantizer()), Segment(3)), FLOAT32)
    triton_gpu.warm_up(layout, 2, FLOAT32, DEVICE, kept=layout)
    assert triton_plan.plan_for(layout, DEVICE).launches


def test_units_warm_up_what_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the layer between units and kernels, with and without memory of weights."""
    monkeypatch.setattr(rows, "backend_for", lambda device: triton_gpu)
    for keeps in (False, True):
        layout = wire_layout((Segment(200 + keeps, Quantizer()), Segment(3)), FLOAT32)
        rows.warm_up(layout, 2, FLOAT32, DEVICE, layout if keeps else None)
        assert triton_plan.plan_for(layout, DEVICE).launches


def test_where_triton_does_not_run_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example without a C compiler, which Triton needs at the first launch."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler")

    triton_gpu.try_out(DEVICE)
    monkeypatch.setattr(triton_gpu, "try_out", fail)
    kernels._triton_backend.cache_clear()
    try:
        with pytest.warns(UserWarning, match="do not run here .*C compiler.*slow reference"):
            assert kernels.backend_for(torch.device("cuda")) is reference
        assert kernels.backend_for(torch.device("cuda")) is reference  # no second warning
        kernels._triton_backend.cache_clear()
        monkeypatch.setattr(triton_gpu, "try_out", lambda device: None)
        assert kernels.backend_for(torch.device("cuda")) is triton_gpu
    finally:
        kernels._triton_backend.cache_clear()


def test_compiles(tmp_path: Path) -> None:
    """To machine code, with vector loads and stores, one rounding an operation, no flush to zero.

    For sm_90 and two formats; `python -m tests.compile_triton` has more of both.
    In a process of its own, because in this one Triton interprets.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_triton", "90", "--quick"],
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
