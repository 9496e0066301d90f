"""Models in plain torch: a GPT of given shapes, and small blocks; and wrapping them for FSDP2."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import qsdp


class Shape(NamedTuple):
    """Of a GPT."""

    layers: int
    width: int
    heads: int
    vocab: int
    sequence: int


GPT_1_3B = Shape(layers=24, width=2048, heads=16, vocab=50257, sequence=1024)
GPT_125M = Shape(layers=12, width=768, heads=12, vocab=50257, sequence=512)
TINY = Shape(layers=2, width=64, heads=2, vocab=256, sequence=32)


class GptBlock(nn.Module):
    """The parameters of a GPT-2 block: 12 tensors, four of them matrices."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(-2))
        return x + self.c_out(gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A GPT-2 whose head is its embedding; returns the loss of predicting the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.width)
        self.wpe = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(GptBlock(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        ids, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = nn.functional.linear(self.ln_f(x), self.wte.weight)
        return cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


class Block(nn.Module):
    """Nine parameters, as in a Llama block, whose sums run in one order on every device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        for name in "qkvogud":
            setattr(self, name, nn.Linear(width, width, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.n1(x)
        x = x + self.o(self.q(normed) * self.k(normed).sigmoid() + self.v(normed))
        normed = self.n2(x)
        return x + self.d(self.g(normed) * self.u(normed))


# The generator is the process's, and ranks may be threads.
_SEEDING = threading.Lock()


def stack_of_blocks(depth: int, width: int) -> nn.Sequential:
    """Blocks one after another; the same weights at every call."""
    with _SEEDING:
        torch.manual_seed(0)
        return nn.Sequential(*[Block(width) for _ in range(depth)])


def gpt(shape: Shape, device: torch.device) -> Gpt:
    """A new GPT; the same weights at every call."""
    with _SEEDING, device:
        torch.manual_seed(0)
        return Gpt(shape)


def shard(
    model: nn.Module,
    device: torch.device,
    *,
    replicas: int = 1,
    param_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Wrap the blocks and then the whole, over all ranks of the default group; in place.

    Args:
        replicas: of the model, for HSDP.
    """
    ranks = torch.distributed.get_world_size()
    sizes = (replicas, ranks // replicas) if replicas > 1 else (ranks,)
    names = ("replicate", "shard")[-len(sizes) :]
    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, sizes, mesh_dim_names=names)}
    if param_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype, torch.float32)
    for module in model.modules():
        if isinstance(module, Block | GptBlock):
            # Also the last one, so that every block gathers twice.
            fully_shard(module, reshard_after_forward=True, **options)
    return fully_shard(model, **options)


def config_of(name: str, **changes: Any) -> qsdp.QSDPConfig:
    """A preset that quantizes small models too, with other changes."""
    return replace(qsdp.QSDPConfig.preset(name), **({"min_numel": 64} | changes))


def quantize(model: nn.Module, name: str, **changes: Any) -> None:
    """Apply a preset; ``stock`` leaves FSDP2 alone."""
    if name != "stock":
        qsdp.apply_qsdp(model, config_of(name, **changes))
