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
ABI = 5  # of cpu.cpp; a library with another number was left over from another version

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
    num_rows = values.shape[0]
    _check(values, (num_rows, layout.numel))
    _check(wire, (num_rows, layout.row_bytes))
    assert wire.dtype == torch.uint8
    assert not table.has_raw or values.dtype == layout.dtype
    _library().qsdp_encode(
        table.address,
        values.data_ptr(),
        wire.data_ptr(),
        num_rows,
        first_row,
        key,
        sender,
        _DTYPES[values.dtype],
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
    num_rows = wire.shape[0]
    _check(values, (num_rows, layout.numel))
    _decode(wire, layout, values, num_rows, 1, 1.0, 1.0, first_sender, sender_step)


def decode_sum(
    wire: torch.Tensor,
    layout: WireLayout,
    out: torch.Tensor,
    *,
    multiply: float = 1.0,
    divide: float = 1.0,
) -> None:
    """See :func:`qsdp.kernels.reference.decode_sum`."""
    num_rows = wire.shape[0]
    assert num_rows >= 1
    _check(out, (layout.numel,))
    _decode(wire, layout, out, 1, num_rows, multiply, divide, 0, 1)


def accumulate(
    values: torch.Tensor, layout: WireLayout, before: torch.Tensor, wire: torch.Tensor
) -> None:
    """See :func:`qsdp.kernels.reference.accumulate_by`; in one pass over memory."""
    table = _table(layout)
    num_rows = values.shape[0]
    _check(values, (num_rows, layout.numel))
    for rows in (before, wire):
        _check(rows, (num_rows, layout.row_bytes))
        assert rows.dtype == torch.uint8
    assert not table.has_raw or values.dtype == layout.dtype
    _library().qsdp_accumulate(
        table.address,
        values.data_ptr(),
        before.data_ptr(),
        wire.data_ptr(),
        num_rows,
        _DTYPES[values.dtype],
        torch.get_num_threads(),
    )


def map_zeros(values: torch.Tensor, maps: torch.Tensor) -> None:
    """See :func:`qsdp.kernels.reference.map_zeros`."""
    assert maps.dtype == torch.uint8 and values.stride(1) == 1 and values.device.type == "cpu"
    for row, into in zip(values, maps, strict=True):
        _library().qsdp_map_zeros(
            row.data_ptr(),
            row.numel(),
            into.data_ptr(),
            _DTYPES[values.dtype],
            torch.get_num_threads(),
        )


def _decode(
    wire: torch.Tensor,
    layout: WireLayout,
    out: torch.Tensor,
    num_outputs: int,
    rows_per_output: int,
    multiply: float,
    divide: float,
    first_sender: int,
    sender_step: int,
) -> None:
    _check(wire, (num_outputs * rows_per_output, layout.row_bytes))
    assert wire.dtype == torch.uint8
    _library().qsdp_decode(
        _table(layout).address,
        wire.data_ptr(),
        out.data_ptr(),
        num_outputs,
        rows_per_output,
        multiply,
        divide,
        first_sender,
        sender_step,
        _DTYPES[out.dtype],
        torch.get_num_threads(),
    )


def _check(tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), tensor.device
    assert tensor.shape == shape, (tensor.shape, shape)


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
    spans = (_Span * len(layout.spans))(*map(_span, layout.spans))
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
    return _Table(ctypes.addressof(header), has_raw, (layout, header, spans, levels))


def _span(span: Span) -> _Span:
    quantizer = span.segment.quantizer
    place = (span.segment.numel, span.value_offset, span.meta_offset, span.data_offset)
    if quantizer is None:
        return _Span(*place, 1)  # zero bits: full precision
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
    library.qsdp_encode.argtypes = (
        *(pointer, pointer, pointer, size, size),
        *(c_uint64, size, c_int32, c_int32),
    )
    library.qsdp_encode.restype = None
    library.qsdp_decode.argtypes = (
        *(pointer, pointer, pointer, size, size),
        *(c_float, c_float, size, size, c_int32, c_int32),
    )
    library.qsdp_decode.restype = None
    library.qsdp_accumulate.argtypes = (pointer,) * 4 + (size, c_int32, c_int32)
    library.qsdp_accumulate.restype = None
    library.qsdp_map_zeros.argtypes = (pointer, size, pointer, c_int32, c_int32)
    library.qsdp_map_zeros.restype = None
    return library, ""
