"""Lightning: ``Trainer(strategy=ModelParallelStrategy(), callbacks=[QSDPCallback(config)])``.

Without the callback, one call at the end of ``configure_model`` does the same, but for the logs and
for checkpoints. With DDP: ``Trainer(strategy="ddp", callbacks=[QSDPDDPCallback(config)])``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
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

    What communication remembers is saved with every checkpoint but those of weights only, a file a
    rank: inside a checkpoint that is a folder (the strategy's default), and in ``NAME.qsdp`` beside
    one that is a file. ``fit``, ``validate`` and ``test`` with ``ckpt_path`` continue with it.

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
        if pl_module is not self._module:
            _save_beside(trainer.strategy, lambda folder: save_comm_state(pl_module, folder))
        self._module = pl_module
        self._numbers = CommNumbers(pl_module) if is_quantized(pl_module) else None

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if pl_module is self._module and is_quantized(pl_module):
            load_comm_state(pl_module, _folder(trainer.ckpt_path))

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


class QSDPDDPCallback(Callback):
    """Quantizes the gradients of a module that Lightning wraps with DistributedDataParallel.

    In place of ``DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...)``, which wants the state before
    there are process groups, and acts on CUDA only. Errors to feed back are saved and loaded with
    checkpoints, as :class:`QSDPCallback` does it.

    Args:
        config: equal on all ranks; the name of a preset will do (``"w32g8"``).
        warmup_steps: as many steps first in full precision.

    Raises:
        ValueError: at the start of ``fit``, if the strategy does not wrap the module with DDP.
    """

    def __init__(self, config: QSDPConfig | str, *, warmup_steps: int = 0) -> None:
        self.config = QSDPConfig.of(config, "QSDPDDPCallback")
        self.warmup_steps = warmup_steps
        self.state: QuantizedDDPState | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                "QSDPDDPCallback needs DistributedDataParallel and this Trainer has "
                f'{type(trainer.strategy).__name__}: set Trainer(strategy="ddp"), or with '
                "ModelParallelStrategy use QSDPCallback"
            )
        first = self.state is None
        # Lightning wraps the module anew for every fit.
        state = self.state = QuantizedDDPState(model, self.config, warmup_steps=self.warmup_steps)
        model.register_comm_hook(state, quantized_ddp_hook)
        if first:
            _save_beside(trainer.strategy, self._save)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.state is not None and trainer.ckpt_path:
            load_ddp_state(self.state, _folder(trainer.ckpt_path))

    def _save(self, folder: Path) -> None:
        assert self.state is not None, "hooked when it was made"
        save_ddp_state(self.state, folder)


def _save_beside(strategy: Strategy, save: Callable[[Path], None]) -> None:
    """Let ``strategy`` call ``save(folder)`` with each checkpoint, and remove what it wrote.

    A callback hears of a checkpoint before it is written, and not where: the strategy is told.
    """
    save_checkpoint, remove_checkpoint = strategy.save_checkpoint, strategy.remove_checkpoint

    def save_both(checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> None:
        whole = "callbacks" in checkpoint  # and not of weights only
        save_checkpoint(checkpoint, filepath, *args, **kwargs)
        strategy.barrier("qsdp")  # what is there now says whether it is a folder
        if whole:
            save(_folder(strategy.broadcast(filepath)))

    def remove_both(filepath: Any) -> None:
        remove_checkpoint(filepath)
        if strategy.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    vars(strategy).update(save_checkpoint=save_both, remove_checkpoint=remove_both)


def _folder(checkpoint: Any) -> Path:
    """Of the files of all ranks for a checkpoint."""
    return Path(checkpoint) if Path(checkpoint).is_dir() else _beside(checkpoint)


def _beside(checkpoint: Any) -> Path:
    return Path(f"{checkpoint}.qsdp")
