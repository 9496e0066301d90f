"""Fine-tuning with LoRA through peft: adapters in float32 on a frozen model in bfloat16.

Adapters are put into the model itself, so that names of blocks and parameters stay as they are and
all else need not know of them.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qsdp.trainer.config import TrainConfig

ALL = "all-linear"
_IN_FILE = "base_model.model."  # how peft's files begin the names of a model's parameters


def add_adapters(model: PreTrainedModel, config: TrainConfig) -> PreTrainedModel:
    """The model with trainable adapters, all else frozen.

    Raises:
        ValueError: no module is called as --lora-targets says.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    assert config.lora is not None
    settings = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=config.lora,
        lora_alpha=alpha(config),
        target_modules=list(config.lora_targets) or ALL,
        # GPT-2's layers keep their weights transposed; peft would say so, module by module.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    try:
        with warnings.catch_warnings():
            # Embeddings that are tied to the head have no adapters to lose the tie by.
            warnings.simplefilter("ignore")
            adapted = get_peft_model(model, settings, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ValueError(f"--lora-targets: {error}") from error
    found: PreTrainedModel = adapted.get_base_model()
    return found


def alpha(config: TrainConfig) -> float:
    """What --lora-alpha says, or twice the rank."""
    assert config.lora is not None
    return config.lora_alpha or 2.0 * config.lora


def write_adapters(
    folder: Path, model: PreTrainedModel, state: dict[str, torch.Tensor], base: Path
) -> None:
    """Write a folder that peft and transformers read.

    Args:
        state: whole adapters by the model's own names.
        base: folder of the model that they belong to.
    """
    from peft import get_peft_model_state_dict

    settings = model.peft_config["default"]
    settings.base_model_name_or_path, settings.inference_mode = str(base.resolve()), True
    settings.target_modules = sorted(settings.target_modules)  # a set, in another order each time
    settings.save_pretrained(str(folder))
    own = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    tensors = {_IN_FILE + name: value.contiguous() for name, value in own.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
