"""Variants: ways to communicate that are compared, and the one grammar of their names.

`qsdp plan` predicts them and `qsdp bench` measures them, under the same names.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qsdp.config import QSDPConfig

UNQUANTIZED = QSDPConfig(exceptions={"*": None})
"""qsdp's transport, with nothing quantized."""
HELP = (
    "stock-fp32, stock-bf16, stock-w{16|32}g{16|32} (FSDP2 as it is); qsdp-fp32, qsdp-bf16 (qsdp's "
    "transport, nothing quantized) or a preset (w8g8, qsgd4), both two-level where nodes have "
    "several ranks and with -flat for flat collectives; FILE.json with fields of QSDPConfig "
    "(two-level where it sets ranks_per_node); presets and files with -bf16 at the end to compute "
    "in bfloat16"
)
_STOCK = {"stock-fp32": "stock-w32g32", "stock-bf16": "stock-w16g16"}
_NOTHING_QUANTIZED = QSDPConfig(None, None)
_DTYPES = {"16": torch.bfloat16, "32": torch.float32}


@dataclass(frozen=True)
class Variant:
    """A way to communicate.

    Attributes:
        name: what :func:`parse_variant` made it from, or any other.
        config: what is quantized and how; None is FSDP2 as it is.
        weight_dtype, gradient_dtype: in which FSDP2 gathers weights and reduces gradients.
        two_level: cross nodes in two levels where they have several ranks.
    """

    name: str
    config: QSDPConfig | None
    weight_dtype: torch.dtype = torch.float32
    gradient_dtype: torch.dtype = torch.float32
    two_level: bool = False

    @property
    def is_stock(self) -> bool:
        """Whether it is FSDP2 as it is."""
        return self.config is None

    @property
    def is_bf16(self) -> bool:
        """Whether weights and gradients are bfloat16 before they are quantized."""
        return self.weight_dtype == self.gradient_dtype == torch.bfloat16

    @property
    def collectives(self) -> str:
        """``stock``, ``flat`` or ``two-level``, for people."""
        return "stock" if self.is_stock else "two-level" if self.two_level else "flat"

    @property
    def comm(self) -> str:
        """What the trainer takes as ``comm``; it sets the ranks of a node itself."""
        config = self.config or _NOTHING_QUANTIZED
        return json.dumps({"name": self.name, **config.to_json()})

    def config_on(self, nodes: int, ranks_per_node: int) -> QSDPConfig:
        """What to apply on such nodes; of stock, a configuration that quantizes nothing.

        Raises:
            ValueError: the configuration was written for nodes of another size.
        """
        config = self.config or _NOTHING_QUANTIZED
        if config.ranks_per_node is None:
            if self.two_level and nodes > 1 and ranks_per_node > 1:
                return replace(config, ranks_per_node=ranks_per_node)
            return config.on_nodes_of(1)
        if config.ranks_per_node not in (1, ranks_per_node):
            raise ValueError(
                f"{self.name} has ranks_per_node={config.ranks_per_node} and the nodes have "
                f"{ranks_per_node} ranks: make them equal, or leave it out for flat collectives"
            )
        return config


def parse_variant(name: str) -> Variant:
    """The variant of a name, by the grammar of :data:`HELP`.

    Raises:
        ValueError: no such name, or a file that holds no QSDPConfig.
        OSError: a file that cannot be read.
    """
    if stock := re.fullmatch(r"stock-w(16|32)g(16|32)", _STOCK.get(name, name)):
        return Variant(name, None, _DTYPES[stock[1]], _DTYPES[stock[2]])
    if unquantized := re.fullmatch(r"qsdp-(fp32|bf16)(-flat)?", name):
        dtype = torch.float32 if unquantized[1] == "fp32" else torch.bfloat16
        return Variant(name, UNQUANTIZED, dtype, dtype, two_level=unquantized[2] is None)
    stem = name.removesuffix("-bf16")
    dtype = torch.float32 if stem == name else torch.bfloat16
    if stem.endswith(".json"):
        config = _read_config(Path(stem))
        label = Path(stem).stem + name.removeprefix(stem)
        return Variant(label, config, dtype, dtype, config.ranks_per_node != 1)
    preset = stem.removesuffix("-flat")
    try:
        config = QSDPConfig.preset(preset)
    except ValueError as error:
        raise ValueError(f"unknown variant {name!r}: there are {HELP}; {error}") from error
    return Variant(name, config, dtype, dtype, two_level=stem == preset)


def is_variant(name: str) -> bool:
    """Whether :func:`parse_variant` knows a name."""
    try:
        parse_variant(name)
    except (ValueError, OSError):
        return False
    return True


def _read_config(path: Path) -> QSDPConfig:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise TypeError(f"got {content!r}")
        return QSDPConfig.from_json(content)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must hold a JSON object of QSDPConfig's fields: {error}"
        ) from error
