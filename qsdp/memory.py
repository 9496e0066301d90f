"""What ranks remember of weights that travel as differences: :class:`KeptWeights`.

It says what to send and takes what arrived; what it remembers is plain tensors. Nothing here knows
of FSDP or of process groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from qsdp.kernels.changes import digest
from qsdp.quantizer import Quantizer
from qsdp.rows import (
    add_changes,
    decode_rows,
    encode_changes,
    encode_rows,
    finish_row,
    take_rows,
)
from qsdp.wire import WireLayout, seal

# Of the error that a row has anyway, by being kept in few bits: what a change may add. Together
# sqrt(1 + 0.3^2), less than a twentieth more.
_TOLERANCE = 0.3
_KEPT_STEPS = 255  # as for 8 bits, where weights are kept as they are gathered
_LEAP = 0.3  # of a parameter's norm: no optimizer step changes it by so much
_FASTER = 3.0  # than the step before: nor by so many times more

# Bits of the mark that a rank sends with its row.
WHOLE = 1  # differences are not right for it: it is to travel whole
LOOKED = 2  # this rank's host looks at the marks of all before it goes on


def largest_change(differences: Quantizer, kept: Quantizer | None) -> float:
    """The largest change, as a share of a segment's norm, that differences are right for.

    Errors of values of one shape are as their ranges over the number of steps.

    Args:
        differences: their format.
        kept: in which weights are kept.
    """
    kept_steps = (1 << kept.bits) - 1 if kept is not None else _KEPT_STEPS
    return _TOLERANCE * ((1 << differences.bits) - 1) / kept_steps


class KeptWeights:
    """The rows of weights that ranks decoded last, bit-identical on all that keep them (SDP4Bit).

    What a rank sends is what has changed since, the error of the row before included, so errors do
    not add up. A row that has not changed since it was last sent travels as zeros and stays as it
    is: all micro-batches and validations of a step see the same weights. What is not finite counts
    as zero when differences are taken: a difference to it would never be finite again.

    Few bits are right for the small changes of optimizer steps. After any other change (weights
    loaded, averaged, made anew), a row is to travel whole once more: its mark says so. On
    accelerators everything stays on the device; see :meth:`to_renew` for when the host looks.

    What is kept is the encoded rows, and of what was last sent a digest: no more than ``kept`` of
    :class:`qsdp.Differences` says.

    Args:
        layout: of a kept row, from :func:`qsdp.ways.kept_layout`; its mark is for the sender's.
        differences: of each segment, of which format the differences are that it travels as; None
            where it travels as it is.
        senders: the ranks of the group whose rows are kept: all of them, or where rows take two
            hops those with this rank's place in every node.
        rank: this one's.
        device: of the weights.
        offload: keep the rows in the host's memory, and copy them from there where they are used.

    Attributes:
        wire: (len(senders), layout.row_bytes) uint8.
        reductions: of gradients, up to the last row that was sent.
        pace: of each segment of differences its last change by training, as a share of its norm.
    """

    def __init__(
        self,
        layout: WireLayout,
        differences: Sequence[Quantizer | None],
        senders: range,
        rank: int,
        device: torch.device,
        offload: bool = False,
    ) -> None:
        self.layout = layout
        self.senders, self.rank, self.own = senders, rank, senders.index(rank)
        self.started, self.reductions, self.device = False, 0, device
        self.on_host = device.type != "cuda"  # where the host decides, at once
        kept_in = [segment.quantizer for segment in layout.segments]
        pairs = enumerate(zip(layout.segments, differences, strict=True))
        limits = {
            index: largest_change(quantizer, segment.quantizer)
            for index, (segment, quantizer) in pairs
            if quantizer is not None and segment.numel
        }
        self._rows, self._limits = list(limits), list(limits.values())
        # Kept as they are gathered: kernels take these as they are.
        self._plain = [index for index in limits if kept_in[index] is None]
        self._owed: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self._places_of: tuple[WireLayout, list[slice]] | None = None
        with torch.inference_mode(False):  # training goes on with it after an inference
            self.wire = _zeros((len(senders), self.layout.row_bytes), device, offload)
            self._stats = torch.zeros(len(kept_in), 4, dtype=torch.float64, device=device)
            self.digests = torch.full_like(self._stats[:, 0], math.nan)
            self._rows_there = torch.tensor(self._rows, dtype=torch.int64, device=device)
            self._limits_there = torch.tensor(self._limits, dtype=torch.float64, device=device)
            self.pace = torch.zeros_like(self._limits_there)

    def start(self, rows: torch.Tensor) -> None:
        """Keep the weights themselves: ``rows`` of all ranks become what is kept of them, in place.

        Args:
            rows: (num_ranks, numel).
        """
        for span, digest_ in zip(self.layout.spans, self.digests, strict=True):
            digest_.copy_(digest(rows[self.rank, span.values]))
        wire = take_rows(len(rows), self.layout, rows.device)
        encode_rows(rows, self.layout, wire, key=0)
        decode_rows(wire, self.layout, rows)
        self.refill(wire[self.senders.start : self.senders.stop : self.senders.step])
        self.started = True

    def restart(self, known: torch.Tensor, digests: torch.Tensor, pace: torch.Tensor) -> None:
        """Take this rank's own row, encoded, and what it stood for, from :meth:`state`.

        The rows of the other ranks are to come to :meth:`refill` before the next gather.
        """
        rows = self.rows()
        rows[self.own].copy_(known)
        self.refill(rows)
        self.digests.copy_(digests)
        self.pace.copy_(pace[:-1])
        self.reductions = int(pace[-1])
        self.started, self._owed = True, None

    def refill(self, wire: torch.Tensor) -> None:
        """Take kept rows of all senders (len(senders), layout.row_bytes), on the device."""
        if wire is not self.wire:
            self.wire.copy_(wire, non_blocking=True)

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of what :meth:`restart` takes: ``kept``, ``digests`` and ``pace``."""
        digests = self.digests.clone()
        if self._owed is not None and _any_whole(self._told(self._owed)):
            # Equal to nothing: whoever continues finds that it has changed, not by training.
            digests.fill_(math.nan)
        reductions = self.pace.new_full((1,), self.reductions)
        return {
            "kept": self.rows()[self.own].clone(),
            "digests": digests,
            "pace": torch.cat((self.pace, reductions)),
        }

    def rows(self) -> torch.Tensor:
        """What is kept, (len(senders), layout.row_bytes), on the device."""
        return self.wire.to(self.device, non_blocking=True)

    def read(self, rows: torch.Tensor) -> None:
        """Write the weights that are kept to ``rows`` (len(senders), numel)."""
        decode_rows(self.rows(), self.layout, rows)

    def outgoing(
        self,
        values: torch.Tensor,
        layout: WireLayout,
        row: torch.Tensor,
        key: int,
        reductions: int,
        looks: bool,
    ) -> int | torch.Tensor:
        """Encode what has changed of this rank's ``values`` (numel,) to ``row``; returns its mark.

        Args:
            layout: of changes.
            row: (layout.row_bytes,) uint8, written completely.
            key: of random rounding.
            reductions: of gradients so far. Values that change without one between were not
                changed by an optimizer.
            looks: whether the host will look at the marks, for the mark.
        """
        known = self.rows()[self.own]
        moved = self._without_plain(values, known) if self._plain else values
        encode_changes(
            moved, layout, row, known, self.layout, self._stats, key=key, sender=self.rank
        )
        if self._plain:
            self._stats_of_plain(moved, values)
        trained, self.reductions = reductions != self.reductions, reductions
        decide = self._decide_here if self.on_host else self._decide
        mark = decide(row, layout, trained) + LOOKED * looks
        self.digests.copy_(self._stats[:, 2])
        finish_row(row, layout, mark)
        return mark

    def _decide_here(self, row: torch.Tensor, layout: WireLayout, trained: bool) -> int:
        """On the host: whether the row is to travel whole; a row that has not changed is zero."""
        stats, pace, digests = self._stats.tolist(), self.pace.tolist(), self.digests.tolist()
        if not any(stats[i][2] != digests[i] or stats[i][3] for i in self._rows):
            for part in self._places(layout):
                row[part] = 0
            return 0
        whole = 0
        for index, (row_, limit) in enumerate(zip(self._rows, self._limits, strict=True)):
            moved, norm = math.sqrt(stats[row_][0]), math.sqrt(stats[row_][1])
            share = moved / norm if norm else math.inf * moved
            usual = not pace[index] or share <= _FASTER * pace[index]
            step = trained and share <= _LEAP and usual
            whole |= share > limit and not step
            if trained and 0 < share <= _LEAP:
                pace[index] = share
        self.pace.copy_(torch.tensor(pace, dtype=torch.float64))
        return int(whole)

    def _decide(self, row: torch.Tensor, layout: WireLayout, trained: bool) -> torch.Tensor:
        """The same on the device: a 0-dimensional int64."""
        stats, digests = self._stats[self._rows_there], self.digests[self._rows_there]
        changed = ((stats[:, 2] != digests) | (stats[:, 3] != 0)).any()
        for part in self._places(layout):
            row[part] *= changed
        share = (stats[:, 0] / stats[:, 1]).sqrt().nan_to_num(nan=0.0, posinf=math.inf)
        step = (share <= _LEAP) & ((self.pace == 0) | (share <= _FASTER * self.pace)) & trained
        whole: torch.Tensor = ((share > self._limits_there) & ~step).any() & changed
        if trained:
            paced = (share > 0) & (share <= _LEAP) & changed
            torch.where(paced, share, self.pace, out=self.pace)
        return whole.long()

    def _places(self, layout: WireLayout) -> list[slice]:
        """Where differences lie in a row, as few slices: each is a launch on an accelerator."""
        if self._places_of is None or self._places_of[0] is not layout:
            places = (part for index in self._rows for part in layout.places(layout.spans[index]))
            self._places_of = layout, _joined(places)
        return self._places_of[1]

    def _without_plain(self, values: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """A copy of values, what is kept of them as they are gathered taken off."""
        moved = values.clone()
        for index in self._plain:
            span = self.layout.spans[index]
            moved[span.values] -= _finite(self._raw(known, index))
        return moved

    def _stats_of_plain(self, moved: torch.Tensor, values: torch.Tensor) -> None:
        for index in self._plain:
            span, row = self.layout.spans[index], self._stats[index]
            change, finite = moved[span.values].double(), moved[span.values].isfinite()
            row[0], row[1] = change.square().sum(), values[span.values].double().square().sum()
            row[2], row[3] = digest(values[span.values]), (~finite).sum()

    def arrived(
        self, wire: torch.Tensor, layout: WireLayout, rows: torch.Tensor, ranks: Sequence[int]
    ) -> None:
        """Take what :meth:`outgoing` gave on all senders; what is kept then goes to ``rows``.

        Args:
            wire: (len(senders), layout.row_bytes) of changes. Blocks without changes stay as they
                are, bit for bit.
            rows: (len(senders), numel), written.
            ranks: the senders' global ranks, for errors.
        """
        kept = self.rows()
        before = [self._raw(kept, index).clone() for index in self._plain]
        add_changes(wire, layout, kept, self.layout, rows, self.senders, ranks)
        for index, raw in zip(self._plain, before, strict=True):
            part = self.layout.spans[index].values
            rows[:, part] += _finite(raw)
            self._raw(kept, index).copy_(rows[:, part])
        self.layout.marks(kept).copy_(layout.marks(wire))
        if self.layout.checksum:
            seal(kept)
        self.refill(kept)

    def due(self) -> list[bool] | None:
        """Which rows the marks of the gather before want to travel whole; None if none do."""
        owed, self._owed = self._owed, None
        due = [bool(mark & WHOLE) for mark in self._told(owed)] if owed else []
        return due if any(due) else None

    def may_travel_whole(
        self, mark: int | torch.Tensor, looks: bool, due: list[bool] | None
    ) -> bool:
        """Whether this rank's row may be one of those that :meth:`to_renew` is going to name."""
        if isinstance(mark, int):
            return bool(mark & WHOLE) or due is not None
        return looks or due is not None

    def to_renew(
        self, marks: torch.Tensor, looks: bool, due: list[bool] | None
    ) -> list[bool] | None:
        """Which rows are to travel whole now, before anybody computes with them; None if none are.

        Equal on all ranks, without a word between their hosts. On CPUs, and on an accelerator where
        every rank's host has noticed that weights may have changed otherwise than by an optimizer
        (:class:`qsdp.watch.Watch`), the hosts look at the marks. In all other cases they look at
        the next gather, when the marks have long arrived and cost no waiting: rows travel then.

        Args:
            marks: (num_ranks,) int64, of all rows of this gather.
            looks: as given to :meth:`outgoing`.
            due: what :meth:`due` gave before this gather.
        """
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

    def own_row(self, whole: Sequence[bool], values: torch.Tensor) -> torch.Tensor:
        """This rank's kept row (layout.row_bytes,), of its ``values`` anew if it is to be whole."""
        if not whole[self.rank]:
            return self.rows()[self.own]
        row = take_rows(1, self.layout, self.device)
        encode_rows(values.view(1, -1), self.layout, row, key=0)
        return row[0]

    def _raw(self, wire: torch.Tensor, index: int) -> torch.Tensor:
        """View: (..., numel) of a segment that is kept in full precision."""
        span = self.layout.spans[index]
        return self.layout.raw(wire, span).view(self.layout.dtype)

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


def _joined(parts: Iterable[slice]) -> list[slice]:
    """Slices sorted, neighbours as one, empty ones left out."""
    found: list[slice] = []
    for part in sorted(parts, key=lambda part: part.start):
        if part.start == part.stop:
            continue
        if found and found[-1].stop == part.start:
            part = slice(found.pop().start, part.stop)
        found.append(part)
    return found


def _any_whole(marks: Iterable[int]) -> bool:
    return any(mark & WHOLE for mark in marks)


def _zeros(shape: tuple[int, int], device: torch.device, offload: bool) -> torch.Tensor:
    """Bytes on the device, or in host memory from which the device copies without the host."""
    if offload and device.type == "cuda":
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=True)
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Zeros in place of what is not finite."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
