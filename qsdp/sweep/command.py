"""`qsdp sweep FILE --out FOLDER`: run what is missing, then the table and the plot.

Every run is a `qsdp train` of its own, so that an interrupted sweep goes on where it stopped: runs
that ended are kept, one that was cut off continues from its last checkpoint. All runs are checked
before the first of them starts, and what a folder holds must have been run as the file says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from qsdp.arguments import TRAIN_PACKAGES, did_you_mean, require_packages
from qsdp.sweep.spec import Case, Sweep, read_sweep
from qsdp.trainer.config import LATEST, flag_of

WIDTH = 110  # of the table in a file
# Settings that leave the results of a run as they are.
_FREE = {"folder", "overwrite", "resume", "timeout", "log_every", "eval_every", "eval_windows",
         "checkpoint_every", "keep_checkpoints", "export", "prefetch"}  # fmt: skip
_RESULT = "result.json"
_NUMBERS = ("valid_loss_decoded", "valid_loss_master", "ratio", "steps")


def run(argv: list[str]) -> int:
    """Exit status of `qsdp sweep argv`. Raises ValueError and OSError on bad use."""
    options = _parser().parse_args(argv)
    require_packages(*TRAIN_PACKAGES)
    sweep = read_sweep(options.file)
    if not options.report:
        from qsdp.trainer.lock import hold

        wanted = _wanted(sweep, options.only, options.seeds)
        missing = _missing(sweep, wanted, options.out)
        with hold(options.out, "--out"):
            for number, (case, seed) in enumerate(wanted, 1):
                if (case, seed) in missing:
                    print(f"[{number}/{len(wanted)}] {case.name}, seed {seed}", flush=True)
                    status = subprocess.run(_command(sweep, case, seed, options.out)).returncode
                    if status:
                        folder = run_folder(options.out, case, seed)
                        said = f"stopped at {folder}; the same command goes on"
                        print(f"qsdp sweep: {said}", file=sys.stderr)
                        return status
    report(sweep, options.out, as_json=options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qsdp sweep",
        description="Train a grid of configurations and seeds, one after another, and compare.",
    )
    add = parser.add_argument
    add("file", type=Path, help="JSON: train (flags for all runs), seeds, cases")
    add("--out", type=Path, required=True, help="folder of the runs, the table and the plot")
    add("--only", nargs="+", default=[], metavar="CASE", help="run these cases only")
    add("--seeds", nargs="+", type=int, default=[], metavar="N", help="run these seeds only")
    add("--report", action="store_true", help="run nothing: compare what is there")
    add("--json", action="store_true", help="print the rows as JSON")
    return parser


def _wanted(sweep: Sweep, only: list[str], seeds: list[int]) -> list[tuple[Case, int]]:
    names = [case.name for case in sweep.cases]
    for name in only:
        if name not in names:
            raise ValueError(f"--only: no case {name!r} in the sweep{did_you_mean(name, names)}")
    wanted = [
        (case, seed)
        for case, seed in sweep.runs()
        if (not only or case.name in only) and (not seeds or seed in seeds)
    ]
    if not wanted:
        raise ValueError(f"--seeds: no case runs with seed {', '.join(map(str, sorted(seeds)))}")
    return wanted


def _missing(sweep: Sweep, wanted: list[tuple[Case, int]], out: Path) -> list[tuple[Case, int]]:
    """Of these runs those that are not finished, all checked.

    Raises:
        ValueError: a run that `qsdp train` would refuse, or one that was made with other settings.
    """
    missing = [run for run in wanted if _result(sweep, *run, out) is None]
    for case, seed in missing:
        _check(sweep, case, seed, out)
    return missing


def run_folder(out: Path, case: Case, seed: int) -> Path:
    return out / case.name / f"seed-{seed}"


def _check(sweep: Sweep, case: Case, seed: int, out: Path) -> None:
    """What `qsdp train` would find before it starts. Raises ValueError with file and case."""
    from qsdp.trainer.check import check

    folder = run_folder(out, case, seed)
    config = sweep.config(case, seed, folder)
    resume = LATEST if _resumable(folder) else None
    try:
        check(replace(config, resume=resume, overwrite=resume is None), config.nproc)
    except (OSError, ValueError) as error:
        raise ValueError(f"{sweep.path}: case {case.name!r}: {error}") from error


def _result(sweep: Sweep, case: Case, seed: int, out: Path) -> dict[str, Any] | None:
    """The result of a run; None where it is not finished.

    Raises:
        ValueError: a folder with results or checkpoints of other settings, or of a damaged run.
    """
    folder = run_folder(out, case, seed)
    finished = (folder / _RESULT).is_file()
    if not finished and not _resumable(folder):
        return None
    saved = _read_object(folder / "config.json")
    wanted = sweep.config(case, seed, folder).to_json()
    if wanted["comm_warmup"] is None:  # a run keeps what it took
        del wanted["comm_warmup"]
    for name in sorted(saved.keys() & wanted.keys() - _FREE):
        if _value(name, saved[name]) != _value(name, wanted[name]):
            raise ValueError(
                f"{folder} was run with {flag_of(name)} {saved[name]} and {sweep.path} says "
                f"{wanted[name]} now; delete the folder to run it again, or give another --out"
            )
    if not finished:
        return None
    result = _read_object(folder / _RESULT)
    for name in _NUMBERS:
        if type(result.get(name)) not in (int, float):
            raise ValueError(
                f"{folder / _RESULT} is damaged: {name} is {result.get(name)!r}; delete it to "
                "validate again"
            )
    return result


def _resumable(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*[0-9]"))


def _value(name: str, value: Any) -> Any:
    """Of two files for --comm the content counts, in whatever order."""
    return json.loads(value) if name == "comm" and str(value).startswith("{") else value


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing beside the results; delete the folder") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; delete the folder to run again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: no object; delete the folder to run again")
    return content


def _command(sweep: Sweep, case: Case, seed: int, out: Path) -> list[str]:
    folder = run_folder(out, case, seed)
    comm = case.comm
    if not isinstance(comm, str):
        path = out / case.name / f"{case.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(comm, indent=1))
        comm = str(path)
    command = [sys.executable, "-m", "qsdp", "train", "--folder", str(folder), "--seed", str(seed)]
    command += ["--comm", comm, "--export", "none", *_flags(sweep.train | case.train)]
    return [*command, "--resume"] if _resumable(folder) else [*command, "--overwrite"]


def _flags(train: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in train.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            values = value if isinstance(value, list) else [value]
            flags += [flag, *map(str, values)]
    return flags


def report(sweep: Sweep, out: Path, *, as_json: bool = False) -> None:
    """Print the table; write it as text, JSON and a plot beside the runs."""
    from rich.console import Console

    from qsdp.sweep.plot import draw
    from qsdp.sweep.table import summarise, table
    from qsdp.trainer.tables import print_table

    results = {
        case.name: {
            seed: result
            for seed in case.seeds or sweep.seeds
            if (result := _result(sweep, case, seed, out)) is not None
        }
        for case in sweep.cases
    }
    rows = summarise(sweep, results)
    if not rows:
        raise ValueError(f"{out} holds no finished run of the sweep yet")
    (out / "sweep.json").write_text(json.dumps(rows, indent=1) + "\n")
    with (out / "sweep.txt").open("w") as file:
        Console(file=file, width=WIDTH).print(table(rows))
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(table(rows), width=WIDTH)
    if draw(rows, out / "sweep.png") and not as_json:
        print(out / "sweep.png")
