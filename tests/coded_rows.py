"""Coded rows of any density, sound and damaged: both backends agree. Also fuzzed, sanitized."""

from __future__ import annotations

import random

import torch

from qsdp import Quantizer
from qsdp.kernels import coded, cpu_coded, reference
from qsdp.wire import Segment, WireLayout, wire_layout

CODINGS = ("elias", "rice")


def form(coding: str, bits: int = 4, block_size: int = 32, rounding: str = "nearest") -> Quantizer:
    return Quantizer(bits, block_size, rounding, scaling="symmetric", coding=coding)  # type: ignore[arg-type]


def layout_of(*segments: Segment, mark: bool = False) -> WireLayout:
    return wire_layout(segments, torch.float32, checksum=True, mark=mark)


def row_of(layout: WireLayout, integers: list[torch.Tensor]) -> torch.Tensor:
    """A row with noise where nothing is coded."""
    row = torch.randint(0, 256, (layout.row_bytes,), dtype=torch.uint8)
    for span, values in zip(layout.coded_spans, integers, strict=True):
        at = 0
        for block in coded.blocks_of(span):
            codes = (values[at : at + block.numel] + block.top).to(torch.uint8)
            row[block.place] = reference.pack(codes, block.bits)
            at += block.numel
    return row


def random_row(chance: random.Random) -> tuple[WireLayout, torch.Tensor]:
    """A layout of one to three segments, and a row whose integers are of any density and size."""
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    segments, integers = [], []
    for _ in range(chance.randint(1, 3)):
        quantizer = form(chance.choice(CODINGS), chance.randint(2, 8), 32 * chance.randint(1, 12))
        numel = chance.choice((1, 31, 40, 384, chance.randint(0, 900)))
        top = quantizer.steps // 2
        values = torch.randn(numel, generator=generator) * top * 2.0 ** chance.uniform(-9, 1)
        if chance.random() < 0.3:
            values *= torch.rand(numel, generator=generator) < chance.random() ** 2
        segments.append(Segment(numel, quantizer))
        if numel:
            integers.append(values.round().clamp(-top, top).long())
    if chance.random() < 0.5:
        segments.insert(chance.randint(0, len(segments)), Segment(chance.randint(0, 9)))
    layout = layout_of(*segments)
    return layout, row_of(layout, integers)


def check_row(layout: WireLayout, row: torch.Tensor, chance: random.Random) -> None:
    """Both backends write the same bytes, read them, and agree on damaged ones."""
    if not layout.coded_spans:
        return
    ours, theirs = (torch.zeros(layout.capacity, dtype=torch.uint8) for _ in range(2))
    length = coded.compact(row, layout, ours)
    assert cpu_coded.compact(row, layout, theirs) == length
    assert torch.equal(ours[:length], theirs[:length])
    blocks = sum(span.segment.num_blocks for span in layout.coded_spans)
    assert length <= 8 + layout.row_bytes + 2 * blocks, "never larger than fixed plus two bytes"
    for expand in (coded.expand, cpu_coded.expand):
        back = torch.full_like(row, 0x5A)
        assert expand(ours[:length].clone(), layout, back) and torch.equal(back, row)
    check_damaged(layout, ours[:length].clone(), chance)


def check_damaged(layout: WireLayout, content: torch.Tensor, chance: random.Random) -> None:
    """Bits flipped behind the length, or bytes cut off: the same row, or the same refusal."""
    for _ in range(chance.choice((1, 1, 3, 20))):
        content[chance.randrange(8, len(content))] ^= 1 << chance.randrange(8)
    if chance.random() < 0.1:
        content = content[: chance.randrange(8, len(content) + 1)].clone()
        content[:8].view(torch.int64)[0] = len(content)
    rows = [torch.zeros(layout.row_bytes, dtype=torch.uint8) for _ in range(2)]
    sound = [
        expand(content, layout, row)
        for expand, row in zip((coded.expand, cpu_coded.expand), rows, strict=True)
    ]
    assert sound[0] == sound[1]
    assert not sound[0] or torch.equal(*rows)
