"""Checkpoints: written whole or not at all, read without running code.

A checkpoint is a folder `step-00000100` that holds, of torch.distributed.checkpoint, one
safetensors file a rank with model, optimizer and what communication remembers, and
`checkpoint.json` with all the rest. It is written under another name and renamed when every rank
has written its part, so a folder with that name is complete, and a crash leaves the one before it
as it was.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from qsdp.agreement import all_gather_json
from qsdp.trainer.config import LATEST
from qsdp.trainer.local import Local, own_tensors, use_own, whole_and_own
from qsdp.trainer.ranks import on_rank_zero, together

DESCRIPTION = "checkpoint.json"
FORMAT = 3
_PARTIAL = ".partial"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Description(NamedTuple):
    """What a checkpoint says of itself, besides tensors; all values are JSON."""

    step: int
    elapsed_s: float
    config: dict[str, Any]
    parameters: dict[str, list[int]]
    """Shape of every parameter."""
    tokenizer: str
    """Hash of the tokenizer's vocabulary."""
    data_states: list[dict[str, Any]]
    """State of each rank's batches."""
    num_ranks: int


# JSON values of Description's fields.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "elapsed_s": (int, float),
    "config": dict,
    "parameters": dict,
    "tokenizer": str,
    "data_states": list,
    "num_ranks": int,
}


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    description: Description,
    *,
    keep: int,
    comm: Mapping[str, torch.Tensor] | None = None,
    local: Local | None = None,
) -> Path:
    """Write `folder/step-N` and delete all but the last `keep`; collective.

    1. Every rank writes its shards into a folder with a name that no reader takes.
    2. Every rank checksums its part of the files; rank 0 writes checkpoint.json.
    3. Rank 0 renames the folder, then deletes old ones.

    Args:
        comm: what :func:`qsdp.comm_state_dict` gave.
        local: where replicas differ: the checkpoint holds their average, and what is each one's.
    """
    final = folder / f"step-{description.step:08d}"
    partial = folder / (final.name + _PARTIAL)
    on_rank_zero(lambda: _fresh_folder(partial))
    of_model = together(lambda: whole_and_own(_tensors(model, optimizer), local))
    tensors = {**of_model, **_comm_tensors(comm or {})}
    together(lambda: _write_tensors(partial, tensors))
    checksums = together(lambda: _checksums(partial))
    on_rank_zero(lambda: _complete(partial, final, description, checksums, keep))
    return final


def _write_tensors(partial: Path, tensors: dict[str, Any]) -> None:
    """Raises OSError on every rank with what the first rank that failed met."""
    writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
    try:
        save(tensors, storage_writer=writer)
    except CheckpointException as failed:  # derives from BaseException: nothing else catches it
        rank, (error, _) = min(failed.failures.items())
        raise OSError(
            f"rank {rank} could not write the checkpoint {partial}: {error}; earlier checkpoints "
            "are whole: make room, then --resume"
        ) from failed


def _fresh_folder(path: Path) -> None:
    for left_over in path.parent.glob("*" + _PARTIAL):
        shutil.rmtree(left_over)
    path.mkdir(parents=True)


def _complete(
    partial: Path, final: Path, description: Description, checksums: dict[str, Any], keep: int
) -> None:
    content = {"format": FORMAT, **description._asdict(), "files": checksums}
    with (partial / DESCRIPTION).open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        shutil.rmtree(final)
    os.rename(partial, final)
    for old in complete_checkpoints(final.parent)[:-keep]:
        shutil.rmtree(old)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if path.suffix != _PARTIAL]
    return sorted(path for path in found if (path / DESCRIPTION).is_file())


def find_checkpoint(resume: str, folder: Path) -> Path:
    """The path that --resume names: a checkpoint, or the latest in `folder`."""
    if resume != LATEST:
        path = Path(resume)
        if not (path / DESCRIPTION).is_file():
            raise FileNotFoundError(
                f"--resume {path} is no complete checkpoint: it has no {DESCRIPTION}"
            )
        return path
    complete = complete_checkpoints(folder)
    if not complete:
        raise FileNotFoundError(
            f"--resume finds no complete checkpoint in {folder}; give --resume PATH, or start "
            "afresh without --resume"
        )
    return complete[-1]


def read_description(path: Path) -> Description:
    """Raises ValueError with the file and the field where checkpoint.json is damaged."""
    return Description(**{name: value for name, value in _content(path).items() if name in _KINDS})


def _content(path: Path) -> dict[str, Any]:
    """All of checkpoint.json, the files' checksums included."""
    file, hint = path / DESCRIPTION, "resume from another checkpoint"
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}; {hint}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: it holds no JSON object; {hint}")
    if content.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"{file}: format is {content['format']!r}, this version of qsdp reads {FORMAT}"
        )
    for name, kind in {"format": int, **_KINDS, "files": dict}.items():
        if name not in content:
            raise ValueError(f"{file} is damaged: it lacks the field {name!r}; {hint}")
        if not isinstance(content[name], kind):
            raise ValueError(f"{file} is damaged: {name} is {content[name]!r}; {hint}")
    return content


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    parameters: dict[str, list[int]],
    tokenizer: str,
) -> Description:
    """Fill model and optimizer from a checkpoint; collective, and an error is every rank's error.

    Raises ValueError where the checkpoint is damaged or belongs to another model or tokenizer; the
    model is untouched then.
    """
    description = together(lambda: read_description(path))
    together(lambda: _check_same_model(path, description, parameters, tokenizer))
    together(lambda: _verify_files(path, dist.get_rank(), dist.get_world_size()))
    tensors = _tensors(model, optimizer)
    together(lambda: _read_tensors(path, tensors))
    _use(tensors, model, optimizer)
    return description


