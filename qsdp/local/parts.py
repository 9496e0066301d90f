"""Parts of a model that are synchronised together: their tensors, anchor and momentum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from qsdp.local.config import OuterStep, SyncConfig
from qsdp.wire import Segment, WireLayout, wire_layout

_WRAPPERS = ("module.", "_fsdp_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Entry:
    """One trained parameter, or one buffer.

    Attributes:
        name: without the prefixes of wrappers.
        names: all of them; tied parameters have several.
        tensor: the parameter itself, a DTensor where it is sharded.
    """

    name: str
    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds of it; changes to it change the parameter."""
        with torch.no_grad():
            tensor = self.tensor.detach()
            return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained_parameters(model: nn.Module) -> list[Entry]:
    """In the order of the model, tied ones once, frozen ones left out."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            names.setdefault(param, []).append(plain_name(name))
    return [Entry(found[0], tuple(found), param) for param, found in names.items()]


def float_buffers(model: nn.Module) -> list[Entry]:
    """Buffers of numbers that training may move: floating-point ones."""
    return [
        Entry(plain_name(name), (plain_name(name),), buffer)
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
    ]


def plain_name(name: str) -> str:
    """A parameter's name without what DDP and torch.compile put before it."""
    while any(name.startswith(prefix) for prefix in _WRAPPERS):
        name = next(name.removeprefix(p) for p in _WRAPPERS if name.startswith(p))
    return name


def digest(entries: Iterable[Entry]) -> str:
    """Of the bits that this rank holds: equal on replicas that start alike."""
    found = hashlib.sha256()
    for entry in entries:
        raw = entry.local.contiguous().view(-1)
        bits = raw.view(torch.int32 if raw.element_size() == 4 else torch.int16).long()
        # Integers, whose sums do not depend on an order; the second one sees places exchanged.
        places = torch.arange(1, bits.numel() + 1, device=bits.device)
        found.update(json.dumps([int(bits.sum()), int((bits * places).sum())]).encode())
    return found.hexdigest()[:16]


def divide(entries: Sequence[Entry], count: int) -> list[list[Entry]]:
    """``count`` runs of consecutive entries of about equal size, by unsharded elements.

    Equal on all ranks, because sizes are. Fewer where there are fewer entries.
    """
    total = sum(entry.tensor.numel() for entry in entries)
    runs: list[list[Entry]] = [[] for _ in range(count)]
    before = 0
    for entry in entries:
        middle = before + entry.tensor.numel() / 2
        runs[min(count - 1, int(middle * count / max(1, total)))].append(entry)
        before += entry.tensor.numel()
    return [run for run in runs if run]


class Part:
    """Entries that are synchronised together, in float32.

    Args:
        entries: with their tensors sharded, as between two steps.
        config: None for what is averaged as it is: differences in full precision, no outer step.

    Attributes:
        layout: of their values in one flat buffer.
        anchor: (numel,) float32, what all replicas had in common last; None where nothing needs it.
        momentum: (numel,) float32 of the outer step; None without.
    """

    def __init__(self, entries: Sequence[Entry], config: SyncConfig | None) -> None:
        self.entries = tuple(entries)
        segments = tuple(
            Segment(
                entry.local.numel(),
                None if config is None else config.quantizer_of(entry.names, entry.tensor.shape),
            )
            for entry in self.entries
        )
        checksum = config is not None and config.verify
        self.layout: WireLayout = wire_layout(segments, torch.float32, checksum)
        self.outer: OuterStep | None = config.outer if config is not None else None
        self.anchor: torch.Tensor | None = None
        self.momentum: torch.Tensor | None = None
        if config is None or config.needs_anchor:
            self.anchor = self.values()
            if self.outer is not None and self.outer.momentum:
                self.momentum = torch.zeros_like(self.anchor)

    @property
    def device(self) -> torch.device:
        return self.entries[0].local.device

    def memories(self) -> list[tuple[str, torch.Tensor]]:
        """Anchor and momentum, those that there are, each (numel,) float32, changed in place."""
        found = (("anchor", self.anchor), ("momentum", self.momentum))
        return [(kind, flat) for kind, flat in found if flat is not None]

    def values(self) -> torch.Tensor:
        """(numel,) float32: a copy of what this rank holds."""
        with torch.inference_mode(False), torch.no_grad():
            return torch.cat([entry.local.flatten().float() for entry in self.entries])

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        """(numel,) float32: what is to be averaged of :meth:`values`.

        By how far they are from the anchor as their dtype can hold it: what it cannot hold stays in
        the anchor instead of coming back as a move. Without an anchor the values themselves.
        """
        if self.anchor is None:
            return values
        return values - self._as_held(self.anchor)

    def arrive(self, average: torch.Tensor) -> torch.Tensor:
        """The weights that replicas have in common now, (numel,) float32; the anchor becomes them.

        Args:
            average: over replicas, of :meth:`moved`; equal on all of them, and so is the result.
        """
        if self.anchor is None:
            return average
        if self.outer is None:
            self.anchor += average
        else:
            move = average
            if self.momentum is not None:
                self.momentum.mul_(self.outer.momentum).add_(average)
                move = average + self.outer.momentum * self.momentum
            self.anchor.add_(move, alpha=self.outer.lr)
        return self.anchor

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Set what this rank holds to ``values``, (numel,) float32, rounded to its dtype."""
        for entry, span in zip(self.entries, self.layout.spans, strict=True):
            local = entry.local
            local.copy_(values[span.values].view(local.shape))

    def _as_held(self, values: torch.Tensor) -> torch.Tensor:
        """Values as they are once they were rounded to the dtypes of the entries."""
        if all(entry.tensor.dtype == torch.float32 for entry in self.entries):
            return values
        rounded = [
            values[span.values].to(entry.tensor.dtype).float()
            for entry, span in zip(self.entries, self.layout.spans, strict=True)
        ]
        return torch.cat(rounded)

    def split(self, flat: torch.Tensor, *, whole: bool = False) -> dict[str, torch.Tensor]:
        """Copies of a flat buffer's pieces by name; ``whole``: DTensors like the parameters."""
        found = {}
        for entry, span in zip(self.entries, self.layout.spans, strict=True):
            piece = flat[span.values].clone().view(entry.local.shape)
            tensor = entry.tensor
            if whole and isinstance(tensor, DTensor):
                piece = DTensor.from_local(
                    *(piece, tensor.device_mesh, tensor.placements),
                    run_check=False, shape=tensor.shape, stride=tensor.stride(),
                )  # fmt: skip
            found[entry.name] = piece
        return found

    def join(self, pieces: dict[str, torch.Tensor], flat: torch.Tensor) -> None:
        """Fill a flat buffer from what :meth:`split` gave."""
        for entry, span in zip(self.entries, self.layout.spans, strict=True):
            piece = pieces[entry.name]
            local = piece.to_local() if isinstance(piece, DTensor) else piece
            flat[span.values] = local.flatten().to(flat)
