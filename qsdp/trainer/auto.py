"""``--comm auto``: decided once, when a run starts, and stored with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import qsdp
from qsdp.auto import AUTO
from qsdp.trainer.checkpoint import read_description
from qsdp.trainer.comm import require_kept
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.metrics import write_json

DECISION = "decision.json"
_EVERYTHING = "*"  # the exception of the transport that quantizes nothing
_PREFIX = "auto-"


def decide_communication(model: nn.Module, config: TrainConfig, resume: Path | None) -> TrainConfig:
    """``config`` with the way that ``--comm auto`` means, as the fields of QSDPConfig.

    A collective call. The run keeps what was decided: whoever resumes it does not decide again,
    whether ``--comm auto`` is given once more or not. The run folder stays the one of ``auto``.

    Args:
        model: sharded.
        resume: the checkpoint to continue from, or None.

    Raises:
        ValueError: flags that do not fit the model; on every rank.
    """
    if config.comm != AUTO:
        return config
    comm = None if resume is None else _decided(resume)
    if comm is None:
        require_kept(model, config)
        decision = qsdp.decide(
            model,
            exceptions=dict.fromkeys(config.keep_full_precision),
            ranks_per_node=config.ranks_per_node,
            micro_batches=_forwards(config),
            sync_every=config.sync_every_micro_batch,
        )
        if dist.get_rank() == 0:
            write_json(config.run_folder / DECISION, decision.to_json())
        comm = json.dumps({"name": _PREFIX + decision.name, **_stored(decision, config)})
    return dataclasses.replace(config, comm=comm, folder=config.run_folder)


def _forwards(config: TrainConfig) -> int:
    return config.micro_batches(dist.get_world_size())


def _stored(decision: qsdp.Decision, config: TrainConfig) -> dict[str, Any]:
    """Fields of QSDPConfig, without the exceptions that --keep-full-precision says again."""
    fields = decision.config.to_json()
    own = (item for item in fields["exceptions"].items() if item[0] == _EVERYTHING)
    fields["exceptions"] = dict(own)
    if config.replicate > 1 and config.quantize_replicas and not fields["exceptions"]:
        fields["replicas"] = fields["gradients"]
    return fields


def _decided(checkpoint: Path) -> str | None:
    """What was decided for the run of a checkpoint; None where it was given."""
    comm = read_description(checkpoint).config.get("comm")
    if not isinstance(comm, str) or not comm.startswith("{"):
        return None
    return comm if str(json.loads(comm).get("name")).startswith(_PREFIX) else None
