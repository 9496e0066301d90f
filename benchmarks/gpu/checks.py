"""Named checks that do not stop each other: one line each, and the status of all of them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable


class Checks:
    """Runs checks, says of each how it ended as soon as it has, and counts failures."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def run(self, name: str, check: Callable[[], object]) -> bool:
        """Whether ``check`` ended without an exception; what it returns is printed beside."""
        start = time.perf_counter()
        try:
            found = check()
        except Exception:
            self.failed.append(name)
            print(f"FAILED  {name}  ({time.perf_counter() - start:.1f} s)", flush=True)
            print(_indented(traceback.format_exc()), flush=True)
            return False
        text = "" if found is None else f": {found}"
        print(f"ok      {name}{text}  ({time.perf_counter() - start:.1f} s)", flush=True)
        return True

    @property
    def status(self) -> int:
        """For the process to exit with."""
        return 1 if self.failed else 0


def require(condition: object, message: str) -> None:
    """Raises AssertionError with ``message``; unlike ``assert``, with optimization too."""
    if not condition:
        raise AssertionError(message)


def _indented(text: str) -> str:
    return "\n".join(f"        {line}" for line in text.rstrip().splitlines())
