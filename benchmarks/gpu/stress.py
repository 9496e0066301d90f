"""Makes missing order between streams show: delays before kernels and exchanges, reused memory.

A kernel or an exchange that does not wait for what it reads gets the values of before only if the
other side is slow; memory that is freed too early is overwritten only if somebody takes it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.gpu.models import Block, GptBlock
from qsdp.kernels import Backend, backend_for

# At most: every second delay is none, the others are uniform up to this.
CYCLES = 2_000_000  # about a millisecond
SECONDS = 0.001
MIB = 1 << 20


class Stress:
    """Delays and allocations on a device, different ones at every call and in every thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._local = threading.local()

    def delay(self) -> None:
        """Keep the current stream busy; without streams, this thread."""
        share = max(0.0, self._random.uniform(-1, 1))
        if self.device.type == "cuda":
            torch.cuda._sleep(int(share * CYCLES) + 1)
        else:
            time.sleep(share * SECONDS)

    def churn(self, sizes: tuple[int, ...] = ()) -> None:
        """Take memory of these sizes and of others, fill it with NaN, and free it.

        In the current stream, whose freed blocks this gets, and in one of others.
        """
        others = [int(2 ** self._random.uniform(9, 22)) for _ in range(3)]
        _fill([*sizes, *sizes, *others], self.device)
        if self.device.type == "cuda":
            with torch.cuda.stream(self._random.choice(self._streams)):
                _fill(others, self.device)

    def before(self) -> None:
        """What comes before an exchange."""
        self.churn()
        self.delay()

    @property
    def _random(self) -> random.Random:
        if not hasattr(self._local, "random"):
            self._local.random = random.Random(threading.get_ident())
        return self._local.random

    @property
    def _streams(self) -> list[torch.cuda.Stream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = [torch.cuda.Stream() for _ in range(3)]
        return self._local.streams

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Delays before and memory reused after every kernel, while this lasts."""
        backend = backend_for(self.device)
        with ExitStack() as stack:
            for name in _functions(Backend):
                if hasattr(backend, name):
                    slow = self._slow(getattr(backend, name))
                    stack.enter_context(mock.patch.object(backend, name, slow))
            yield

    def _slow(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            self.delay()
            result = function(*args, **kwargs)
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            self.churn(tuple(min(tensor.nbytes, 64 * MIB) for tensor in tensors))
            return result

        return slow

    def watch(self, model: nn.Module) -> None:
        """Reuse memory around every block, in forward and backward."""

        def after(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: self.churn())

        for module in model.modules():
            if isinstance(module, Block | GptBlock):
                module.register_forward_pre_hook(lambda *_: self.churn())
                module.register_forward_hook(after)


def _functions(protocol: type) -> list[str]:
    return [n for n, value in vars(protocol).items() if callable(value) and not n.startswith("_")]


def _fill(sizes: list[int], device: torch.device) -> None:
    kept = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    for tensor in kept:
        tensor.fill_(0xFF)
