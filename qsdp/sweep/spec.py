"""What a sweep is to run, as a JSON file says it. Every error names the file and the field."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qsdp.arguments import did_you_mean
from qsdp.trainer.comm_file import embedded_comm
from qsdp.trainer.config import PRESETS, TrainConfig, typed_fields

# Fields of a run that the sweep itself sets.
OWN = ("folder", "overwrite", "resume", "seed", "comm", "export")


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
        path: of the file, for errors.
    """

    cases: tuple[Case, ...]
    seeds: tuple[int, ...]
    train: dict[str, Any]
    path: Path

    def runs(self) -> list[tuple[Case, int]]:
        """Every run, seed by seed, so that what is there after an interruption can be paired."""
        every = [(case, case.seeds or self.seeds) for case in self.cases]
        seeds = list(dict.fromkeys(seed for _, seeds in every for seed in seeds))
        return [(case, seed) for seed in seeds for case, seeds in every if seed in seeds]

    def config(self, case: Case, seed: int, folder: Path) -> TrainConfig:
        """The configuration of a run. Raises OSError and ValueError, with the file and the case."""
        try:
            typed = typed_fields(self.train | case.train)
            preset = PRESETS[typed.get("preset", "tiny")]().to_json()
            comm = case.comm
            if isinstance(comm, dict):
                comm = json.dumps({"name": case.name, **comm})
            own = {"folder": str(folder), "seed": seed, "comm": embedded_comm(comm)}
            own["export"] = "none"
            return TrainConfig.from_json(preset | self.train | case.train | own)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path}: case {case.name!r}: {error}") from error


def read_sweep(path: Path) -> Sweep:
    """Raises OSError and ValueError, naming the file and the field, for what is no sweep."""
    content = _read(path)
    _require(isinstance(content, dict), path, "what it holds", "an object", content)
    _check_names(path, "", content, ("train", "seeds", "cases"), ("train", "seeds", "cases"))
    _require(
        isinstance(content["cases"], dict) and bool(content["cases"]),
        path, "cases", "an object of at least one case, by name", content["cases"],
    )  # fmt: skip
    cases = tuple(_case(path, name, value) for name, value in content["cases"].items())
    names = [case.name for case in cases]
    for case in cases:
        if case.against is not None and (case.against == case.name or case.against not in names):
            others = ", ".join(name for name in names if name != case.name)
            place = f"case {case.name!r}: against"
            _require(False, path, place, f"another case of the sweep ({others})", case.against)
    sweep = Sweep(cases, _seeds(path, "seeds", content["seeds"]),
                  _train(path, "train", content["train"]), path)  # fmt: skip
    for case, seed in sweep.runs():
        sweep.config(case, seed, Path())
    return sweep


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8 text: byte {error.start} cannot be decoded"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} holds no JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object; JSON itself would take the last of two values for one name."""
    names = [name for name, _ in pairs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} stands there twice; give each name once")
    return dict(pairs)


def _case(path: Path, name: str, value: Any) -> Case:
    place = f"case {name!r}"
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"{path}: {place} is to be the name of a folder, without '/'")
    if isinstance(value, str):
        return Case(name, value)
    _require(isinstance(value, dict), path, place, "a preset or an object with comm", value)
    _check_names(path, f"{place}: ", value, ("comm", "seeds", "against", "reference", "train"),
                 ("comm",))  # fmt: skip
    comm, against, reference = (value.get(key) for key in ("comm", "against", "reference"))
    _require(
        isinstance(comm, str | dict), path, f"{place}: comm",
        "the name of a preset or an object of QSDPConfig's fields", comm,
    )  # fmt: skip
    _require(against is None or isinstance(against, str), path, f"{place}: against",
             "the name of another case", against)  # fmt: skip
    _require(reference is None or _is_number(reference), path, f"{place}: reference",
             "a number above 0", reference)  # fmt: skip
    return Case(
        name,
        comm,
        _seeds(path, f"{place}: seeds", value["seeds"]) if "seeds" in value else None,
        against,
        reference,
        _train(path, f"{place}: train", value.get("train", {})),
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _seeds(path: Path, place: str, value: Any) -> tuple[int, ...]:
    good = isinstance(value, list) and all(type(seed) is int and seed >= 0 for seed in value)
    good = good and 0 < len(value) == len(set(value))
    _require(good, path, place, "a list of different integers, such as [1, 2, 3]", value)
    return tuple(value)


def _train(path: Path, place: str, value: Any) -> dict[str, Any]:
    """Flags; a single text where a flag takes several is one of them."""
    _require(isinstance(value, dict), path, place, "an object of flags of qsdp train", value)
    for name in OWN:
        if name in value:
            raise ValueError(f"{path}: {place}: {name} is set by the sweep itself; leave it out")
    several = {name for name, kind in TrainConfig.__annotations__.items() if "tuple" in str(kind)}
    flags = {
        name: [each] if name in several and isinstance(each, str) else each
        for name, each in value.items()
    }
    try:
        typed_fields(flags)
    except ValueError as error:
        raise ValueError(f"{path}: {place}: {error}") from error
    return flags


def _check_names(
    path: Path, place: str, value: dict[str, Any], allowed: tuple[str, ...], needed: tuple[str, ...]
) -> None:
    for name in value:
        if name not in allowed:
            hint = did_you_mean(name, allowed) or f"; allowed are {', '.join(allowed)}"
            raise ValueError(f"{path}: {place}unknown field {name!r}{hint}")
    for name in needed:
        if name not in value:
            raise ValueError(f"{path}: {place}{name} is missing; needed are {', '.join(needed)}")


def _require(good: bool, path: Path, place: str, allowed: str, value: Any) -> None:
    if not good:
        raise ValueError(f"{path}: {place} must be {allowed}, got {json.dumps(value)}")
