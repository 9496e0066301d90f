"""Many sweeps, one after another, beside other work: resumable, with a deadline and pauses.

    python benchmarks/quality/evidence.py --out FOLDER [--until 09:30] [--pause-while FILE]

`evidence.json` says which sweeps, in order; each is a `qsdp sweep` of its own, into a folder of
FOLDER. Runs that are finished are kept, so the same command goes on where it was stopped. While
FILE exists, all processes of the run in hand are stopped (SIGSTOP), and go on when it is gone.
Texts that sweeps name are looked for in the folder where the command is given.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_FIELDS = {"sweep", "out", "only", "seeds"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--plan", type=Path, default=HERE / "evidence.json", help="JSON: a list of sweeps")
    add("--out", type=Path, required=True, help="folder of all runs")
    add("--until", type=_clock, help="HH:MM of today; a run in hand is ended then, and lost")
    add("--pause-while", type=Path, metavar="FILE", help="stand still while this file exists")
    options = parser.parse_args()
    # As an exception, so that the run in hand is ended too, and not left behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for number, command in enumerate(commands(options.plan, options.out), 1):
        status = attend(command, options.until, options.pause_while)
        if status:
            print(f"evidence.py: sweep {number} stopped; the same command goes on", file=sys.stderr)
            return status
    return 0


def _clock(text: str) -> datetime:
    clock = datetime.strptime(text, "%H:%M").time()
    return datetime.combine(datetime.now().date(), clock)


def commands(plan: Path, out: Path) -> list[list[str]]:
    """The `qsdp sweep` of each entry. Raises ValueError for a field that is none."""
    found = []
    for entry in json.loads(plan.read_text()):
        _check(plan, entry)
        command = [sys.executable, "-m", "qsdp", "sweep", str(plan.parent / entry["sweep"])]
        command += ["--out", str(out / entry["out"])]
        for flag in ("only", "seeds"):
            if flag in entry:
                command += [f"--{flag}", *map(str, entry[flag])]
        found.append(command)
    return found


def _check(plan: Path, entry: dict[str, Any]) -> None:
    unknown = sorted(entry.keys() - _FIELDS)
    missing = sorted({"sweep", "out"} - entry.keys())
    if unknown or missing:
        raise ValueError(
            f"{plan}: a sweep has the fields {', '.join(sorted(_FIELDS))}, sweep and out at least; "
            f"got {', '.join(sorted(entry))}"
        )
    for name in ("only", "seeds"):
        if not isinstance(entry.get(name, []), list):
            raise ValueError(f"{plan}: {name} is a list; got {entry[name]!r}")


def attend(command: list[str], until: datetime | None, pause: Path | None) -> int:
    """Run a command, standing still while ``pause`` exists; its status, or 1 at the deadline."""
    child = subprocess.Popen(command)
    stopped: set[int] = set()
    try:
        while child.poll() is None:
            if until is not None and datetime.now() >= until:
                return 1
            if pause is not None and pause.exists():
                # Again and again: a process may have started another before it was stopped.
                stopped |= _signal(set(descendants(child.pid)) - stopped, signal.SIGSTOP)
            elif stopped:
                _signal(stopped, signal.SIGCONT)
                stopped = set()
            time.sleep(1)
        return child.returncode
    finally:
        if child.poll() is None:
            everyone = set(descendants(child.pid))
            _signal(everyone, signal.SIGTERM)
            _signal(everyone, signal.SIGCONT)
            child.wait()


def _signal(processes: set[int], number: signal.Signals) -> set[int]:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
    return processes


def descendants(root: int) -> Iterator[int]:
    """The process and all that it started. Ranks lead sessions of their own: no group has all."""
    listing = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        process, parent = map(int, line.split())
        children.setdefault(parent, []).append(process)
    waiting = [root]
    while waiting:
        process = waiting.pop()
        yield process
        waiting += children.get(process, [])


if __name__ == "__main__":
    sys.exit(main())
