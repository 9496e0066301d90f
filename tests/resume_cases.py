"""Frameworks that save and load what communication remembers, and DDP's hook in each of them.

Run by two ranks for test_integrations.py, as integration_cases.py is. Each stops in the middle,
goes on from its checkpoint, and must end as a run without a break, bit for bit.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import qsdp
from qsdp import Differences, Feedback, Learned, LevelSchedule, QSDPConfig, Quantizer

NEAREST = Quantizer(4, rounding="nearest")
# All that communication may remember: kept weights, residuals, learned levels.
REMEMBERS = QSDPConfig(
    weights=Differences(NEAREST),
    gradients=Feedback(Learned(NEAREST, LevelSchedule(first_step=1, every=2))),
)
# To nearest: DDP orders its buckets anew after its first step, and random bits go by place.
DDP = QSDPConfig(weights=None, gradients=Feedback(NEAREST))
TEXT = list(Path(__file__).read_bytes())
DATA = [{"input_ids": w, "labels": w} for w in (TEXT[at : at + 32] for at in range(2000))]


def same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found and found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=1, **shape))


# Accelerate -------------------------------------------------------------------------------------


def accelerated(folder: Path, config: QSDPConfig, plugin: Any, resume: bool) -> tuple[list, dict]:
    """Six steps with a checkpoint after three, or the last three from there."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from qsdp.integrations.accelerate import quantize

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    ddp = quantize(accelerator, model, config)
    if resume:
        accelerator.load_state(str(folder))
    losses = []
    for step in range(3 if resume else 0, 6):
        at = 100 * step + 17 * accelerator.process_index
        ids = torch.tensor([entry["input_ids"] for entry in DATA[at : at + 4]])
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 2:
            accelerator.save_state(str(folder))
            accelerator.wait_for_everyone()
    AcceleratorState._reset_state(reset_partial_state=True)
    return losses, (qsdp.comm_state_dict(model) if ddp is None else ddp.state_dict())


def case_accelerate_resumes(rank: int, folder: Path) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from integration_cases import fsdp_on_cpu

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    with fsdp_on_cpu():
        whole, expected = accelerated(folder / "accelerate", REMEMBERS, plugin, False)
        resumed, found = accelerated(folder / "accelerate", REMEMBERS, plugin, True)
    assert resumed == whole[3:], (resumed, whole)
    same_state(found, expected)


def case_accelerate_ddp(rank: int, folder: Path) -> None:
    """Below prepare, which has wrapped the model with DDP."""
    whole, expected = accelerated(folder / "accelerate_ddp", DDP, None, False)
    resumed, found = accelerated(folder / "accelerate_ddp", DDP, None, True)
    assert resumed == whole[3:], (resumed, whole)
    same_state(found, expected)


# Trainer ----------------------------------------------------------------------------------------


