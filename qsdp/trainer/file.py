"""A whole run as one file: `qsdp train --config FILE`, YAML or JSON.

Keys are the flags of `qsdp train`, with `_` or `-`. Every error is one line that names file and
key. Paths in the file count from where the command runs, as on the command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qsdp.arguments import require_package
from qsdp.trainer.config import typed_fields

_YAML = (".yaml", ".yml")


def read_run_file(path: Path) -> dict[str, Any]:
    """Fields of TrainConfig that the file sets, each of its type.

    Raises:
        OSError, ValueError, RuntimeError: no such file, a damaged one, a key that is no flag or has
            a value of another type, or YAML without the package that reads it.
    """
    if path.suffix not in (".json", *_YAML):
        raise ValueError(f"--config: the file must end with .json, .yaml or .yml, got {path}")
    if not path.is_file():
        raise FileNotFoundError(f"--config: there is no file {path}")
    try:
        text = path.read_text(encoding="utf-8")
        content = _yaml(text) if path.suffix in _YAML else _json(text)
        if not isinstance(content, dict):
            raise ValueError("it must hold flags of qsdp train, such as steps and comm, by name")
        fields = _by_field(content)
        if isinstance(fields.get("comm"), dict):  # what a file for --comm holds, written in place
            fields["comm"] = json.dumps({"name": path.stem, **fields["comm"]})
        return typed_fields(fields, spell=str)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _by_field(content: dict[Any, Any]) -> dict[str, Any]:
    """Keys written as TrainConfig's fields are. Raises ValueError on one that stands twice."""
    fields = {str(key).replace("-", "_"): value for key, value in content.items()}
    if len(fields) < len(content):
        _unique(str(key).replace("-", "_") for key in content)
    if "config" in fields:
        raise ValueError("config names no other file: write its keys here")
    return fields


def _unique(keys: Iterable[Any]) -> None:
    """JSON and YAML themselves would take the last of two values for one key."""
    seen = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"{key} stands there twice; give each key once")
        seen.add(key)


def _json(text: str) -> Any:
    def together(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _unique(key for key, _ in pairs)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=together)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from error


def _yaml(text: str) -> Any:
    require_package("--config in YAML", "yaml", "pyyaml")
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        """Plain values only; what YAML 1.1 takes for a text, 1e-4, is the number that it says."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _unique(self.construct_object(key, deep=True) for key, _ in node.value)
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", error)
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"no YAML{line}: {' '.join(str(problem).split())}") from error
