"""What --comm says: the name of a preset, or a JSON file with the fields of QSDPConfig."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch import nn

import qsdp
from qsdp.trainer.config import TrainConfig


def comm_config(config: TrainConfig) -> qsdp.QSDPConfig:
    """The configuration of communication, flags of the trainer included.

    Raises:
        ValueError: no such preset, or a field that QSDPConfig refuses.
    """
    if not config.comm.startswith("{"):
        comm = qsdp.QSDPConfig.preset(config.comm)
    else:
        content = json.loads(config.comm)
        try:
            comm = qsdp.QSDPConfig.from_json({k: v for k, v in content.items() if k != "name"})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"--comm {content.get('name')}: {error}") from error
    changes: dict[str, Any] = {"seed": config.seed}
    if config.keep_full_precision:
        changes["keep_full_precision"] = config.keep_full_precision
    if config.intra_node:
        inner = comm.intra_node.gradients if comm.intra_node else None
        changes["intra_node"] = qsdp.IntraNode(config.intra_node, inner)
    return dataclasses.replace(comm, **changes)


def quantize_communication(model: nn.Module, config: TrainConfig) -> None:
    """Install qsdp as --comm says, and count what goes over the network either way."""
    qsdp.apply_qsdp(model, comm_config(config))
    qsdp.observe_comms(model)


def quantizes_weights(config: TrainConfig) -> bool:
    """Whether training sees other weights than the full-precision masters."""
    comm = comm_config(config)
    return comm.weights is not None or bool(comm.overrides)


@dataclasses.dataclass(frozen=True)
class CommState:
    """What communication remembers, taken from one model and given to another or the same."""

    shared: dict[str, Any]
    own: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> CommState:
        own = {name: tensor.clone() for name, tensor in qsdp.comm_tensors(model).items()}
        return cls(qsdp.comm_state_dict(model), own)

    def restore(self, model: nn.Module) -> None:
        qsdp.load_comm_state_dict(model, self.shared)
        qsdp.load_comm_tensors(model, self.own)
