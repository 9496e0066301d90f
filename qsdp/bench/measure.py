"""Measure the kernels' operations beside a copy of the same tensor and beside peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from qsdp.bench.peers import BLOCK_SIZE, Peer, bfloat16_cast, fbgemm_sum, peers
from qsdp.bench.timing import median_seconds
from qsdp.check import KEY, example_levels, name_of
from qsdp.kernels import Backend
from qsdp.wire import Segment, WireLayout, wire_layout

SUM_ROWS = 4
ROUNDINGS = ("nearest", "stochastic", "shift")
COPY = "copy"


class Kind(NamedTuple):
    """A format to measure at every bit width; ``name`` says what is not the plain format in it."""

    rounding: str
    has_levels: bool = False
    name: str | None = None
    options: dict[str, Any] = {}


_SMALL = {"block_size": 128, "scale_dtype": "bfloat16"}
PLAIN = (*map(Kind, ROUNDINGS), Kind("nearest", True))
FEW_BITS = (
    Kind("dither", name="dither"),
    Kind("nearest", name="symmetric", options={"scaling": "symmetric"}),
    Kind("nearest", name="hadamard", options={"transform": "hadamard"}),
    Kind("nearest", name="block 128", options=_SMALL),
    Kind("nearest", True, "levels, block 128", _SMALL),
    Kind("dither", name="hadamard, block 128", options={**_SMALL, "transform": "hadamard"}),
)


@dataclass(frozen=True)
class Row:
    """One result; the fields are the keys of ``--json``.

    ``gbps`` counts bytes of values on CPU; on a GPU, bytes read and written. ``copy_gbps`` counts
    the same way. Decoding is the same for all roundings (None) but dither. ``format`` is None for
    blocks of 1024 with min-max scales in float32.
    """

    op: str
    bits: int
    rounding: str | None
    levels: int | None
    dtype: str
    threads: int | None
    gbps: float
    copy_gbps: float
    ratio: float
    peer: str | None
    device: str
    format: str | None = None


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    device: torch.device
    mib: float
    threads: tuple[int, ...]
    bits: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    repetitions: int
    compiled: bool = False


class Candidate(NamedTuple):
    """Something to time: what it is and the bytes that one run counts and moves."""

    rounding: str | None
    levels: int | None
    peer: str | None
    run: Callable[[], object]
    moved_bytes: int
    format: str | None = None


def measure(settings: Settings, backend: Backend) -> Iterator[Row]:
    """Rows group by group: one operation, bit width, dtype and thread count at a time."""
    for threads in settings.threads if settings.device.type == "cpu" else (None,):
        if threads is not None:
            torch.set_num_threads(threads)
        for dtype in settings.dtypes:
            values, target = _values(settings, dtype)
            for bits in settings.bits:
                groups = {
                    "encode": _encode_group(settings, backend, values, bits),
                    "decode": _decode_group(settings, backend, values, target, bits),
                    "decode_sum": _decode_sum_group(backend, values, target, bits),
                    "accumulate": _accumulate_group(backend, values, target, bits),
                }
                for op, group in groups.items():
                    yield from _time(settings, op, bits, group, values, target, threads)


def _values(settings: Settings, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal numbers, and memory of the same size that has been touched."""
    step = SUM_ROWS * BLOCK_SIZE
    numel = max(int(settings.mib * 2**20) // dtype.itemsize // step, 1) * step
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(numel, generator=generator).to(dtype).to(settings.device)
    return values, torch.zeros_like(values)


def _time(
    settings: Settings,
    op: str,
    bits: int,
    group: list[Candidate],
    values: torch.Tensor,
    target: torch.Tensor,
    threads: int | None,
) -> Iterator[Row]:
    runs: dict[str, Callable[[], object]] = {COPY: lambda: target.copy_(values)}
    runs |= {str(index): candidate.run for index, candidate in enumerate(group)}
    seconds = median_seconds(runs, settings.device, repetitions=settings.repetitions)
    on_gpu = settings.device.type == "cuda"
    copy_gbps = values.nbytes * (2 if on_gpu else 1) / seconds[COPY] / 1e9
    for index, candidate in enumerate(group):
        counted = candidate.moved_bytes if on_gpu else values.nbytes
        gbps = counted / seconds[str(index)] / 1e9
        yield Row(
            op,
            16 if candidate.peer == "cast to bfloat16" else bits,
            candidate.rounding,
            candidate.levels,
            name_of(values.dtype),
            threads,
            round(gbps, 3),
            round(copy_gbps, 3),
            round(gbps / copy_gbps, 3),
            candidate.peer,
            settings.device.type,
            candidate.format,
        )


def _layout(numel: int, bits: int, kind: Kind, dtype: torch.dtype) -> WireLayout:
    table = example_levels(bits) if kind.has_levels else None
    options = {"block_size": BLOCK_SIZE, **kind.options}
    segment = Segment(numel, bits, rounding=kind.rounding, levels=table, **options)
    return wire_layout((segment,), dtype)


def _wire(backend: Backend, rows: torch.Tensor, layout: WireLayout) -> torch.Tensor:
    wire = torch.zeros(len(rows), layout.row_bytes, dtype=torch.uint8, device=rows.device)
    backend.encode(rows, layout, wire, key=KEY)
    return wire


def _kinds(values: torch.Tensor, plain: tuple[Kind, ...]) -> tuple[Kind, ...]:
    return plain + (FEW_BITS if values.dtype == torch.float32 else ())


def _candidate(
    kind: Kind, bits: int, run: Callable[[], object], moved: int, *, decodes: bool
) -> Candidate:
    rounding = None if decodes and kind.rounding != "dither" else kind.rounding
    levels = 1 << bits if kind.has_levels else None
    return Candidate(rounding, levels, None, run, moved, kind.name)


def _encode_group(
    settings: Settings, backend: Backend, values: torch.Tensor, bits: int
) -> list[Candidate]:
    group = []
    for kind in _kinds(values, PLAIN):
        layout = _layout(values.numel(), bits, kind, values.dtype)
        wire = _wire(backend, values[None], layout)

        def run(layout: WireLayout = layout, wire: torch.Tensor = wire) -> None:
            backend.encode(values[None], layout, wire, key=KEY)

        moved = values.nbytes + wire.nbytes
        group.append(_candidate(kind, bits, run, moved, decodes=False))
    return group + [
        Candidate("nearest", None, peer.name, peer.encode, _peer_bytes(values, peer))
        for peer in _peers(settings, values, bits)
    ]


def _decode_group(
    settings: Settings, backend: Backend, values: torch.Tensor, target: torch.Tensor, bits: int
) -> list[Candidate]:
    group = []
    for kind in _kinds(values, (Kind("nearest"), Kind("nearest", True))):
        layout = _layout(values.numel(), bits, kind, values.dtype)
        wire = _wire(backend, values[None], layout)

        def run(layout: WireLayout = layout, wire: torch.Tensor = wire) -> None:
            backend.decode(wire, layout, target[None])

        moved = values.nbytes + wire.nbytes
        group.append(_candidate(kind, bits, run, moved, decodes=True))
    return group + [
        Candidate(None, None, peer.name, peer.decode, _peer_bytes(values, peer))
        for peer in _peers(settings, values, bits)
    ]


def _decode_sum_group(
    backend: Backend, values: torch.Tensor, target: torch.Tensor, bits: int
) -> list[Candidate]:
    rows = values.view(SUM_ROWS, -1)
    out = target.view(SUM_ROWS, -1)[0]
    group = []
    for kind in _kinds(values, (Kind("nearest"), Kind("nearest", True))):
        layout = _layout(rows.shape[1], bits, kind, values.dtype)
        wire = _wire(backend, rows, layout)

        def run(layout: WireLayout = layout, wire: torch.Tensor = wire) -> None:
            backend.decode_sum(wire, layout, out, divide=float(SUM_ROWS))

        group.append(_candidate(kind, bits, run, out.nbytes + wire.nbytes, decodes=True))
    peer = fbgemm_sum(rows, bits) if values.dtype == torch.float32 else None
    if peer is not None:
        moved = out.nbytes + SUM_ROWS * out.numel() * bits // 8
        group.append(Candidate(None, None, "fbgemm", peer, moved))
    return group


def _accumulate_group(
    backend: Backend, values: torch.Tensor, target: torch.Tensor, bits: int
) -> list[Candidate]:
    layout = _layout(values.numel(), bits, Kind("nearest"), values.dtype)
    before = _wire(backend, values[None], layout)
    wire = torch.zeros_like(before)

    def run() -> None:
        backend.accumulate(target[None], layout, before, wire)

    return [Candidate("nearest", None, None, run, 2 * (values.nbytes + wire.nbytes))]


def _peers(settings: Settings, values: torch.Tensor, bits: int) -> list[Peer]:
    if values.dtype != torch.float32:
        return []
    found = list(peers(values, bits, compiled=settings.compiled))
    return [*found, bfloat16_cast(values)] if bits == max(settings.bits) else found


def _peer_bytes(values: torch.Tensor, peer: Peer) -> int:
    return values.nbytes + values.numel() * peer.bits // 8
