"""`qsdp train`: from flags to a checked configuration, to ranks, to a run.

The process that the user starts checks all that it can and then starts the ranks, which parse the
same flags again and train.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from qsdp.arguments import TRAIN_PACKAGES, require_packages
from qsdp.trainer.config import LATEST, PRESETS, TrainConfig, embedded_comm


def run(argv: list[str]) -> int:
    """Exit status of `qsdp train argv`. Raises ValueError and OSError on bad use."""
    require_packages(*TRAIN_PACKAGES)
    config = parse(argv)
    if config.dataset:
        require_packages("datasets")
    from qsdp.trainer.ranks import SharedError, started_by_launcher

    if not started_by_launcher():
        from qsdp.trainer.check import check
        from qsdp.trainer.launch import launch

        check(config, config.nproc)
        return launch(argv, config.nproc, config.run_folder)
    from qsdp.trainer.loop import train

    try:
        train(config)
    except SharedError as error:
        _end_rank(str(error) if os.environ["LOCAL_RANK"] == "0" else None)
    except Exception as error:
        # Not foreseen, so whoever looks for the cause needs the whole of it, but not on the screen
        # once for every rank.
        rank = os.environ["RANK"]
        config.run_folder.mkdir(parents=True, exist_ok=True)
        path = config.run_folder / f"traceback-rank{rank}.txt"
        path.write_text(traceback.format_exc())
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        _end_rank(f"rank {rank}: {cause} (traceback in {path})")
    return 0


def _end_rank(message: str | None) -> NoReturn:
    """End this rank with status 1, after one line where there is a message.

    Without the interpreter's teardown: gloo's threads still run after an error, and destroying them
    there now and then aborts, which would turn status 1 into 134.
    """
    if message is not None:
        print(f"qsdp train: error: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def parse(argv: list[str]) -> TrainConfig:
    """Flags over the preset that they name, or with --resume over the run's own configuration."""
    import tyro

    argv = _with_resume_value(argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="tiny")
    first.add_argument("--folder", type=Path)
    first.add_argument("--resume")
    chosen, _ = first.parse_known_args(argv)
    # A name that is no preset is left for tyro to refuse.
    default = PRESETS.get(chosen.preset, PRESETS["tiny"])()
    if chosen.resume and chosen.folder and (chosen.folder / "config.json").is_file():
        default = dataclasses.replace(read_config(chosen.folder), resume=None)
    config = tyro.cli(TrainConfig, prog="qsdp train", args=argv, default=default)
    return dataclasses.replace(config, comm=embedded_comm(config.comm))


def read_config(run_folder: Path) -> TrainConfig:
    """The configuration that a run wrote.

    Raises:
        OSError, ValueError: the folder holds no run, or a damaged one.
    """
    path = run_folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{run_folder} is no run folder of qsdp train: it has no config.json"
        )
    try:
        return TrainConfig.from_json(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _with_resume_value(argv: list[str]) -> list[str]:
    """`--resume` without a path means the latest checkpoint."""
    completed = []
    for flag, following in zip(argv, [*argv[1:], "--"], strict=True):
        completed.append(flag)
        if flag == "--resume" and following.startswith("--"):
            completed.append(LATEST)
    return completed
