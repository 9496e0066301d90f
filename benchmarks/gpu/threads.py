"""Several ranks as threads of one process, on one device: torch's threaded process group.

Its collectives are copies that rank 0's thread makes of all ranks' tensors. By itself the group
knows nothing of streams; here every collective waits for what each rank has put into its stream
before, and each rank's stream waits for the copies, as NCCL's do when called synchronously. So
what is missing around a collective shows, and what it orders itself does not.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed import multi_threaded_pg as threaded

TIMEOUT_S = 100


class Recorder:
    """The bytes that every rank gives to each collective, in order; ``before`` runs first.

    Attributes:
        sent: by rank, ``(collective, bytes)``.
    """

    def __init__(self, num_ranks: int, before: Callable[[], None] = lambda: None) -> None:
        self.sent: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(num_ranks)]
        self.before = before
        self.keeps = True

    def record(self, kind: str, data: Any) -> None:
        """Called by every rank's thread as it enters a collective."""
        self.before()
        given = _given(kind, data)
        if self.keeps and given is not None and dist.get_world_size() == len(self.sent):
            # Copied in the stream and left on the device: the host does not wait here.
            copy = given.detach().contiguous().view(-1).view(torch.uint8).clone()
            self.sent[dist.get_rank()].append((kind, copy))


_recorder: Recorder | None = None


def _given(kind: str, data: Any) -> torch.Tensor | None:
    """What a rank sends, of the collectives that qsdp calls."""
    if kind == "AllGather":
        return data[1][0]
    if kind == "AllToAllBase":
        return data[1]
    return None


class OrderedCollective(threaded.Collective):
    """Waits in streams before its copies and after them."""

    def __init__(self, world_size: int, collective: Any, pg: Any) -> None:
        super().__init__(world_size, collective, pg)
        self._kind = type(collective).__name__
        self._entered: list[torch.cuda.Event] = []
        self._copied: torch.cuda.Event | None = None
        self._copy, collective.work = collective.work, self._work

    def _work(self, data: Any) -> None:
        """In rank 0's thread, once all ranks have entered."""
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        for event in self._entered:
            stream.wait_event(event)
        self._copy(data)
        if stream is not None:
            self._copied = stream.record_event()

    def join(self, rank: int, data: Any) -> Any:
        if _recorder is not None:
            _recorder.record(self._kind, data)
        if torch.cuda.is_available():
            self._entered.append(torch.cuda.current_stream().record_event())
        work = super().join(rank, data)
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        return work


def run_threads(
    fn: Callable[..., Any], num_ranks: int, *args: Any, recorder: Recorder | None = None
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ranks that are threads; return their results in order.

    Each has its own stream on a GPU and one thread on CPU. The first exception of a rank is raised
    here, with the others ended.
    """
    global _recorder
    results: list[Any] = [None] * num_ranks
    errors: list[tuple[int, BaseException]] = []
    store = dist.HashStore()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        stream = torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else None
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            with stream or nullcontext():
                results[rank] = fn(rank, *args)
                if stream is not None:
                    torch.cuda.synchronize()
        except BaseException as error:
            errors.append((rank, error))
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    before, _recorder = _recorder, recorder
    num_threads = torch.get_num_threads()
    _prepare_torch()
    with _threaded_groups():
        for thread in threads:
            thread.start()
        try:
            _join(threads)
        finally:
            _recorder = before
            torch.set_num_threads(num_threads)
    _raise_first(errors)
    return results


def _join(threads: list[threading.Thread]) -> None:
    until = time.monotonic() + TIMEOUT_S
    for rank, thread in enumerate(threads):
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            frame = sys._current_frames().get(thread.ident or 0)
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "nowhere"
            threaded.ProcessLocalGroup.exception_handle(TimeoutError())
            raise TimeoutError(f"rank {rank} has not ended after {TIMEOUT_S} s; it is at {where}")


def _raise_first(errors: list[tuple[int, BaseException]]) -> None:
    """Of the rank that failed by itself, not of those that were ended because of it."""
    for rank, error in errors:
        if not isinstance(error, SystemExit):
            error.add_note(f"on rank {rank}")
            raise error
    if errors:
        raise RuntimeError(f"rank {errors[0][0]} was ended, and no rank says why")


@contextmanager
def _threaded_groups() -> Iterator[None]:
    """Each thread its own world of process groups, while this lasts."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    hook = sys.excepthook  # init_process_group puts its own around it, in every thread
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    try:
        with mock.patch.object(threaded, "Collective", OrderedCollective):
            yield
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        sys.excepthook = hook
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


def _prepare_torch() -> None:
    """What threads would do at once, and what torch 2.11 forgot."""
    # Sharded tensors enter this mode to learn shapes. Without a GPU, a CUDA build of torch then
    # replaces what switches devices, and crashes if that is in another thread's hands.
    with FakeTensorMode():
        pass
    # Asked for when groups are destroyed.
    if not hasattr(threaded.ThreadLocalWorld(), "comms"):
        threaded.ThreadLocalWorld.comms = property(lambda _: [])
