"""Device code of the Triton backend: the maps of :mod:`qsdp.kernels.zeros`.

Where a run is whole bytes of a map and its lanes are in order, encode and decode call these
functions; for other block sizes the kernels here go over the values once more.
"""

# Triton compiles these functions, Python never runs them: there is nothing for mypy to check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from qsdp.kernels.triton_plan import MAP_RUN, MAP_VALUES
from qsdp.kernels.triton_runs import find_span, from_words, row_offset, run_of
from qsdp.wire import ZERO_GROUP

GROUP = tl.constexpr(ZERO_GROUP)
BYTE = tl.constexpr(MAP_VALUES)
LANES = tl.constexpr(MAP_RUN)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)

_SCALARS = ["value_outer", "value_inner", "wire_outer", "wire_inner", "num_rows", "row_stride"]


@triton.jit
def store_map(x, zeros, start, count):
    """Write the map of a tile of a run.

    Args:
        x: float32 of any shape, whose lanes are the run's values from ``start`` on; zero past its
            end.
        zeros: pointer to the run's first byte.
        count: values of the run.
    """
    BYTES: tl.constexpr = x.numel // BYTE
    magnitude = x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS
    largest = tl.max(tl.reshape(magnitude, (BYTES * 8, GROUP)), axis=1)
    there = start + GROUP * tl.arange(0, BYTES * 8) < count
    bits = ((largest == 0) & there).to(tl.int32) << (tl.arange(0, BYTES * 8) % 8)
    packed = tl.sum(tl.reshape(bits, (BYTES, 8)), axis=1)
    byte = tl.arange(0, BYTES)
    tl.store(zeros + start // BYTE + byte, packed.to(tl.uint8), mask=start + BYTE * byte < count)


@triton.jit
def load_map(zeros, start, count, LANES: tl.constexpr):
    """The map of a tile of ``LANES`` values from ``start`` on, a byte an element, int32."""
    byte = tl.arange(0, LANES // BYTE)
    mask = start + BYTE * byte < count
    return tl.load(zeros + start // BYTE + byte, mask=mask, other=0).to(tl.int32)


@triton.jit
def is_zero(packed, like):
    """What a map says of every lane of a tile, bool of the shape of ``like``."""
    BYTES: tl.constexpr = packed.numel
    bits = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
    return tl.reshape(tl.broadcast_to(bits[:, :, None], (BYTES, 8, GROUP)), like.shape) != 0


@triton.jit(do_not_specialize=_SCALARS)
def write_maps_kernel(
    values, wire, programs, spans, value_outer, value_inner, wire_outer, wire_inner,
    BF16: tl.constexpr,
):  # fmt: skip
    """Grid (programs, inner rows, outer rows)."""
    span, index = find_span(tl.program_id(0), programs, spans)
    at, count = run_of(span, index, LANES)
    lane = tl.arange(0, LANES)
    source = values + row_offset(value_outer, value_inner) + tl.load(span + 2) + at
    x = from_words(tl.load(source + lane, mask=lane < count, other=0), BF16)
    zeros = wire + row_offset(wire_outer, wire_inner) + tl.load(span + 7) + at // BYTE
    store_map(x, zeros, 0, count)


@triton.jit(do_not_specialize=_SCALARS)
def write_zeros_kernel(
    values, wire, programs, spans, num_rows, row_stride,
    value_outer, value_inner, wire_outer, wire_inner,
):  # fmt: skip
    """Grid (programs, inner rows, outer rows): zeros where ``num_rows`` maps from each row on,
    ``row_stride`` bytes apart, have a bit in common.
    """
    span, index = find_span(tl.program_id(0), programs, spans)
    at, count = run_of(span, index, LANES)
    lane = tl.arange(0, LANES)
    zeros = wire + row_offset(wire_outer, wire_inner) + tl.load(span + 7) + at // BYTE
    packed = load_map(zeros, 0, count, LANES)
    for _ in range(1, num_rows):
        zeros += row_stride
        packed &= load_map(zeros, 0, count, LANES)
    clear = is_zero(packed, lane) & (lane < count)
    target = values + row_offset(value_outer, value_inner) + tl.load(span + 2) + at
    tl.store(target + lane, tl.zeros((LANES,), values.dtype.element_ty), mask=clear)
