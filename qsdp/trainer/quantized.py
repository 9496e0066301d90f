"""`--fake-quantize`: training in the bits in which a model is deployed, and the folder to deploy.

That folder is in the format pack-quantized of compressed-tensors, which transformers reads where
that package is installed, and which serving runtimes read: codes of all rows packed densely into
int32, steps as ``weight_scale``, and the format's description in config.json.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

import qsdp
from qsdp.qat import CodedWeight, FakeQuantization, FakeQuantizer, fake_quantize
from qsdp.trainer.config import TrainConfig

_WEIGHTS = "model.safetensors"


def fake_quantizer(config: TrainConfig) -> FakeQuantizer | None:
    """What the flags say; None without --fake-quantize."""
    if config.fake_quantize is None:
        return None
    block, start = config.fake_quantize_block, config.fake_quantize_start
    if block is None:
        return FakeQuantizer(config.fake_quantize, start_step=start)
    try:
        return FakeQuantizer(config.fake_quantize, "block", "largest", block, start)
    except ValueError as error:
        raise ValueError(f"--fake-quantize-block {block}: {error}") from error


def quantize_layers(model: PreTrainedModel, config: TrainConfig) -> FakeQuantization | None:
    """Fake-quantize the linear layers of the blocks, in place, before the model is sharded.

    The head stays in full precision, and so does what --keep-full-precision names.

    Raises:
        ValueError: layers that cannot be quantized so.
    """
    quantizer = fake_quantizer(config)
    if quantizer is None:
        return None
    head = model.get_output_embeddings()
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    kept = [
        name
        for name, module in linear.items()
        if module is head
        or any(fnmatchcase(f"{name}.weight", pattern) for pattern in config.keep_full_precision)
    ]
    if len(kept) == len(linear):
        raise ValueError(
            f"--fake-quantize {config.fake_quantize} quantizes linear layers, and "
            f"{type(model).__name__} has none in its blocks, or --keep-full-precision names all; "
            "give --architecture llama, another --model, or fewer patterns"
        )
    try:
        return fake_quantize(model, quantizer, modules=(nn.Linear,), keep=kept)
    except ValueError as error:
        raise ValueError(f"--fake-quantize {config.fake_quantize}: {error}") from error


def travels_exactly(config: TrainConfig) -> bool:
    """Whether quantized weights are sent in their own bits, in place of those that --comm says."""
    quantizer = fake_quantizer(config)
    if quantizer is None or quantizer.block_size is None or quantizer.start_step:
        return False
    try:
        quantizer.wire(quantizer.block_size)
    except ValueError:  # 8 bits
        return False
    return True


def steps_fit(saved: Mapping[str, Any], step: int, config: TrainConfig) -> bool:
    """Whether the steps in a checkpoint are of this quantizer and of after the switch.

    Args:
        saved: the checkpoint's configuration.
        step: that it was saved at.
    """
    same = saved.get("fake_quantize") == config.fake_quantize
    return same and step >= int(saved.get("fake_quantize_start", 0))


def write_quantized(
    folder: Path,
    float_folder: Path,
    coded: Mapping[str, CodedWeight],
    model: PreTrainedModel,
    fake: FakeQuantization,
) -> None:
    """Write the folder to deploy beside the float one, whole or not at all.

    Args:
        float_folder: of the same model, as save_pretrained and the tokenizer wrote it.
        coded: weights by the plain model's names.
    """
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    weights = list(float_folder.glob("*.safetensors"))
    shutil.copytree(float_folder, partial, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: value for path in weights for name, value in load_file(path).items()}
    for name, (codes, steps) in coded.items():
        # Steps of bfloat16 weights are numbers of bfloat16, so nothing is rounded here.
        dtype = tensors.pop(name).dtype
        tensors[f"{name}_packed"] = pack_codes(codes, fake.quantizer.bits)
        tensors[f"{name}_scale"] = steps.to(dtype).contiguous()
        tensors[f"{name}_shape"] = torch.tensor(codes.shape)
    save_file(tensors, partial / _WEIGHTS, metadata={"format": "pt"})
    content = json.loads((partial / "config.json").read_text())
    content["quantization_config"] = _description(model, fake)
    (partial / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 (rows, columns) to int32 (rows, ceil(columns * bits / 32)).

    Code i of a row, plus 2^(bits - 1), takes the bits from ``i * bits`` on, lowest first.
    """
    rows, columns = codes.shape
    shifted = codes.to(torch.int64) + (1 << (bits - 1))
    singles = ((shifted[:, :, None] >> torch.arange(bits)) & 1).reshape(rows, columns * bits)
    words = -(-columns * bits // 32)
    padded = torch.nn.functional.pad(singles, (0, words * 32 - columns * bits))
    values = (padded.view(rows, words, 32) << torch.arange(32)).sum(-1)
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)


def _description(model: PreTrainedModel, fake: FakeQuantization) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    quantizer, block = fake.quantizer, fake.quantizer.block_size
    weights = {
        "num_bits": quantizer.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if block is None else "group",
        "group_size": block,
        "dynamic": False,
    }
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [name for name in linear if name not in fake.names],
    }


def on_the_wire(
    comm: qsdp.QSDPConfig, config: TrainConfig, fake: FakeQuantization | None
) -> qsdp.QSDPConfig:
    """``comm``, with quantized weights sent as they are where that is possible."""
    if fake is None or not travels_exactly(config):
        return comm
    return fake.on_the_wire(comm)
