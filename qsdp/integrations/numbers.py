"""Bytes, ratio and weight error of a running model, for the logs of a framework."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from qsdp import CommStats, comm_stats


class CommNumbers:
    """What this rank's communication did since the last look.

    Args:
        model: after :func:`qsdp.apply_qsdp`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last = comm_stats(model)
        self._meter = WeightErrorMeter(model)

    def watch(self) -> None:
        """Measure the weights of the forwards until the next :meth:`read`."""
        self._meter.start()

    def read(self) -> dict[str, float]:
        """``qsdp_sent_bytes`` since the last call, ``qsdp_ratio`` to stock for these bytes, and
        ``qsdp_weight_error`` if a forward was watched."""
        stats, last = comm_stats(self._model), self._last
        self._last = stats
        sent = stats.sent - last.sent
        ratio = (stats.stock_sent - last.stock_sent) / sent if sent else CommStats().ratio
        numbers = {"qsdp_sent_bytes": float(sent), "qsdp_ratio": ratio}
        error = self._meter.stop()
        return numbers if error is None else {**numbers, "qsdp_weight_error": error}


class WeightErrorMeter:
    """Relative L2 distance of the weights that a forward computes with from this rank's shards.

    A hook sees each FSDP module just after it was unsharded, so nothing is gathered for it. Layouts
    with more than one sharded dimension (tensor parallelism) are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        # FSDP2 puts other tensors in the place of the sharded ones and back: these stay the same.
        self._sharded = {
            (id(owner), name): param
            for owner in model.modules()
            for name, param in owner.named_parameters(recurse=False)
            if isinstance(param, DTensor)
        }
        self._hooks: list[RemovableHandle] = []
        self._seen: set[tuple[int, str]] = set()
        self._error = self._norm = 0.0

    def start(self) -> None:
        """Measure the next forward; earlier results are dropped."""
        self.stop()
        for module in self._modules:
            hook = partial(self._measure, module)
            self._hooks.append(module.register_forward_pre_hook(lambda *_, hook=hook: hook()))

    def stop(self) -> float | None:
        """The error, or None if nothing was measured."""
        for hook in self._hooks:
            hook.remove()
        error = (self._error / self._norm) ** 0.5 if self._norm else None
        self._hooks, self._seen, self._error, self._norm = [], set(), 0.0, 0.0
        return error

    @torch.no_grad()
    def _measure(self, module: nn.Module) -> None:
        for key, decoded in self._unsharded(module):
            self._seen.add(key)
            sharded = self._sharded[key]
            own = _own_part(decoded, sharded)
            if own is not None:
                exact = sharded.to_local().float()
                self._error += float((own.float() - exact).square().sum())
                self._norm += float(exact.square().sum())

    def _unsharded(self, module: nn.Module) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for owner in module.modules():
            for name, param in owner.named_parameters(recurse=False):
                key = (id(owner), name)
                known = key in self._sharded and key not in self._seen
                if known and not isinstance(param, DTensor):
                    yield key, param


def _own_part(whole: torch.Tensor, sharded: DTensor) -> torch.Tensor | None:
    """What of ``whole`` this rank holds in ``sharded``; None if that is not one plain shard."""
    dims = [i for i, placement in enumerate(sharded.placements) if placement.is_shard()]
    if len(dims) != 1 or whole.shape != sharded.shape:
        return None
    placement, mesh = sharded.placements[dims[0]], sharded.device_mesh
    assert isinstance(placement, Shard)
    chunks = whole.chunk(mesh.size(dims[0]), placement.dim)
    rank = mesh.get_local_rank(dims[0])
    return chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)
