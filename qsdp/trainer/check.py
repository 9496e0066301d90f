"""What can be checked before training: by the process that starts the ranks, and by rank 0."""

from __future__ import annotations

from qsdp.trainer.checkpoint import find_checkpoint, read_description
from qsdp.trainer.comm import comm_config
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.lock import refuse_held
from qsdp.trainer.metrics import RESULT
from qsdp.trainer.quantized import fake_quantizer
from qsdp.trainer.text import check_files


def check(config: TrainConfig, num_ranks: int) -> None:
    """Raises ValueError or FileNotFoundError, in one line that names the flag to change."""
    comm_config(config)
    fake_quantizer(config)
    config.micro_batches(num_ranks)
    _check_mesh(config, num_ranks)
    check_files(config)
    if config.model is not None and not (config.model / "config.json").is_file():
        raise FileNotFoundError(f"--model: {config.model} is no folder with a config.json")
    if config.tokenizer is not None and not config.tokenizer.exists():
        raise FileNotFoundError(f"--tokenizer: there is no file or folder {config.tokenizer}")
    if config.dataset and not (config.tokenizer or config.model):
        raise ValueError("--dataset needs --tokenizer PATH (or a --model that has one)")
    folder = config.run_folder
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--folder: {folder} is a file")
    refuse_held(folder)
    if config.resume:
        path = find_checkpoint(config.resume, folder / "checkpoints")
        step = read_description(path).step
        # At the last step without a result: what comes after training failed, and is done again.
        if step > config.steps or (step == config.steps and (folder / RESULT).is_file()):
            raise ValueError(
                f"{path} is at step {step} and --steps is {config.steps}; raise --steps above "
                f"{step} to train on"
            )
    elif not config.overwrite and (folder / "config.json").exists():
        raise ValueError(
            f"{folder} already holds a run; --resume continues it, --overwrite deletes it, "
            "--folder names another"
        )


def _check_mesh(config: TrainConfig, num_ranks: int) -> None:
    if num_ranks % config.replicate:
        raise ValueError(f"--replicate must divide the ranks, {num_ranks}, got {config.replicate}")
    shards = num_ranks // config.replicate
    if config.ranks_per_node is not None and shards % config.ranks_per_node:
        of = "" if config.replicate == 1 else f" of a replica, {num_ranks} / {config.replicate}"
        raise ValueError(
            f"--ranks-per-node must divide the ranks{of or f', {num_ranks}'}, got "
            f"{config.ranks_per_node}"
        )
