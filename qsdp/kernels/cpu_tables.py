"""Layouts as cpu.cpp reads them: ctypes structures, made once for each layout."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from qsdp.kernels.blocks import FRACTION, level_thresholds
from qsdp.quantizer import CHOICES
from qsdp.wire import Span, WireLayout

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROUNDINGS = CHOICES["rounding"]  # in the order of cpu.cpp's numbers
_MAX_TABLES = 1024


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
        ("mean", c_int32),
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


class Table(NamedTuple):
    """A layout as cpu.cpp reads it."""

    address: int
    has_raw: bool
    has_maps: bool
    sizes: tuple[int, ...]  # values of each segment
    alive: tuple[Any, ...]  # what the address, and the id under which the table is kept, refer to


# By identity: hashing a layout costs more than encoding a small one. A table keeps its layout
# alive, so an id is not used again while it is in here.
_tables: dict[int, Table] = {}


def table_of(layout: WireLayout) -> Table:
    """The table of a layout, made at its first use."""
    table = _tables.get(id(layout))
    if table is None:
        if len(_tables) >= _MAX_TABLES:
            _tables.clear()
        table = _tables[id(layout)] = _build_table(layout)
    return table


def _build_table(layout: WireLayout) -> Table:
    # Empty segments have nothing on the wire, but count for the random counter: they stay.
    maps = layout.zero_maps or (None,) * len(layout.spans)
    spans = (_Span * len(layout.spans))(*map(_span, layout.spans, maps))
    header = _Layout(
        ctypes.addressof(spans),
        len(spans),
        layout.numel,
        layout.row_bytes,
        layout.payload_bytes,
        DTYPES[layout.dtype],
    )
    quantizers = [segment.quantizer for segment in layout.segments]
    levels = [_level_tables(q.levels) for q in quantizers if q is not None and q.levels]
    has_raw = any(quantizer is None for quantizer in quantizers)
    alive = (layout, header, spans, levels)
    sizes = tuple(segment.numel for segment in layout.segments)
    return Table(ctypes.addressof(header), has_raw, any(maps), sizes, alive)


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
        quantizer.symmetric + (quantizer.scaling == "l2"),  # 2: TWO_NORM
        quantizer.scale_dtype == "bfloat16",
        quantizer.transform == "hadamard",
        quantizer.scaling == "mean",
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
