"""The native side of :mod:`qsdp.kernels.coded`: same bytes, through cpu.cpp."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import torch

from qsdp.kernels import cpu
from qsdp.quantizer import CODINGS
from qsdp.wire import Span, WireLayout


class _Span(ctypes.Structure):
    _fields_ = [
        ("numel", c_int64),
        ("block_size", c_int64),
        ("data_offset", c_int64),
        ("bits", c_int32),
        ("coding", c_int32),
    ]


class _Layout(ctypes.Structure):
    _fields_ = [
        ("spans", c_void_p),
        ("places", c_void_p),
        ("num_spans", c_int64),
        ("num_places", c_int64),
        ("num_blocks", c_int64),
        ("plain_bytes", c_int64),
    ]


def compact(row: torch.Tensor, layout: WireLayout, coded: torch.Tensor) -> int:
    """See :func:`qsdp.kernels.coded.compact`."""
    _check(row, layout.row_bytes)
    _check(coded, layout.capacity)
    header, _alive = _table(layout)
    length: int = cpu.library().qsdp_compact(
        ctypes.addressof(header), row.data_ptr(), coded.data_ptr(), torch.get_num_threads()
    )
    return length


def expand(coded: torch.Tensor, layout: WireLayout, row: torch.Tensor) -> bool:
    """See :func:`qsdp.kernels.coded.expand`."""
    _check(row, layout.row_bytes)
    _check(coded, coded.numel())
    header, _alive = _table(layout)
    place, size = coded.data_ptr(), coded.numel()
    threads = torch.get_num_threads()
    address = ctypes.addressof(header)
    return bool(cpu.library().qsdp_expand(address, place, size, row.data_ptr(), threads))


def _check(tensor: torch.Tensor, size: int) -> None:
    assert tensor.is_cpu and tensor.is_contiguous() and tensor.dtype == torch.uint8
    assert tensor.shape == (size,), (tensor.shape, size)


def _table(layout: WireLayout) -> tuple[_Layout, object]:
    """The structure that cpu.cpp reads, and what has to live as long."""
    spans = (_Span * len(layout.coded_spans))(*map(_span, layout.coded_spans))
    pairs = [n for place in layout.plain_places for n in (place.start, place.stop - place.start)]
    places = (c_int64 * len(pairs))(*pairs)
    blocks = sum(span.segment.num_blocks for span in layout.coded_spans)
    addresses = ctypes.addressof(spans), ctypes.addressof(places)
    header = _Layout(*addresses, len(spans), len(pairs) // 2, blocks, sum(pairs[1::2]))
    return header, (spans, places)


def _span(span: Span) -> _Span:
    form = span.segment.format
    number = CODINGS.index(form.coding) - 1  # of those that cpu.cpp knows
    return _Span(span.segment.numel, form.block_size, span.data_offset, form.bits, number)
