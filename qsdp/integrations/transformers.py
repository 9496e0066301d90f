"""Hugging Face ``Trainer``: ``Trainer(..., callbacks=[QSDPCallback(config)])`` with FSDP2.

With DDP: ``trainer.add_callback(QSDPDDPCallback(trainer, config))``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from qsdp import QSDPConfig, QuantizedDDPState, apply_qsdp, is_quantized, quantized_ddp_hook
from qsdp.integrations.files import (
    load_comm_state,
    load_ddp_state,
    save_comm_state,
    save_ddp_state,
)
from qsdp.integrations.numbers import CommNumbers

try:
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
    that continues from a checkpoint in ``output_dir`` continues with it. With
    ``load_best_model_at_end``, the best checkpoint's comes back with its weights, so that an
    evaluation gives what it gave then.

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
            load_comm_state(model, _folder(args, state))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._model is not None, "Trainer trains before it saves"
        save_comm_state(self._model, _folder(args, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        best = state.best_model_checkpoint
        if self._model is not None and args.load_best_model_at_end and best is not None:
            load_comm_state(self._model, Path(best))

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


class QSDPDDPCallback(TrainerCallback):  # type: ignore[misc]
    """Quantizes the gradients of a Trainer that runs DistributedDataParallel.

    Registers :func:`qsdp.quantized_ddp_hook` when training begins. Its errors to feed back are
    saved with checkpoints, a file a rank, and taken up again from a checkpoint in ``output_dir``.

    Args:
        trainer: the one that it is added to; it alone knows the wrapped model.
        config: equal on all ranks; the name of a preset will do (``"w32g8"``).
        warmup_steps: as many steps first in full precision.

    Raises:
        ValueError: at the start of training, if the model is not wrapped with DDP.
    """

    def __init__(self, trainer: Any, config: QSDPConfig | str, *, warmup_steps: int = 0) -> None:
        self.config = QSDPConfig.of(config, "QSDPDDPCallback")
        self.warmup_steps = warmup_steps
        self.state: QuantizedDDPState | None = None
        self._trainer = trainer
        self._model: DistributedDataParallel | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = self._trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                "QSDPDDPCallback needs DistributedDataParallel and this Trainer has "
                f"{type(model).__name__}: start the script with torchrun, on two ranks or more, or "
                "with FSDP2 use QSDPCallback"
            )
        if self.state is None or model is not self._model:  # not trainer.train() a second time
            self.state = QuantizedDDPState(model, self.config, warmup_steps=self.warmup_steps)
            model.register_comm_hook(self.state, quantized_ddp_hook)
            self._model = model
        if state.global_step:
            load_ddp_state(self.state, _folder(args, state))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.state is not None, "Trainer trains before it saves"
        save_ddp_state(self.state, _folder(args, state))


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """The checkpoint of the current step."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _logs_after(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether Trainer logs when the coming step is done; at the end of an epoch it may too."""
    step: int = state.global_step + 1
    return step % max(state.logging_steps, 1) == 0 or (step == 1 and bool(args.logging_first_step))
