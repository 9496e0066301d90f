"""Resuming a run: from a checkpoint to model, optimizer, data and communication."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

import qsdp
from qsdp.qat import FakeQuantization
from qsdp.trainer.checkpoint import Description, load_checkpoint, load_comm, load_own
from qsdp.trainer.comm import remembers_alike
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.data import Data, vocabulary_digest
from qsdp.trainer.local import (
    Local,
    comm_state,
    make_local,
    remembers_sync,
    same_replicas,
    split_state,
)
from qsdp.trainer.quantized import steps_fit
from qsdp.trainer.ranks import Ranks, together

# Settings that another part of the same training may differ in.
_FREE_ON_RESUME = {
    "folder", "overwrite", "resume", "nproc", "device", "timeout", "log_every", "eval_every",
    "eval_windows", "final_eval_windows", "checkpoint_every", "keep_checkpoints", "export",
    "wandb", "prefetch",
}  # fmt: skip
_DEFAULTS = TrainConfig().to_json()


class Progress(NamedTuple):
    """Where a run stands."""

    step: int
    elapsed_s: float
    """Seconds in training steps, over all processes that continued the run."""


def continue_run(
    path: Path,
    config: TrainConfig,
    ranks: Ranks,
    data: Data,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    fake: FakeQuantization | None,
) -> tuple[Progress, Local | None]:
    """Fill all that a run holds from a checkpoint; collective. Returns where the run goes on.

    Raises:
        ValueError: a checkpoint that is damaged or of something else; on every rank.
    """
    saved = load_checkpoint(
        path,
        model,
        optimizer,
        parameters=shapes(model),
        tokenizer=vocabulary_digest(data.tokenizer),
    )
    together(lambda: _require_frozen(path, saved, config))
    afresh = False
    if fake is not None:
        fake.load_state_dict({"steps_taken": saved.step})
        afresh = fake.active and not steps_fit(saved.config, saved.step, config)
        if afresh:
            fake.initialize()

    def continue_data() -> None:
        states = saved.data_states
        if len(states) == ranks.num_ranks:
            data.batches.load_state(states[ranks.rank])
        elif any(states):
            raise ValueError(
                f"{path} holds the stream positions of {len(states)} ranks; resume with --nproc "
                f"{len(states)}, not {ranks.num_ranks}"
            )

    together(continue_data)
    # At the average of all replicas, which is where those that are new go on from.
    local = together(lambda: make_local(model, optimizer, mesh, config, saved.step))
    # With learned steps that are new, replicas are new, too: their own are of the other grid.
    own = same_replicas(saved.config, saved.num_ranks, config) and not afresh
    between = remembers_sync(saved.config, config) and not afresh
    _resume_communication(path, saved, model, ranks, local, own, between, config)
    if own:
        load_own(path, model, optimizer)
    if ranks.rank == 0:
        now = config.to_json()
        for name in sorted(set(now) - _FREE_ON_RESUME):
            # A checkpoint may be older than a flag.
            if saved.config.get(name, _DEFAULTS[name]) != now[name]:
                flag = "--" + name.replace("_", "-")
                print(
                    f"qsdp train: warning: {flag} was {saved.config.get(name)} when {path} was "
                    f"saved, is {now[name]} now"
                )
    return Progress(saved.step, saved.elapsed_s), local


def _require_frozen(path: Path, saved: Description, config: TrainConfig) -> None:
    """Raises ValueError where a second moment that was frozen would be changed again."""
    at_step, now = saved.config.get("freeze_second_moment"), config.freeze_second_moment
    frozen = at_step is not None and at_step < saved.step
    if frozen and (now is None or now > saved.step):
        raise ValueError(
            f"--freeze-second-moment is {now}, and {path}, of step {saved.step}, holds a second "
            f"moment that was frozen after step {at_step}: give --freeze-second-moment {at_step}"
        )


def _resume_communication(
    path: Path,
    saved: Description,
    model: PreTrainedModel,
    ranks: Ranks,
    local: Local | None,
    own: bool,
    between: bool,
    config: TrainConfig,
) -> None:
    """What communication remembered inside replicas, and between them.

    Args:
        own: whether each rank goes on as the one that it was.
        between: whether synchronisations do.
    """
    inside = remembers_alike(saved.config, config) and (local is None or own)
    suffix = f".rank{ranks.rank}"
    fresh = {
        name: value
        for name, value in comm_state(model, local).items()
        if (between if local is not None and name.startswith("sync.") else inside)
        and (own or local is None or not name.endswith(suffix))
    }
    of_replica, of_sync = split_state(load_comm(path, saved, fresh), local)
    with warnings_on_a_line(ranks):
        if inside:
            together(lambda: qsdp.load_comm_state_dict(model, of_replica))
        if local is not None and between:
            together(lambda: local.sync.load_state_dict(of_sync))


@contextmanager
def warnings_on_a_line(ranks: Ranks) -> Iterator[None]:
    """Warnings without the line of code that gave them; all ranks have the same, one tells."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if ranks.rank == 0:
        for warning in caught:
            print(f"qsdp train: warning: {str(warning.message).removeprefix('qsdp: ')}", flush=True)


def shapes(model: PreTrainedModel) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}
