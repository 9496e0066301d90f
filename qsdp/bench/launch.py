"""Run a benchmark on several ranks: those that torchrun started, or some that are started here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from qsdp.trainer.launch import rank_environment
from qsdp.trainer.ranks import SharedError, end_rank, started_by_launcher


def run_ranks(command: list[str], nproc: int | None, body: Callable[[], None]) -> int:
    """Run ``body`` as one of torchrun's ranks; else start ``nproc`` of them.

    Args:
        command: what stands after ``qsdp bench``.

    Returns the exit status. An error that all ranks share is printed once.

    Raises:
        ValueError: neither torchrun nor ``nproc``, or both.
    """
    name = f"qsdp bench {command[0]}"
    if not started_by_launcher():
        if nproc is None:
            raise ValueError(
                f"{name} needs ranks: run it under torchrun, or give --nproc N for N ranks here"
            )
        if nproc < 2:
            raise ValueError(f"--nproc must be at least 2, got {nproc}")
        return _start(_without_nproc(command), nproc)
    try:
        body()
    except (SharedError, ValueError) as error:
        first = os.environ["LOCAL_RANK"] == "0"
        end_rank(1, f"{name}: error: {error}" if first else None)
    end_rank(0)


def torchrun(*arguments: str) -> list[str]:
    """The command line of torchrun with this interpreter."""
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def _without_nproc(command: list[str]) -> list[str]:
    """torchrun would take it for an abbreviation of its own options."""
    pairs = zip(command, ["", *command], strict=False)
    return [
        word for word, before in pairs if before != "--nproc" and not word.startswith("--nproc")
    ]


def _start(command: list[str], nproc: int) -> int:
    arguments = ("--standalone", "--nproc-per-node", str(nproc), "-m", "qsdp", "bench", *command)
    process = subprocess.Popen(torchrun(*arguments), env=rank_environment(nproc))
    try:
        return process.wait()
    except KeyboardInterrupt:  # the ranks got it too
        process.terminate()
        process.wait()
        return 130
