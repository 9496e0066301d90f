"""The native CPU backend: calls cpu.cpp, which gives the bytes of ``reference``, through ctypes.

The library is built when the package is installed and loaded at the first use. This file checks
what it passes on and keeps every layout's table of spans; it computes nothing.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qsdp.kernels.blocks import FRACTION, level_thresholds
from qsdp.quantizer import CHOICES
from qsdp.wire import Span, WireLayout

NAME = "cpu"

LIBRARY = Path(__file__).with_name("_cpu.so")
ABI = 6  # of cpu.cpp; a library with another number was left over from another version

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROUNDINGS = CHOICES["rounding"]  # in the order of cpu.cpp's numbers
_MAX_TABLES = 1024
_MEND = "install a C++ compiler (g++ or clang++), then reinstall qsdp: pip install --no-deps "
_MEND += "--force-reinstall qsdp"


class _Span(ctypes.Structure):
    _fields_ = [
        ("numel", c_int64),
        ("value_offset", c_int64),
        ("meta_offset", c_int64),
        ("data_offset", c_int64),
        ("block_size", c_int64),
        ("bits", c_int32),
        ("rounding", c_int32),
        ("steps", c_int32),
        ("symmetric", c_int32),
        ("short_meta", c_int32),
        ("rotated", c_int32),
        ("levels", c_void_p),
        ("level_tree", c_void_p),
        ("level_codes", c_void_p),
        ("map_offset", c_int64),
    ]


class _Layout(ctypes.Structure):
    _fields_ = [
        ("spans", c_void_p),
        ("num_spans", c_int64),
        ("numel", c_int64),
        ("row_bytes", c_int64),
        ("payload_bytes", c_int64),
        ("dtype", c_int32),
    ]


class _Table(NamedTuple):
    """A layout as cpu.cpp reads it."""

    address: int
    has_raw: bool
    has_maps: bool
    alive: tuple[Any, ...]  # what the address, and the id under which the table is kept, refer to


def available() -> bool:
    """Whether the library was built and loads; loads it."""
    return _load()[0] is not None


def why_unavailable() -> str:
    """What keeps the library from loading and how to mend it; empty if it loads."""
    return _load()[1]


def isa() -> str:
    """The instruction set in use: avx512, avx2 or baseline."""
    name: bytes = _library().qsdp_isa()
    return name.decode()


def set_isa(name: str | None) -> None:
    """Use this instruction set from now on; None: the best one.

    Raises:
        ValueError: this machine does not run it, or there is none of this name.
    """
    if _library().qsdp_set_isa(None if name is None else name.encode()):
        raise ValueError(f"set_isa takes avx512, avx2 or baseline if it runs here, got {name!r}")


def encode(
    values: torch.Tensor,
    layout: WireLayout,
    wire: torch.Tensor,
    *,
    key: int,
    first_row: int = 0,
    sender: int = 0,
) -> None:
    """See :func:`qsdp.kernels.reference.encode`."""
    table = _table(layout)
    num_rows, inner, steps, wire_steps = _rows(values, layout.numel, wire, layout.row_bytes)
    dtype = values.dtype
    assert wire.dtype == torch.uint8
    assert not table.has_raw or dtype == layout.dtype
    _library().qsdp_encode(
        table.address,
        values.data_ptr(),
        wire.data_ptr(),
        num_rows,
        inner,
        *steps,
        *wire_steps,
        first_row,
        key,
        sender,
        _DTYPES[dtype],
        torch.get_num_threads(),
    )


def decode(
    wire: torch.Tensor,
    layout: WireLayout,
    values: torch.Tensor,
    *,
    first_sender: int = 0,
    sender_step: int = 1,
) -> None:
    """See :func:`qsdp.kernels.reference.decode`."""
    num_rows, inner, steps, wire_steps = _rows(values, layout.numel, wire, layout.row_bytes)
    _decode(
        *(wire, layout, values, num_rows, 1, inner, wire_steps, steps),
        *(1.0, 1.0, first_sender, sender_step),
    )


def decode_sum(
    wire: torch.Tensor,
    layout: WireLayout,
    out: torch.Tensor,
    *,
    multiply: float = 1.0,
    divide: float = 1.0,
) -> None:
    """See :func:`qsdp.kernels.reference.decode_sum`."""
    num_rows, step = _matrix(wire, layout.row_bytes)
    assert num_rows >= 1
    _check(out, layout.numel)
    _decode(
        *(wire, layout, out, 1, num_rows, num_rows, (0, step), (0, 0)),
        *(multiply, divide, 0, 1),
    )


def accumulate(
    values: torch.Tensor, layout: WireLayout, before: torch.Tensor, wire: torch.Tensor
) -> None:
    """See :func:`qsdp.kernels.reference.accumulate_by`; in one pass over memory."""
    table = _table(layout)
    num_rows, step = _matrix(values, layout.numel)
    steps = [step]
    for rows in (before, wire):
        assert rows.dtype == torch.uint8 and len(rows) == num_rows
        steps.append(_matrix(rows, layout.row_bytes)[1])
    assert not table.has_maps and (not table.has_raw or values.dtype == layout.dtype)
    _library().qsdp_accumulate(
        table.address,
        values.data_ptr(),
        before.data_ptr(),
        wire.data_ptr(),
        num_rows,
        *steps,
        _DTYPES[values.dtype],
        torch.get_num_threads(),
    )


def difference(
    values: torch.Tensor,
    layout: WireLayout,
    before: torch.Tensor,
    sent: torch.Tensor,
    change: torch.Tensor,
    stats: torch.Tensor,
) -> None:
    """See :func:`qsdp.kernels.reference.difference_by`; in one pass over memory."""
    table = _table(layout)
    for each in (values, sent, change):
        _check(each, layout.numel)
        assert each.dtype == layout.dtype
    _check(before, layout.row_bytes)
    _check(stats.view(-1), 4 * len(layout.spans))
    assert before.dtype == torch.uint8 and stats.dtype == torch.float64 and not table.has_maps
    _library().qsdp_difference(
        table.address,
        values.data_ptr(),
        before.data_ptr(),
        sent.data_ptr(),
        change.data_ptr(),
        stats.data_ptr(),
        _DTYPES[values.dtype],
        torch.get_num_threads(),
    )


def _decode(
    wire: torch.Tensor,
    layout: WireLayout,
    out: torch.Tensor,
    num_outputs: int,
    rows_per_output: int,
    inner: int,
    wire_steps: tuple[int, int],
    steps: tuple[int, int],
    multiply: float,
    divide: float,
    first_sender: int,
    sender_step: int,
) -> None:
    assert wire.dtype == torch.uint8
    _library().qsdp_decode(
        _table(layout).address,
        wire.data_ptr(),
        out.data_ptr(),
        num_outputs,
        rows_per_output,
        inner,
        *wire_steps,
        *steps,
        multiply,
        divide,
        first_sender,
        sender_step,
        _DTYPES[out.dtype],
        torch.get_num_threads(),
    )


# Strides of dimensions of one element or of none may be anything: they are not used, or not read.


def _rows(
    values: torch.Tensor, numel: int, wire: torch.Tensor, row_bytes: int
) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """How many rows there are, how many in the inner dimension, and the steps of both tensors.

    Steps are from row of rows to row of rows, and from row to row.
    """
    if values.ndim == 2:
        (num_rows, step), (num_wires, wire_step) = _matrix(values, numel), _matrix(wire, row_bytes)
        assert num_rows == num_wires, (values.shape, wire.shape)
        return num_rows, num_rows, (0, step), (0, wire_step)
    outer, inner, size = values.shape
    assert (size, wire.shape) == (numel, (outer, inner, row_bytes)), (values.shape, wire.shape)
    assert values.is_cpu and wire.is_cpu
    outer_step, step, one = values.stride()
    outer_wire_step, wire_step, one_byte = wire.stride()
    assert (one == 1 or size <= 1) and (one_byte == 1 or row_bytes <= 1)
    return outer * inner, inner, (outer_step, step), (outer_wire_step, wire_step)


def _matrix(tensor: torch.Tensor, size: int) -> tuple[int, int]:
    """How many rows of ``size`` contiguous elements a matrix has, and the step from row to row."""
    num_rows, columns = tensor.shape
    step, one = tensor.stride()
    assert tensor.is_cpu and columns == size, (tensor.device, tensor.shape, size)
    assert one == 1 or size <= 1
    return num_rows, step


def _check(tensor: torch.Tensor, size: int) -> None:
    """A vector of this size."""
    assert tensor.is_cpu and tensor.is_contiguous() and tensor.shape == (size,), tensor.shape


# By identity: hashing a layout costs more than encoding a small one. A table keeps its layout
# alive, so an id is not used again while it is in here.
_tables: dict[int, _Table] = {}


def _table(layout: WireLayout) -> _Table:
    table = _tables.get(id(layout))
    if table is None:
        if len(_tables) >= _MAX_TABLES:
            _tables.clear()
        table = _tables[id(layout)] = _build_table(layout)
    return table


def _build_table(layout: WireLayout) -> _Table:
    # Empty segments have nothing on the wire, but count for the random counter: they stay.
    maps = layout.zero_maps or (None,) * len(layout.spans)
    spans = (_Span * len(layout.spans))(*map(_span, layout.spans, maps))
    header = _Layout(
        ctypes.addressof(spans),
        len(spans),
        layout.numel,
        layout.row_bytes,
        layout.payload_bytes,
        _DTYPES[layout.dtype],
    )
    quantizers = [segment.quantizer for segment in layout.segments]
    levels = [_level_tables(q.levels) for q in quantizers if q is not None and q.levels]
    has_raw = any(quantizer is None for quantizer in quantizers)
    alive = (layout, header, spans, levels)
    return _Table(ctypes.addressof(header), has_raw, any(maps), alive)


def _span(span: Span, zero_map: slice | None) -> _Span:
    quantizer = span.segment.quantizer
    place = (span.segment.numel, span.value_offset, span.meta_offset, span.data_offset)
    if quantizer is None:
        return _Span(*place, 1, map_offset=-1)  # zero bits: full precision
    tables: list[int | None] = [None, None, None]
    if quantizer.levels is not None:
        tables = [table.data_ptr() for table in _level_tables(quantizer.levels)]
    return _Span(
        *place,
        quantizer.block_size,
        quantizer.bits,
        _ROUNDINGS.index(quantizer.rounding),
        quantizer.steps,
        quantizer.symmetric,
        quantizer.scale_dtype == "bfloat16",
        quantizer.transform == "hadamard",
        *tables,
        -1 if zero_map is None else zero_map.start,
    )


@lru_cache(maxsize=_MAX_TABLES)
def _level_tables(levels: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels, thresholds as a search tree, and the code of every position on the grid.

    The tree lies depth after depth, with room behind it for a vector to be loaded from any of them.
    """
    thresholds = level_thresholds(levels)
    depths = range(len(levels).bit_length() - 1)
    strides = [len(levels) >> depth for depth in depths]
    tree = torch.cat([thresholds[stride // 2 - 1 :: stride] for stride in strides])
    tree = torch.nn.functional.pad(tree, (0, 16)).to(torch.int32)
    codes = torch.bucketize(torch.arange(FRACTION + 1), thresholds, right=True).to(torch.uint8)
    return torch.tensor(levels, dtype=torch.float32), tree, codes


def _library() -> ctypes.CDLL:
    library, why = _load()
    assert library is not None, why
    return library


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    if not LIBRARY.exists():
        return None, f"qsdp's native CPU kernels were not built; {_MEND}"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        abi = library.qsdp_abi()
    except (OSError, AttributeError) as error:
        return None, f"qsdp's native CPU kernels do not load ({error}); {_MEND}"
    if abi != ABI:
        return None, f"qsdp's native CPU kernels are of another version; {_MEND}"
    pointer, size = c_void_p, c_int64
    library.qsdp_isa.restype = c_char_p
    library.qsdp_set_isa.argtypes = (c_char_p,)
    signatures = {
        "encode": (*(pointer,) * 3, *(size,) * 7, c_uint64, size, c_int32, c_int32),
        "decode": (
            *(*(pointer,) * 3, *(size,) * 7),
            *(c_float, c_float, size, size, c_int32, c_int32),
        ),
        "accumulate": (*(pointer,) * 4, *(size,) * 4, c_int32, c_int32),
        "difference": (*(pointer,) * 6, c_int32, c_int32),
    }
    for name, types in signatures.items():
        function = getattr(library, f"qsdp_{name}")
        function.argtypes, function.restype = types, None
    return library, ""
