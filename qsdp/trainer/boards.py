"""Where metrics can be watched: TensorBoard always, Weights & Biases with --wandb. On rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from qsdp.trainer.config import TrainConfig

TENSORBOARD = "tensorboard"
WANDB = "wandb"
_WANDB_ID = "wandb-id"
_NO_METRICS = ("step", "elapsed_s")


class Board(Protocol):
    """What takes the numbers of a step or a validation."""

    def add(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def open_boards(config: TrainConfig, run_folder: Path, resume_step: int) -> list[Board]:
    """The boards of a run that goes on after ``resume_step``, 0 for a fresh one.

    Raises:
        RuntimeError: Weights & Biases refuses.
    """
    boards: list[Board] = [_TensorBoard(run_folder / TENSORBOARD, resume_step)]
    if config.wandb is not None:
        boards.append(_WeightsAndBiases(config, run_folder))
    return boards


def metrics_of(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl that boards draw over steps."""
    return {name: value for name, value in record.items() if name not in _NO_METRICS}


class _TensorBoard:
    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def add(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One run there for a run folder, however often it is resumed: the folder keeps its id.

    How it is sent is said by wandb's own environment variables, such as WANDB_MODE=offline.
    """

    def __init__(self, config: TrainConfig, run_folder: Path) -> None:
        import wandb

        kept = run_folder / _WANDB_ID
        try:
            self._run = wandb.init(
                project=config.wandb,
                name=run_folder.name,
                dir=str(run_folder),
                config=config.to_json(),
                id=kept.read_text().strip() if kept.is_file() else None,
                resume="allow",
                # The console is the trainer's own.
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # wandb's own derive from Exception alone
            raise RuntimeError(f"--wandb {config.wandb}: {error}") from error
        kept.write_text(f"{self._run.id}\n")

    def add(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


def forget(run_folder: Path) -> None:
    """A fresh run in this folder is another one on Weights & Biases, too."""
    (run_folder / _WANDB_ID).unlink(missing_ok=True)