def load_own(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give each rank its own again, of replicas that differ; collective, after load_checkpoint."""
    tensors = _tensors(model, optimizer)
    own = own_tensors(tensors)
    together(lambda: _read_tensors(path, own))
    _use(use_own(tensors, own), model, optimizer)


def _use(tensors: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill model and optimizer with what :func:`_tensors` gave, or was read into it."""
    model_state = {
        name.removeprefix("model."): value
        for name, value in tensors.items()
        if name.startswith("model.")
    }
    set_model_state_dict(model, model_state, options=StateDictOptions(strict=False))
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    for name in optimizer_state:
        if "optimizer." + name in tensors:
            optimizer_state[name] = tensors["optimizer." + name]
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=_OPTIONS)


def load_weights(path: Path, model: nn.Module, tokenizer: str) -> None:
    """Fill a whole model, in this process alone, with a checkpoint's full-precision weights, the
    trained ones.

    Raises:
        OSError, ValueError: the checkpoint is damaged, or of another model or tokenizer.
    """
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    _check_same_model(path, read_description(path), shapes, tokenizer)
    _verify_files(path)
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    tensors = {"model." + name: value.data for name, value in trained}
    with warnings.catch_warnings():  # that there is one process
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        _read_tensors(path, tensors, alone=True)


def load_comm(
    path: Path, description: Description, fresh: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What :func:`save_checkpoint` got as ``comm``, for :func:`qsdp.load_comm_state_dict`.

    A collective call. Of a checkpoint of another number of ranks only what all ranks share.

    Args:
        description: of the checkpoint.
        fresh: what :func:`qsdp.comm_state_dict` gives of the model here; read into, in part.
    """
    own = f".rank{dist.get_rank()}"
    same_ranks = description.num_ranks == dist.get_world_size()
    state = {n: value for n, value in fresh.items() if same_ranks or not n.endswith(own)}
    if state:
        together(lambda: _read_tensors(path, _comm_tensors(state)))
    return state


def _comm_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under their names in a checkpoint."""
    return {"comm." + name: value for name, value in state.items()}


def _read_tensors(path: Path, tensors: dict[str, Any], *, alone: bool = False) -> None:
    try:
        load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=alone)
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        raise OSError(
            f"rank {rank} could not read {path}: {error}; resume from another checkpoint"
        ) from failed


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer state by name. Tied parameters appear once; what is frozen is left out,
    because the model is read with it, and settings of the optimizer, because the run's
    configuration gives them."""
    left_out = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    left_out -= {name for name, value in model.named_parameters() if value.requires_grad}
    state: dict[str, Any] = {
        "model." + name: value
        for name, value in get_model_state_dict(model).items()
        if name not in left_out
    }
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    for name, value in optimizer_state.items():
        if isinstance(value, torch.Tensor):
            state["optimizer." + name] = value
    return state


def _checksums(folder: Path) -> dict[str, Any]:
    """Size and CRC-32 of every file, the ranks sharing the work; equal on all ranks."""
    files = sorted(folder.glob("*.safetensors"))
    mine = {
        path.name: {"bytes": path.stat().st_size, "crc32": _crc32(path)}
        for path in files[dist.get_rank() :: dist.get_world_size()]
    }
    return {name: value for part in all_gather_json(mine) for name, value in part.items()}


def _verify_files(path: Path, rank: int = 0, num_ranks: int = 1) -> None:
    """Raises ValueError on a file that is missing or is not as it was written; the ranks share
    the work."""
    expected = _content(path)["files"]
    for name, entry in sorted(expected.items())[rank::num_ranks]:
        file = path / name
        hint = "resume from another checkpoint"
        if not file.is_file():
            raise ValueError(f"{file} is missing; {hint}")
        if file.stat().st_size != entry["bytes"]:
            raise ValueError(
                f"{file} has {file.stat().st_size} bytes, {entry['bytes']} were written; {hint}"
            )
        if _crc32(file) != entry["crc32"]:
            raise ValueError(f"{file} is damaged: its CRC-32 is not {entry['crc32']}; {hint}")


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def _check_same_model(
    path: Path, description: Description, parameters: dict[str, list[int]], tokenizer: str
) -> None:
    there = description.parameters
    for name in sorted(set(there) | set(parameters)):
        if there.get(name) != parameters.get(name):
            raise ValueError(
                f"{path} is of another model: parameter {name} has shape "
                f"{there.get(name, 'none')} there and {parameters.get(name, 'none')} here; change "
                "--preset, --model, --fake-quantize or the shape, or give another --resume PATH"
            )
    if description.tokenizer != tokenizer:
        raise ValueError(
            f"{path} was trained with another tokenizer ({description.tokenizer}, here "
            f"{tokenizer}); give the same --tokenizer or --data"
        )
