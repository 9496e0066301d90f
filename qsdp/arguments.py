"""What commands check before they work: packages, files to write, names that were meant.

Imports nothing but the standard library, so that help and mistakes need not wait.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

# Of the extra `train`.
TRAIN_PACKAGES = ("numpy", "tyro", "rich", "safetensors", "tokenizers", "transformers",
                  "tensorboard", "matplotlib")  # fmt: skip
_EXTRA = {*TRAIN_PACKAGES, "datasets"}


def require_packages(*names: str) -> None:
    """Raises RuntimeError where a package of the extra `train` is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(lacks(", ".join(missing)))


def require_package(flag: str, name: str, install: str = "") -> None:
    """Raises RuntimeError where the package that ``flag`` needs is not installed.

    Args:
        install: what pip installs it by, if not by its name.
    """
    if importlib.util.find_spec(name) is None:
        how = f"pip install {install or name}"
        raise RuntimeError(f"{flag} needs {name}, not installed here: {how}")


def lacks(packages: str) -> str:
    """What to install where these packages are missing."""
    return f"this needs {packages}, not installed here: pip install 'qsdp[train]'"


def missing_package(error: ModuleNotFoundError) -> str | None:
    """The package of the extra `train` that an import did not find; None if it is another."""
    package = (error.name or "").partition(".")[0]
    return package if package in _EXTRA else None


def require_writable(flag: str, file: Path) -> None:
    """Make the folder of a file that a command is to write at its end.

    Raises:
        OSError: the file cannot be written, with the flag that names it.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{flag} {file}: {file.parent} cannot be made: {error}") from error
    if file.is_dir():
        raise IsADirectoryError(f"{flag} {file} is a folder; give the name of a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PermissionError(f"{flag} {file} cannot be written: no permission")


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no allowed name, all in small letters, is close."""
    close = get_close_matches(given.lower(), list(allowed), n=1)
    return f"; did you mean {close[0]}?" if close else ""
