"""This process as one of several ranks: the process group, and how ranks agree.

Anything that can fail on one rank only goes through `on_rank_zero` or `together`: then every
rank raises the same error and none is left waiting in a collective.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from qsdp.agreement import all_gather_json

T = TypeVar("T")


class SharedError(ValueError):
    """An error that every rank raises, so that one of them is enough to print it."""


class Ranks(NamedTuple):
    rank: int
    num_ranks: int
    device: torch.device


def started_by_launcher() -> bool:
    """Whether torchrun, the user's or our own, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))


@contextmanager
def process_group(device: Literal["auto", "cpu", "cuda"], timeout: float) -> Iterator[Ranks]:
    """Join the other ranks: NCCL on GPUs, gloo on CPUs.

    An exception leaves the group as it is: taking it down could wait for peers that are in a
    collective. The process is to end, and they see the connection drop.
    """
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    local_rank = int(os.environ["LOCAL_RANK"])
    here = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} has no GPU, this machine shows "
                f"{torch.cuda.device_count()}; lower --nproc or pass --device cpu"
            )
        torch.cuda.set_device(here)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if use_cuda else "gloo",
        timeout=timedelta(seconds=timeout),
        device_id=here if use_cuda else None,
    )
    yield Ranks(dist.get_rank(), dist.get_world_size(), here)
    dist.destroy_process_group()


def end_rank(status: int, message: str | None = None) -> NoReturn:
    """End this process, after one line on stderr where there is a message.

    What was registered with atexit runs; the interpreter is not taken down. One of gloo's threads
    can still hold the last tensor that it sent, and a thread that asks for the interpreter's lock
    while the interpreter ends aborts the process: status 134 after a run that went well.
    """
    if message is not None:
        print(message, file=sys.stderr)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run on rank 0 while the others wait; every rank gets the result, or raises the error.

    The result is a JSON value: no pickle crosses the network.
    """
    outcome: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            outcome = {"result": work()}
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            outcome = {"error": _one_line(error)}
    outcome = all_gather_json(outcome)[0]
    if "error" in outcome:
        raise SharedError(outcome["error"])
    result: T = outcome["result"]
    return result


def together(work: Callable[[], T]) -> T:
    """Run on every rank; where any rank fails, every rank raises what the lowest of them met."""
    result: T | None = None
    message: str | None = None
    try:
        result = work()
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        message = _one_line(error)
    messages: list[str | None] = all_gather_json(message)
    failed = [(rank, text) for rank, text in enumerate(messages) if text is not None]
    if failed:
        rank, text = failed[0]
        everywhere = len(failed) == len(messages) and len(set(messages)) == 1
        raise SharedError(text if everywhere else f"rank {rank}: {text}")
    return result  # type: ignore[return-value]  # as above


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
