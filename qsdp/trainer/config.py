"""What a run is: `TrainConfig`, frozen and checked on construction, and the presets that build it.

The flags of `qsdp train` are generated from these fields and their docstrings. This file imports
neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from qsdp.arguments import did_you_mean
from qsdp.trainer.replicas import ReplicaFlags, check_replica_flags

PresetName = Literal["tiny", "gpt2-125m", "gpt2-350m", "gpt2-1.3b"]
LATEST = "latest"


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(ReplicaFlags):
    """Pretrain or continue a causal language model with quantized communication."""

    preset: PresetName = "tiny"
    """Shape and recipe to start from; the other flags override single values."""
    folder: Path | None = None
    """Run folder; default runs/PRESET-COMM. All nodes must see it."""
    overwrite: bool = False
    """Delete what the run folder holds and start afresh."""
    resume: str | None = None
    """`--resume` alone continues from the run folder's latest checkpoint, `--resume PATH` from that
    one."""
    comm: str = "w8g8"
    """Bits of weights and gradients on the wire, w{1..8|32}g{1..8|32}, 32 for full precision; or
    sdp4bit, bitdp, qsgd{2|4|8}; auto to measure and decide; or a JSON file of a QSDPConfig."""
    comm_warmup: int | None = None
    """Steps at first in which gradients travel in more bits, with presets that begin so, such as
    bitdp; default: a tenth of --steps. A resumed run keeps it."""
    keep_full_precision: tuple[str, ...] = ()
    """Glob patterns of parameter names that are never quantized."""
    ranks_per_node: int | None = None
    """Ranks in each node, for two-level collectives; 1 for flat ones; left out, as launched."""
    replicate: int = 1
    """Replicas of the sharded model (HSDP): ranks / replicas shard it, and replicas add up their
    gradients."""
    quantize_replicas: bool = True
    """With --replicate, replicas send the preset's bits too. A JSON file has its `replicas`."""
    seed: int = 17
    """Seed of the initial weights, the order of the text, dropout and rounding."""

    nproc: int = 1
    """Ranks to start on this machine; ignored under torchrun."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs where there are any. GPUs speak NCCL, CPUs gloo."""
    timeout: float = 600.0
    """Seconds after which a collective that does not finish ends the run."""

    model: Path | None = None
    """Folder of a Hugging Face causal language model to continue, in place of the preset's."""
    lora: int | None = None
    """Rank of LoRA adapters: train these in float32 and leave --model as it is, in bfloat16."""
    lora_alpha: float | None = None
    """Adapters count alpha / rank times; default: twice the rank."""
    lora_targets: tuple[str, ...] = ()
    """Ends of the names of modules that get adapters, such as q_proj; default: all linear ones but
    the head."""
    fake_quantize: int | None = None
    """Bits, 2 to 8, of the weights of linear layers in blocks: train in what is deployed, and
    export that, too. Each output channel learns its step."""
    fake_quantize_block: int | None = None
    """With --fake-quantize, values of a row that share a step, taken from the largest of them:
    weights of 2 to 7 bits then travel in these bits, without any error."""
    fake_quantize_start: int = 0
    """Steps in full precision before that; as many as --steps for quantization after training."""
    architecture: Literal["auto", "gpt2", "llama"] = "auto"
    """Of the preset's model; auto: gpt2, or llama with --fake-quantize."""
    layers: int = 4
    """Transformer blocks of the preset's model."""
    width: int = 192
    """Width of the preset's model."""
    heads: int = 6
    """Attention heads of the preset's model."""
    vocab_size: int = 1024
    """Size of the tokenizer trained on the text, where none is given."""
    sequence_length: int = 128
    """Tokens that the model sees at once."""
    dropout: float = 0.0
    """Dropout of the preset's model."""

    data: tuple[Path, ...] = ()
    """Text files to train on; default: the plays of Shakespeare of `qsdp[demo]`."""
    valid: Path | None = None
    """Text file to validate on; default: held out of the training text."""
    valid_fraction: float = 0.1
    """Part of the training text, at its end, that is held out where --valid is not given."""
    dataset: str | None = None
    """Data set that `datasets` streams, such as allenai/c4, in place of files."""
    dataset_config: str | None = None
    """Configuration of the data set, such as en."""
    dataset_files: tuple[Path, ...] = ()
    """Files for the builders json, text, csv and parquet of `datasets`."""
    dataset_split: str = "train"
    """Split to train on."""
    dataset_valid_split: str = "validation"
    """Split to validate on, where --valid is not given."""
    text_field: str = "text"
    """Field of the data set that holds the text."""
    tokenizer: Path | None = None
    """A tokenizer.json or a Hugging Face folder; default: the model folder's, or a byte-level BPE
    trained on the text."""

    steps: int = 480
    """Optimizer steps."""
    batch_size: int = 8
    """Sequences in an optimizer step, over all ranks."""
    micro_batch_size: int | None = None
    """Sequences in one forward of one rank; default: no gradient accumulation."""
    sync_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch, which saves memory, rather than after the last."""
    lr: float = 1e-3
    """Peak learning rate, reached after the warm-up and followed by a cosine."""
    warmup_steps: int = 48
    """Steps of linear warm-up."""
    final_lr_fraction: float = 0.1
    """Learning rate of the last step, as a part of the peak."""
    beta1: float = 0.9
    """AdamW."""
    freeze_second_moment: int | None = None
    """After so many steps Adam's second moment stays as it is (1-bit Adam); left out, never."""
    beta2: float = 0.95
    """AdamW."""
    eps: float = 1e-8
    """AdamW."""
    weight_decay: float = 0.0
    """AdamW, on matrices."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 is no clipping."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes and gathers in bfloat16 and reduces gradients in float32."""
    reduce_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which FSDP2 hands over gradients to reduce; bf16 halves what stock sends."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward, block by block."""
    prefetch: bool = True
    """On CPUs, gather the next block's weights while this one computes, as GPUs always do; holds
    one block more in memory. benchmarks/results/overlap.txt has what it gains."""
    compile: bool = False
    """torch.compile each block."""

    log_every: int = 20
    """Steps between two lines of the log."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the metrics, too, beside TensorBoard."""
    eval_every: int = 120
    """Steps between two validations; 0 validates at the end only."""
    eval_windows: int = 256
    """Windows of sequence_length tokens in a validation during training, spread over the text."""
    final_eval_windows: int = 512
    """The same for the validation at the end."""
    checkpoint_every: int = 100
    """Steps between two checkpoints; 0 saves at the end and when interrupted only."""
    keep_checkpoints: int = 2
    """How many checkpoints stay in the run folder."""
    export: Literal["best", "decoded", "master", "none"] = "best"
    """Weights of the final model: as training sees them (decoded), the full-precision masters, or
    the better in validation; with --fake-quantize best is decoded."""

    def __post_init__(self) -> None:
        for name in ("nproc", "layers", "width", "heads", "vocab_size", "sequence_length", "steps",
                     "batch_size", "log_every", "eval_windows", "final_eval_windows",
                     "keep_checkpoints", "replicate"):  # fmt: skip
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("warmup_steps", "eval_every", "checkpoint_every", "seed"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        for name in ("lr", "eps", "timeout"):
            value = getattr(self, name)
            self._require(name, math.isfinite(value) and value > 0, "a positive number")
        for name in ("beta1", "beta2", "dropout", "valid_fraction"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        for name in ("clip", "weight_decay"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("final_lr_fraction", 0 <= self.final_lr_fraction <= 1, "between 0 and 1")
        self._require("width", self.width % self.heads == 0, f"a multiple of --heads {self.heads}")
        ranks = self.ranks_per_node
        self._require("ranks_per_node", ranks is None or ranks >= 1, "at least 1, or left out")
        micro = self.micro_batch_size
        self._require("micro_batch_size", micro is None or micro >= 1, "at least 1")
        warmup = self.comm_warmup
        self._require("comm_warmup", warmup is None or warmup >= 0, "at least 0, or left out")
        self._check_lora()
        check_replica_flags(
            self,
            replicate=self.replicate,
            quantize_replicas=self.quantize_replicas,
            comm=self.comm,
        )
        self._check_fake_quantize()
        if self.data and self.dataset:
            raise ValueError("--data and --dataset exclude each other: give one of them")
        if not self.data and not self.dataset and self.valid:
            raise ValueError("--valid needs --data or --dataset: the plays hold out whole plays")
        if self.dataset_files and not self.dataset:
            raise ValueError("--dataset-files needs --dataset with a builder: json, text, csv, ...")

    def _check_lora(self) -> None:
        alpha = self.lora_alpha
        self._require("lora", self.lora is None or self.lora >= 1, "at least 1, or left out")
        self._require("lora_alpha", alpha is None or alpha > 0, "above 0")
        if self.lora is None:
            for name in ("lora_alpha", "lora_targets"):
                if getattr(self, name):
                    raise ValueError(f"{flag_of(name)} needs --lora RANK")
        elif self.model is None:
            raise ValueError("--lora needs --model: adapters are trained on a model that is there")
        elif self.export == "decoded":
            raise ValueError("--export decoded does not go with --lora: adapters are exported for "
                             "the model as it is on disk; leave it out")  # fmt: skip

    def _check_fake_quantize(self) -> None:
        bits, start = self.fake_quantize, self.fake_quantize_start
        self._require("fake_quantize", bits is None or 2 <= bits <= 8, "from 2 to 8, or left out")
        between = f"from 0 to --steps {self.steps}"
        self._require("fake_quantize_start", 0 <= start <= self.steps, between)
        if self.model is not None and self.architecture != "auto":
            raise ValueError("--architecture is of the preset's model, and --model has its own")
        if bits is None and (start or self.fake_quantize_block is not None):
            raise ValueError("--fake-quantize-block and -start need --fake-quantize BITS")
        if bits is not None and self.lora is not None:
            raise ValueError("--fake-quantize does not go with --lora, whose base is frozen: give "
                             "--lora a --model that was quantized before")  # fmt: skip

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ValueError(f"{flag_of(name)} must be {allowed}, got {getattr(self, name)}")

    @property
    def run_folder(self) -> Path:
        bits = "" if self.fake_quantize is None else f"-int{self.fake_quantize}"
        return self.folder or Path("runs") / f"{self.preset}-{self.comm_name}{bits}"

    @property
    def comm_name(self) -> str:
        """What to call the configuration of communication."""
        if not self.comm.startswith("{"):
            return self.comm
        return str(json.loads(self.comm).get("name", "custom"))

    def micro_batches(self, num_ranks: int) -> int:
        """Forwards of one rank in a step. Raises ValueError where the batch does not divide."""
        per_round = num_ranks * (self.micro_batch_size or 1)
        if self.batch_size % per_round:
            raise ValueError(
                f"--batch-size must be a multiple of ranks * --micro-batch-size = {num_ranks} * "
                f"{self.micro_batch_size or 1}, got {self.batch_size}"
            )
        return self.batch_size // per_round if self.micro_batch_size else 1

    def to_json(self) -> dict[str, Any]:
        """Fields as JSON values; `from_json` is the inverse."""
        plain = dataclasses.asdict(self)
        return {
            name: [str(v) for v in value]
            if isinstance(value, tuple)
            else (str(value) if isinstance(value, Path) else value)
            for name, value in plain.items()
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainConfig:
        """Raises ValueError on a name that is no field, and on a value of another type."""
        return cls(**typed_fields(values))


def typed_fields(values: dict[str, Any], spell: Callable[[str], str] = flag_of) -> dict[str, Any]:
    """Fields of :class:`TrainConfig` from JSON values.

    Args:
        spell: how messages write the name of a field.

    Raises:
        ValueError: a name that is no field, or a value of another type.
    """
    kinds = get_type_hints(TrainConfig)
    for name in values:
        if name not in kinds:
            hint = did_you_mean(name, kinds) or ": it is no option of qsdp train"
            raise ValueError(f"unknown field {name!r}{hint}")
    return {name: _typed(spell(name), kinds[name], value) for name, value in values.items()}


def _typed(name: str, kind: Any, value: Any) -> Any:
    options = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if value is None and NoneType in options:
        return None
    kind = options[0]
    if get_origin(kind) is Literal:
        allowed = f"one of {', '.join(get_args(kind))}"
        if value in get_args(kind):
            return value
    elif get_origin(kind) is tuple:
        allowed = "a list of texts"
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(map(get_args(kind)[0], value))
    elif kind is Path:
        allowed = "a text"
        if isinstance(value, str):
            return Path(value)
    else:
        allowed = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[kind]
        if type(value) is kind or (kind is float and type(value) is int):
            return kind(value)
    null = ", or null" if NoneType in options else ""
    got = json.dumps(value, default=str)
    raise ValueError(f"{name} must be {allowed}{null}, got {got}")


def tiny() -> TrainConfig:
    """A GPT-2 of 2.0M parameters: a minute and a half on two cores."""
    return TrainConfig()


def _gpt2(preset: PresetName, **shape_and_recipe: Any) -> TrainConfig:
    """The recipe that the sizes of GPT-2 share: QSDP's experiments (arXiv 2302.02390)."""
    return TrainConfig(
        preset=preset,
        vocab_size=50257,
        sequence_length=2048,
        warmup_steps=100,
        precision="bf16",
        eval_every=500,
        eval_windows=512,
        final_eval_windows=2048,
        checkpoint_every=500,
        **shape_and_recipe,
    )


def gpt2_125m() -> TrainConfig:
    return _gpt2("gpt2-125m", layers=12, width=768, heads=12, batch_size=256, micro_batch_size=16,
                 lr=6e-4, steps=4800)  # fmt: skip


def gpt2_350m() -> TrainConfig:
    return _gpt2("gpt2-350m", layers=24, width=1024, heads=16, batch_size=256, micro_batch_size=8,
                 lr=3e-4, steps=13400)  # fmt: skip


def gpt2_1_3b() -> TrainConfig:
    return _gpt2("gpt2-1.3b", layers=24, width=2048, heads=16, batch_size=512, micro_batch_size=16,
                 lr=2e-4, steps=24800)  # fmt: skip


PRESETS: dict[str, Callable[[], TrainConfig]] = dict(
    zip(get_args(PresetName), (tiny, gpt2_125m, gpt2_350m, gpt2_1_3b), strict=True)
)
