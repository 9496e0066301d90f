"""Run a command for a limited time, with all that it starts, and pass on what it prints."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

OK = "ok"
# For Python to say where every thread is; then all of them are killed.
LAST_WORDS_S = 3.0


class Ended(NamedTuple):
    """How a command ended: ``ok``, or what went wrong."""

    status: str
    seconds: float


def run_limited(
    command: Sequence[str],
    limit: float,
    environment: Mapping[str, str],
    write: Callable[[str], None],
) -> Ended:
    """Run ``command``; ``write`` gets its lines, of both outputs, as they come."""
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment,
        text=True,
        errors="replace",
        process_group=0,  # to kill what it has started, too
    )
    reader = threading.Thread(target=_pass_on, args=(process, write), daemon=True)
    reader.start()
    try:
        status = _wait(process, limit)
    finally:
        _kill(process, signal.SIGKILL)
        process.wait()
        reader.join(timeout=LAST_WORDS_S)
    return Ended(status, time.monotonic() - start)


def _wait(process: subprocess.Popen[str], limit: float) -> str:
    try:
        code = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=LAST_WORDS_S)
        return f"timed out after {limit:.0f} s"
    return OK if code == 0 else f"FAILED, status {code}"


def _pass_on(process: subprocess.Popen[str], write: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        write(line)


def _kill(process: subprocess.Popen[str], number: int) -> None:
    """All of the command's processes; those that ended are no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
