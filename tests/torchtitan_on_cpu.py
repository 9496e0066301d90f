"""torchtitan's own trainer on CPU ranks, for the tests.

torchtitan 0.2 knows no CPU: it asks torch.cuda for names and memory. It also hands every
reduce-scatter a PREMUL_SUM(1.0), which gloo refuses; a model without qsdp is told to sum instead,
which is the same number. Nothing else is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.distributed.fsdp import FSDPModule

import qsdp
from qsdp.integrations.torchtitan import quantized_spec, save_comm_state

CPU = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    synchronize=lambda *args: None,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 34),
    reset_peak_memory_stats=lambda *args: None,
    empty_cache=lambda: None,
    memory_stats=lambda device=None: {},
)

with (
    mock.patch("torch._utils._get_available_device_type", lambda: "cpu"),
    mock.patch("torch._utils._get_device_module", lambda name: CPU),
):
    from torchtitan.config import JobConfig
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer


def summing(parallelize_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @wraps(parallelize_fn)
    def parallelize(*args: object, **kwargs: object) -> nn.Module:
        model = parallelize_fn(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize


def train(
    comm: str | qsdp.QSDPConfig,
    folder: Path,
    steps: int,
    *,
    checkpoint_every: int = 0,
    load_step: int = 0,
    shard: bool = True,
) -> dict[str, object]:
    """Train torchtitan's debug model with its own trainer; files are made in ``folder`` before.

    ``comm`` is "stock", a preset, a configuration, or "raw": qsdp's collectives in full precision.
    With ``load_step``, it goes on from the checkpoint of that step; without ``shard``, with DDP.
    """
    name = f"test_{comm if isinstance(comm, str) else 'config'}_{load_step}_{shard}"
    spec = train_spec.get_train_spec("llama3")
    if comm in ("stock", "w32g32"):
        spec = replace(spec, parallelize_fn=summing(spec.parallelize_fn))
    if comm == "raw":
        spec = quantized_spec(spec, qsdp.QSDPConfig(exceptions={"*": None}))
    elif comm != "stock":
        spec = quantized_spec(spec, comm)
    train_spec.register_train_spec(name, spec)
    config = JobConfig()
    config.model.name, config.model.flavor = name, "debugmodel"
    config.model.hf_assets_path = str(folder / "tokenizer")
    config.job.dump_folder = str(folder / "dump")
    config.training.dataset_path = str(folder / "text")
    config.training.local_batch_size, config.training.seq_len = 2, 32
    config.training.steps = steps
    config.training.mixed_precision_param = "float32"
    config.optimizer.implementation = "foreach"
    config.lr_scheduler.warmup_steps = 2
    config.metrics.log_freq = 1
    config.debug.seed = 0
    config.activation_checkpoint.mode = "none"
    if not shard:
        parallelism = config.parallelism
        parallelism.data_parallel_shard_degree, parallelism.data_parallel_replicate_degree = 1, 2
    config.checkpoint.enable = bool(checkpoint_every)
    config.checkpoint.interval = checkpoint_every
    config.checkpoint.load_step = load_step or -1
    config.checkpoint.keep_latest_k = 0
    config.checkpoint.last_save_model_only = False
    with mock.patch.object(dist, "init_process_group"):  # the test has one already
        trainer = Trainer(config)
    if comm != "stock":
        save_comm_state(trainer)
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.append(float(loss))
    trainer.train()
    trainer.close()
    model = trainer.model_parts[0]
    quantized = shard and qsdp.is_quantized(model)
    stats = qsdp.comm_stats(model) if quantized else qsdp.CommStats()
    state = qsdp.comm_state_dict(model) if quantized else {}
    return {
        "losses": losses,
        "sent": stats.sent,
        "stock_sent": stats.stock_sent,
        "state": {name: value.clone() for name, value in state.items()},
    }


def make_files(folder: Path) -> None:
    """A tokenizer and a data set, both made of this file."""
    text = Path(__file__).read_text()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=[*special.values()], show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "text").mkdir()
    lines = [json.dumps({"text": text[at : at + 2000]}) for at in range(0, len(text), 500)]
    (folder / "text" / "data.json").write_text("\n".join(lines))
