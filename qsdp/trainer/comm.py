"""What --comm says: the name of a preset, or a JSON file with the fields of QSDPConfig."""

from __future__ import annotations

import dataclasses
import json
from fnmatch import fnmatchcase

from torch import nn

import qsdp
from qsdp.arguments import did_you_mean
from qsdp.trainer.config import TrainConfig

_BITS = (*range(2, 9), 32)
PRESETS = [f"w{weights}g{gradients}" for weights in _BITS for gradients in _BITS]


def comm_config(config: TrainConfig) -> qsdp.QSDPConfig:
    """The configuration of communication, flags of the trainer included.

    Raises:
        ValueError: no such preset, or a field that QSDPConfig refuses.
    """
    if not config.comm.startswith("{"):
        try:
            comm = qsdp.QSDPConfig.preset(config.comm)
        except ValueError as error:
            raise ValueError(f"--comm: {error}{did_you_mean(config.comm, PRESETS)}") from error
    else:
        content = json.loads(config.comm)
        try:
            comm = qsdp.QSDPConfig.from_json({k: v for k, v in content.items() if k != "name"})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"--comm {content.get('name')}: {error}") from error
    comm = dataclasses.replace(comm, seed=config.seed)
    if config.ranks_per_node is not None:
        try:
            comm = dataclasses.replace(comm, ranks_per_node=config.ranks_per_node)
        except ValueError as error:
            raise ValueError(f"--ranks-per-node {config.ranks_per_node}: {error}") from error
    return comm.with_exceptions(dict.fromkeys(config.keep_full_precision))


def quantize_communication(model: nn.Module, config: TrainConfig) -> None:
    """Install qsdp as --comm says, and count what goes over the network either way.

    Raises:
        ValueError: a configuration that does not fit the model; on every rank.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in config.keep_full_precision:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"--keep-full-precision: {pattern!r} matches no parameter; the model has "
                f"{len(names)}, such as {', '.join(names[:3])}"
            )
    try:
        qsdp.apply_qsdp(model, comm_config(config))
    except ValueError as error:
        raise ValueError(f"--comm {config.comm_name}: {error}") from error
    qsdp.observe_comms(model)


def quantizes_weights(config: TrainConfig) -> bool:
    """Whether training sees other weights than the full-precision masters."""
    return any(way is not None for way in comm_config(config).ways("weights"))


def remembers_alike(saved: dict[str, object], config: TrainConfig) -> bool:
    """Whether communication remembers the same under a configuration saved as JSON values."""
    now = config.to_json()
    return all(saved.get(name) == now[name] for name in ("comm", "keep_full_precision"))
