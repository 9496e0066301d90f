"""Validation perplexity, on the weights that training sees or on the full-precision masters."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedModel

import qsdp
from qsdp.qat import FakeQuantization
from qsdp.trainer.batches import validation_starts, windows
from qsdp.trainer.comm import quantize_communication
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.model import fsdp_modules
from qsdp.trainer.ranks import Ranks
from qsdp.trainer.tokenizer import Tokens


def token_losses(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each next token, float32; `batch` is (sequences, length + 1)."""
    # (sequences, length, vocabulary)
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def validation_loss(
    model: PreTrainedModel, tokens: Tokens, config: TrainConfig, ranks: Ranks, *, limit: int
) -> float:
    """Mean loss over at most `limit` windows of the validation text; equal on all ranks.

    All ranks call the model equally often, as its collectives demand: a rank that has run out of
    windows repeats the first one and leaves it out of the sum. Ends with all modules sharded.
    """
    starts = validation_starts(len(tokens), config.sequence_length, limit)
    micro = config.micro_batch_size or config.batch_size // ranks.num_ranks
    per_round = ranks.num_ranks * micro
    padded = np.full(math.ceil(len(starts) / per_round) * per_round, -1)
    padded[: len(starts)] = starts
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    model.eval()
    for mine in padded.reshape(-1, ranks.num_ranks, micro)[:, ranks.rank]:
        batch = windows(tokens, np.maximum(mine, 0), config.sequence_length).to(ranks.device)
        losses = token_losses(model, batch).view(micro, -1).double()
        counted = torch.from_numpy(mine >= 0).to(ranks.device)
        total += torch.stack(
            [losses[counted].sum(), losses[counted].numel() * torch.ones_like(total[0])]
        )
    model.train()
    dist.all_reduce(total)
    # A forward without a backward leaves the root unsharded; what it holds must not outlive the
    # communication that gathered it.
    for module in fsdp_modules(model):
        module.reshard()
    return float(total[0] / total[1])


def master_validation_loss(
    model: PreTrainedModel,
    tokens: Tokens,
    config: TrainConfig,
    ranks: Ranks,
    *,
    limit: int,
    fake: FakeQuantization | None = None,
) -> float:
    """The same on the full-precision masters, with qsdp and fake quantization off meanwhile.

    What communication remembers is the same afterwards, bit for bit; its counters are at zero.
    """
    state = qsdp.comm_state_dict(model)
    qsdp.remove_qsdp(model)
    try:
        with nullcontext() if fake is None else fake.disabled():
            return validation_loss(model, tokens, config, ranks, limit=limit)
    finally:
        with warnings.catch_warnings():  # what it warns of was told when the run began
            warnings.simplefilter("ignore")
            quantize_communication(model, config, fake)
        qsdp.load_comm_state_dict(model, state)
