"""The one way to get several ranks in a test: gloo processes, file rendezvous, no ports."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 100

# Ranks are forked from a server that has imported what they all need, and has run nothing. Only
# what is fixed when torch is imported is the server's; all else of the environment is passed on.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "qsdp.ddp",
        "qsdp.fsdp",
        "qsdp.state",
    ]
)


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Run ``fn(rank, *args)`` on gloo ranks of one thread each; return their results in order.

    ``fn`` and its arguments must be picklable. The first rank that fails fails the caller, with its
    traceback; a rank that hangs prints its stack and is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receive, send = CONTEXT.Pipe(duplex=False)
            store, environment = os.path.join(folder, "store"), dict(os.environ)
            process = CONTEXT.Process(
                target=_run, args=(send, fn, rank, num_ranks, store, environment, args)
            )
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            results = _collect(pipes)
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
    return results


def run_cases(
    rank: int, cases: dict[str, Callable[[int], None]], names: tuple[str, ...]
) -> dict[str, str | None]:
    """Run the named cases on this rank; of each the traceback if it failed, or None.

    For :func:`run_ranks`, so that many cases share one launch. Cases must be importable functions.
    """
    results: dict[str, str | None] = {}
    for name in names:
        try:
            cases[name](rank)
            results[name] = None
        except BaseException:  # what pytest.warns and pytest.raises fail with is no Exception
            results[name] = traceback.format_exc()
        dist.barrier()
    return results


def check_case(results: list[dict[str, str | None]], name: str) -> None:
    """Fail with the traceback of the first rank on which a case of :func:`run_cases` failed."""
    for rank, of_rank in enumerate(results):
        assert of_rank[name] is None, f"rank {rank}:\n{of_rank[name]}"


def _collect(pipes: list[Connection]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=TIMEOUT_S + 10)
        assert ready, f"ranks {sorted(waiting.values())} gave no answer"
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                ok, results[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"rank {rank} died without an answer") from None
            assert ok, f"rank {rank} failed:\n{results[rank]}"
    return results


def _run(
    send: Connection,
    fn: Callable[..., Any],
    rank: int,
    num_ranks: int,
    store: str,
    environment: dict[str, str],
    args: Any,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    dist.set_debug_level_from_env()
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True, file=sys.stderr)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=30),
        )
        send.send((True, fn(rank, *args)))
    except BaseException:
        send.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
