"""Models as sizes: which parameters communicate together, and how many bytes a rank's row takes.

The arithmetic of :mod:`qsdp.wire`, without torch; `tests/test_plan.py` holds the two together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

META_BYTES = 8  # scale and offset of a block, in float32
ROW_ALIGNMENT = 8
MIN_QUANTIZED = 1024  # elements; smaller parameters travel in full precision, as vectors do


@dataclass(frozen=True)
class Parameter:
    """A parameter of ``rows`` x ``columns``, sharded by rows; a vector has one column."""

    rows: int
    columns: int = 1

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def quantized(self) -> bool:
        return self.columns > 1 and self.numel >= MIN_QUANTIZED


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
        return sum(parameter.numel for unit in self.units for parameter in unit)


def gpt2(
    layers: int, width: int, *, vocab: int, sequence: int, name: str = "", blocks_per_unit: int = 1
) -> Model:
    """A GPT-2: embeddings and final norm in the root unit, then its blocks.

    Args:
        blocks_per_unit: blocks that are wrapped together.
    """
    d = width
    block = (
        Parameter(d), Parameter(d),
        Parameter(d, 3 * d), Parameter(3 * d), Parameter(d, d), Parameter(d),
        Parameter(d), Parameter(d),
        Parameter(d, 4 * d), Parameter(4 * d), Parameter(4 * d, d), Parameter(d),
    )  # fmt: skip
    root = (Parameter(vocab, d), Parameter(sequence, d), Parameter(d), Parameter(d))
    # 6 for each weight that multiplies a token; scores and their use, over the whole sequence.
    block_flops = 6.0 * 12 * d * d + 12.0 * sequence * d
    sizes = [min(blocks_per_unit, layers - start) for start in range(0, layers, blocks_per_unit)]
    return Model(
        name or f"gpt2 {layers}x{width}",
        (root, *(block * size for size in sizes)),
        (6.0 * vocab * d, *(block_flops * size for size in sizes)),
    )


def from_counts(parameters: float, layers: int, *, sequence: int) -> Model:
    """A transformer known by its number of parameters and layers only: equal blocks of matrices."""
    width = math.sqrt(parameters / (12 * layers))
    block = (Parameter(round(12 * width), round(width)),)
    flops = 6.0 * parameters / layers + 12.0 * sequence * width
    name = f"{parameters / 1e9:g}B, {layers} layers"
    return Model(name, ((), *((block,) * layers)), (0.0, *((flops,) * layers)))


@lru_cache(maxsize=4096)
def shard_numel(unit: tuple[Parameter, ...], num_ranks: int) -> int:
    """Values of a unit that each rank holds, padding included."""
    return sum(-(-parameter.rows // num_ranks) * parameter.columns for parameter in unit)


@lru_cache(maxsize=65536)
def row_bytes(
    unit: tuple[Parameter, ...],
    num_ranks: int,
    bits: int,
    *,
    block_size: int,
    itemsize: int,
    meta_bytes: int = META_BYTES,
) -> int:
    """Bytes of one rank's row of a unit at ``bits``; of full-precision parameters ``itemsize``."""
    total = 0
    for parameter in unit:
        numel = -(-parameter.rows // num_ranks) * parameter.columns
        if not parameter.quantized or bits >= 16:  # kept in full precision
            total += numel * itemsize
            continue
        full, rest = divmod(numel, block_size)
        total += (full + (rest > 0)) * meta_bytes
        total += full * _code_bytes(block_size, bits) + _code_bytes(rest, bits)
    return -(-total // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _code_bytes(numel: int, bits: int) -> int:
    widths = (8,) if bits == 8 else tuple(width for width in (4, 2, 1) if bits & width)
    return sum(-(-numel * width // 8) for width in widths)
