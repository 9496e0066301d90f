"""Hugging Face ``Trainer``: ``Trainer(..., callbacks=[QSDPCallback(config)])``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from qsdp import QSDPConfig, apply_qsdp, comm_state_dict, is_quantized, load_comm_state_dict
from qsdp.integrations.numbers import CommNumbers

try:
    from safetensors.torch import load_file, save_file
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError(
        f"qsdp.integrations.transformers needs transformers ({error}): "
        "pip install 'qsdp[accelerate]'"
    ) from error


class QSDPCallback(TrainerCallback):  # type: ignore[misc]
    """Quantizes the communication of a Trainer that runs FSDP2.

    Applies ``config`` when training begins, after Trainer has sharded the model, and adds to the
    training logs, as this rank sees them: ``qsdp_sent_bytes`` since the log before, ``qsdp_ratio``
    to what stock FSDP2 would have sent, and ``qsdp_weight_error``, the relative distance of the
    weights in the last step's forward from the full-precision ones.

    What communication remembers is saved with Trainer's checkpoints, a file a rank, and training
    that continues from a checkpoint in ``output_dir`` continues with it.

    Trainer tells its own reporters (TensorBoard, ...) before the callbacks it was given. To have
    the numbers there too, put this one first:
    ``trainer.callback_handler.callbacks.insert(0, QSDPCallback(config))``.

    Args:
        config: equal on all ranks; the name of a preset will do (``"w8g8"``).

    Raises:
        ValueError: at the start of training, if the model is not sharded by FSDP2 or is quantized
            already.
    """

    def __init__(self, config: QSDPConfig | str) -> None:
        self.config = QSDPConfig.of(config, "QSDPCallback")
        self._model: nn.Module | None = None
        self._numbers: CommNumbers | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        assert model is not None, "Trainer passes the model"
        if not args.fsdp:
            raise ValueError(
                "QSDPCallback needs FSDP2 and this Trainer does not use it: set "
                "TrainingArguments(fsdp=True) and start the script with torchrun"
            )
        if args.fsdp_config.get("version", 2) != 2:
            raise ValueError(
                "QSDPCallback needs FSDP2 and this Trainer uses FSDP1: set "
                'TrainingArguments(fsdp_config={"version": 2})'
            )
        if args.device.type == "cpu" and not _is_sharded(model):
            raise ValueError(
                "QSDPCallback needs FSDP2 and this Trainer runs on CPUs, where Accelerate does not "
                "offer it: train on accelerators, or as examples/plain.py does"
            )
        if is_quantized(model) and model is not self._model:
            raise ValueError(
                "QSDPCallback found a model that is quantized already: take away the call of "
                "apply_qsdp, or the second QSDPCallback"
            )
        apply_qsdp(model, self.config)
        self._model = model
        self._numbers = CommNumbers(model) if is_quantized(model) else None
        if state.global_step:
            _load_state(model, args, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._model is not None, "Trainer trains before it saves"
        remembered = comm_state_dict(self._model)
        if remembered:
            save_file(remembered, _file(args, state, dist.get_rank()))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._numbers is not None and _logs_after(args, state):
            self._numbers.watch()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._numbers is None or logs is None or "loss" not in logs:
            return
        numbers = self._numbers.read()
        logs.update(numbers)  # for the callbacks after this one
        state.log_history[-1].update(numbers)


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _load_state(model: nn.Module, args: TrainingArguments, state: TrainerState) -> None:
    """Continue with what this rank saved, or where there are more ranks now, with rank 0's."""
    if not comm_state_dict(model):
        return
    found = [_file(args, state, rank) for rank in (dist.get_rank(), 0)]
    found = [file for file in found if file.is_file()]
    if not found:
        warnings.warn(
            f"qsdp: {_file(args, state, dist.get_rank())} is missing: what communication "
            "remembered when this checkpoint was saved starts afresh",
            stacklevel=2,
        )
    load_comm_state_dict(model, load_file(found[0]) if found else {})


def _file(args: TrainingArguments, state: TrainerState, rank: int) -> Path:
    """In the checkpoint of the current step."""
    folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    return folder / f"qsdp-rank{rank}.safetensors"


def _logs_after(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether Trainer logs when the coming step is done; at the end of an epoch it may too."""
    step: int = state.global_step + 1
    return step % max(state.logging_steps, 1) == 0 or (step == 1 and bool(args.logging_first_step))
