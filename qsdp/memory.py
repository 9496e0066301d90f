"""What ranks remember between steps: :class:`KeptWeights` for differences, :class:`Residuals`.

Both say what to send and take what arrived; what they remember is plain tensors. Nothing here knows
of FSDP or of process groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from qsdp.buffers import pool
from qsdp.quantizer import Quantizer
from qsdp.rows import accumulate_rows, decode_rows, difference_rows, encode_rows
from qsdp.wire import Segment, WireLayout, wire_layout

# Of the error that a row has anyway, by being kept in few bits: what a change may add. Together
# sqrt(1 + 0.3^2), less than a twentieth more.
_TOLERANCE = 0.3
_KEPT_STEPS = 255  # as for 8 bits, where weights are kept as they are gathered
_LEAP = 0.3  # of a parameter's norm: no optimizer step changes it by so much
_FASTER = 3.0  # than the step before: nor by so many times more

# Bits of the mark that a rank sends with its row.
WHOLE = 1  # differences are not right for it: it is to travel whole
LOOKED = 2  # this rank's host looks at the marks of all before it goes on


@dataclass(frozen=True)
class Keeping:
    """How one segment of a row of weights is kept.

    Attributes:
        segment: its format in memory.
        differences: of which format the differences are that it travels as; None where it travels
            as it is.
    """

    segment: Segment
    differences: Quantizer | None

    @property
    def limit(self) -> float:
        """The largest change, as a share of the segment's norm, that differences are right for.

        Errors of values of one shape are as their ranges over the number of steps.
        """
        assert self.differences is not None
        kept = self.segment.quantizer
        kept_steps = (1 << kept.bits) - 1 if kept is not None else _KEPT_STEPS
        return _TOLERANCE * ((1 << self.differences.bits) - 1) / kept_steps


class KeptWeights:
    """The rows of weights that all ranks decoded last, bit-identical on all of them (SDP4Bit).

    What a rank sends is what has changed since, the error of the row before included, so errors do
    not add up. A row that has not changed since it was last sent travels as zeros and stays as it
    is: all micro-batches and validations of a step see the same weights. What is not finite counts
    as zero when differences are taken: a difference to it would never be finite again.

    Few bits are right for the small changes of optimizer steps. After any other change (weights
    loaded, averaged, made anew), a row is to travel whole once more: its mark says so. On
    accelerators everything stays on the device; see :meth:`to_renew` for when the host looks.

    Args:
        keeping: how each segment of a row is kept, in order.
        dtype: of the weights.
        num_ranks: rows.
        own: which of them is this rank's.

    Attributes:
        reductions: of gradients, up to the last row that was sent.
        pace: of each segment of differences its last change by training, as a share of its norm.
    """

    def __init__(
        self,
        keeping: Sequence[Keeping],
        dtype: torch.dtype,
        num_ranks: int,
        own: int,
        device: torch.device,
    ) -> None:
        self.layout = wire_layout(tuple(k.segment for k in keeping), dtype)
        self.num_ranks, self.own, self.started, self.reductions = num_ranks, own, False, 0
        self.on_host = device.type != "cuda"  # where the host decides, at once
        pairs = list(zip(self.layout.spans, keeping, strict=True))
        differing = [i for i, (s, k) in enumerate(pairs) if k.differences and s.segment.numel]
        self._differences = _joined(s.values for s, k in pairs if k.differences)
        # Kept as they are gathered: there is no code to accumulate into.
        plain = [(s, k) for s, k in pairs if k.differences and s.segment.quantizer is None]
        self._plain = _joined(span.values for span, _ in plain)
        self._rows, self._limits = differing, [pairs[i][1].limit for i in differing]
        self._owed: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        with torch.inference_mode(False):  # training goes on with it after an inference
            shape = num_ranks, self.layout.row_bytes
            self.wire = torch.zeros(shape, dtype=torch.uint8, device=device)
            # Another one, because accumulating reads the one while it writes the other.
            self._spare = torch.empty_like(self.wire)
            self.sent = torch.zeros(self.layout.numel, dtype=dtype, device=device)
            self.pace = torch.zeros(len(differing), dtype=torch.float64, device=device)
            self._stats = torch.zeros(len(pairs), 4, dtype=torch.float64, device=device)
            self._rows_there = torch.tensor(differing, dtype=torch.int64, device=device)
            self._limits_there = torch.tensor(self._limits, dtype=torch.float64, device=device)

    def start(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the weights themselves.

        Args:
            rows: (num_ranks, numel) of all ranks; they become what is kept of them, in place.
            values: (numel,), this rank's own.
        """
        self.sent.copy_(values)
        encode_rows(rows, self.layout, self.wire, key=0)
        decode_rows(self.wire, self.layout, rows)
        self.started = True

    def restart(self, known: torch.Tensor, sent: torch.Tensor, pace: torch.Tensor) -> None:
        """Take this rank's own row, encoded, and what it stood for, from :meth:`state`.

        The rows of the other ranks are to be written to ``wire`` before the next gather.
        """
        self.wire[self.own].copy_(known)
        self.sent.copy_(sent)
        self.pace.copy_(pace[:-1])
        self.reductions = int(pace[-1])
        self.started, self._owed = True, None

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of what :meth:`restart` takes: ``kept``, ``sent`` and ``pace``."""
        sent = self.sent.clone()
        if self._owed is not None and _any_whole(self._told(self._owed)):
            # Equal to nothing: whoever continues finds that it has changed, not by training.
            sent.fill_(math.nan)
        reductions = self.pace.new_full((1,), self.reductions)
        return {
            "kept": self.wire[self.own].clone(),
            "sent": sent,
            "pace": torch.cat((self.pace, reductions)),
        }

    def read(self, rows: torch.Tensor) -> None:
        """Write the weights that are kept to ``rows`` (num_ranks, numel)."""
        decode_rows(self.wire, self.layout, rows)

    def outgoing(
        self, values: torch.Tensor, reductions: int, looks: bool
    ) -> tuple[torch.Tensor, int | torch.Tensor]:
        """What to send of this rank's ``values`` (numel,), and the mark of its row.

        Args:
            reductions: of gradients so far. Values that change without one between were not
                changed by an optimizer.
            looks: whether the host will look at the marks, for the mark.
        """
        change = pool.take(values.numel(), values.dtype, values.device)
        before = self.wire[self.own]
        difference_rows(values, self.layout, before, self.sent, change, self._stats)
        for part in self._plain:  # raw, so `change` holds the values themselves
            _subtract_raw(change, before, self.layout, part)
        if self._plain:
            self._stats_of_plain(change, values)
        trained, self.reductions = reductions != self.reductions, reductions
        decide = self._decide_here if self.on_host else self._decide
        return change, decide(change, trained) + LOOKED * looks

    def _decide_here(self, change: torch.Tensor, trained: bool) -> int:
        """On the host: whether the row is to travel whole; a row that has not changed is zero."""
        stats, pace = self._stats.tolist(), self.pace.tolist()
        if not any(stats[row][2] or stats[row][3] for row in self._rows):
            for part in self._differences:
                change[part] = 0
            return 0
        whole = 0
        for index, (row, limit) in enumerate(zip(self._rows, self._limits, strict=True)):
            moved, norm = math.sqrt(stats[row][0]), math.sqrt(stats[row][1])
            share = moved / norm if norm else math.inf * moved
            usual = not pace[index] or share <= _FASTER * pace[index]
            step = trained and share <= _LEAP and usual
            whole |= share > limit and not step
            if trained and 0 < share <= _LEAP:
                pace[index] = share
        self.pace.copy_(torch.tensor(pace, dtype=torch.float64))
        return int(whole)

    def _decide(self, change: torch.Tensor, trained: bool) -> torch.Tensor:
        """The same on the device: a 0-dimensional int64."""
        stats = self._stats[self._rows_there]
        changed = (stats[:, 2:] != 0).any()
        for part in self._differences:  # what has not changed is finite
            change[part] *= changed
        share = (stats[:, 0] / stats[:, 1]).sqrt().nan_to_num(nan=0.0, posinf=math.inf)
        step = (share <= _LEAP) & ((self.pace == 0) | (share <= _FASTER * self.pace)) & trained
        whole = ((share > self._limits_there) & ~step).any() & changed
        if trained:
            paced = (share > 0) & (share <= _LEAP) & changed
            torch.where(paced, share, self.pace, out=self.pace)
        return whole.long()

    def _stats_of_plain(self, change: torch.Tensor, values: torch.Tensor) -> None:
        """Of what is kept as it is gathered, for which the kernels take no differences."""
        for row, span in enumerate(self.layout.spans):
            if span.segment.quantizer is None and span.segment.numel:
                part, finite = change[span.values].double(), change[span.values].isfinite()
                self._stats[row, 0] = part.square().sum()
                self._stats[row, 1] = values[span.values].double().square().sum()
                self._stats[row, 3] = (~finite).sum()

    def arrived(self, rows: torch.Tensor) -> None:
        """Take what :meth:`outgoing` gave on all ranks: ``rows`` (num_ranks, numel) become weights.

        Blocks without differences stay as they are, bit for bit.
        """
        for part in self._plain:
            for row, known in zip(rows, self.wire, strict=True):
                row[part] += _finite(_raw(known, self.layout, part))
        accumulate_rows(rows, self.layout, self.wire, self._spare)
        self.wire, self._spare = self._spare, self.wire

    def to_renew(self, marks: torch.Tensor, looks: bool) -> list[bool] | None:
        """Which rows are to travel whole now, before anybody computes with them; None if none are.

        Equal on all ranks, without a word between their hosts. On CPUs, and on an accelerator where
        every rank's host has noticed that weights may have changed otherwise than by an optimizer
        (:class:`qsdp.watch.Watch`), the hosts look at the marks. In all other cases they look at
        the next gather, when the marks have long arrived and cost no waiting: rows travel then.

        Args:
            marks: (num_ranks,) int64, of all rows of this gather.
            looks: as given to :meth:`outgoing`.
        """
        owed, self._owed = self._owed, None
        due = [bool(mark & WHOLE) for mark in self._told(owed)] if owed else None
        if due is not None and not any(due):
            due = None
        if not looks:
            self._owed = self._tell(marks)
            return due
        now = marks.tolist()
        if not all(mark & LOOKED for mark in now):
            self._owed = self._tell(marks)
            return due
        if not _any_whole(now):
            return due
        return [bool(mark & WHOLE) or bool(due and due[i]) for i, mark in enumerate(now)]

    def renew(self, whole: Sequence[bool]) -> None:
        """Put this rank's row into ``wire`` anew if it is to travel whole; the others' stay."""
        if whole[self.own]:
            row = self.wire[self.own : self.own + 1]
            encode_rows(self.sent.view(1, -1), self.layout, row, key=0)

    def _tell(self, marks: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Send marks to the host, which does not wait for them."""
        if marks.device.type == "cpu":
            return marks.clone(), None
        there = torch.empty(marks.shape, dtype=marks.dtype, pin_memory=True)
        there.copy_(marks, non_blocking=True)
        return there, torch.cuda.current_stream().record_event()

    def _told(self, owed: tuple[torch.Tensor, torch.cuda.Event | None]) -> list[int]:
        marks, event = owed
        if event is not None:
            event.synchronize()
        told: list[int] = marks.tolist()
        return told


