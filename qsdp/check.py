"""`qsdp check`: which backend runs, why, and whether it gives the reference's bytes here.

:func:`mismatches` is the comparison itself, which the tests and the benchmark use as well. The
reference always runs on the CPU: that is the specification.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import platform
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from qsdp.kernels import VALUE_DTYPES, Backend, backend_for, reference
from qsdp.wire import Segment, WireLayout, wire_layout

KEY = 0x0123456789ABCDEF
FIRST_ROW = 3
ROUNDINGS = ("nearest", "stochastic", "shift", "levels")
BITS = range(2, 9)


class Format(NamedTuple):
    """How blocks are coded, but for their bits; ``rounding`` is one of ROUNDINGS or dither."""

    rounding: str
    scaling: str = "minmax"
    scale_dtype: str = "float32"
    transform: str | None = None

    def __str__(self) -> str:
        defaults = self._field_defaults.items()
        changed = [getattr(self, name) for name, value in defaults if getattr(self, name) != value]
        return " ".join((self.rounding, *changed))


# All others that a Quantizer allows: shift needs an offset, and one of full precision.
FORMATS = (
    *(Format(rounding, transform="hadamard") for rounding in ROUNDINGS),
    *itertools.starmap(
        Format,
        itertools.product(
            ("nearest", "stochastic", "levels"),
            ("minmax", "symmetric"),
            ("bfloat16",),
            (None, "hadamard"),
        ),
    ),
    *(
        Format(rounding, "symmetric", transform=transform)
        for rounding in ("nearest", "stochastic", "levels")
        for transform in (None, "hadamard")
    ),
    *itertools.starmap(
        Format,
        itertools.product(
            ("dither",), ("minmax", "symmetric"), ("float32", "bfloat16"), (None, "hadamard")
        ),
    ),
)
FACTORS = (
    {"multiply": 0.3, "divide": 3.0},
    {"multiply": 1.0, "divide": 1.0},
    {"multiply": 1.0, "divide": 4.0},
)


class Comparison(NamedTuple):
    """What :func:`compare` found."""

    cases: int
    differences: list[str]


def mismatches(
    backend: Backend, layout: WireLayout, values: torch.Tensor, device: torch.device
) -> list[str]:
    """Run every operation in ``backend`` and in the reference; name those that differ.

    Args:
        values: (num_rows, layout.numel) on the CPU.
        device: where the backend runs.

    Wire bytes must be equal; values too, bit for bit, except that any NaN equals any other.
    Buffers are filled with noise before, so what is not written shows.
    """
    num_rows, found = len(values), []
    expected = torch.full((num_rows, layout.row_bytes), 0x5A, dtype=torch.uint8)
    wire = torch.full_like(expected, 0xA5, device=device)
    reference.encode(values, layout, expected, key=KEY, first_row=FIRST_ROW)
    backend.encode(values.to(device), layout, wire, key=KEY, first_row=FIRST_ROW)
    if not torch.equal(wire.cpu(), expected):
        found.append("encode")
    wire = expected.to(device)
    for dtype, factors in zip(VALUE_DTYPES, FACTORS, strict=True):
        wanted = torch.full((num_rows, layout.numel), 3.0, dtype=dtype)
        got = torch.full_like(wanted, 5.0, device=device)
        reference.decode(expected, layout, wanted)
        backend.decode(wire, layout, got)
        if not same_bits(got.cpu(), wanted):
            found.append(f"decode to {name_of(dtype)}")
        reference.decode_sum(expected, layout, wanted[0], **factors)
        backend.decode_sum(wire, layout, got[0], **factors)
        if not same_bits(got[0].cpu(), wanted[0]):
            found.append(f"decode_sum to {name_of(dtype)}")
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit patterns, or both NaN, everywhere."""
    words = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool(((a.view(words) == b.view(words)) | (a.isnan() & b.isnan())).all())


