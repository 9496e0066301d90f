"""Hugging Face Accelerate: one call below ``accelerator.prepare``, with FSDP2 or with DDP.

:func:`qsdp.apply_qsdp` below ``prepare`` does the same, but for checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsdp import QSDPConfig, QuantizedDDPState, apply_qsdp, quantized_ddp_hook
from qsdp.integrations.files import (
    load_comm_state,
    load_ddp_state,
    save_comm_state,
    save_ddp_state,
)


def quantize(
    accelerator: Any, model: nn.Module, config: QSDPConfig | str, *, warmup_steps: int = 0
) -> QuantizedDDPState | None:
    """Quantize a prepared model's communication, and save what that remembers with its checkpoints.

    ``accelerator.save_state(folder)`` then writes a file a rank beside Accelerate's own, and
    ``accelerator.load_state(folder)`` continues with it.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: what ``accelerator.prepare`` returned: sharded by FSDP2, or wrapped with DDP.
        config: equal on all ranks; the name of a preset will do.
        warmup_steps: of DDP, the first steps in full precision.

    Returns:
        The state of DDP's hook, for its numbers; None for FSDP2.

    Raises:
        ValueError, TypeError: as :func:`qsdp.apply_qsdp`.
    """
    if isinstance(model, DistributedDataParallel):
        ddp = QuantizedDDPState(model, config, warmup_steps=warmup_steps)
        model.register_comm_hook(ddp, quantized_ddp_hook)
    else:
        ddp = None
        apply_qsdp(model, config)

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        if ddp is None:
            save_comm_state(model, Path(folder))
        else:
            save_ddp_state(ddp, Path(folder))

    def load(models: list[nn.Module], folder: str) -> None:
        if ddp is None:
            load_comm_state(model, Path(folder))
        else:
            load_ddp_state(ddp, Path(folder))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return ddp