def trainer_of(folder: Path, fsdp: bool, **fields: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    sharded = {
        "fsdp": True,
        "fsdp_config": {
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    }
    args = TrainingArguments(
        output_dir=str(folder),
        **(sharded if fsdp else {}),
        **{
            "max_steps": 6,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_steps": 3,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **fields,
        },
    )
    return Trainer(model=llama(), args=args, train_dataset=DATA, eval_dataset=DATA[:32])


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def case_trainer_resumes(rank: int, folder: Path) -> None:
    """From a checkpoint on as many ranks, and with a warning from one that lost its files."""
    from integration_cases import fsdp_on_cpu

    from qsdp.integrations.transformers import QSDPCallback

    def train(resume: str | None) -> tuple[list[float], nn.Module]:
        trainer = trainer_of(folder / "resumes", True)
        trainer.add_callback(QSDPCallback(REMEMBERS))
        trainer.train(resume_from_checkpoint=resume)
        return losses_of(trainer), trainer.model_wrapped

    middle = folder / "resumes" / "checkpoint-3"
    with fsdp_on_cpu():
        whole, model = train(None)
        expected = qsdp.comm_state_dict(model)
        assert (middle / f"qsdp-rank{rank}.safetensors").is_file()
        resumed, model = train(str(middle))
        assert resumed == whole
        same_state(qsdp.comm_state_dict(model), expected)
        dist.barrier()
        (middle / f"qsdp-rank{rank}.safetensors").unlink()
        dist.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(str(middle))
        assert any("remembered when this checkpoint" in str(w.message) for w in caught)


def case_trainer_loads_the_best_model(rank: int, folder: Path) -> None:
    """At w4g4: what was measured of the best checkpoint is measured again once it is loaded."""
    from integration_cases import fsdp_on_cpu

    from qsdp.integrations.transformers import QSDPCallback

    # The rate leaps after three steps, so that the first checkpoint is the best.
    class Leap(QSDPCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_begin(args, state, control, **kwargs)
            for group in kwargs["optimizer"].param_groups:
                group["lr"] = 1e-3 if state.global_step < 3 else 0.3

    with fsdp_on_cpu():
        trainer = trainer_of(
            folder / "best",
            True,
            eval_strategy="steps",
            eval_steps=3,
            load_best_model_at_end=True,
        )
        trainer.add_callback(Leap("w4g4"))
        trainer.train()
        seen = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-3"), seen
        assert seen[1] > 1.2 * seen[0], seen
        assert trainer.evaluate()["eval_loss"] == seen[0], seen
        assert qsdp.is_quantized(trainer.model_wrapped)


def case_trainer_ddp(rank: int, folder: Path) -> None:
    from qsdp.integrations.transformers import QSDPDDPCallback

    def train(resume: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer = trainer_of(folder / "trainer_ddp", False)
        callback = QSDPDDPCallback(trainer, DDP)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume)
        assert callback.state.stats().ratio > 4
        return losses_of(trainer), callback.state.state_dict()

    whole, expected = train(None)
    resumed, found = train(str(folder / "trainer_ddp" / "checkpoint-3"))
    assert resumed == whole, (resumed, whole)
    same_state(found, expected)


def case_trainer_ddp_mistake(rank: int, folder: Path) -> None:
    from fsdp_cases import raises_everywhere

    from qsdp.integrations.transformers import QSDPDDPCallback

    trainer = mock.Mock(model_wrapped=nn.Linear(4, 4))
    callback = QSDPDDPCallback(trainer, "w32g8")
    raises_everywhere(lambda: callback.on_train_begin(None, None, None), "DistributedDataParallel")


# Lightning --------------------------------------------------------------------------------------


def light_module(shard: bool) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            self.losses: list[float] = []
            self.sharded = False

        def configure_model(self) -> None:
            if shard and not self.sharded:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
                self.sharded = True

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            # By step: Lightning begins an epoch anew when it goes on from the middle of one.
            seed = 10 * self.global_step + self.global_rank
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
            loss = (self.net(x) - x).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, x: torch.Tensor, index: int) -> None:
            self.log("val", (self.net(x) - x).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


def fit(
    folder: Path, strategy: Any, callback: Any, resume: str | None, weights_only: bool = False
) -> tuple[Any, Any]:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    saver = ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        every_n_train_steps=3,
        save_top_k=-1,
        save_weights_only=weights_only,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[callback, saver],
        max_steps=6,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        limit_val_batches=2,
    )
    module = light_module(isinstance(strategy, ModelParallelStrategy))
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(x, batch_size=4)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return trainer, module


def case_lightning_resumes(rank: int, folder: Path) -> None:
    """From a checkpoint that is a folder, and from one that is a file."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from qsdp.integrations import lightning as integration
    from qsdp.integrations.files import load_comm_state
    from qsdp.integrations.lightning import QSDPCallback

    for distributed in (True, False):
        here = folder / f"lightning_{distributed}"

        def train(resume: str | None, here: Path = here, kind: bool = distributed) -> tuple:
            strategy = ModelParallelStrategy(
                data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=kind
            )
            trainer, module = fit(here, strategy, QSDPCallback(REMEMBERS), resume)
            return trainer, module, qsdp.comm_state_dict(module)

        trainer, whole, expected = train(None)
        middle = here / "step=3.ckpt"
        files = middle if distributed else here / "step=3.ckpt.qsdp"
        assert (files / f"qsdp-rank{rank}.safetensors").is_file()
        _, resumed, found = train(str(middle))
        assert resumed.losses == whole.losses[3:], (resumed.losses, whole.losses)
        same_state(found, expected)
        # An evaluation of a checkpoint takes up what communication remembered, too.
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
        loader = torch.utils.data.DataLoader(x, batch_size=4)
        with mock.patch.object(integration, "load_comm_state", wraps=load_comm_state) as load:
            trainer.validate(whole, loader, ckpt_path=str(middle), verbose=False)
        load.assert_called_once_with(whole, files)
        dist.barrier()
        trainer.strategy.remove_checkpoint(str(middle))
        dist.barrier()
        assert not middle.exists() and not files.exists()


def case_lightning_ddp(rank: int, folder: Path) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    from qsdp.integrations.lightning import QSDPDDPCallback

    def train(resume: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        callback = QSDPDDPCallback(DDP)
        _, module = fit(folder / "lightning_ddp", DDPStrategy(), callback, resume)
        assert callback.state.stats().ratio > 4
        return module.losses, callback.state.state_dict()

    whole, expected = train(None)
    resumed, found = train(str(folder / "lightning_ddp" / "step=3.ckpt"))
    assert resumed == whole[3:], (resumed, whole)
    same_state(found, expected)


def case_lightning_ddp_mistake(rank: int, folder: Path) -> None:
    from fsdp_cases import raises_everywhere

    from qsdp.integrations.lightning import QSDPDDPCallback

    trainer = mock.Mock()
    trainer.strategy.model = nn.Linear(4, 4)
    raises_everywhere(
        lambda: QSDPDDPCallback("w32g8").on_fit_start(trainer, nn.Linear(4, 4)),
        "DistributedDataParallel",
    )


# torchtitan -------------------------------------------------------------------------------------


def case_torchtitan_resumes(rank: int, folder: Path) -> None:
    """Its trainer and its checkpoints, which are torch.distributed.checkpoint's."""
    import torchtitan_on_cpu as titan

    files = folder / "titan"
    if rank == 0:
        files.mkdir()
        titan.make_files(files)
    dist.barrier()
    whole = titan.train(REMEMBERS, files, 6, checkpoint_every=3)
    resumed = titan.train(REMEMBERS, files, 6, checkpoint_every=3, load_step=3)
    assert resumed["losses"] == whole["losses"][3:], (resumed, whole)
    same_state(resumed["state"], whole["state"])


def case_torchtitan_ddp(rank: int, folder: Path) -> None:
    """Without shards torchtitan uses DDP, which gets the hook before its first forward."""
    import torchtitan_on_cpu as titan
    from integration_cases import counted_bytes

    files = folder / "titan_ddp"
    if rank == 0:
        files.mkdir()
        titan.make_files(files)
    dist.barrier()
    stock = titan.train("stock", files, 6, shard=False)
    with counted_bytes() as moved:
        quantized = titan.train("w32g8", files, 6, shard=False)
    assert moved.bytes > 0, "gradients did not travel as rows"
    pairs = list(zip(stock["losses"], quantized["losses"], strict=True))
    assert all(abs(a - b) < 0.02 * a for a, b in pairs), pairs
    assert pairs[-1][0] != pairs[-1][1]


# verl and TRL -----------------------------------------------------------------------------------


def case_verl_recipe(rank: int, folder: Path) -> None:
    """A stand-in for verl 0.9.1's `FSDPEngine._build_fsdp_module`, its calls in their order.

    verl/workers/engine/fsdp/transformer_impl.py:465-473, and apply_fsdp2 and what it calls,
    verl/utils/fsdp_utils.py:549-600: layers by class name, embedding and head by name, then the
    root, in mixed precision; then the full state is loaded.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def build(config: str | None) -> nn.Module:
        module = llama()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
        kwargs = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}
        full_state = module.state_dict()
        parts = [
            part
            for name, part in module.named_modules()
            if isinstance(part, LlamaDecoderLayer | nn.Embedding) or name == "lm_head"
        ]
        for part in parts:
            fully_shard(part, **kwargs)
        fully_shard(module, **kwargs)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, full_state, options=options)  # fsdp2_load_full_state_dict
        return module if config is None else qsdp.apply_qsdp(module, config)

    follows_stock(build)


def case_trl_recipe(rank: int, folder: Path) -> None:
    """TRL 1.16.0 trains with transformers' Trainer, whose callback it takes; its reference model
    is sharded by prepare_fsdp (trl/models/utils.py:292) in one unit, and only evaluated."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def reference(config: str | None) -> nn.Module:
        policy = MixedPrecisionPolicy()
        model = fully_shard(llama(), reshard_after_forward=True, mp_policy=policy).eval()
        return model if config is None else qsdp.apply_qsdp(model, config)

    ids = torch.tensor([entry["input_ids"] for entry in DATA[:4]])
    with torch.no_grad():
        exact = reference(None)(input_ids=ids).logits
        assert torch.equal(reference("w32g32")(input_ids=ids).logits, exact)
        # Differences start with one gather of the weights themselves.
        for config, band, ratio in (("w8g8", 0.02, 3), ("w4g4", 0.2, 1.5)):
            model = reference(config)
            first, again = (model(input_ids=ids).logits for _ in range(2))
            assert torch.equal(first, again), "a reference gives the same every time"
            assert (first - exact).norm() < band * exact.norm()
            assert qsdp.comm_stats(model).ratio > ratio, qsdp.comm_stats(model)


def follows_stock(build: Any) -> None:
    runs = {}
    for config in (None, "w32g32", "w8g8", "w4g4"):
        model, losses = build(config), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            at = 100 * step + 17 * dist.get_rank()
            ids = torch.tensor([entry["input_ids"] for entry in DATA[at : at + 4]])
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs[config] = losses
    assert runs[None] == runs["w32g32"]
    for config, band in (("w8g8", 0.02), ("w4g4", 0.1)):
        pairs = list(zip(runs[None], runs[config], strict=True))
        assert all(math.isfinite(b) and abs(a - b) < band * a for a, b in pairs), runs


def case_missing_files_are_told(rank: int, folder: Path) -> None:
    from qsdp.integrations.files import load_comm_state, save_comm_state

    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    qsdp.apply_qsdp(model, "w4g4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_comm_state(model, folder / "nowhere")
    assert any("is missing" in str(w.message) for w in caught)
    save_comm_state(model, folder / "somewhere")
    load_comm_state(model, folder / "somewhere")


CASES = {name: fn for name, fn in list(globals().items()) if name.startswith("case_")}
