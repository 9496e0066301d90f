"""Coded rows between ranks: the values of fixed rows, bit for bit, in fewer bytes."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from ddp_cases import hooked
from fsdp_cases import build, equal, shards, train
from torch.distributed.device_mesh import init_device_mesh

import qsdp
from qsdp import Differences, Feedback, QSDPConfig, Quantizer
from qsdp.stats import CommMeter
from qsdp.wire import Segment, WireLayout, wire_layout

CODINGS = ("elias", "rice")


def forms(coding: str) -> tuple[Quantizer, Quantizer]:
    """The same format without a coding, and with one."""
    plain = Quantizer(4, 128, "stochastic", scaling="symmetric")
    return plain, replace(plain, coding=coding)


def layouts(coding: str, numel: int) -> tuple[WireLayout, WireLayout]:
    """Rows of several segments, with checksums: full precision and a fixed one among them."""

    def one(quantizer: Quantizer) -> WireLayout:
        other = Quantizer(8, 96, "shift")
        sizes = (numel - 300, 0, 93, 200, 7)
        kinds = (quantizer, quantizer, other, replace(quantizer, bits=2), None)
        segments = tuple(Segment(n, kind) for n, kind in zip(sizes, kinds, strict=True))
        return wire_layout(segments, torch.float32, checksum=True, zeros=True)

    fixed, coded = (one(form) for form in forms(coding))
    return fixed, coded


def peaked(numel: int, seed: int) -> torch.Tensor:
    """Values most of which are small, as gradients have them; rank by rank of other density."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    return x * x.abs() ** (1 + dist.get_rank())


def case_collectives_give_the_values_of_fixed_rows(rank: int) -> None:
    """All-gather, reduce-scatter, all-reduce, now and later, in rows of each rank's own size."""
    size, numel = dist.get_world_size(), 2500
    for coding in CODINGS:
        fixed, coded = layouts(coding, numel)
        own, full = peaked(numel, rank), peaked(size * numel, 7 + rank)
        for later in (False, True):
            results, sent = [], []
            for layout in (fixed, coded):
                meter = CommMeter()
                gathered, reduced = torch.empty(size * numel), torch.empty(numel)
                summed = full.clone()[:numel]
                works = [
                    qsdp.all_gather_quantized(
                        gathered, own, quantizer=layout, key=3, async_op=later, meter=meter
                    ),
                    qsdp.reduce_scatter_quantized(
                        reduced, full, quantizer=layout, key=4, async_op=later, meter=meter
                    ),
                    qsdp.all_reduce_quantized(
                        summed, quantizer=layout, key=5, async_op=later, meter=meter
                    ),
                ]
                for work in works:
                    if work is not None:
                        work.wait()
                results.append((gathered, reduced, summed))
                sent.append(meter.sent)
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            assert sent[1] < 0.9 * sent[0], sent
            assert torch.equal(results[1][0], same_on_all(results[1][0]))


def same_on_all(tensor: torch.Tensor) -> torch.Tensor:
    first = tensor.clone()
    dist.broadcast(first, 0)
    return first


def case_bytes_are_those_of_the_rows(rank: int) -> None:
    """What the meter counts: a size and the coded row to every other rank, nothing else."""
    size, numel = dist.get_world_size(), 4096
    _, coded = forms("rice")
    own = peaked(numel, rank)
    meter = CommMeter()
    output = torch.empty(size * numel)
    qsdp.all_gather_quantized(output, own, quantizer=coded, key=3, meter=meter)
    lengths = [None] * size
    dist.all_gather_object(lengths, meter.sent)
    assert len({*lengths}) == size, "rows are of different sizes"
    layout = wire_layout((Segment(numel, coded),), torch.float32)
    assert 8 * (size - 1) < meter.sent < (size - 1) * layout.row_bytes


