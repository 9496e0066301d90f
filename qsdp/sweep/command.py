"""`qsdp sweep FILE --out FOLDER`: run what is missing, then the table and the plot.

Every run is a `qsdp train` of its own, so that an interrupted sweep goes on where it stopped: runs
that ended are kept, one that was cut off continues from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from qsdp.sweep.spec import Case, Sweep, read_sweep
from qsdp.sweep.table import summarise, table
from qsdp.trainer.metrics import RESULT
from qsdp.trainer.tables import print_table

WIDTH = 110  # of the table in a file


def run(argv: list[str]) -> int:
    """Exit status of `qsdp sweep argv`. Raises ValueError and OSError on bad use."""
    options = _parser().parse_args(argv)
    sweep = read_sweep(options.file)
    if not options.report:
        status = _run_missing(sweep, options.out, set(options.only), set(options.seeds))
        if status:
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


def _run_missing(sweep: Sweep, out: Path, only: set[str], seeds: set[int]) -> int:
    unknown = only - {case.name for case in sweep.cases}
    if unknown:
        raise ValueError(f"--only: no case {sorted(unknown)[0]!r} in the sweep")
    wanted = [
        (case, seed)
        for case, seed in sweep.runs()
        if (not only or case.name in only) and (not seeds or seed in seeds)
    ]
    if not wanted:
        raise ValueError(f"--seeds: no case runs with seed {', '.join(map(str, sorted(seeds)))}")
    for number, (case, seed) in enumerate(wanted, 1):
        folder = run_folder(out, case, seed)
        if (folder / RESULT).is_file():
            continue
        print(f"[{number}/{len(wanted)}] {case.name}, seed {seed}", flush=True)
        status = subprocess.run(_command(sweep, case, seed, out)).returncode
        if status:
            print(f"qsdp sweep: stopped at {folder}; the same command goes on", file=sys.stderr)
            return status
    return 0


def run_folder(out: Path, case: Case, seed: int) -> Path:
    return out / case.name / f"seed-{seed}"


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
    resumable = any((folder / "checkpoints").glob("step-*[0-9]"))
    return [*command, "--resume"] if resumable else [*command, "--overwrite"]


def _flags(train: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in train.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            values = value if isinstance(value, list) else [value]
            flags += [flag, *map(str, values)]
    return flags


def report(sweep: Sweep, out: Path, *, as_json: bool = False) -> None:
    """Print the table; write it as text, JSON and a plot beside the runs."""
    results = {
        case.name: {
            seed: json.loads(path.read_text())
            for seed in case.seeds or sweep.seeds
            if (path := run_folder(out, case, seed) / RESULT).is_file()
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
    from qsdp.sweep.plot import draw

    draw(rows, out / "sweep.png")
    if not as_json:
        print(out / "sweep.png")
