"""Frameworks with qsdp against the same without, run by two ranks for test_integrations.py.

The recipes are those of ``examples/``. Each case returns what it measured.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import resume_cases
import torch
import torch.distributed as dist
from fsdp_cases import raises_everywhere

import qsdp
from qsdp import QSDPConfig, Ways

EXAMPLES = Path(__file__).parent.parent / "examples"
W8G8 = QSDPConfig.preset("w8g8")
Result = dict[str, Any]
STEPS = 12


def compare(train: Callable[[str, int], Result]) -> Result:
    """Off is bitwise the framework alone, 8 bits end within 2 % of it, bytes counted were sent."""
    stock, off = train("stock", STEPS), train("w32g32", STEPS)
    assert stock["losses"] == off["losses"], (stock, off)
    assert stock["losses"][-1] < stock["losses"][0]
    with counted_bytes() as moved:
        quantized = train("w8g8", STEPS)
    tails = [sum(run["losses"][-5:]) / 5 for run in (stock, quantized)]
    assert abs(tails[1] / tails[0] - 1) < 0.02, (stock, quantized)
    assert moved.bytes == quantized["sent"] > 0
    ratio = quantized["stock_sent"] / quantized["sent"]
    assert 3.5 < ratio < 4.0, quantized
    return {
        "loss": tails[0],
        "loss_w8g8": tails[1],
        "stock_bytes": int(quantized["stock_sent"]),
        "bytes": int(quantized["sent"]),
        "ratio": ratio,
        "weight_error": quantized.get("weight_error"),
    }


class counted_bytes:
    """Counts what qsdp hands to torch.distributed for other ranks, in row exchanges."""

    def __enter__(self) -> counted_bytes:
        self.bytes = 0
        exchange, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

        def counted_exchange(ops: list[dist.P2POp]) -> object:
            self.bytes += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
            return exchange(ops)

        def counted_all_to_all(output: torch.Tensor, input: torch.Tensor, **kwargs: Any) -> object:
            self.bytes += input.nbytes * (dist.get_world_size() - 1) // dist.get_world_size()
            return all_to_all(output, input, **kwargs)

        self._patches = [
            mock.patch.object(dist, "batch_isend_irecv", counted_exchange),
            mock.patch.object(dist, "all_to_all_single", counted_all_to_all),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()


def fsdp_on_cpu() -> Any:
    """Accelerate 1.15 offers FSDP on accelerators only; this lifts that one check."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    init = PartialState.__init__

    def lifted(self: PartialState, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_XPU

    return mock.patch.object(PartialState, "__init__", lifted)


def case_plain(rank: int, folder: Path) -> Result:
    import plain

    return compare(plain.train)


def case_ddp(rank: int, folder: Path) -> Result:
    """Two warm-up steps and the biases travel raw, so the ratio of the whole run is lower."""
    import ddp

    stock, off, quantized = (ddp.train(comm, STEPS) for comm in ("stock", "w32g32", "w32g8"))
    assert stock["losses"] == off["losses"]
    tails = [sum(run["losses"][-5:]) / 5 for run in (stock, quantized)]
    assert abs(tails[1] / tails[0] - 1) < 0.02
    ratio = quantized["stock_sent"] / quantized["sent"]
    assert 2.5 < ratio < 4.0
    return {
        "loss": tails[0],
        "loss_w8g8": tails[1],
        "stock_bytes": quantized["stock_sent"],
        "bytes": quantized["sent"],
        "ratio": ratio,
        "weight_error": None,
    }


def case_accelerate(rank: int, folder: Path) -> Result:
    import accelerate_fsdp2 as example

    with fsdp_on_cpu():
        return compare(example.train)


def case_accelerate_wrong_order(rank: int, folder: Path) -> None:
    """Before prepare; on what Accelerate wrapped with DDP; on FSDP1."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = torch.nn.Linear(64, 64)
    raises_everywhere(lambda: qsdp.apply_qsdp(model, W8G8), "below accelerator.prepare")
    AcceleratorState._reset_state(reset_partial_state=True)
    ddp = Accelerator(cpu=True).prepare(model)
    raises_everywhere(lambda: qsdp.apply_qsdp(ddp, W8G8), "DistributedDataParallel", "fully_shard")
    AcceleratorState._reset_state(reset_partial_state=True)


def case_wrapped_again(rank: int, folder: Path) -> None:
    """fully_shard after apply_qsdp is found by whoever reads the numbers."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
    fully_shard(model[0])
    qsdp.apply_qsdp(model, W8G8)
    fully_shard(model)
    raises_everywhere(lambda: qsdp.comm_stats(model), "move apply_qsdp below the last fully_shard")


def case_trainer(rank: int, folder: Path) -> Result:
    import hf_trainer as example

    with fsdp_on_cpu():
        result = compare(example.train)
    assert 0.001 < result["weight_error"] < 0.02
    return result


def case_trainer_mistakes(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from transformers import TrainerState, TrainingArguments

    from qsdp.integrations.transformers import QSDPCallback

    model = torch.nn.Linear(64, 64)

    def begin(callback: QSDPCallback, **fields: Any) -> None:
        args = TrainingArguments(output_dir=str(folder / "out"), use_cpu=True, **fields)
        callback.on_train_begin(args, TrainerState(), None, model=model)

    callback = QSDPCallback(W8G8)
    raises_everywhere(lambda: begin(callback), "TrainingArguments(fsdp=True)")
    raises_everywhere(
        lambda: begin(callback, fsdp=True, fsdp_config={"version": 1}), '{"version": 2}'
    )
    raises_everywhere(lambda: begin(callback, fsdp=True), "runs on CPUs", "does not offer it")
    with mock.patch.object(TrainingArguments, "device", torch.device("cuda")):
        raises_everywhere(lambda: begin(callback, fsdp=True), "no FSDP2 module")
    fully_shard(model)
    begin(callback, fsdp=True)
    begin(callback, fsdp=True)  # trainer.train() a second time
    raises_everywhere(lambda: begin(QSDPCallback(W8G8), fsdp=True), "second QSDPCallback")
    qsdp.remove_qsdp(model)
    begin(QSDPCallback(QSDPConfig.preset("w32g32")), fsdp=True)
    assert not qsdp.is_quantized(model)


def case_lightning(rank: int, folder: Path) -> Result:
    import lightning_fsdp2 as example

    result = compare(example.train)
    assert 0.001 < result["weight_error"] < 0.02
    return result


def case_lightning_mistakes(rank: int, folder: Path) -> None:
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from qsdp.integrations.lightning import QSDPCallback

    callback, module = QSDPCallback(W8G8), torch.nn.Linear(64, 64)
    for strategy, part in ((DDPStrategy(), "DDPStrategy"), (FSDPStrategy(), "which is FSDP1")):
        trainer = SimpleNamespace(strategy=strategy)
        raises_everywhere(lambda t=trainer: callback.on_fit_start(t, module), part, "fully_shard")
    trainer = SimpleNamespace(strategy=ModelParallelStrategy())
    raises_everywhere(lambda: callback.on_fit_start(trainer, module), "end of configure_model")
    fully_shard(module)
    qsdp.apply_qsdp(module, W8G8)
    raises_everywhere(lambda: callback.on_fit_start(trainer, module), "out of configure_model")


def case_torchtitan(rank: int, folder: Path) -> Result:
    """Its trainer, debug model and PREMUL_SUM(1.0); raw is qsdp's collectives, bit for bit."""
    import torchtitan_on_cpu as titan

    if rank == 0:
        titan.make_files(folder)
    dist.barrier()
    runs: dict[str, Result] = {}

    def train(comm: str, steps: int) -> Result:
        runs[comm] = titan.train(comm, folder, steps // 2)
        return runs[comm]

    result = compare(train)
    assert train("raw", STEPS)["losses"] == runs["stock"]["losses"]
    return result


def case_torchtitan_wrapped_function(rank: int, folder: Path) -> None:
    """Without torchtitan: any specification with a parallelize_fn, and the op that it hands on."""
    from dataclasses import dataclass

    from torch.distributed.fsdp import fully_shard

    from qsdp.integrations.torchtitan import quantized_spec

    @dataclass
    class Spec:
        parallelize_fn: Callable[..., torch.nn.Module]
        flavor: str = "debugmodel"

    def parallelize(model: torch.nn.Module, *, degree: int) -> torch.nn.Module:
        """What torchtitan's own does."""
        fully_shard(model).set_gradient_divide_factor(1.0)
        return model

    spec = quantized_spec(Spec(parallelize), W8G8)
    assert spec.flavor == "debugmodel" and spec.parallelize_fn.__doc__ == parallelize.__doc__
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    model = spec.parallelize_fn(model, degree=2)
    assert qsdp.is_quantized(model)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    model(x).sum().backward()
    exact = x.sum(0).expand(64, 64).contiguous()
    dist.all_reduce(exact)  # a sum: torchtitan divides by tokens, not by ranks
    own = exact.chunk(dist.get_world_size())[rank]
    error = (model.weight.grad.to_local() - own).abs().max()
    assert error < 0.02 * own.abs().max()
    raises_everywhere(lambda: quantized_spec(object(), W8G8), "has a parallelize_fn")


def case_axolotl_plugin(rank: int, folder: Path) -> None:
    """On a stand-in for axolotl's base class: axolotl does not install beside these versions."""
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = object  # type: ignore[attr-defined]
    names = ("axolotl", "axolotl.integrations")
    stand_ins = {name: ModuleType(name) for name in names} | {base.__name__: base}
    with mock.patch.dict(sys.modules, stand_ins):
        from qsdp.integrations.axolotl import QSDPArgs, QSDPPlugin
    plugin = QSDPPlugin()
    assert plugin.get_input_args() == f"{QSDPArgs.__module__}.{QSDPArgs.__name__}"
    cfg = QSDPArgs(qsdp_preset="w8g4", qsdp_keep_full_precision=["*.lm_head.*"])
    (callback,) = plugin.add_callbacks_post_trainer(cfg, None)
    assert callback.config.gradients.bits == 4
    assert callback.config.exceptions == (("*.lm_head.*", Ways(None, None)),)
    try:
        QSDPArgs(qsdp_preset="w9g9")
    except ValueError as error:
        assert "presets are" in str(error)
    else:
        raise AssertionError("a preset that does not exist")


CASES = {name: fn for name, fn in list(globals().items()) if name.startswith("case_")}
# A launch for each: what runs together imports the same packages.
HUGGING_FACE = ("accelerate", "trainer", "axolotl", "verl", "trl")
LAUNCHES = [
    [name for name in cases if name.removeprefix("case_").startswith(HUGGING_FACE) == here]
    for cases in (CASES, resume_cases.CASES)
    for here in (True, False)
]
CASES |= resume_cases.CASES


def run_cases(rank: int, names: list[str], folder: str) -> dict[str, str | Result | None]:
    """What each case measured, or the traceback of one that failed."""
    # The frameworks look for torchrun's variables; the process group is there already.
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": folder,
    }
    sys.path.insert(0, str(EXAMPLES))
    warnings.simplefilter("ignore")
    results: dict[str, str | Result | None] = {}
    for name in names:
        try:
            results[name] = CASES[name](rank, Path(folder))
        except Exception:
            results[name] = traceback.format_exc()
        dist.barrier()
    return results
