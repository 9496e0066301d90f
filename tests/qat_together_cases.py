"""What ranks run for test_qat_together.py: fake quantization beside mixed precision, compiled
blocks, and what a model becomes when it is written and read again."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch
from fsdp_cases import equal, same_on_all_ranks, shards, train, unsharded
from qat_cases import Net, adam, plain, steps_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

import qsdp
from qsdp import FakeQuantizer, QSDPConfig, Quantizer
from qsdp.qat import FakeQuantization
from qsdp.trainer.comm import quantize_communication
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.export import export_model
from qsdp.trainer.model import build_optimizer, new_model, shard
from qsdp.trainer.quantized import quantize_layers
from qsdp.trainer.ranks import Ranks
from qsdp.trainer.text import Text
from qsdp.trainer.tokenizer import load_tokenizer, train_tokenizer

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TINY = {"layers": 2, "width": 64, "heads": 2, "vocab_size": 300, "sequence_length": 32}


def build(quantizer: FakeQuantizer, policy: MixedPrecisionPolicy) -> tuple[Net, FakeQuantization]:
    model = plain(hidden=96)
    handle = qsdp.fake_quantize(model, quantizer, keep=("head",))
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, handle


def case_bfloat16_is_exact_on_the_wire(rank: int) -> None:
    """Weights as codes and as bfloat16: the same losses, masters and weights, bit for bit."""
    for bits in range(2, 8):
        quantizer = FakeQuantizer(bits, per="block", step="largest", block_size=32)
        runs = []
        for wire in (False, True):
            model, handle = build(quantizer, HALF)
            if wire:
                qsdp.apply_qsdp(model, handle.on_the_wire(QSDPConfig(None, None)))
            losses = steps_of(model, handle, rank, adam(model), first=0, count=3)
            with unsharded(model):
                used = {name: model.get_submodule(name).weight.clone() for name in handle.names}
            assert same_on_all_ranks(used)
            assert {weight.dtype for weight in used.values()} == {torch.bfloat16}
            runs.append((losses, shards(model), list(used.values())))
        (losses, masters, weights), (on_wire, also_masters, also_weights) = runs
        assert losses == on_wire and equal(masters, also_masters), bits
        assert equal(weights, also_weights), bits
        # On another grid they are others: the comparison can fail.
        model, handle = build(quantizer, HALF)
        qsdp.apply_qsdp(model, QSDPConfig(Quantizer(4, rounding="nearest"), None))
        assert steps_of(model, handle, rank, adam(model), first=0, count=3) != losses


def case_bfloat16_steps_reach_float32_masters(rank: int) -> None:
    """Steps are bfloat16 numbers where they act, and train in float32 behind that."""
    model, handle = build(FakeQuantizer(4), HALF)
    before = [step.full_tensor().clone() for step in handle.parameters()]
    steps_of(model, handle, rank, adam(model), first=0, count=1)
    for step, was in zip(handle.parameters(), before, strict=True):
        assert step.dtype == torch.float32
        moved = (step.full_tensor() - was).abs()
        assert 0 < moved.max() <= 4e-3  # Adam's first step, far below bfloat16's at these values
    decoded = qsdp.decoded_state_dict(model, full=True)
    if rank == 0:
        for codes, steps in handle.export(decoded).values():
            assert torch.equal(steps.bfloat16().float(), steps)
            assert codes.min() >= -8 and codes.max() <= 7


def case_compiled_blocks_train_the_same(rank: int) -> None:
    """As --compile does it, the forward of each block, through the switch: the same losses."""
    torch.compiler.reset()
    for quantizer in (FakeQuantizer(4, start_step=2), FakeQuantizer(4, "channel", "largest")):
        runs = []
        for compiled in (False, True):
            model = plain()
            handle = qsdp.fake_quantize(model, quantizer, keep=("head",))
            for block in model.blocks:
                if compiled:
                    block.forward = torch.compile(block.forward, backend="aot_eager")
                fully_shard(block)
            fully_shard(model)
            losses = steps_of(model, handle, rank, adam(model), first=0, count=4)
            runs.append((losses, shards(model)))
        assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1]), quantizer


def replicas(
    quantizer: FakeQuantizer, config: qsdp.SyncConfig
) -> tuple[Net, FakeQuantization, qsdp.ReplicaSync, torch.optim.Optimizer]:
    """Two replicas of two shards, on four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = plain(hidden=97)
    handle = qsdp.fake_quantize(model, quantizer, keep=("head",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = adam(model)
    group = mesh["replicate"].get_group()
    return model, handle, qsdp.ReplicaSync(model, optimizer, group, config), optimizer


SYNCS = {
    "average": {},
    "outer": {"outer": qsdp.OuterStep(0.7, 0.9), "differences": qsdp.Feedback(Quantizer(4))},
    "overlap": {"fragments": 2, "overlap_steps": 2},
    "outer overlap": {"overlap_steps": 2, "outer": qsdp.OuterStep(0.7, 0.9)},
}


def case_replicas_switch_and_stay_alike(rank: int) -> None:
    """Steps are those of the average, on all replicas, and no synchronisation takes them for a
    move. Where replicas have synchronised, they compute with the same quantized weights."""
    # At a synchronisation; right after it, where some have a part under way.
    for (name, fields), start in product(SYNCS.items(), (4, 5)):
        config = qsdp.SyncConfig(qsdp.SyncSchedule(base=4), **fields)
        model, handle, sync, optimizer = replicas(FakeQuantizer(4, start_step=start), config)
        for step in range(9):
            train(model, rank, 1, first=step, optimizer=optimizer)
            sync.step()
            if step == start - 1:
                with sync.average():
                    handle.initialize()
                    expected = [p.full_tensor() for p in handle.parameters()]
            handle.step(sync)
            if step == start - 1:
                first = [p.full_tensor() for p in handle.parameters()]
                assert equal(first, expected), name
                assert same_on_all_ranks(dict(zip(handle.names, first, strict=True))), name
            if not sync.common:
                continue
            masters = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
            assert same_on_all_ranks(masters), (name, step)
            with unsharded(model):
                used = {n: model.get_submodule(n).weight.clone() for n in handle.names}
            assert same_on_all_ranks(used), (name, step)
        sync.finish()
        masters = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
        assert same_on_all_ranks(masters) and handle.active, name
        for now, before in zip(handle.parameters(), expected, strict=True):
            moved = (now.full_tensor() - before).abs()
            # Adam moves a step by its learning rate at most, an outer step with momentum that by
            # less than seven times.
            assert 0 < moved.max() < 8 * 3e-3 * 7, (name, moved.max())


def case_a_switch_without_the_others_is_no_use(rank: int) -> None:
    """The reason for ``handle.step(sync)``: an outer step takes the first steps for a move."""
    config = qsdp.SyncConfig(qsdp.SyncSchedule(base=4), **SYNCS["outer"])
    model, handle, sync, optimizer = replicas(FakeQuantizer(4, start_step=3), config)
    for step in range(4):
        train(model, rank, 1, first=step, optimizer=optimizer)
        handle.step()
        if step == 2:
            first = [p.to_local().clone() for p in handle.parameters()]
        sync.step()
    moved = [
        (p.to_local() - f).abs().max() for p, f in zip(handle.parameters(), first, strict=True)
    ]
    assert min(moved) > 0.5


def run_of(config: TrainConfig, rank: int) -> tuple[PreTrainedModel, FakeQuantization]:
    """A Llama as `qsdp train` makes it, after three steps."""
    torch.manual_seed(3)
    model = new_model(config, 300, 0)
    fake = quantize_layers(model, config)
    assert fake is not None
    shard(model, config, Ranks(rank, 2, torch.device("cpu")))
    optimizer = build_optimizer(model, config)
    quantize_communication(model, config, fake)
    for step in range(3):
        ids = torch.randint(
            0, 300, (2, 32), generator=torch.Generator().manual_seed(9 * step + rank)
        )
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fake.step()
    model.eval()
    return model, fake


MODELS = {
    "learned": {"fake_quantize": 4},
    "switched": {"fake_quantize": 4, "fake_quantize_start": 2, "comm": "w32g32"},
    "differences": {"fake_quantize": 8, "comm": "w4g4"},
    "blocks": {"fake_quantize": 3, "fake_quantize_block": 32},
    "seven bits": {"fake_quantize": 7, "fake_quantize_block": 32},
}
IDS = torch.arange(60).view(2, 30)


def write_models(rank: int, folder: Path) -> None:
    """Of each kind: a folder as a run exports it, and logits of the model that was trained."""
    text = Text(["the old king"], [])
    tokenizer = load_tokenizer(train_tokenizer(text, 300, folder / str(rank)))
    names = ("valid_perplexity_decoded", "valid_perplexity_master", "steps", "tokens",
             "parameters", "num_ranks")  # fmt: skip
    for name, fields in MODELS.items():
        config = TrainConfig(**TINY, **fields, precision="bf16")
        model, fake = run_of(config, rank)
        with torch.no_grad():
            logits = model(input_ids=IDS, use_cache=False).logits
        export_model(
            folder / name / "model", model, tokenizer, Ranks(rank, 2, torch.device("cpu")),
            weights="decoded", config=config, result=dict.fromkeys(names, 1), fake=fake,
        )  # fmt: skip
        if rank == 0:
            torch.save(logits, folder / name / "logits.pt")


FOUR = ("case_replicas_switch_and_stay_alike", "case_a_switch_without_the_others_is_no_use")
CASES = {name: fn for name, fn in list(globals().items()) if name.startswith("case_")}
