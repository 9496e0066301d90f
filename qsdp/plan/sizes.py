"""Models as names and shapes, and the bytes of a rank's row of them, from :mod:`qsdp.wire`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from qsdp.config import QSDPConfig
from qsdp.quantizer import Quantizer
from qsdp.rows import encode
from qsdp.ways import Differences, Direction, kept_layout, row_layout
from qsdp.wire import LENGTH_BYTES, WireLayout, code_bytes, tensor_layout

_SAMPLE = 1 << 14  # values


@dataclass(frozen=True)
class Parameter:
    """A parameter, sharded along its first dimension.

    Attributes:
        names: for the patterns of ``QSDPConfig(exceptions=...)``; tied ones have several.
        shape: unsharded.
        trains: whether it has a gradient.
        shard: values that each rank holds where that is known; by shape and ranks otherwise.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    trains: bool = True
    shard: int | None = None

    def shard_numel(self, num_ranks: int) -> int:
        """Values that each rank holds, padding included."""
        if self.shard is not None:
            return self.shard
        return -(-self.shape[0] // num_ranks) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Model:
    """Units in the order of the forward, the root first; each is gathered and reduced as one.

    Attributes:
        name: for people.
        units: parameters of each unit.
        flops: of forward and backward for one token, per unit, without recomputation.
    """

    name: str
    units: tuple[tuple[Parameter, ...], ...]
    flops: tuple[float, ...]

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return sum(parameter.shard_numel(1) for unit in self.units for parameter in unit)

    @property
    def names(self) -> list[str]:
        """All names of all parameters."""
        return [name for unit in self.units for parameter in unit for name in parameter.names]


def gpt2(
    layers: int, width: int, *, vocab: int, sequence: int, name: str = "", blocks_per_unit: int = 1
) -> Model:
    """A GPT-2: embeddings and final norm in the root unit, then its blocks.

    Args:
        blocks_per_unit: blocks that are wrapped together.
    """
    root = (
        Parameter(("transformer.wte.weight", "lm_head.weight"), (vocab, width)),
        Parameter(("transformer.wpe.weight",), (sequence, width)),
        *_layer("transformer.ln_f", width),
    )
    blocks = [_gpt2_block(f"transformer.h.{index}", width) for index in range(layers)]
    wrapped = [blocks[i : i + blocks_per_unit] for i in range(0, layers, blocks_per_unit)]
    # 6 for each weight that multiplies a token; scores and their use, over the whole sequence.
    flops = 6.0 * 12 * width * width + 12.0 * sequence * width
    return Model(
        name or f"gpt2 {layers}x{width}",
        (root, *(sum(unit, ()) for unit in wrapped)),
        (6.0 * vocab * width, *(flops * len(unit) for unit in wrapped)),
    )


def _gpt2_block(path: str, d: int) -> tuple[Parameter, ...]:
    return (
        *_layer(f"{path}.ln_1", d),
        *_layer(f"{path}.attn.c_attn", d, 3 * d),
        *_layer(f"{path}.attn.c_proj", d, d),
        *_layer(f"{path}.ln_2", d),
        *_layer(f"{path}.mlp.c_fc", d, 4 * d),
        *_layer(f"{path}.mlp.c_proj", 4 * d, d),
    )


def _layer(path: str, *shape: int) -> tuple[Parameter, Parameter]:
    """A weight and its bias."""
    return Parameter((f"{path}.weight",), shape), Parameter((f"{path}.bias",), shape[-1:])


def from_counts(parameters: float, layers: int, *, sequence: int) -> Model:
    """A transformer known by its number of parameters and layers only: equal blocks of matrices."""
    width = math.sqrt(parameters / (12 * layers))
    shape = (round(12 * width), round(width))
    units = tuple((Parameter((f"layers.{index}.weight",), shape),) for index in range(layers))
    flops = 6.0 * parameters / layers + 12.0 * sequence * width
    name = f"{parameters / 1e9:g}B, {layers} layers"
    return Model(name, ((), *units), (0.0, *((flops,) * layers)))


class Rows(NamedTuple):
    """One rank's row of a unit: values, and bytes in every direction.

    Attributes:
        numel: values, padding included.
        reduced: of these the ones with a gradient.
        plain_weights, plain_gradients: bytes of the values in the dtype that FSDP2 hands over.
        weights: bytes on the wire.
        gradients: the same; with two levels, between nodes.
        inside_node: of gradients inside a node, with two levels.
        own_gather, own_reduce: whether qsdp carries weights and gradients, or FSDP2 itself.
        kept: bytes of a row of weights as ranks keep it, where weights travel as differences, once
            a forward; 0 where they do not.
        two_level: whether qsdp's collectives take two levels.
    """

    numel: int
    reduced: int
    plain_weights: int
    plain_gradients: int
    weights: int
    gradients: int
    inside_node: int
    own_gather: bool
    own_reduce: bool
    kept: int
    two_level: bool


def expected_bytes(layout: WireLayout) -> int:
    """Bytes of a row where it travels; of coded segments those of normal numbers.

    Real gradients and differences have heavier tails, and take fewer.
    """
    if not layout.coded_spans:
        return layout.row_bytes
    saved = 0.0
    for span in layout.coded_spans:
        form = span.segment.format
        fixed = code_bytes(form.block_size, form.bits) / form.block_size
        saved += span.segment.numel * (fixed - coded_bytes_a_value(form))
    return LENGTH_BYTES + layout.row_bytes - int(saved)


@lru_cache(maxsize=256)
def coded_bytes_a_value(quantizer: Quantizer) -> float:
    """Bytes of codes and their headers, measured on a few blocks of normal numbers."""
    numel = quantizer.block_size * max(1, _SAMPLE // quantizer.block_size)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    layout = tensor_layout(numel, quantizer)
    plain = sum(place.stop - place.start for place in layout.plain_places)
    return float(encode(values, quantizer).numel() - LENGTH_BYTES - plain) / numel


@lru_cache(maxsize=8192)
def unit_rows(
    unit: tuple[Parameter, ...],
    num_ranks: int,
    config: QSDPConfig,
    weight_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
) -> Rows:
    """What a rank sends of a unit, as :func:`qsdp.apply_qsdp` with ``config`` lays it out."""
    sizes = [parameter.shard_numel(num_ranks) for parameter in unit]
    ways = [config.ways_of(parameter.names, parameter.shape) for parameter in unit]
    numel, two_level = sum(sizes), (config.ranks_per_node or 1) > 1

    trained = [parameter.trains for parameter in unit]

    def row_bytes(direction: Direction, dtype: torch.dtype) -> int:
        there = [direction == "weights" or trains for trains in trained]
        chosen = [way[direction] for way, is_there in zip(ways, there, strict=True) if is_there]
        lengths = [size for size, is_there in zip(sizes, there, strict=True) if is_there]
        layout = row_layout(lengths, chosen, direction, dtype, config.verify)
        # Inside nodes nothing is coded.
        return layout.row_bytes if direction == "inside_node" else expected_bytes(layout)

    # A direction in which nothing is quantized is left to FSDP2.
    own_gather = config.weights is not None or any(way["weights"] for way in ways)
    own_reduce = config.gradients is not None or any(way["gradients"] for way in ways)
    reduced = sum(size for size, trains in zip(sizes, trained, strict=True) if trains)
    weights, gradients = numel * weight_dtype.itemsize, reduced * gradient_dtype.itemsize
    # Between nodes travel sums, which are float32.
    reduced_dtype = torch.float32 if two_level else gradient_dtype
    return Rows(
        numel,
        reduced,
        weights,
        gradients,
        row_bytes("weights", weight_dtype) if own_gather else weights,
        row_bytes("gradients", reduced_dtype) if own_reduce else gradients,
        row_bytes("inside_node", gradient_dtype),
        own_gather,
        own_reduce,
        kept_layout(sizes, [way["weights"] for way in ways], weight_dtype, config.verify).row_bytes
        if any(isinstance(way["weights"], Differences) for way in ways)
        else 0,
        two_level,
    )
