"""FSDP2 with qsdp on torch's fake process group: one rank's work without any other rank.

`benchmarks/gpu` measures on it what one GPU can show; here the same code runs on the CPU.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import qsdp.fsdp
import qsdp.rows
from benchmarks.gpu.fake import RANK, HostReads, fake_ranks
from benchmarks.gpu.models import TINY, gpt, quantize, shard, stack_of_blocks
from benchmarks.gpu.steps import CONFIGURATIONS, Run, format_times, measure, never_waits, prepare
from qsdp.buffers import pool
from qsdp.fsdp import units_of
from qsdp.memory import KeptWeights

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def eight_ranks() -> Iterator[None]:
    with fake_ranks(8):
        yield


@pytest.mark.parametrize("name", [*CONFIGURATIONS, "w3g3"])
def test_steps_run(name: str) -> None:
    run = prepare(name, TINY, 2, CPU)
    assert dist.get_world_size() == 8 and dist.get_rank() == RANK
    assert math.isfinite(run.step().item())
    if name != "stock":
        # A step gathers the root once and each block twice; differences move nothing in backward.
        stats = qsdp.comm_stats(run.model, reset=True)
        run.step()
        stats = qsdp.comm_stats(run.model)
        assert stats.sent > 0 and stats.ratio > (2.0 if name == "w8g8" else 5.0)


def test_two_levels_run() -> None:
    """Groups of nodes are made on the fake group, too."""
    model = gpt(TINY, CPU)
    shard(model, CPU)
    quantize(model, "w8g8", ranks_per_node=4)
    tokens = torch.zeros(2, TINY.sequence + 1, dtype=torch.long)
    model(tokens).backward()
    assert all(p.grad is not None for p in model.parameters())


def bytes_alive() -> int:
    """Of all tensors that somebody holds, but for memory that waits to be used again."""
    gc.collect()
    pooled = {b.untyped_storage().data_ptr() for group in pool._by_size.values() for b in group}
    storages = {}
    for thing in gc.get_objects():
        # What asks objects for their class wakes deprecated ones; a DTensor has no memory itself.
        if issubclass(type(thing), torch.Tensor) and not isinstance(thing, DTensor):
            storage = thing.untyped_storage()
            if storage.nbytes() and storage.device.type == "cpu":
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for at, size in storages.items() if at not in pooled)


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_differences_keep_a_byte_a_parameter(ranks_per_node: int) -> None:
    """All in all, counted: of the whole model, or of one in so many as a node has ranks."""
    shape = TINY._replace(width=256, layers=4)
    alive = {}
    for name in ("w8g4", "w4g4"):
        before = bytes_alive()
        run = prepare(name, shape, 2, CPU, ranks_per_node=ranks_per_node)
        numel = 8 * sum(p.to_local().numel() for p in run.model.parameters())
        run.step()
        alive[name] = bytes_alive() - before
        del run
    kept = alive["w4g4"] - alive["w8g4"]
    assert 1.0 < kept * ranks_per_node / numel < 1.03, (alive, numel)


def test_memory_that_is_large_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of each parameter is more than an eighth of six bytes; than of twelve it is not."""
    prepare("w4g4", TINY, 2, CPU)
    assert not caplog.messages
    monkeypatch.setattr(qsdp.fsdp, "_SHARDED_BYTES", 6)
    for name, ranks_per_node, said in (("w4g4", 1, True), ("w4g4", 4, False), ("w8g8", 1, False)):
        caplog.clear()
        with mock.patch.object(dist, "get_rank", return_value=0):
            prepare(name, TINY, 2, CPU, ranks_per_node=ranks_per_node)
        lines = [line for line in caplog.messages if "keep" in line]
        assert len(lines) == said
        assert all("GB on every rank, more than" in line and "\n" not in line for line in lines)


@pytest.mark.parametrize("name", ["stock", "w8g8"])
def test_nothing_is_read_from_the_device_in_a_step(name: str) -> None:
    run = prepare(name, TINY, 2, CPU)
    with HostReads() as reads:
        run.backward()
    assert not reads.found


def test_reads_are_counted_by_place() -> None:
    with HostReads() as reads:
        values = torch.ones(3)
        assert values.sum().item() == 3 and not torch.equal(values, values + 1)
        values[values > 0] = 0
    assert {name.split()[0] for name in reads.found} >= {"_local_scalar_dense", "equal"}
    assert sum(reads.found.values()) == 3


@pytest.mark.parametrize("name", ["w8g8", "w4g4"])
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_the_triton_kernels_train_as_the_native_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, on the layouts and calls of real units."""
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here: benchmarks/gpu runs this")
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.7.1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from qsdp.kernels import triton_gpu

    expected = train(name)
    monkeypatch.setattr(qsdp.rows, "backend_for", lambda device: triton_gpu)
    for found, wanted in zip(train(name), expected, strict=True):
        assert torch.equal(found, wanted)


def train(name: str) -> list[torch.Tensor]:
    """Losses and gradients of a model that is quick to interpret."""
    model = shard(stack_of_blocks(1, 16), CPU)
    quantize(model, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(1 if name == "w8g8" else 2):  # differences begin with the second gather
        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_what_is_measured() -> None:
    run = prepare("w8g8", TINY, 2, CPU)
    times = measure(run, CPU, 2)
    assert 0 < times.host <= times.step and times.peak is None
    assert "reads of values" in never_waits(run, CPU)
    assert "w8g8" in format_times({run.name: times})
    assert isinstance(run, Run)


def on_a_device(model: torch.nn.Module) -> list[KeptWeights]:
    """Let what is kept behave as on an accelerator."""
    kept = [p.kept for unit in units_of(model) for p in unit.parts(torch.bfloat16) if p.kept]
    for one in kept:
        one.on_host = False
    return kept


@pytest.mark.parametrize("preset", ["w4g4", "w3g3"])
def test_differences_leave_the_host_alone_while_training(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks are looked at where weights were changed otherwise, and then once."""
    run = prepare(preset, TINY, 2, CPU)
    kept = on_a_device(run.model)
    looked: list[bool] = []
    to_renew = KeptWeights.to_renew

    def spy(
        self: KeptWeights, marks: torch.Tensor, looks: bool, due: list[bool] | None
    ) -> list[bool] | None:
        looked.append(looks)
        return to_renew(self, marks, looks, due)

    monkeypatch.setattr(KeptWeights, "to_renew", spy)
    run.step()  # the hosts have not looked at anything yet
    looked.clear()
    with HostReads() as reads:
        run.backward()
    assert not reads.found and looked == [False] * len(kept)
    looked.clear()
    run.step()
    assert looked == [False] * len(kept), "an optimizer's steps are expected"
    looked.clear()
    run.model.load_state_dict(run.model.state_dict())
    run.step()
    assert looked == [True] * len(kept)
    looked.clear()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(1.001)
    run.step()
    assert looked == [True] * len(kept)
    looked.clear()
    run.step()
    assert not any(looked)
