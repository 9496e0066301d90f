"""What a sweep is to run, as a JSON file says it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One configuration of communication and the seeds it runs with.

    Attributes:
        name: of the row in the table; also of its folder.
        comm: the name of a preset, or QSDPConfig's fields.
        seeds: None for those of the sweep.
        against: name of another case to compare this one with as well, seed by seed.
        reference: perplexity over that of full precision, as published elsewhere; for the plot.
        train: flags of `qsdp train` that this case has of its own.
    """

    name: str
    comm: str | dict[str, Any]
    seeds: tuple[int, ...] | None = None
    against: str | None = None
    reference: float | None = None
    train: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """A grid.

    Attributes:
        cases: in the order of the table; the first is what the others are compared with.
        seeds: of the cases that have none of their own.
        train: flags of `qsdp train` for all runs, by name.
    """

    cases: tuple[Case, ...]
    seeds: tuple[int, ...]
    train: dict[str, Any]

    def runs(self) -> list[tuple[Case, int]]:
        """Every run, seed by seed, so that what is there after an interruption can be paired."""
        every = [(case, case.seeds or self.seeds) for case in self.cases]
        seeds = list(dict.fromkeys(seed for _, seeds in every for seed in seeds))
        return [(case, seed) for seed in seeds for case, seeds in every if seed in seeds]


def read_sweep(path: Path) -> Sweep:
    """Raises OSError and ValueError, naming the file and the field, for what is no sweep."""
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} holds no JSON: {error}") from error
    allowed = {"train", "seeds", "cases"}
    if not isinstance(content, dict) or set(content) != allowed:
        raise ValueError(f"{path} must hold an object with {', '.join(sorted(allowed))}")
    cases = tuple(_case(path, name, value) for name, value in content["cases"].items())
    seeds = tuple(content["seeds"])
    if not cases or not seeds or not all(isinstance(seed, int) for seed in seeds):
        raise ValueError(f"{path} must name at least one case, and seeds as a list of integers")
    names = {case.name for case in cases}
    for case in cases:
        if case.against is not None and case.against not in names - {case.name}:
            raise ValueError(
                f"{path}: case {case.name!r} is against {case.against!r}, which must be another "
                "case of the sweep"
            )
    return Sweep(cases, seeds, dict(content["train"]))


def _case(path: Path, name: str, value: Any) -> Case:
    if "/" in name or name in (".", ".."):
        raise ValueError(f"{path}: case {name!r} is to be the name of a folder, without '/'")
    if isinstance(value, str):
        return Case(name, value)
    allowed = {"comm", "seeds", "against", "reference", "train"}
    if not isinstance(value, dict) or "comm" not in value or not set(value) <= allowed:
        raise ValueError(
            f"{path}: case {name!r} must be a preset or an object with comm, and perhaps "
            f"{', '.join(sorted(allowed - {'comm'}))}"
        )
    seeds = tuple(value["seeds"]) if "seeds" in value else None
    return Case(
        name,
        value["comm"],
        seeds,
        value.get("against"),
        value.get("reference"),
        dict(value.get("train", {})),
    )
