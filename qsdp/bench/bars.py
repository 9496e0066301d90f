"""The speeds that the kernels promise, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from qsdp.bench.measure import Row

NEAREST_AND_SHIFT = ("nearest", "shift")
SLOW_PEERS = ("bitsandbytes", "torchao", "hivemind", "DDP hook")


class Bar(NamedTuple):
    """At least ``at_least`` times a copy, for every one of our rows that ``applies``."""

    text: str
    at_least: float
    applies: Callable[[Row], bool]


class Verdict(NamedTuple):
    """What became of a bar at one thread count; ``measured`` is None where nothing applies."""

    text: str
    threads: int | None
    at_least: float
    measured: float | None

    @property
    def passed(self) -> bool:
        return self.measured is not None and self.measured >= self.at_least


def _encode(row: Row, bits: tuple[int, ...], roundings: tuple[str, ...]) -> bool:
    plain = row.op == "encode" and row.levels is None and row.format is None
    return plain and row.bits in bits and row.rounding in roundings


def _plain(row: Row, op: str, bits: tuple[int, ...]) -> bool:
    return row.op == op and row.levels is None and row.format is None and row.bits in bits


def _of_few_bits(row: Row, op: str, roundings: tuple[str | None, ...]) -> bool:
    """The formats beside the plain one, at the widths that they are for."""
    wanted = row.op == op and row.format is not None and row.bits in (3, 4)
    return wanted and row.levels is None and row.rounding in roundings


COPY_BARS = (
    Bar("encode 8 bit nearest, shift", 1.2, lambda r: _encode(r, (8,), NEAREST_AND_SHIFT)),
    Bar("encode 8 bit stochastic", 0.8, lambda r: _encode(r, (8,), ("stochastic",))),
    Bar("encode 4 bit nearest, shift", 1.1, lambda r: _encode(r, (4,), NEAREST_AND_SHIFT)),
    Bar("encode 3, 5, 6, 7 bit nearest", 0.7, lambda r: _encode(r, (3, 5, 6, 7), ("nearest",))),
    Bar("decode 8 and 4 bit", 1.2, lambda r: _plain(r, "decode", (8, 4))),
    Bar("decode_sum of 4 rows, 8 bit", 1.5, lambda r: _plain(r, "decode_sum", (8,))),
    Bar("encode with 16 levels", 0.5, lambda r: r.op == "encode" and r.levels == 16),
    Bar("encode 3, 4 bit, other formats", 0.7, lambda r: _of_few_bits(r, "encode", ("nearest",))),
    Bar("encode 3, 4 bit, dither", 0.7, lambda r: _of_few_bits(r, "encode", ("dither",))),
    Bar("decode 3, 4 bit, other formats", 0.7, lambda r: _of_few_bits(r, "decode", (None,))),
    Bar("decode 3, 4 bit, dither", 0.7, lambda r: _of_few_bits(r, "decode", ("dither",))),
)
GPU_BARS = (
    Bar("encode, bytes moved", 0.8, lambda r: r.op == "encode" and r.levels is None),
    Bar("decode, bytes moved", 0.8, lambda r: r.op == "decode" and r.levels is None),
)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Every bar at every thread count of the float32 rows; the worst row of a bar decides."""
    rows = [row for row in rows if row.dtype == "float32"]
    found = []
    for threads in dict.fromkeys(row.threads for row in rows):
        here = [row for row in rows if row.threads == threads]
        on_gpu = any(row.device == "cuda" for row in here)
        for bar in GPU_BARS if on_gpu else COPY_BARS:
            ratios = [row.ratio for row in here if row.peer is None and bar.applies(row)]
            text = f"{bar.text}, against a copy"
            found.append(Verdict(text, threads, bar.at_least, min(ratios, default=None)))
        if not on_gpu:
            found += _against_fbgemm(here, threads)
        found += [_against_slow_peer(here, peer, threads) for peer in SLOW_PEERS]
    return found


def _against_fbgemm(rows: list[Row], threads: int | None) -> list[Verdict]:
    found = []
    for op, bits, at_least in (
        *(("encode", bits, 1.05) for bits in (8, 4)),
        *(("decode", bits, 1.05) for bits in (8, 4)),
        ("decode_sum", 8, 2.0),
    ):
        ours, theirs = _ours(rows, op, bits), _of(rows, op, "fbgemm", bits)
        measured = ours.gbps / theirs.gbps if ours and theirs else None
        text = f"{op} {bits} bit, against fbgemm{' and add' if op == 'decode_sum' else ''}"
        found.append(Verdict(text, threads, at_least, measured))
    return found


def _against_slow_peer(rows: list[Row], peer: str, threads: int | None) -> Verdict:
    """Both ways one after another, 8 bits."""
    ours = _seconds_a_gigabyte(_ours(rows, op, 8) for op in ("encode", "decode"))
    theirs = _seconds_a_gigabyte(_of(rows, op, peer, 8) for op in ("encode", "decode"))
    measured = theirs / ours if ours and theirs else None
    return Verdict(f"encode + decode 8 bit, against {peer}", threads, 5.0, measured)


def _ours(rows: list[Row], op: str, bits: int) -> Row | None:
    return next(
        (
            row
            for row in rows
            if row.peer is None and _plain(row, op, (bits,)) and row.rounding in (None, "nearest")
        ),
        None,
    )


def _of(rows: list[Row], op: str, peer: str, bits: int) -> Row | None:
    return next((r for r in rows if r.peer == peer and _plain(r, op, (bits,))), None)


def _seconds_a_gigabyte(rows: Iterable[Row | None]) -> float | None:
    seconds = [None if row is None else 1 / row.gbps for row in rows]
    known = [s for s in seconds if s is not None]
    return sum(known) if len(known) == len(seconds) else None


def format_verdicts(found: Sequence[Verdict]) -> str:
    """One line a bar: pass, FAIL or not measured."""
    lines = []
    for verdict in found:
        word = "pass" if verdict.passed else "FAIL"
        got = f"{verdict.measured:6.2f}" if verdict.measured is not None else "   -  "
        if verdict.measured is None:
            word = "none"
        threads = "" if verdict.threads is None else f"{verdict.threads} thread"
        threads += "s" if verdict.threads not in (None, 1) else ""
        lines.append(f"{word}  {got} >= {verdict.at_least:<5} {threads:<10} {verdict.text}")
    return "\n".join([*lines, "none: not measured, or the peer is not installed"])
