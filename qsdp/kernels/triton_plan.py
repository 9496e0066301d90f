"""What the Triton backend launches for a layout, and the tables that its programs read.

[Note: programs and spans] One launch covers all rows and all segments of one *format* (all fields
of a quantizer but its table of levels). A program handles a *run* of a segment: some whole blocks,
or a piece of full precision. Two tables on the device tell it which: ``programs`` has for each
program the line of ``spans`` that it belongs to, and ``spans`` has a line for each segment. So a
program costs four bytes, however many there are, and a table is made in a few tensor operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from qsdp.kernels.blocks import level_thresholds
from qsdp.quantizer import Quantizer
from qsdp.wire import ZERO_GROUP, Segment, Span, WireLayout, code_bytes

WARP_VALUES = 1024  # 32 a thread, 16 where a warp has 64
MAX_TILE = 4096  # larger blocks are read twice
MAX_ALIGNMENT = 16
MAP_VALUES = 8 * ZERO_GROUP  # that share a byte of a map of zeros
MAP_RUN = 4096  # values of a program that does maps alone
# Columns of `spans`: first program, values, value offset, meta offset, data offset, segment,
# levels, map offset, meta padding.
COLUMNS = 9
# Others would be taken for nearest.
KNOWN_ROUNDINGS = ("nearest", "stochastic", "shift", "dither")

_MAX_PLANS = 1024


@dataclass(frozen=True)
class Format:
    """What a kernel is specialised for, a compile-time argument of its own.

    The quantizer without its table of levels, which is data, and what follows from it. Device code
    reads fields only, no properties: Triton keeps compiled kernels on disk by the values of the
    fields and the source of the device code, and would not notice that a property had changed.
    """

    quantizer: Quantizer
    tile: int  # lanes for one block, or for a piece of it
    tiles: int  # to a block
    blocks: int  # whole blocks of a program
    levels: bool
    steps: int  # from a block's lowest point to its highest
    symmetric: bool
    meta_bytes: int  # of a scale or an offset
    ahead: bool  # whether a sum loads several rows before it decodes the first of them
    hashed: int = field(init=False, repr=False, compare=False)  # Triton hashes it at every launch

    def __post_init__(self) -> None:
        values = (self.quantizer, self.tile, self.blocks, self.levels)
        object.__setattr__(self, "hashed", hash(values))

    def __hash__(self) -> int:
        return self.hashed

    @property
    def run(self) -> int:
        """Values of a program."""
        return self.blocks * self.quantizer.block_size

    @property
    def has_map(self) -> bool:
        """Whether zeros need a map to arrive as zeros."""
        return self.levels or not self.quantizer.keeps_zeros

    @property
    def maps_itself(self) -> bool:
        """Whether a run is whole bytes of a map, and its lanes are in order without gaps."""
        size = self.quantizer.block_size
        return size == self.tile or (self.blocks == 1 and size % MAP_VALUES == 0)


@dataclass(frozen=True)
class Launch:
    """One format's programs; the first ``num_raw`` are of full precision.

    Alignments are the largest powers of two, up to 16, that divide all offsets in a row.
    """

    num_programs: int
    num_raw: int
    programs: torch.Tensor  # (num_programs,) int32
    spans: torch.Tensor  # (num_spans, COLUMNS) int64
    thresholds: torch.Tensor  # int32, of all level tables of the format, one after another
    levels: torch.Tensor  # float32, likewise
    value_alignment: int
    code_alignment: int
    tiles: int
    first_partial: int  # where this launch's partial sums begin; see triton_update.py
    # Compile-time arguments and options of kernels: those that encode, and those that only decode,
    # without the rounding where that does not matter; both with and without maps.
    encode_options: dict[str, Any]
    decode_options: dict[str, Any]
    update_options: dict[str, Any]
    difference_options: dict[str, Any]


@dataclass(frozen=True)
class Maps:
    """Programs for maps of zeros that the kernels of their format do not handle themselves."""

    num_programs: int
    programs: torch.Tensor
    spans: torch.Tensor


@dataclass(frozen=True)
class Plan:
    """All launches for a layout on a device."""

    layout: WireLayout
    launches: tuple[Launch, ...]
    maps: Maps | None
    partials: torch.Tensor  # (number of segments, 2) int64: first partial sum of each, how many
    num_partials: int
    num_spans: int

    def without_programs(self) -> Plan:
        """The same with nothing to do: what launches it compiles and loads the same kernels."""
        idle = tuple(replace(launch, num_programs=0) for launch in self.launches)
        maps = self.maps and replace(self.maps, num_programs=0)
        return replace(self, launches=idle, maps=maps, num_spans=0)


class Pair(NamedTuple):
    """Two launches of the same programs, for changes and for what is kept, that become one.

    With the options of kernels that decode what is kept and encode changes, and that decode changes
    and encode what is kept.
    """

    changes: Launch
    kept: Launch
    encode_options: dict[str, Any]
    add_options: dict[str, Any]


@dataclass(frozen=True)
class PairPlan:
    """All launches for a layout of changes and one of what is kept: see :func:`pair_plan_for`."""

    layouts: tuple[WireLayout, WireLayout]
    pairs: tuple[Pair, ...]
    partials: torch.Tensor
    num_partials: int
    num_spans: int

    def without_programs(self) -> PairPlan:
        """As :meth:`Plan.without_programs`."""
        idle = (p._replace(changes=replace(p.changes, num_programs=0)) for p in self.pairs)
        return replace(self, pairs=tuple(idle), num_spans=0)


# By identity: hashing a layout costs more than launching. A plan keeps its layouts alive, so an id
# is not used again while it is in here.
_plans: dict[tuple[int, torch.device], Plan] = {}
_pair_plans: dict[tuple[int, int, torch.device], tuple[Any, PairPlan | None]] = {}


def plan_for(layout: WireLayout, device: torch.device) -> Plan:
    """The plan for a layout, made once; its tables are copied to ``device`` then."""
    plan = _plans.get((id(layout), device))
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[id(layout), device] = _plan(layout, device)
    return plan


def _plan(layout: WireLayout, device: torch.device) -> Plan:
    launches, partials, num_partials = _launches((layout,), device)
    return Plan(
        layout,
        tuple(launch for (launch,) in launches),
        _maps(layout, device),
        partials,
        num_partials,
        len(layout.spans),
    )


def pair_plan_for(
    layout: WireLayout, kept_layout: WireLayout, device: torch.device
) -> PairPlan | None:
    """The plan for changes of ``layout`` to what is kept in ``kept_layout``, made once; None if
    some of them cannot be encoded and added in one pass: see :func:`in_one_pass`.
    """
    key = id(layout), id(kept_layout), device
    layouts = layout, kept_layout
    if key not in _pair_plans:
        if len(_pair_plans) >= _MAX_PLANS:
            _pair_plans.clear()
        fits = all(map(in_one_pass, layout.segments, kept_layout.segments))
        plan = _pair_plan(layouts, device) if fits and not any(layout.zero_maps) else None
        _pair_plans[key] = layouts, plan
    return _pair_plans[key][1]


def in_one_pass(segment: Segment, kept: Segment) -> bool:
    """Whether changes of a segment are encoded from what is kept of it, and added to it, while they
    are in registers: if runs of both are the same values in the same lanes.

    They are if blocks are of one size, or all sizes are powers of two up to ``WARP_VALUES``, and no
    block is larger than ``MAX_TILE``. What is in full precision has to be so in both.
    """
    quantizers = segment.quantizer, kept.quantizer
    if None in quantizers or not segment.numel:
        return not segment.numel or quantizers == (None, None)
    one, other = (format_of(each.format) for each in (segment, kept))
    size, lanes = one.quantizer.block_size, one.blocks * one.tile
    return (
        one.tiles == other.tiles == 1
        and (one.run, lanes) == (other.run, other.blocks * other.tile)
        and (size == other.quantizer.block_size or one.run == lanes)
        and "l2" not in (one.quantizer.scaling, other.quantizer.scaling)
    )


def _pair_plan(layouts: tuple[WireLayout, WireLayout], device: torch.device) -> PairPlan:
    launches, partials, num_partials = _launches(layouts, device)
    pairs = []
    for changes, kept in launches:
        formats = changes.encode_options["FORMAT"], kept.encode_options["FORMAT"]
        # Drawn bits leave no registers for the rest.
        drawn = any(format_.quantizer.rounding == "dither" for format_ in formats)
        num_warps = changes.encode_options["num_warps"] * (1 + drawn)
        options = {"num_warps": num_warps, "enable_fp_fusion": False}
        encode = {"CHANGE": formats[0], "FORMAT": decode_format(formats[1]), **options}
        add = {"CHANGE": decode_format(formats[0]), "FORMAT": formats[1], **options}
        pairs.append(Pair(changes, kept, encode, add))
    return PairPlan(layouts, tuple(pairs), partials, num_partials, len(layouts[0].spans))


def _launches(
    layouts: tuple[WireLayout, ...], device: torch.device
) -> tuple[list[tuple[Launch, ...]], torch.Tensor, int]:
    """Launches for layouts of the same segments, a tuple for each combination of formats; where
    partial sums of each segment are, (number of segments, 2); and how many there are.
    """
    groups: dict[tuple[Format, ...], list[int]] = {}
    raw: list[int] = []
    for index, segments in enumerate(zip(*(layout.segments for layout in layouts), strict=True)):
        if segments[0].numel and segments[0].quantizer is None:
            raw.append(index)
        elif segments[0].numel:
            groups.setdefault(tuple(format_of(s.format) for s in segments), []).append(index)
    if raw and not groups:
        groups[(format_of(Quantizer()),) * len(layouts)] = []
    launches: list[tuple[Launch, ...]] = []
    partials, num_partials = [[0, 0]] * len(layouts[0].spans), 0
    for formats, indices in groups.items():
        made = [
            _launch(layout, format_, raw, indices, num_partials, device)
            for layout, format_ in zip(layouts, formats, strict=True)
        ]
        for index, count in zip((*raw, *indices), made[0][1], strict=True):
            partials[index] = [num_partials, count * formats[0].tiles]
            num_partials += count * formats[0].tiles
        launches.append(tuple(launch for launch, _ in made))
        raw = []
    return launches, torch.tensor(partials, dtype=torch.int64).to(device), num_partials


@lru_cache(maxsize=1024)
def format_of(quantizer: Quantizer) -> Format:
    """Raises NotImplementedError for a rounding that the device code does not know."""
    if quantizer.rounding not in KNOWN_ROUNDINGS:
        raise NotImplementedError(
            f"the Triton kernels know rounding {', '.join(KNOWN_ROUNDINGS)}, not "
            f"{quantizer.rounding!r}: extend qsdp/kernels/triton_encode.py and _decode"
        )
    tile = min(int(triton.next_power_of_2(quantizer.block_size)), MAX_TILE)
    return Format(
        replace(quantizer, levels=None),
        tile=tile,
        tiles=-(-quantizer.block_size // tile),
        blocks=max(WARP_VALUES // tile, 1),
        levels=quantizer.levels is not None,
        steps=quantizer.steps,
        symmetric=quantizer.symmetric,
        meta_bytes=2 if quantizer.scale_dtype == "bfloat16" else 4,
        # Drawing the bits of dither again leaves no registers for that in many bits.
        ahead=quantizer.rounding != "dither" or quantizer.bits <= 4,
    )


def _launch(
    layout: WireLayout,
    format_: Format,
    raw: list[int],
    indices: list[int],
    first_partial: int,
    device: torch.device,
) -> tuple[Launch, list[int]]:
    """A launch, and how many programs each of its segments has, full precision first."""
    itemsize = layout.dtype.itemsize
    lines, counts, num_raw = [], [], 0
    for index in raw:
        span, run = layout.spans[index], format_.blocks * format_.tile
        counts.append(-(-span.segment.numel // run))
        line = [span.segment.numel, span.value_offset, 0, span.data_offset // itemsize]
        lines.append([num_raw, *line, index, 0, 0, 0])
        num_raw += counts[-1]
    tables: dict[tuple[float, ...], int] = {}  # and where each begins
    first = num_raw
    for index in indices:
        span = layout.spans[index]
        levels, at = span.segment.format.levels, len(tables) << format_.quantizer.bits
        levels_at = tables.setdefault(levels, at) if levels else 0
        zeros = layout.zero_maps[index] if layout.zero_maps else None
        map_at = zeros.start if zeros is not None else 0
        counts.append(-(-span.segment.numel // format_.run))
        lines.append([first, *_span_line(span, index, levels_at, map_at)])
        first += counts[-1]
    quantized = [layout.spans[index] for index in indices]
    # Whole runs are multiples of these apart.
    run_bytes = format_.blocks * code_bytes(format_.quantizer.block_size, format_.quantizer.bits)
    thresholds = [[*level_thresholds(table).tolist(), 0] for table in tables]
    num_warps = format_.blocks * format_.tile // WARP_VALUES
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": False}
    # These hold more in registers: half of the values a thread.
    wider = options | {"num_warps": 2 * num_warps}
    maps = any(layout.zero_maps) and format_.has_map and format_.maps_itself
    decoding = {"FORMAT": decode_format(format_), **options}
    launch = Launch(
        first,
        num_raw,
        _programs(counts, device),
        torch.tensor(lines, dtype=torch.int64).to(device),
        torch.tensor(thresholds, dtype=torch.int32).to(device),
        torch.tensor(list(tables), dtype=torch.float32).to(device),
        math.gcd(MAX_ALIGNMENT, format_.run, *(span.value_offset for span in quantized)),
        math.gcd(MAX_ALIGNMENT, run_bytes, *(span.data_offset for span in quantized)),
        format_.tiles,
        first_partial,
        {"FORMAT": format_, "MAPS": maps, **options},
        {"MAPS": maps, **decoding},
        {"FORMAT": format_, **wider},
        decoding | wider,
    )
    return launch, counts


def decode_format(format_: Format) -> Format:
    """The same for all roundings that the decoder does not have to know."""
    if format_.quantizer.rounding == "dither":
        return format_
    return _as_nearest(format_)


@lru_cache(maxsize=1024)
def _as_nearest(format_: Format) -> Format:
    return replace(format_, quantizer=replace(format_.quantizer, rounding="nearest"))


def _span_line(span: Span, index: int, levels_at: int, map_at: int) -> list[int]:
    """A quantized segment's line of ``spans`` but for the first program.

    The meta offset counts in numbers. The last column is how many numbers of padding follow the
    segment's last scale.
    """
    segment = span.segment
    number = segment.meta_dtype.itemsize
    padding = segment.meta_bytes // number - segment.num_blocks * segment.meta_numbers
    line = [segment.numel, span.value_offset, span.meta_offset // number, span.data_offset]
    return [*line, index, levels_at, map_at, padding]


def _maps(layout: WireLayout, device: torch.device) -> Maps | None:
    lines, counts, first = [], [], 0
    for span, place in zip(layout.spans, layout.zero_maps, strict=bool(layout.zero_maps)):
        if place is None or format_of(span.segment.format).maps_itself:
            continue
        lines.append([first, span.segment.numel, span.value_offset, 0, 0, 0, 0, place.start, 0])
        counts.append(-(-span.segment.numel // MAP_RUN))
        first += counts[-1]
    if not lines:
        return None
    spans = torch.tensor(lines, dtype=torch.int64).to(device)
    return Maps(first, _programs(counts, device), spans)


def _programs(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """The line of each program: line i for ``counts[i]`` programs."""
    lines = torch.arange(len(counts), dtype=torch.int32)
    return lines.repeat_interleave(torch.tensor(counts, dtype=torch.int64)).to(device)
