"""How a rank is asked to stop after its step: by a signal, or by a file in the run folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether this rank was asked to stop; the launcher leaves the file."""

    def __init__(self, stop_file: Path) -> None:
        self._stop_file = stop_file
        self._signalled = False
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def release(self) -> None:
        """No step is left to stop after: from now on a signal ends the process."""
        self._stop_file.unlink(missing_ok=True)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def requested(self) -> bool:
        return self._signalled or self._stop_file.exists()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested():
            os._exit(128 + number)  # asked twice: whoever asks does not want to wait
        self._signalled = True
