"""One process at a time writes to a folder: it locks a file there for as long as it lives."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

LOCK_FILE = "lock"


def refuse_held(folder: Path, flag: str = "--folder") -> None:
    """Raises ValueError, with the process that holds it, where a folder is locked."""
    if (folder / LOCK_FILE).is_file():
        with (folder / LOCK_FILE).open("a+") as file:
            _lock(file, folder, flag)


def hold(folder: Path, flag: str = "--folder") -> TextIO:
    """Lock a folder, made where it is missing, until the file that is returned closes.

    The lock ends with this process, however it ends.

    Args:
        flag: that names the folder; for the error.

    Raises:
        ValueError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK_FILE).open("a+")
    try:
        _lock(file, folder, flag)
    except ValueError:
        file.close()
        raise
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _lock(file: TextIO, folder: Path, flag: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise ValueError(
            f"{folder} is in use by {holder}; wait until that ends, or give another {flag}"
        ) from error
    except OSError:
        pass  # a file system without locks
