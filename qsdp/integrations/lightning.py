"""Lightning: ``Trainer(strategy=ModelParallelStrategy(), callbacks=[QSDPCallback(config)])``.

Without the callback, one call at the end of ``configure_model`` does the same, but for the logs.
"""

from __future__ import annotations

from typing import Any

from qsdp import QSDPConfig, apply_qsdp, is_quantized
from qsdp.integrations.numbers import CommNumbers

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
except ImportError as error:
    raise ImportError(
        f"qsdp.integrations.lightning needs lightning ({error}): pip install 'qsdp[lightning]'"
    ) from error


class QSDPCallback(Callback):
    """Quantizes the communication of a module that ``configure_model`` has sharded.

    Applies ``config`` at the start of ``fit`` and logs, every ``log_every_n_steps`` and as rank 0
    sees them: ``qsdp_sent_bytes`` since the log before, ``qsdp_ratio`` to what stock FSDP2 would
    have sent, and ``qsdp_weight_error``, the relative distance of the weights in that step's
    forward from the full-precision ones.

    Args:
        config: equal on all ranks; the name of a preset will do (``"w8g8"``).

    Raises:
        ValueError: at the start of ``fit``, if the strategy does not shard with FSDP2, or the
            module is not sharded or is quantized already.
    """

    def __init__(self, config: QSDPConfig | str) -> None:
        self.config = QSDPConfig.of(config, "QSDPCallback")
        self._module: LightningModule | None = None
        self._numbers: CommNumbers | None = None
        self._due: int | None = None  # the step to log after

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(trainer.strategy, ModelParallelStrategy):
            fsdp1 = " (which is FSDP1)" if isinstance(trainer.strategy, FSDPStrategy) else ""
            raise ValueError(
                f"QSDPCallback needs FSDP2 and this Trainer has {type(trainer.strategy).__name__}"
                f"{fsdp1}: set Trainer(strategy=ModelParallelStrategy()) and call fully_shard in "
                "configure_model"
            )
        if is_quantized(pl_module) and pl_module is not self._module:
            raise ValueError(
                "QSDPCallback found a module that is quantized already: take apply_qsdp out of "
                "configure_model, or take away the second QSDPCallback"
            )
        apply_qsdp(pl_module, self.config)
        self._module = pl_module
        self._numbers = CommNumbers(pl_module) if is_quantized(pl_module) else None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step + 1
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._numbers is not None and step % every == 0:
            self._due = step
            self._numbers.watch()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # Of accumulated batches only the last one makes a step.
        if self._numbers is not None and self._due == trainer.global_step:
            self._due = None
            pl_module.log_dict(self._numbers.read(), rank_zero_only=True)
