"""Files that ``--comm`` names. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def embedded_comm(comm: str, flag: str = "--comm") -> str:
    """The content of the file that ``comm`` names, with the file's name; a preset as it is.

    A run keeps what the file held when it started.

    Args:
        flag: that ``comm`` was given to.

    Raises:
        OSError, ValueError: the file cannot be read, or holds no JSON object; with the flag.
    """
    if comm.startswith("{"):
        if not isinstance(_json(comm, f"{flag}: {comm}"), dict):
            raise ValueError(f"{flag} must be a preset or a .json file, got {comm}")
        return comm
    path = Path(comm)
    if path.suffix != ".json":
        if path.is_file():
            raise ValueError(f"{flag}: the name of a file must end with .json, got {comm}")
        return comm
    if not path.is_file():
        raise FileNotFoundError(f"{flag}: there is no file {comm}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: {comm} is not UTF-8 text: {error}") from error
    content = _json(text, f"{flag}: {comm}")
    if not isinstance(content, dict):
        raise ValueError(f"{flag}: {comm} must hold a JSON object of QSDPConfig's fields")
    return json.dumps({"name": path.stem, **content})


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} holds no JSON: {error}") from error
