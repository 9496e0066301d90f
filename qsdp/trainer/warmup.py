"""The learning rate of every step."""

from __future__ import annotations

import math

from qsdp.trainer.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of step 1, 2, ..., config.steps: linear warm-up, then a cosine to the end."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine)
