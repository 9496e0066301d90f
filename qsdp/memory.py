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
from qsdp.rows import accumulate_rows, decode_rows, encode_rows
from qsdp.wire import Segment, WireLayout, wire_layout

_LOOK = 1024  # values of a row that nearly always tell whether it has changed
# Of the error that a row has anyway, by being kept in few bits: what a change may add. Together
# sqrt(1 + 0.3^2), less than a twentieth more.
_TOLERANCE = 0.3
_KEPT_STEPS = 255  # as for 8 bits, where weights are kept as they are gathered
_LEAP = 0.3  # of a parameter's norm: no optimizer step changes it by so much
_FASTER = 3.0  # than the step before: nor by so many times more


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
    loaded, averaged, made anew), a row is to travel whole once more: :meth:`outgoing` says so.

    Args:
        keeping: how each segment of a row is kept, in order.
        dtype: of the weights.
        num_ranks: rows.
        own: which of them is this rank's.
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
        self.num_ranks, self.own, self.started = num_ranks, own, False
        spans = [(s, k.differences) for s, k in zip(self.layout.spans, keeping, strict=True)]
        pairs = zip(self.layout.spans, keeping, strict=True)
        self._limits = [(s.values, k.limit) for s, k in pairs if k.differences and s.segment.numel]
        self._as_is = _joined(span.values for span, differs in spans if not differs)
        self._differences = _joined(span.values for span, differs in spans if differs)
        # Kept as they are gathered: there is no code to accumulate into.
        self._plain = _joined(
            span.values for span, differs in spans if differs and span.segment.quantizer is None
        )
        self._as_is_bytes = _joined(
            slice(span.data_offset, span.data_offset + self.layout.raw_bytes(span))
            for span, differs in spans
            if not differs
        )
        with torch.inference_mode(False):  # training goes on with it after an inference
            shape = num_ranks, self.layout.row_bytes
            self.wire = torch.zeros(shape, dtype=torch.uint8, device=device)
            # Another one, because accumulating reads the one while it writes the other.
            self._spare = torch.empty_like(self.wire)
            self.sent = torch.zeros(self.layout.numel, dtype=dtype, device=device)
            # Of each segment of differences its last change by training, as a share of its norm;
            # then how many reductions there had been.
            self.pace = torch.zeros(len(self._limits) + 1, dtype=torch.float64)

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
        """Take this rank's own row, encoded, and what it stood for, from a saved state.

        The rows of the other ranks are to be written to ``wire`` before the next gather.
        """
        self.wire[self.own].copy_(known)
        self.sent.copy_(sent)
        self.pace.copy_(pace)
        self.started = True

    def read(self, rows: torch.Tensor) -> None:
        """Write the weights that are kept to ``rows`` (num_ranks, numel)."""
        decode_rows(self.wire, self.layout, rows)

    def outgoing(self, values: torch.Tensor, reductions: int) -> tuple[torch.Tensor, bool]:
        """What to send of this rank's ``values`` (numel,), and whether they must travel whole too.

        Args:
            reductions: of gradients so far. Values that change without one between were not
                changed by an optimizer.
        """
        change = pool.take(values.numel(), values.dtype, values.device)
        decode_rows(self.wire[self.own : self.own + 1], self.layout, change.view(1, -1))
        _make_finite(change)
        torch.sub(values, change, out=change)
        # An infinity is equal to itself, but not known to the others.
        if torch.equal(values, self.sent) and bool(change.isfinite().all()):
            change.zero_()
            whole = False
        else:
            whole = self._is_too_much(change, values, reductions)
            self.sent.copy_(values)
        for part in self._as_is:
            change[part] = values[part]
        return change, whole

    def _is_too_much(self, change: torch.Tensor, values: torch.Tensor, reductions: int) -> bool:
        """Whether ``change`` is not an optimizer's, and too large for its few bits."""
        trained = reductions != int(self.pace[-1])
        self.pace[-1] = reductions
        too_much = False
        for index, (part, limit) in enumerate(self._limits):
            moved, norm = float(change[part].norm()), float(values[part].norm())
            share, pace = moved / norm if norm else math.inf * moved, float(self.pace[index])
            step = trained and share <= _LEAP and (not pace or share <= _FASTER * pace)
            too_much |= share > limit and not step
            if trained and 0 < share <= _LEAP:
                self.pace[index] = share
        return too_much

    def renew(self, whole: bool) -> None:
        """Put this rank's row into ``wire`` anew if it is to travel whole; the others' stay."""
        if whole:
            row = self.wire[self.own : self.own + 1]
            encode_rows(self.sent.view(1, -1), self.layout, row, key=0)

    def arrived(self, rows: torch.Tensor) -> None:
        """Take what :meth:`outgoing` gave on all ranks: ``rows`` (num_ranks, numel) become weights.

        A row without differences stays as it is, bit for bit.
        """
        changed, before = self._changed(rows), self.wire
        if self._plain:
            kept = torch.empty_like(rows)
            decode_rows(before, self.layout, kept)
            _make_finite(kept)
            for part in self._plain:
                rows[:, part] += kept[:, part]
        accumulate_rows(rows, self.layout, before, self._spare)
        self.wire, self._spare = self._spare, before
        # On CPUs it costs nothing to see that there is nothing to put back.
        if changed.device.type == "cpu" and changed.all():
            return
        # Encoding what was decoded may move a scale by its last bit.
        renewed = changed[:, None].expand_as(before).clone()
        for part in self._as_is_bytes:
            renewed[:, part] = True
        torch.where(renewed, self.wire, before, out=self.wire)
        decode_rows(self.wire, self.layout, rows)

    def _changed(self, rows: torch.Tensor) -> torch.Tensor:
        """(num_ranks,) bool: rows whose differences are not all zero."""
        parts = [rows[:, part] for part in self._differences]
        if rows.device.type != "cpu":
            return torch.stack([part.any(1) for part in parts]).any(0)
        return torch.tensor(
            [
                any(bool(part[row, :_LOOK].any()) for part in parts)
                or any(bool(part[row].any()) for part in parts)
                for row in range(len(rows))
            ]
        )


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


def _make_finite(values: torch.Tensor) -> None:
    """Zeros in place of what is not finite."""
    # A sum is finite only if all of its terms are, and reads without writing.
    if values.device.type != "cpu" or not values.sum().isfinite():
        torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0, out=values)
