"""Ranks as threads of this process, as `benchmarks/gpu` runs them on one GPU; here on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import qsdp
from benchmarks.gpu.stress import Stress
from benchmarks.gpu.threaded import (
    Job,
    Result,
    collectives_equal,
    equals_stock,
    gathered_twice,
    replicas_equal,
    run_job,
    stress_changes_nothing,
    train,
)
from benchmarks.gpu.threads import Recorder, run_threads

CPU = torch.device("cpu")
SMALL = {"width": 32, "depth": 2}
REPLICAS = (("replicas", qsdp.Quantizer(8)),)


def in_process(rank: int, jobs: list[Job]) -> list[tuple[list[float], list[list[float]]]]:
    """As numbers: a rank that has ended keeps no tensors."""
    return [as_numbers(train(rank, job, None, None)) for job in jobs]


def as_numbers(result: Result) -> tuple[list[float], list[list[float]]]:
    return result.losses, [shard.tolist() for shard in result.shards]


@pytest.mark.ranks
def test_threads_give_what_processes_give() -> None:
    """Over gloo, point to point; with quantized gradients no sum depends on the transport."""
    jobs = [Job(CPU, preset, **SMALL) for preset in ("w8g8", "w4g4", "w3g3")]
    by_rank = run_ranks(in_process, 2, jobs)
    for index, job in enumerate(jobs):
        processes = [results[index] for results in by_rank]
        assert list(map(as_numbers, run_job(job))) == processes, job.preset


def test_w32g32_is_stock() -> None:
    equals_stock(Job(CPU, "stock", **SMALL))


def test_collectives_twice() -> None:
    assert "144 results" in collectives_equal(CPU, numel=10_001)


@pytest.mark.parametrize("preset", ["w8g8", "w4g4"])
def test_backward_has_the_weights_of_forward(preset: str) -> None:
    gathered_twice(Job(CPU, preset, **SMALL))


@pytest.mark.parametrize("preset", ["w8g8", "w4g4", "w3g3"])
def test_delays_change_nothing(preset: str) -> None:
    stress_changes_nothing(Job(CPU, preset, **SMALL), times=1)


@pytest.mark.parametrize("preset", ["w8g8", "w4g4"])
def test_hsdp(preset: str) -> None:
    job = Job(CPU, preset, 4, 2, REPLICAS, **SMALL)
    replicas_equal(job)
    stress_changes_nothing(job, times=1)


def test_the_recorder_sees_what_ranks_send() -> None:
    def send(rank: int) -> None:
        values = torch.full((4,), float(rank))
        dist.all_to_all_single(torch.empty(4), values)
        assert dist.get_world_size() == 2

    recorder = Recorder(2)
    run_threads(send, 2, recorder=recorder)
    for rank in range(2):
        ((kind, sent),) = recorder.sent[rank]
        assert kind == "AllToAllBase"
        assert torch.equal(sent.view(torch.float32), torch.full((4,), float(rank)))


def test_the_first_error_is_raised_and_nobody_waits() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise KeyError("on purpose")
        dist.barrier()

    with pytest.raises(KeyError, match="on purpose"):
        run_threads(fail, 2)
    assert not dist.is_initialized() and threading.active_count() < 50
    assert run_threads(lambda rank: rank, 2) == [0, 1]


def test_stress_delays_kernels_while_it_lasts() -> None:
    from qsdp.kernels import backend_for

    backend = backend_for(CPU)
    before = backend.encode
    with Stress(CPU).kernels():
        assert backend.encode is not before
        qsdp.encode(torch.ones(100), qsdp.Quantizer(8))
    assert backend.encode is before
