"""What --comm says: a preset's name, or a JSON file with the fields of QSDPConfig.

Or ``auto``: see :mod:`qsdp.trainer.auto`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from fnmatch import fnmatchcase

import torch
from torch import nn

import qsdp
from qsdp.arguments import did_you_mean
from qsdp.auto import AUTO
from qsdp.config import NAMED_PRESETS
from qsdp.qat import FakeQuantization
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.quantized import on_the_wire

_BITS = (*range(1, 9), 32)
PRESETS = [
    AUTO,
    *NAMED_PRESETS,
    *(f"w{weights}g{gradients}" for weights in _BITS for gradients in _BITS),
]
WARMUP_SHARE = 10  # of a run's steps, one in so many


def comm_config(config: TrainConfig) -> qsdp.QSDPConfig:
    """The configuration of communication, flags of the trainer included.

    Before ``auto`` is decided, any that it may become.

    Raises:
        ValueError: no such preset, or a field that QSDPConfig refuses.
    """
    if not config.comm.startswith("{"):
        try:
            auto = config.comm == AUTO
            comm = qsdp.QSDPConfig() if auto else qsdp.QSDPConfig.preset(config.comm)
        except ValueError as error:
            raise ValueError(f"--comm: {error}{did_you_mean(config.comm, PRESETS)}") from error
    else:
        content = json.loads(config.comm)
        try:
            comm = qsdp.QSDPConfig.from_json({k: v for k, v in content.items() if k != "name"})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"--comm {content.get('name')}: {error}") from error
    comm = dataclasses.replace(comm, seed=config.seed)
    preset = not config.comm.startswith("{")
    comm = _warmed_up(comm, config)
    if config.ranks_per_node is not None:
        try:
            if preset:
                comm = comm.on_nodes_of(config.ranks_per_node)
            else:
                comm = dataclasses.replace(comm, ranks_per_node=config.ranks_per_node)
        except ValueError as error:
            raise ValueError(f"--ranks-per-node {config.ranks_per_node}: {error}") from error
    return _between_replicas(comm, config).with_exceptions(
        dict.fromkeys(config.keep_full_precision)
    )


def _warmed_up(comm: qsdp.QSDPConfig, config: TrainConfig) -> qsdp.QSDPConfig:
    """A preset's warm-up takes as many steps as --comm-warmup says."""
    if not _begins_in_more_bits(comm, config):
        if config.comm_warmup is not None:
            raise ValueError(
                f"--comm-warmup is for presets that begin in more bits, such as bitdp, and --comm "
                f"is {config.comm_name}: leave it out, or give a file that has its `warmup`"
            )
        return comm
    steps = with_warmup(config, comm).comm_warmup
    if comm.warmup is None or not steps:
        return dataclasses.replace(comm, warmup=None)
    reductions = steps * _reductions_of_a_step(config)
    return dataclasses.replace(comm, warmup=dataclasses.replace(comm.warmup, steps=reductions))


def _begins_in_more_bits(comm: qsdp.QSDPConfig, config: TrainConfig) -> bool:
    """Whether it is a preset with a warm-up; a file says itself how long its own takes."""
    return comm.warmup is not None and not config.comm.startswith("{")


def with_warmup(config: TrainConfig, comm: qsdp.QSDPConfig) -> TrainConfig:
    """``config`` with the steps that ``comm``'s warm-up takes, for a run to keep: resumed for more
    steps in all, it shall not begin again.
    """
    if config.comm_warmup is not None or not _begins_in_more_bits(comm, config):
        return config
    return dataclasses.replace(config, comm_warmup=max(config.steps // WARMUP_SHARE, 1))


def _reductions_of_a_step(config: TrainConfig) -> int:
    """What the clock of a warm-up counts."""
    ranks = int(os.environ.get("WORLD_SIZE", config.nproc))
    return config.micro_batches(ranks) if config.sync_every_micro_batch else 1


def _between_replicas(comm: qsdp.QSDPConfig, config: TrainConfig) -> qsdp.QSDPConfig:
    """With --replicate, a preset's gradients travel alike between replicas."""
    if comm.replicas is not None and config.sync_every is not None:
        raise ValueError(
            f"--comm {config.comm_name} says how replicas reduce gradients, and with --sync-every "
            "they reduce none: leave replicas out"
        )
    if comm.replicas is not None and config.replicate == 1:
        raise ValueError(
            f"--comm {config.comm_name} says how replicas reduce gradients, and there is one: give "
            "--replicate N, or leave replicas out"
        )
    preset = not config.comm.startswith("{")
    reduces = config.replicate > 1 and config.sync_every is None
    if not (preset and reduces and config.quantize_replicas):
        return comm
    assert not isinstance(comm.gradients, qsdp.Learned)  # no preset has it
    return dataclasses.replace(comm, replicas=comm.gradients)


def quantize_communication(
    model: nn.Module, config: TrainConfig, fake: FakeQuantization | None = None
) -> None:
    """Install qsdp as --comm says, and count what goes over the network either way.

    Args:
        fake: of --fake-quantize, whose weights may travel as they are.

    Raises:
        ValueError: a configuration that does not fit the model; on every rank.
    """
    require_kept(model, config)
    try:
        qsdp.apply_qsdp(model, on_the_wire(comm_config(config), config, fake))
    except ValueError as error:
        raise ValueError(f"--comm {config.comm_name}: {error}") from error
    qsdp.observe_comms(model)


def freeze_second_moment(optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
    """As --freeze-second-moment says; ValueError where it does not fit."""
    if config.freeze_second_moment is None:
        return
    try:
        at_step, comm = config.freeze_second_moment, comm_config(config)
        qsdp.freeze_second_moment(optimizer, at_step, config=comm)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--freeze-second-moment: {error}") from error


def require_kept(model: nn.Module, config: TrainConfig) -> None:
    """Raises ValueError where a pattern of --keep-full-precision matches no parameter."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in config.keep_full_precision:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"--keep-full-precision: {pattern!r} matches no parameter; the model has "
                f"{len(names)}, such as {', '.join(names[:3])}"
            )


def quantizes_weights(config: TrainConfig) -> bool:
    """Whether training sees other weights than the full-precision masters."""
    return config.fake_quantize is not None or any(
        way is not None for way in comm_config(config).ways("weights")
    )


def remembers_alike(saved: dict[str, object], config: TrainConfig) -> bool:
    """Whether communication remembers the same under a configuration saved as JSON values."""
    now, older = config.to_json(), TrainConfig().to_json()
    names = ("comm", "keep_full_precision", "replicate", "quantize_replicas", "fake_quantize",
             "fake_quantize_block", "fake_quantize_start")  # fmt: skip
    return all(saved.get(name, older[name]) == now[name] for name in names)
