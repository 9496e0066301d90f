"""`qsdp train`: from flags to a checked configuration, to ranks, to a run.

The process that the user starts checks all that it can and then starts the ranks, which parse the
same flags again and train.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import traceback
from pathlib import Path

from qsdp.arguments import TRAIN_PACKAGES, require_package, require_packages
from qsdp.trainer.comm_file import embedded_comm
from qsdp.trainer.config import LATEST, PRESETS, TrainConfig
from qsdp.trainer.file import read_run_file


def run(argv: list[str]) -> int:
    """Exit status of `qsdp train argv`. Raises ValueError and OSError on bad use."""
    require_packages(*TRAIN_PACKAGES)
    config = parse(argv)
    if config.dataset:
        require_packages("datasets")
    if config.wandb is not None:
        require_package("--wandb", "wandb")
    if config.lora is not None:
        require_package("--lora", "peft", "'qsdp[lora]'")
    from qsdp.trainer.ranks import SharedError, end_rank, started_by_launcher

    if not started_by_launcher():
        from qsdp.trainer.check import check
        from qsdp.trainer.launch import launch

        check(config, config.nproc)
        return launch(argv, config.nproc, config.run_folder)
    from qsdp.trainer.loop import train

    try:
        train(config)
    except SharedError as error:
        first = os.environ["LOCAL_RANK"] == "0"
        end_rank(1, f"qsdp train: error: {error}" if first else None)
    except Exception as error:
        # Not foreseen, so whoever looks for the cause needs the whole of it, but not on the screen
        # once for every rank.
        rank = os.environ["RANK"]
        config.run_folder.mkdir(parents=True, exist_ok=True)
        path = config.run_folder / f"traceback-rank{rank}.txt"
        path.write_text(traceback.format_exc())
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        end_rank(1, f"qsdp train: error: rank {rank}: {cause} (traceback in {path})")
    end_rank(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File:
    config: Path | None = None
    """A YAML or JSON file of these flags, for a whole run; flags that are given override it. Each
    run writes one: RUN/config.json."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Flags(TrainConfig, _File):
    """Train or fine-tune a causal language model with quantized communication."""

    def __post_init__(self) -> None:
        """Nothing is checked before file and flags are together."""


def parse(argv: list[str]) -> TrainConfig:
    """Flags over the file of --config, over the run's own configuration with --resume, over the
    preset.

    Raises:
        OSError, ValueError, RuntimeError: a file that cannot be read, or settings that exclude each
            other; in one line.
    """
    import tyro

    argv = _with_resume_value(argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--preset", "--resume"):
        first.add_argument(flag)
    for flag in ("--folder", "--config"):
        first.add_argument(flag, type=Path)
    chosen, _ = first.parse_known_args(argv)
    written = read_run_file(chosen.config) if chosen.config else {}
    # A name that is no preset is left for tyro to refuse.
    preset = PRESETS.get(chosen.preset or written.get("preset", "tiny"), PRESETS["tiny"])()
    folder = chosen.folder or written.get("folder")
    if (chosen.resume or written.get("resume")) and folder and (folder / "config.json").is_file():
        preset = dataclasses.replace(read_config(folder), resume=None)
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    default = _Flags(**{name: getattr(preset, name) for name in names} | written)
    flags = tyro.cli(_Flags, prog="qsdp train", args=argv, default=default)
    values = {name: getattr(flags, name) for name in names}
    given = "comm_warmup" in written or any(a.split("=")[0] == "--comm-warmup" for a in argv)
    if values["comm"] != preset.comm and not given:
        values["comm_warmup"] = None  # what a resumed run took was of another --comm
    try:
        config = TrainConfig(**values)
        return dataclasses.replace(config, comm=embedded_comm(config.comm))
    except ValueError as error:
        name = str(error).split()[0].strip("-:").replace("-", "_")
        if name in written and written[name] == values[name]:
            raise ValueError(f"{chosen.config}: {error}") from error
        raise


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
