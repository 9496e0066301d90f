"""torchtitan: a model's specification whose ``parallelize_fn`` ends with qsdp.

torchtitan shards in ``parallelize_fn`` and switches FSDP2's own division of gradients off, so
qsdp's reduce-scatter sums, with PREMUL_SUM(1.0), and the trainer's loss is scaled by tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from qsdp import (
    QSDPConfig,
    QuantizedDDPState,
    apply_qsdp,
    comm_state_dict,
    is_quantized,
    load_comm_state_dict,
    quantized_ddp_hook,
)

P = ParamSpec("P")
Spec = TypeVar("Spec")


def quantized_parallelize(
    parallelize_fn: Callable[P, nn.Module], config: QSDPConfig | str
) -> Callable[P, nn.Module]:
    """``parallelize_fn``, with the communication of the model that it returns quantized.

    Without shards (``data_parallel_shard_degree=1``) torchtitan uses DDP: give it a configuration
    of gradients only (``"w32g8"``) then. What that feeds back is not saved with checkpoints.
    """

    @wraps(parallelize_fn)
    def parallelize(*args: P.args, **kwargs: P.kwargs) -> nn.Module:
        model = parallelize_fn(*args, **kwargs)
        if hasattr(model, "register_comm_hook") and not _is_sharded(model):
            return _hooked(model, config)
        return apply_qsdp(model, config)

    return parallelize


def _hooked(model: nn.Module, config: QSDPConfig | str) -> nn.Module:
    """DDP's hook on a model of ``replicate``: before its first forward, which makes its DDP.

    Not now: parameters on the meta device are replaced by others until then.
    """

    def hook_once(*unused: Any) -> None:
        handle.remove()
        register: Any = model.register_comm_hook
        register(QuantizedDDPState(model, config), quantized_ddp_hook)

    handle = model.register_forward_pre_hook(hook_once, prepend=True)
    return model


def quantized_spec(spec: Spec, config: QSDPConfig | str) -> Spec:
    """A copy of a torchtitan ``ModelSpec`` (``TrainSpec`` before 0.3) that trains with qsdp.

    Args:
        config: equal on all ranks; the name of a preset will do (``"w8g8"``).

    Raises:
        TypeError: ``spec`` has no ``parallelize_fn``.
    """
    if not is_dataclass(spec) or isinstance(spec, type) or not hasattr(spec, "parallelize_fn"):
        raise TypeError(
            "quantized_spec takes a torchtitan ModelSpec or TrainSpec, which has a parallelize_fn, "
            f"got {type(spec).__name__}"
        )
    changed: Any = {"parallelize_fn": quantized_parallelize(spec.parallelize_fn, config)}
    return replace(spec, **changed)


def save_comm_state(trainer: Any) -> None:
    """Let torchtitan's checkpoints hold what communication remembers, as ``qsdp``.

    Call it once a trainer is made, before it trains (``QSDPTrainer`` in
    ``examples/torchtitan_qsdp.py``). A checkpoint that was saved without it is loaded with
    ``--checkpoint.exclude_from_loading qsdp``.
    """
    trainer.checkpointer.states["qsdp"] = CommState(trainer.model_parts)


class CommState:
    """:func:`qsdp.comm_state_dict` of a rank's model parts, as torch.distributed.checkpoint's
    ``Stateful``: also for checkpoints of your own."""

    def __init__(self, model_parts: Sequence[nn.Module]) -> None:
        self.parts = [part for part in model_parts if _remembers(part)]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            f"{index}.{name}": value
            for index, part in enumerate(self.parts)
            for name, value in comm_state_dict(part).items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for index, part in enumerate(self.parts):
            start = f"{index}."
            own = {
                name.removeprefix(start): v for name, v in state.items() if name.startswith(start)
            }
            load_comm_state_dict(part, own)


def _remembers(part: nn.Module) -> bool:
    return _is_sharded(part) and is_quantized(part)


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())