def case_residuals_are_those_of_fixed_rows(rank: int) -> None:
    """Error feedback adds what the codes lost, however they travel."""
    size, numel = dist.get_world_size(), 1500
    fixed, coded = layouts("rice", numel)
    full = peaked(size * numel, rank)
    residuals = [torch.zeros(size, numel) for _ in range(2)]
    for _ in range(3):
        outputs = [torch.empty(numel) for _ in range(2)]
        for layout, residual, output in zip((fixed, coded), residuals, outputs, strict=True):
            qsdp.reduce_scatter_quantized(output, full, quantizer=layout, key=9, residual=residual)
        assert torch.equal(*outputs) and torch.equal(*residuals)


def four_case_two_hops_code_between_nodes_alone(rank: int) -> None:
    """The values of fixed rows; inside a node the bytes of fixed rows, between nodes fewer."""
    numel = 3000
    fixed, coded = layouts("rice", numel)
    own, full = peaked(numel, rank), peaked(4 * numel, 7 + rank)
    results, meters = [], []
    for layout in (fixed, coded):
        meter = CommMeter(ranks_per_node=2)
        gathered, reduced = torch.empty(4 * numel), torch.empty(numel)
        both = {"key": 3, "ranks_per_node": 2, "meter": meter}
        qsdp.all_gather_quantized(gathered, own, quantizer=layout, **both)
        qsdp.reduce_scatter_quantized(reduced, full, quantizer=layout, inside=layout, **both)
        results.append((gathered, reduced))
        meters.append(meter)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    before, after = meters
    assert before.sent - before.inter_node == after.sent - after.inter_node
    assert after.inter_node < 0.9 * before.inter_node


def configs(coding: str) -> tuple[QSDPConfig, QSDPConfig]:
    """Differences of weights and gradients, verified: without a coding, and with one."""

    def one(coding: str) -> QSDPConfig:
        weights = Quantizer(4, 128, "nearest", scaling="symmetric", coding=coding)  # type: ignore[arg-type]
        gradients = replace(weights, bits=6, rounding="stochastic", scaling="l2")
        return QSDPConfig(Differences(weights), gradients, verify=True)

    return one("fixed"), one(coding)


def case_fsdp_trains_alike(rank: int) -> None:
    """Weights and losses of fixed rows, bit for bit, in fewer bytes; weights as differences."""
    for coding in CODINGS:
        models, losses, sent = [], [], []
        for config in configs(coding):
            model = build()
            qsdp.apply_qsdp(model, config)
            losses.append(train(model, rank, 4))
            models.append(shards(model))
            sent.append(qsdp.comm_stats(model).sent)
        assert losses[0] == losses[1] and equal(*models)
        assert sent[1] < sent[0], sent


def case_ddp_trains_alike(rank: int) -> None:
    """The same with DDP's hook, whose reductions are asynchronous, and feedback at both ends."""
    weights = []
    for coding in ("fixed", "rice"):
        form = Quantizer(4, 128, "nearest", scaling="symmetric", coding=coding)  # type: ignore[arg-type]
        model, state = hooked(QSDPConfig(None, Feedback(form)))
        train(model, rank, 4)
        weights.append([p.detach().clone() for p in model.parameters()])
        weights[-1].append(torch.tensor(state.stats().sent))
    *fixed, before = weights[0]
    *coded, after = weights[1]
    assert equal(fixed, coded) and after < before


def four_case_replicas_reduce_alike(rank: int) -> None:
    """HSDP: gradients between replicas, and FSDP's own, in coded rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for coding in ("fixed", "rice"):
        form = Quantizer(4, 128, "stochastic", scaling="symmetric", coding=coding)  # type: ignore[arg-type]
        model = build(mesh=mesh)
        qsdp.apply_qsdp(model, QSDPConfig(None, form, replicas=form))
        train(model, rank, 3)
        found.append(shards(model))
    assert equal(*found)


ALL = {name: case for name, case in globals().items() if name.startswith("case_")}
FOUR = ALL | {name: case for name, case in globals().items() if name.startswith("four_case_")}