def example_values(num_rows: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that hold what is hard: every fourth run of 100 values is of another nature.

    Normal numbers of many sizes; among them runs of signed zeros, constants, denormals, tiny
    ranges, numbers near the largest, and single NaNs and infinities.
    """
    generator = torch.Generator().manual_seed(numel)
    size = torch.exp(6 * torch.randn(num_rows, -(-numel // 100), generator=generator))
    rows = torch.randn(num_rows, numel, generator=generator)
    rows *= size.repeat_interleave(100, dim=1)[:, :numel]
    largest = torch.finfo(dtype).max
    rows.clamp_(-largest, largest)
    kinds = (
        torch.tensor([0.0, -0.0]),
        torch.tensor([-3.25]),
        torch.tensor([torch.finfo(dtype).tiny / 3, -torch.finfo(dtype).tiny / 5, 0.0]),
        torch.tensor([1.0, 1.0 + torch.finfo(dtype).eps]),
        torch.tensor([largest, -largest, largest / 2, 1.0]),
        torch.tensor([1.0, torch.nan, 2.0]),
        torch.tensor([torch.inf, 1.0]),
        torch.tensor([0.5, -torch.inf]),
    )
    for place, kind in enumerate(kinds):
        start = 100 + 400 * place
        for row in range(place % 2, num_rows, 2):
            part = rows[row, start : start + 100]
            part.copy_(kind.repeat(100)[: len(part)])
    return rows.to(dtype)


def example_levels(bits: int) -> tuple[float, ...]:
    """An uneven table for a bit width."""
    steps = torch.arange(1 << bits, dtype=torch.float64) / ((1 << bits) - 1)
    return tuple((steps**1.5).tolist())


def example_segment(numel: int, bits: int, block_size: int, form: Format) -> Segment:
    """A segment of this format; ``levels`` with the table of :func:`example_levels`."""
    rounding, scaling, scale_dtype, transform = form
    levels = None
    if rounding == "levels":
        rounding, levels = "nearest", example_levels(bits)
    return Segment(numel, bits, block_size, rounding, levels, scaling, scale_dtype, transform)


def example_layout(bits: int, rounding: str | Format, dtype: torch.dtype) -> WireLayout:
    """Segments of several block sizes, short last blocks, full precision between them."""
    form = Format(rounding) if isinstance(rounding, str) else rounding
    parts = [
        example_segment(2 * 1024 + 333, bits, 1024, form),
        Segment(77),
        example_segment(97, bits, 1024, form),
        Segment(0),
        example_segment(0, bits, 32, form),
        example_segment(1250, bits, 96, form),
    ]
    return wire_layout(tuple(parts), dtype)


def compare(
    backend: Backend, device: torch.device, formats: Sequence[Format] = FORMATS
) -> Comparison:
    """Compare with the reference over bits, roundings, dtypes and special values.

    Every bit width, rounding and dtype of the plain formats; of ``formats``, every one in every
    dtype, while the bit widths take turns.
    """
    cases: list[tuple[int, Format, torch.dtype]] = [
        (bits, Format(rounding), dtype)
        for rounding in ROUNDINGS
        for bits in BITS
        for dtype in VALUE_DTYPES
    ]
    turns = itertools.cycle(BITS)
    cases += [(next(turns), form, dtype) for form in formats for dtype in VALUE_DTYPES]
    found = []
    for bits, form, dtype in cases:
        layout = example_layout(bits, form, dtype)
        values = example_values(2, layout.numel, dtype)
        for name in mismatches(backend, layout, values, device):
            found.append(f"{name}: {bits} bits, {form}, {name_of(dtype)}")
    return Comparison(len(cases), found)


def name_of(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def describe(backend: Backend) -> str:
    """The backend's name and, where it tells, its instruction set."""
    isa = getattr(backend, "isa", None)
    return f"{backend.NAME} ({isa()})" if isa is not None else backend.NAME


def main(argv: list[str] | None = None) -> int:
    """Print what runs here; 1 if a backend differs from the reference, or a theorem fails."""
    text = "Which kernels run on this machine, and do they give the bytes of the reference?"
    parser = argparse.ArgumentParser(prog="qsdp check", description=text)
    parser.add_argument(
        "--theory",
        action="store_true",
        help="check the convergence guarantees of docs/theory.md instead, on this library's "
        "quantizers (half a minute)",
    )
    if parser.parse_args(argv).theory:
        status: int = importlib.import_module("qsdp.theory.command").main()
        return status
    print(f"torch        {torch.__version__}, Python {platform.python_version()}")
    print(f"FSDP2 hooks  {_hooks()}")
    good = _report(torch.device("cpu"))
    if torch.cuda.is_available():
        good &= _report(torch.device("cuda"))
    else:
        print("CUDA         no device")
    return 0 if good else 1


run = main


def _hooks() -> str:
    try:
        from torch.distributed.fsdp import FSDPModule

        importlib.import_module("qsdp.units")
    except ImportError as error:
        return f"missing: {error}"
    names = ("set_custom_all_gather", "set_custom_reduce_scatter")
    missing = [name for name in names if not hasattr(FSDPModule, name)]
    return f"missing: FSDPModule.{missing[0]}" if missing else "there"


def _report(device: torch.device) -> bool:
    title = "CPU" if device.type == "cpu" else "CUDA"
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        backend = backend_for(device)
    print(f"{title:<12} {describe(backend)}{_why(backend, device, notes)}")
    if backend is reference and device.type == "cpu":
        return True
    start = time.perf_counter()
    comparison = compare(backend, device)
    seconds = time.perf_counter() - start
    verdict = f"equal to the reference in {comparison.cases} cases ({seconds:.1f} s)"
    if comparison.differences:
        verdict = f"DIFFERS from the reference in {len(comparison.differences)} results:"
    print(f"{'':<12} {verdict}")
    for difference in comparison.differences[:10]:
        print(f"{'':<14} {difference}")
    return not comparison.differences


def _why(backend: Backend, device: torch.device, notes: list[warnings.WarningMessage]) -> str:
    if device.type == "cuda" and backend is not reference:
        triton = importlib.import_module("triton")
        return f" {triton.__version__} on {torch.cuda.get_device_name(device)}"
    if backend is reference:
        # The warning is given once a process; the CPU backend can tell again.
        reasons = [str(note.message) for note in notes]
        if not reasons and device.type == "cpu":
            reasons = [importlib.import_module("qsdp.kernels.cpu").why_unavailable()]
        return f": slow. {' '.join(reasons)}".rstrip()
    return ", built with the package; this machine's best instruction set"


if __name__ == "__main__":
    raise SystemExit(main())