class Residuals:
    """What quantization lost of each parameter, to be added to what is quantized next.

    By name, so that it does not matter which parameters are reduced together, and how often.
    """

    def __init__(self) -> None:
        self._of: dict[str, torch.Tensor] = {}
        self._together: dict[tuple[str | None, ...], torch.Tensor] = {}

    def together(
        self, names: tuple[str | None, ...], layout: WireLayout, num_rows: int, device: torch.device
    ) -> torch.Tensor:
        """Residuals of segments that are quantized as one: (num_rows, layout.numel) float32.

        The result is remembered, and changed in place by whoever quantizes.

        Args:
            names: of the segments; None for those that take no feedback, whose part is zero.
        """
        flat = self._together.get(names)
        if flat is None or flat.shape != (num_rows, layout.numel):
            # Sets that overlap are those of before: DDP rebuilds its buckets, layers come and go.
            mine = {name for name in names if name is not None}
            self._together = {k: v for k, v in self._together.items() if not mine & {*k}}
            with torch.inference_mode(False):
                flat = torch.zeros(num_rows, layout.numel, device=device)
            self._together[names] = flat
            for name, span in zip(names, layout.spans, strict=True):
                if name is None:
                    continue
                part = flat[:, span.values]
                known = self._of.get(name)
                if known is not None and known.shape == part.shape:
                    part.copy_(known)
                self._of[name] = part
        for name, span in zip(names, layout.spans, strict=True):
            if name is None:
                flat[:, span.values] = 0
        return flat

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of each parameter's residual, (num_rows, numel) float32."""
        return {name: part.clone() for name, part in self._of.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Continue with copies of what :meth:`state` gave; parameters it lacks start from zero."""
        self._together.clear()
        self._of = {name: part.clone() for name, part in state.items()}


def _joined(parts: Iterable[slice]) -> list[slice]:
    """Slices in order, neighbours as one, empty ones left out."""
    joined: list[slice] = []
    for part in parts:
        if part.start == part.stop:
            continue
        if joined and joined[-1].stop == part.start:
            part = slice(joined.pop().start, part.stop)
        joined.append(part)
    return joined


def _any_whole(marks: Iterable[int]) -> bool:
    return any(mark & WHOLE for mark in marks)


def _raw(row: torch.Tensor, layout: WireLayout, part: slice) -> torch.Tensor:
    """The values of segments in full precision that lie together, in an encoded row."""
    start = next(
        span.data_offset
        for span in layout.spans
        if span.segment.quantizer is None and span.segment.numel and span.values.start == part.start
    )
    size = (part.stop - part.start) * layout.dtype.itemsize
    return row[start : start + size].view(layout.dtype)


def _subtract_raw(
    change: torch.Tensor, before: torch.Tensor, layout: WireLayout, part: slice
) -> None:
    change[part] -= _finite(_raw(before, layout, part))


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Zeros in place of what is not finite."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
