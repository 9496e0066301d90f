"""One rank of many on torch's fake process group, which sends nothing.

A rank does all the work of its step, collectives apart: what it would get from others is a copy of
its own. So times, launches, memory and host synchronisations show on one GPU; losses mean nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import qsdp

RANK = 1  # not the first, which could be special
# By name in torch 2.11 and in 2.13; output and input come first.
_REDUCE = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else ""
_EXCHANGES = ("all_to_all_single", "all_to_all", _REDUCE or "reduce_scatter_tensor")


@contextmanager
def fake_ranks(num_ranks: int = 8) -> Iterator[None]:
    """A default group of this many ranks, this process one of them, while this lasts."""
    dist.init_process_group("fake", rank=RANK, world_size=num_ranks, store=FakeStore())
    try:
        with ExitStack() as stack:
            for name in _EXCHANGES:
                if not _writes(getattr(dist, name), num_ranks):
                    writing = _writing(getattr(dist, name))
                    stack.enter_context(mock.patch.object(dist, name, writing))
            yield
    finally:
        dist.destroy_process_group()


def _writes(exchange: Callable[..., Any], num_ranks: int) -> bool:
    """torch 2.11 leaves the output of some collectives as it was: noise, which may be NaN."""
    output, input = torch.zeros(num_ranks), torch.ones(num_ranks)
    if exchange.__name__ == "all_to_all":
        exchange(list(output), list(input))
    else:
        exchange(output if exchange.__name__ == "all_to_all_single" else output[:1], input)
    return bool(output.any())


def _writing(exchange: Callable[..., Any]) -> Callable[..., Any]:
    def writing(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        work = exchange(output, input, *args, **kwargs)
        both = ([output], [input]) if isinstance(output, torch.Tensor) else (output, input)
        for to, source in zip(*both, strict=True):
            count = min(to.numel(), source.numel())
            to.view(-1)[:count].copy_(source.view(-1)[:count])
        return work

    return writing


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for the device, by operator: on CPU, where nothing waits."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        indices = args[1] if name.startswith("index") and len(args) > 1 else ()
        masks = [i for i in indices or () if isinstance(i, torch.Tensor) and i.dtype == torch.bool]
        if name in self.NAMES or (masks and isinstance(indices, list | tuple)):
            self.found[f"{name} in {_caller()}"] += 1
        return func(*args, **kwargs or {})


def _caller() -> str:
    """The innermost line of qsdp that is running, or of this benchmark."""
    ours = str(Path(qsdp.__file__).parent)
    frame = sys._getframe(2)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
