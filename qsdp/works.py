"""Asynchronous work: transfers whose results are decoded when somebody waits for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from qsdp.stats import CommMeter


class _DecodingWork(dist.Work):
    """A Work that decodes once its transfers are done; ``wait`` may be called repeatedly."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish
        self._done = False

    def wait(self, timeout: object = None) -> bool:
        if not self._done:
            self._finish()
            self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done


def done_work() -> dist.Work:
    """A Work of which nothing is left to wait for."""
    return _DecodingWork(lambda: None)


def complete(
    works: list[dist.Work],
    decode: Callable[[], None],
    async_op: bool,
    meter: CommMeter,
    device: torch.device,
) -> dist.Work | None:
    """Wait for transfers, then decode: now, or when the returned Work is waited for."""

    def finish() -> None:
        with meter.phase("network", device):
            for work in works:
                work.wait()
        decode()

    if async_op:
        return _DecodingWork(finish)
    finish()
    return None
