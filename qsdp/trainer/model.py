"""The model of a run: built or read from a folder, wrapped for FSDP2, with qsdp on it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qsdp.param_group import gather_asynchronously
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.lora import add_adapters
from qsdp.trainer.ranks import Ranks


def build_model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The whole model in float32; with --lora the adapters, and all else frozen in bfloat16.

    Equal on all ranks, because the seed is.
    """
    torch.manual_seed(config.seed)
    if config.model is not None:
        model = _read_model(config)
    else:
        vocab_size = max(config.vocab_size, len(tokenizer))
        model = new_model(config, vocab_size, tokenizer.eos_token_id)
    _check_fits(model, config, tokenizer)
    return model if config.lora is None else add_adapters(model, config)


def new_model(config: TrainConfig, vocab_size: int, eos_token_id: int) -> PreTrainedModel:
    """A GPT-2 or a Llama of the configuration's shape, freshly initialised."""
    if config.architecture == "llama" or (
        config.architecture == "auto" and config.fake_quantize is not None
    ):
        return _new_llama(config, vocab_size, eos_token_id)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=config.sequence_length,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            # GPT-2's approximation by tanh, in one kernel where the default takes seven.
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            bos_token_id=eos_token_id,
            eos_token_id=eos_token_id,
        )
    )


def _new_llama(config: TrainConfig, vocab_size: int, eos_token_id: int) -> PreTrainedModel:
    """With its feed-forward layers as large as GPT-2's, in three matrices."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=config.width,
            intermediate_size=32 * round(config.width / 12),
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            max_position_embeddings=config.sequence_length,
            attention_dropout=config.dropout,
            tie_word_embeddings=True,
            bos_token_id=eos_token_id,
            eos_token_id=eos_token_id,
        )
    )


def _read_model(config: TrainConfig) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(
            config.model,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # the other format runs code when it is read
            dtype=torch.float32 if config.lora is None else torch.bfloat16,
        )
    except Exception as error:  # safetensors raises its own Exception on a damaged file
        raise ValueError(f"--model {config.model} cannot be read: {error}") from error


def _check_fits(
    model: PreTrainedModel, config: TrainConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions < config.sequence_length:
        raise ValueError(
            f"--sequence-length must be at most {positions}, the positions of the model, got "
            f"{config.sequence_length}"
        )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model "
            f"{model.get_input_embeddings().num_embeddings}; give the model's --tokenizer"
        )
    if not model._no_split_modules:
        raise ValueError(
            f"{type(model).__name__} does not name its blocks (_no_split_modules is empty), so it "
            "is not known what to shard; give another --model"
        )


def shard(model: PreTrainedModel, config: TrainConfig, ranks: Ranks) -> DeviceMesh:
    """Wrap each block and then the whole for FSDP2, in place; returns the mesh of all ranks."""
    whole = _mesh(config, ranks)
    # Replicas with steps of their own know nothing of each other.
    mesh = whole if config.sync_every is None else whole["shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.precision == "bf16" else None,
        reduce_dtype=torch.bfloat16 if config.reduce_precision == "bf16" else torch.float32,
    )
    names = set(model._no_split_modules)
    for block in [m for m in model.modules() if type(m).__name__ in names]:
        # The forward is replaced rather than the module: parameter names stay as they are, and
        # FSDP2's hooks stay outside of what is recomputed or compiled.
        if config.compile:
            block.forward = torch.compile(block.forward)
        if config.activation_checkpointing:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if config.prefetch and ranks.device.type == "cpu":
        _prefetch(model)
    return whole


def _mesh(config: TrainConfig, ranks: Ranks) -> DeviceMesh:
    """One dimension of shards, or replicas of consecutive shards, which then share nodes."""
    shards = ranks.num_ranks // config.replicate
    if config.replicate == 1:
        return init_device_mesh(ranks.device.type, (shards,))
    shape, names = (config.replicate, shards), ("replicate", "shard")
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)


def _prefetch(model: nn.Module) -> None:
    """Start each gather one block early; without streams FSDP2 ends it before the block begins."""
    assert isinstance(model, FSDPModule)
    gather_asynchronously(model)
    blocks = [module for module in fsdp_modules(model) if module is not model]
    for block, following in zip([model, *blocks], blocks, strict=False):
        block.set_modules_to_forward_prefetch([following])


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


class Count(NamedTuple):
    """Elements of all parameters, and of those that are trained."""

    parameters: int
    trained: int


def num_parameters(model: nn.Module) -> int:
    return count_parameters(model).parameters


def count_parameters(model: nn.Module) -> Count:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return Count(sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained))


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
