"""The final model, as a folder that `AutoModelForCausalLM.from_pretrained` reads; of a run with
--lora its adapters, as a folder that peft reads.

At few bits the weights that training sees (decoded) and the full-precision masters are different
models, so the folder says which it holds: in qsdp.json and in the model card.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import qsdp
from qsdp.qat import FakeQuantization
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.lora import alpha, write_adapters
from qsdp.trainer.metrics import write_json
from qsdp.trainer.quantized import write_quantized
from qsdp.trainer.ranks import Ranks, on_rank_zero

Weights = Literal["decoded", "master"]

_HOLDS = {
    "decoded": "the weights that training saw: the full-precision masters after quantization",
    "master": "the full-precision masters",
}


def export_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    *,
    weights: Weights,
    config: TrainConfig,
    result: dict[str, Any],
    fake: FakeQuantization | None = None,
) -> None:
    """Gather the weights and write the folder on rank 0; collective.

    With ``fake`` and decoded weights these are the quantized ones, and ``folder-intB`` holds their
    codes.
    """
    decoded = weights == "decoded"
    state = qsdp.decoded_state_dict(model, full=True) if decoded else master_weights(model)
    lora = config.lora is not None

    def write() -> None:
        # Written whole or not at all, like a checkpoint.
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        if lora:
            assert config.model is not None
            write_adapters(partial, model, state, config.model)
        else:
            plain = state if fake is None else plain_state(fake, state, decoded)
            _unsharded_model(model, plain).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        about = {"weights": weights, "holds": _HOLDS[weights], "comm": config.comm_name, **result}
        write_json(partial / "qsdp.json", about)
        (partial / "README.md").write_text(_model_card(weights, config, result))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        for older in folder.parent.glob(f"{folder.name}-int[2-8]"):  # of the model that was here
            shutil.rmtree(older)
        if fake is not None and decoded:
            coded = folder.with_name(f"{folder.name}-int{fake.quantizer.bits}")
            write_quantized(coded, folder, fake.export(state), model, fake)

    on_rank_zero(write)


def plain_state(
    fake: FakeQuantization, state: dict[str, torch.Tensor], quantized: bool
) -> dict[str, torch.Tensor]:
    """Whole weights under the plain model's names, quantized or as they are."""
    folded = fake.quantized_state_dict(state)
    if quantized:
        return folded
    masters = {fake.plain_name(name): value for name, value in state.items()}
    return {name: masters[name] for name in folded}


def master_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole trained parameters in full precision, on rank 0's CPU; the other ranks get none."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _unsharded_model(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A model of the same architecture that holds `state`, without allocating it first."""
    dtype = next(iter(state.values())).dtype
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    whole.load_state_dict(state, assign=True, strict=False)
    whole.tie_weights()
    missing = [name for name, value in whole.state_dict().items() if value.is_meta]
    if missing:
        raise RuntimeError(f"the gathered model lacks {missing[0]}")
    return whole


def _model_card(weights: Weights, config: TrainConfig, result: dict[str, Any]) -> str:
    decoded, master = result["valid_perplexity_decoded"], result["valid_perplexity_master"]
    model = config.preset if config.model is None else config.model.name
    holds = f"This folder holds **{weights}** weights: {_HOLDS[weights]}."
    library, trained = "transformers", f"{result['parameters']:,} parameters"
    if config.lora is not None:
        library = "peft"
        trained = f"{result['trained_parameters']:,} of {trained} trained"
        holds = (
            f"This folder holds LoRA adapters of rank {config.lora}, alpha {alpha(config):g}, in "
            f"float32, for the model in `{config.model}`.\nThat stayed as it was, in bfloat16."
        )
    text = config.dataset or ", ".join(p.name for p in config.data) or "38 plays of Shakespeare"
    return f"""---
library_name: {library}
tags: [qsdp]
---

# {model}, trained with qsdp {config.comm_name}

{holds}

| weights | validation perplexity |
|---|---|
| decoded, as training sees them | {decoded:.3f} |
| full-precision masters | {master:.3f} |

Trained on {text} for {result["steps"]} steps, {result["tokens"]:,} tokens, with
{trained}, seed {config.seed}, on {result["num_ranks"]} ranks.
"""
