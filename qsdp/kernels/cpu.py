"""The native CPU backend: calls cpu.cpp, which gives the bytes of ``reference``, through ctypes.

The library is built when the package is installed and loaded at the first use. This file checks
what it passes on; it computes nothing.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch

from qsdp.kernels.cpu_tables import DTYPES, Table, table_of
from qsdp.wire import WireLayout

NAME = "cpu"

LIBRARY = Path(__file__).with_name("_cpu.so")
ABI = 9  # of cpu.cpp; a library with another number was left over from another version

_MEND = "install a C++ compiler (g++ or clang++), then reinstall qsdp: pip install --no-deps "
_MEND += "--force-reinstall qsdp"


def available() -> bool:
    """Whether the library was built and loads; loads it."""
    return _load()[0] is not None


def why_unavailable() -> str:
    """What keeps the library from loading and how to mend it; empty if it loads."""
    return _load()[1]


def isa() -> str:
    """The instruction set in use: avx512, avx2 or baseline."""
    name: bytes = library().qsdp_isa()
    return name.decode()


def set_isa(name: str | None) -> None:
    """Use this instruction set from now on; None: the best one.

    Raises:
        ValueError: this machine does not run it, or there is none of this name.
    """
    if library().qsdp_set_isa(None if name is None else name.encode()):
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
    table = table_of(layout)
    num_rows, inner, steps, wire_steps = _rows(values, layout.numel, wire, layout.row_bytes)
    dtype = values.dtype
    assert wire.dtype == torch.uint8
    assert not table.has_raw or dtype == layout.dtype
    library().qsdp_encode(
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
        DTYPES[dtype],
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


def encode_changes(
    values: torch.Tensor,
    layout: WireLayout,
    wire: torch.Tensor,
    kept: torch.Tensor,
    kept_layout: WireLayout,
    stats: torch.Tensor,
    *,
    key: int,
    first_row: int = 0,
    sender: int = 0,
) -> None:
    """See :func:`qsdp.kernels.changes.encode_changes_by`; in one pass over memory."""
    table, kept_table = _tables_of_changes(layout, kept_layout, values.dtype)
    _check(values, layout.numel)
    _check(wire, layout.row_bytes)
    _check(kept, kept_layout.row_bytes)
    _check(stats.view(-1), 4 * len(layout.spans))
    assert wire.dtype == kept.dtype == torch.uint8 and stats.dtype == torch.float64
    library().qsdp_encode_changes(
        table.address,
        kept_table.address,
        values.data_ptr(),
        wire.data_ptr(),
        kept.data_ptr(),
        stats.data_ptr(),
        first_row,
        key,
        sender,
        DTYPES[values.dtype],
        torch.get_num_threads(),
    )


def add_changes(
    wire: torch.Tensor,
    layout: WireLayout,
    kept: torch.Tensor,
    kept_layout: WireLayout,
    values: torch.Tensor,
    *,
    first_sender: int = 0,
    sender_step: int = 1,
) -> None:
    """See :func:`qsdp.kernels.changes.add_changes_by`; in one pass over memory."""
    table, kept_table = _tables_of_changes(layout, kept_layout, values.dtype)
    num_rows, values_step = _matrix(values, layout.numel)
    steps = []
    for rows, size in ((wire, layout.row_bytes), (kept, kept_layout.row_bytes)):
        assert rows.dtype == torch.uint8 and len(rows) == num_rows
        steps.append(_matrix(rows, size)[1])
    library().qsdp_add_changes(
        table.address,
        kept_table.address,
        wire.data_ptr(),
        kept.data_ptr(),
        values.data_ptr(),
        num_rows,
        *steps,
        values_step,
        first_sender,
        sender_step,
        DTYPES[values.dtype],
        torch.get_num_threads(),
    )


def _tables_of_changes(
    layout: WireLayout, kept_layout: WireLayout, dtype: torch.dtype
) -> tuple[Table, Table]:
    """Of changes and of what is kept: layouts of the same segments."""
    table, kept_table = table_of(layout), table_of(kept_layout)
    assert table.sizes == kept_table.sizes and not (table.has_maps or kept_table.has_maps)
    assert layout.dtype == kept_layout.dtype == dtype
    return table, kept_table


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
    library().qsdp_decode(
        table_of(layout).address,
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
        DTYPES[out.dtype],
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


def library() -> ctypes.CDLL:
    """What :func:`available` has loaded."""
    found, why = _load()
    assert found is not None, why
    return found


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
        "encode_changes": (*(pointer,) * 6, size, c_uint64, size, c_int32, c_int32),
        "add_changes": (*(pointer,) * 5, *(size,) * 6, c_int32, c_int32),
    }
    for name, types in signatures.items():
        function = getattr(library, f"qsdp_{name}")
        function.argtypes, function.restype = types, None
    library.qsdp_compact.argtypes = (*(pointer,) * 3, c_int32)
    library.qsdp_compact.restype = size
    library.qsdp_expand.argtypes = (pointer, pointer, size, pointer, c_int32)
    return library, ""
