"""Starts the ranks of `qsdp train --nproc N` on this machine, with torchrun's launcher.

The launcher runs in this process rather than behind the command `torchrun`, because that one
answers Ctrl-C by ending the ranks after 30 seconds and with a page of traceback. Here Ctrl-C,
SIGTERM and SIGHUP leave a file in the run folder that the ranks look for after each step; a second
Ctrl-C ends them at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

STOP_FILE = "stop"
INTERRUPTED = 130


def launch(argv: list[str], num_ranks: int, run_folder: Path) -> int:
    """Run `qsdp train argv` on `num_ranks` ranks; returns the exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.update(rank_environment(num_ranks))
    # What the launcher logs about a failed rank is told below, in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    stop = _StopOnSignal(run_folder / STOP_FILE)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle="SIGQUIT",
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "qsdp", "train", *argv)
    except ChildFailedError as failed:
        rank, failure = _cause(failed.failures)
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"qsdp train: error: rank {rank} was ended by {name}", file=sys.stderr)
            return 128 - failure.exitcode
        return int(failure.exitcode)
    except KeyboardInterrupt:
        print("qsdp train: ended without a checkpoint", file=sys.stderr)
        return INTERRUPTED
    return 128 + stop.signal if stop.signal else 0


def _cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed first, among all that have.

    A rank that a signal ended comes before peers, which fail at the same moment for they lost it.
    SIGTERM comes last: the launcher sends it to ranks that still run when another one has failed.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        failure = item[1]
        return failure.exitcode == -signal.SIGTERM, failure.exitcode >= 0, failure.timestamp

    return min(failures.items(), key=order)


def rank_environment(num_ranks: int) -> dict[str, str]:
    """This environment, for ranks that share the cores; what it sets already stays.

    Huge pages make fresh memory, which CPU collectives use, cheap.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ours = {
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // num_ranks)),
        "THP_MEM_ALLOC_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }
    return ours | dict(os.environ)


class _StopOnSignal:
    """The first signal asks the ranks to stop, the second ends them."""

    def __init__(self, stop_file: Path) -> None:
        self.signal = 0
        self._stop_file = stop_file
        self._stop_file.unlink(missing_ok=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        print("\nqsdp train: stopping after this step; again to end at once", file=sys.stderr)
        self._stop_file.parent.mkdir(parents=True, exist_ok=True)
        self._stop_file.touch()
