"""The speeds that the kernels promise, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from qsdp.bench.measure import Row

SLOW_PEERS = ("bitsandbytes", "torchao", "hivemind", "DDP hook")


OTHERS = ("nearest symmetric", "nearest hadamard", "nearest bfloat16 block 128")
LEVELS = ("nearest levels", "nearest levels bfloat16 block 128")
DITHER = ("dither", "dither bfloat16 hadamard block 128")
RICE = ("stochastic symmetric rice block 512",)


class Bar(NamedTuple):
    """At least ``at_least`` times a copy, for every one of our rows that is meant."""

    text: str
    at_least: float
    op: str
    bits: tuple[int, ...]
    formats: tuple[str, ...] | None  # None is all without levels

    def means(self, row: Row) -> bool:
        """Whether it promises something about a row."""
        formats = self.formats or (() if row.format in LEVELS else (row.format,))
        return row.op == self.op and row.bits in self.bits and row.format in formats


COPY_BARS = (
    Bar("encode 8 bit nearest, shift", 1.2, "encode", (8,), ("nearest", "shift")),
    Bar("encode 8 bit stochastic", 0.8, "encode", (8,), ("stochastic",)),
    Bar("encode 4 bit nearest, shift", 1.1, "encode", (4,), ("nearest", "shift")),
    Bar("encode 3, 5, 6, 7 bit nearest", 0.7, "encode", (3, 5, 6, 7), ("nearest",)),
    Bar("decode 8 and 4 bit", 1.2, "decode", (8, 4), ("nearest",)),
    Bar("decode_sum of 4 rows, 8 bit", 1.5, "decode_sum", (8,), ("nearest",)),
    Bar("encode with 16 levels", 0.5, "encode", (4,), LEVELS),
    Bar("encode 3, 4 bit, other formats", 0.7, "encode", (3, 4), OTHERS),
    Bar("encode 3, 4 bit, dither", 0.7, "encode", (3, 4), DITHER),
    Bar("decode 3, 4 bit, other formats", 0.7, "decode", (3, 4), OTHERS),
    Bar("decode 3, 4 bit, dither", 0.7, "decode", (3, 4), DITHER),
    Bar("encode in Rice codes", 0.3, "encode", tuple(range(2, 9)), RICE),
    Bar("decode Rice codes", 0.3, "decode", tuple(range(2, 9)), RICE),
)
GPU_BARS = tuple(
    Bar(f"{op}, bytes moved", 0.8, op, tuple(range(2, 9)), None) for op in ("encode", "decode")
)


class Verdict(NamedTuple):
    """What became of a bar at one thread count; ``measured`` is None where nothing applies."""

    text: str
    threads: int | None
    at_least: float
    measured: float | None

    @property
    def passed(self) -> bool:
        return self.measured is not None and self.measured >= self.at_least


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Every bar at every thread count of the float32 rows; the worst row of a bar decides."""
    rows = [row for row in rows if row.dtype == "float32"]
    found = []
    for threads in dict.fromkeys(row.threads for row in rows):
        here = [row for row in rows if row.threads == threads]
        on_gpu = any(row.device == "cuda" for row in here)
        for bar in GPU_BARS if on_gpu else COPY_BARS:
            ratios = [row.ratio for row in here if row.peer is None and bar.means(row)]
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
        ours, theirs = _of(rows, op, None, bits), _of(rows, op, "fbgemm", bits)
        measured = ours.gbps / theirs.gbps if ours and theirs else None
        text = f"{op} {bits} bit, against fbgemm{' and add' if op == 'decode_sum' else ''}"
        found.append(Verdict(text, threads, at_least, measured))
    return found


def _against_slow_peer(rows: list[Row], peer: str, threads: int | None) -> Verdict:
    """Both ways one after another, 8 bits."""
    ours = _seconds_a_gigabyte(_of(rows, op, None, 8) for op in ("encode", "decode"))
    theirs = _seconds_a_gigabyte(_of(rows, op, peer, 8) for op in ("encode", "decode"))
    measured = theirs / ours if ours and theirs else None
    return Verdict(f"encode + decode 8 bit, against {peer}", threads, 5.0, measured)


def _of(rows: list[Row], op: str, peer: str | None, bits: int) -> Row | None:
    """The row of a peer, or of our kernels with nearest rounding and nothing else."""
    wanted = (op, peer, bits, "nearest")
    return next((r for r in rows if (r.op, r.peer, r.bits, r.format) == wanted), None)


def _seconds_a_gigabyte(rows: Iterable[Row | None]) -> float | None:
    seconds = [None if row is None else 1 / row.gbps for row in rows]
    known = [s for s in seconds if s is not None]
    return sum(known) if len(known) == len(seconds) else None


def format_verdicts(found: Sequence[Verdict]) -> str:
    """One line a bar: pass, FAIL or not measured."""
    lines = []
    for verdict in found:
        word, got = "pass" if verdict.passed else "FAIL", f"{verdict.measured or 0:6.2f}"
        if verdict.measured is None:
            word, got = "none", "   -  "
        threads = "" if verdict.threads is None else f"{verdict.threads} thread"
        threads += "s" if verdict.threads not in (None, 1) else ""
        lines.append(f"{word}  {got} >= {verdict.at_least:<5} {threads:<10} {verdict.text}")
    return "\n".join([*lines, "none: not measured, or the peer is not installed"])
