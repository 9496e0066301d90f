"""Hugging Face ``Trainer``: ``Trainer(..., callbacks=[QSDPCallback(config)])``."""

from __future__ import annotations

from typing import Any

from torch import nn

from qsdp import QSDPConfig, apply_qsdp, is_quantized
from qsdp.integrations.numbers import CommNumbers

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
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

    Trainer tells its own reporters (TensorBoard, ...) before the callbacks it was given. To have
    the numbers there too, put this one first:
    ``trainer.callback_handler.callbacks.insert(0, QSDPCallback(config))``.

    Raises:
        ValueError: at the start of training, if the model is not sharded by FSDP2 or is quantized
            already.
    """

    def __init__(self, config: QSDPConfig) -> None:
        self.config = config
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
        if is_quantized(model) and model is not self._model:
            raise ValueError(
                "QSDPCallback found a model that is quantized already: take away the call of "
                "apply_qsdp, or the second QSDPCallback"
            )
        apply_qsdp(model, self.config)
        self._model = model
        self._numbers = CommNumbers(model) if is_quantized(model) else None

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


def _logs_after(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether Trainer logs when the coming step is done; at the end of an epoch it may too."""
    step: int = state.global_step + 1
    return step % max(state.logging_steps, 1) == 0 or (step == 1 and bool(args.logging_first_step))
