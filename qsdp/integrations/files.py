"""What communication remembers, as one file a rank inside a framework's checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from qsdp import QuantizedDDPState, comm_state_dict, load_comm_state_dict

try:
    from safetensors.torch import load_file, save_file
except ImportError as error:
    raise ImportError(
        f"qsdp saves what communication remembers with safetensors ({error}): "
        "pip install safetensors"
    ) from error


def rank_file(folder: Path, rank: int | None = None) -> Path:
    """The file of a rank, by default this one, in a checkpoint's folder."""
    return folder / f"qsdp-rank{dist.get_rank() if rank is None else rank}.safetensors"


def save_comm_state(model: nn.Module, folder: Path) -> None:
    """Save this rank's :func:`qsdp.comm_state_dict`; nothing where qsdp remembers nothing.

    Ranks that share no file system each have theirs on their own.
    """
    _save(comm_state_dict(model), folder)


def load_comm_state(model: nn.Module, folder: Path) -> None:
    """Continue with what :func:`save_comm_state` saved; a collective call, on every rank.

    Where there are more ranks now, the new ones take rank 0's file, which levels go on from. With a
    warning, communication starts afresh where files are missing.

    Raises:
        ValueError: the files are of another model or configuration.
    """
    if not comm_state_dict(model):
        return
    found = [file for file in (rank_file(folder), rank_file(folder, 0)) if file.is_file()]
    if not found:
        _warn(folder)
    load_comm_state_dict(model, load_file(found[0]) if found else {})


def save_ddp_state(state: QuantizedDDPState, folder: Path) -> None:
    """Save this rank's errors to feed back, and the step."""
    _save(state.state_dict(), folder)


def load_ddp_state(state: QuantizedDDPState, folder: Path) -> None:
    """Continue with what :func:`save_ddp_state` saved on this rank, or afresh with a warning.

    Raises:
        ValueError: the file is of another model, or of another number of ranks.
    """
    if rank_file(folder).is_file():
        state.load_state_dict(load_file(rank_file(folder)))
    else:
        _warn(folder)


def _save(state: Mapping[str, torch.Tensor], folder: Path) -> None:
    if state:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(state), rank_file(folder))


def _warn(folder: Path) -> None:
    warnings.warn(
        f"qsdp: {rank_file(folder)} is missing: what communication remembered when this "
        "checkpoint was saved starts afresh",
        stacklevel=3,
    )
