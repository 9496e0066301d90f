"""What ranks run for test_local.py: one function a case, each asserting on its own rank.

Four ranks: four replicas of one rank, or two of two.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import Net, batch, loss_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import qsdp
from qsdp import Feedback, OuterStep, QSDPConfig, Quantizer, ReplicaSync, SyncConfig, SyncSchedule
from qsdp.config import difference_quantizer
from qsdp.stages import piece_layout
from qsdp.wire import Segment, wire_layout

FOUR_BITS = Feedback(QSDPConfig.preset("w32g4").gradients)
ONE_BIT = Feedback(difference_quantizer(1))
EVERY_3 = SyncSchedule(base=3)
CONFIGS = {
    "raw": SyncConfig(EVERY_3),
    "4 bits": SyncConfig(EVERY_3, FOUR_BITS),
    "2 bits, no feedback": SyncConfig(EVERY_3, QSDPConfig.preset("w32g2").gradients),
    "1 bit": SyncConfig(EVERY_3, ONE_BIT),
    "outer": SyncConfig(EVERY_3, Feedback(Quantizer(8)), OuterStep()),
    "fragments": SyncConfig(EVERY_3, FOUR_BITS, OuterStep(), fragments=3),
    "overlap": SyncConfig(EVERY_3, None, overlap_steps=2),
    "fragments, overlap": SyncConfig(EVERY_3, FOUR_BITS, OuterStep(), fragments=3, overlap_steps=2),
}


class WithBuffers(Net):
    """With statistics that every replica moves on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(48)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mesh_2x2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def one_rank(config: SyncConfig, cls: type[nn.Module] = Net, **kwargs: Any) -> Any:
    """``(model, optimizer, sync)`` of a replica of one rank."""
    torch.manual_seed(0)
    model = cls()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, ReplicaSync(model, optimizer, dist.group.WORLD, config, **kwargs)


def sharded(mesh: DeviceMesh, config: SyncConfig, comm: str | None = None, **kwargs: Any) -> Any:
    """The same of a replica of two ranks that shard the model."""
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    if comm is not None:
        qsdp.apply_qsdp(model, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    group = mesh["replicate"].get_group()
    return model, optimizer, ReplicaSync(model, optimizer, group, config, **kwargs)


def train(rank: int, model: nn.Module, optimizer: Any, sync: Any, steps: int) -> list[bool]:
    """As many steps on batches of this rank's own; what ``sync.step`` returned."""
    found = []
    for step in range(sync.steps, sync.steps + steps):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(sync.step())
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(model: nn.Module) -> torch.Tensor:
    return torch.cat([local(p).flatten().clone() for p in model.parameters()])


def alike(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    found = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, values, group=group)
    return all(torch.equal(each, values) for each in found)


def case_every_step_with_sgd_is_data_parallel(rank: int) -> None:
    """H = 1 and SGD: averages of weights are averages of gradients, within rounding."""
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stock = torch.optim.SGD(reference.parameters(), lr=0.1)
    sync = ReplicaSync(model, optimizer, dist.group.WORLD, SyncConfig(), total_steps=5)
    for step in range(5):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert sync.step()
        loss_of(reference, batch(rank, step)).backward()
        for param in reference.parameters():
            dist.all_reduce(param.grad)
            param.grad /= 4
        stock.step()
        stock.zero_grad()
    assert (bits(model) - bits(reference)).abs().max() <= 1e-6


def case_replicas_are_alike_after_a_synchronisation_and_move_nothing_between(rank: int) -> None:
    for name, config in CONFIGS.items():
        model, optimizer, sync = one_rank(config, WithBuffers, total_steps=11)
        sync.stats(reset=True)
        for step in range(1, 12):
            due = sync.due(step)
            train(rank, model, optimizer, sync, 1)
            sent = sync.stats(reset=True).sent
            whole = config.fragments == 1 and not config.overlap_steps
            assert (sent > 0) == due or config.overlap_steps, (name, step)
            assert sync.common == (due and whole or step == 11), (name, step)
            if sync.common:
                assert alike(bits(model)), (name, step)
                assert alike(model.batch_norm.running_mean), name
            elif whole:
                assert not alike(bits(model)), (name, step)
        with pytest.raises(ValueError, match="total_steps is 11"):
            sync.step()


def case_bytes_are_those_of_the_layout(rank: int) -> None:
    for config in (CONFIGS["raw"], CONFIGS["4 bits"], CONFIGS["1 bit"]):
        model, optimizer, sync = one_rank(config)
        sync.stats(reset=True)
        train(rank, model, optimizer, sync, 6)
        segments = tuple(
            Segment(p.numel(), config.quantizer_of([n], p.shape))
            for n, p in model.named_parameters()
        )
        row = piece_layout(wire_layout(segments, torch.float32), 4).row_bytes
        # Two rounds, two exchanges each; and the digest of the agreement.
        assert sync.stats().sent == 2 * 3 * (2 * row + 32)
        assert sync.stats().all_reduce_sent == sync.stats().sent


def case_the_average_is_that_of_the_masters_in_rank_order(rank: int) -> None:
    model, optimizer, sync = one_rank(SyncConfig(EVERY_3))
    train(rank, model, optimizer, sync, 2)
    loss_of(model, batch(rank, 2)).backward()
    optimizer.step()
    mine = bits(model)
    found = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(found, mine)
    assert sync.step()
    mean = (found[0] + found[1] + found[2] + found[3]) / 4
    assert torch.equal(bits(model), mean)


def case_intervals_follow_the_learning_rate(rank: int) -> None:
    """Of the round's first step, read off the optimizer, and fixed for the whole round."""
    schedule = SyncSchedule(base=2, alpha=0.02, warmup_steps=4)
    model, optimizer, sync = one_rank(SyncConfig(schedule), total_steps=40)
    for group in optimizer.param_groups:
        group["initial_lr"] = 1e-2
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)
    rounds = []
    for step in range(40):
        if not rounds or rounds[-1] != sync.round:
            rounds.append(sync.round)
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        sync.step()
    expected = list(schedule.rounds(40, lambda step: 1e-2 * (1 - step / 40)))
    assert [(r.first, r.interval) for r in rounds] == expected
    assert len({interval for _, interval in expected}) > 3


def case_the_outer_step_is_torchs_nesterov(rank: int) -> None:
    """On minus the mean move, with the sign that makes replicas go where they went."""
    outer = OuterStep(0.7, 0.9)
    model, optimizer, sync = one_rank(SyncConfig(EVERY_3, None, outer))
    anchor = nn.Parameter(bits(model))
    sgd = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        train(rank, model, optimizer, sync, 2)
        loss_of(model, batch(rank, sync.steps)).backward()
        optimizer.step()
        optimizer.zero_grad()
        move = bits(model) - anchor.detach()
        dist.all_reduce(move)
        anchor.grad = -move / 4
        sgd.step()
        assert sync.step()
        assert (bits(model) - anchor.detach()).abs().max() <= 1e-5


def case_what_was_taken_and_what_is_remembered_is_what_was_trained(rank: int) -> None:
    """Feedback at both ends: moves that are known, and what they should have added up to."""
    torch.manual_seed(0)
    model = nn.Linear(64, 48, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for way in (FOUR_BITS, Feedback(QSDPConfig.preset("w32g2").gradients), ONE_BIT):
        exact = model.weight.detach().double().clone()
        sync = ReplicaSync(model, optimizer, dist.group.WORLD, SyncConfig(differences=way))
        for step in range(12):
            moves = [
                torch.randn(48, 64, generator=torch.Generator().manual_seed(100 * step + each))
                for each in range(4)
            ]
            with torch.no_grad():
                model.weight += moves[rank]
            sync.step()
            exact += sum(move.double() for move in moves) / 4
        state = sync.state_dict()
        owed = state[f"sent.weight.rank{rank}"].flatten()[: 48 * 64] / 4
        dist.all_reduce(owed)
        forwarded = state[f"forwarded.weight.rank{rank}"].flatten()
        pieces = [torch.empty_like(forwarded) for _ in range(4)]
        dist.all_gather(pieces, forwarded)
        owed += torch.cat(pieces)[: 48 * 64]
        difference = (model.weight.detach().double().flatten() + owed - exact.flatten()).abs().max()
        assert difference <= 1e-4, difference
        assert owed.abs().max() > 1e-2


def case_a_run_resumes_bit_for_bit(rank: int) -> None:
    """In the middle of a round, at its end, and with averages under way."""
    for name, config in CONFIGS.items():
        for stop in (3, 4, 5):
            model, optimizer, sync = one_rank(config, WithBuffers, total_steps=11)
            train(rank, model, optimizer, sync, stop)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
            train(rank, model, optimizer, sync, 11 - stop)
            again, optimizer, sync = one_rank(config, WithBuffers, total_steps=11)
            fresh = {name: value.shape for name, value in sync.state_dict().items()}
            assert fresh == {name: value.shape for name, value in saved[2].items()}
            again.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            sync.load_state_dict(saved[2])
            assert sync.steps == stop
            train(rank, again, optimizer, sync, 11 - stop)
            assert torch.equal(bits(again), bits(model)), (name, stop)


def case_other_replicas_go_on_from_the_average(rank: int) -> None:
    """A state of four replicas on two: rounds, anchor and momentum go on, with a warning."""
    config = SyncConfig(EVERY_3, FOUR_BITS, OuterStep())
    model, optimizer, sync = one_rank(config)
    train(rank, model, optimizer, sync, 4)
    state, weights = sync.state_dict(), sync.average_of(model.state_dict())
    assert alike(weights["norm.weight"]) and not alike(model.norm.weight.detach())
    mesh = mesh_2x2()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = ReplicaSync(model, optimizer, mesh["replicate"].get_group(), config)
    model.load_state_dict(weights)
    with pytest.warns(UserWarning, match="saved by 4 replicas on 4 ranks, and here are 2 on 4"):
        sync.load_state_dict(state)
    assert sync.round == (1, 3, 3) and sync.steps == 4
    assert train(rank, model, optimizer, sync, 2) == [False, True]
    assert alike(bits(model), mesh["replicate"].get_group())
    with pytest.raises(ValueError, match="lacks 'anchor"):
        sync.load_state_dict({n: v for n, v in state.items() if not n.startswith("anchor")})


def case_replicas_of_several_ranks(rank: int) -> None:
    """FSDP2 inside, stock and quantized in every way: replicas are alike, and what is gathered is
    what was set."""
    mesh = mesh_2x2()
    group = mesh["replicate"].get_group()
    for comm in (None, "w8g8", "w4g4"):
        for config in (CONFIGS["raw"], CONFIGS["fragments, overlap"]):
            model, optimizer, sync = sharded(mesh, config, comm, total_steps=9)
            train(rank, model, optimizer, sync, 7)
            with torch.no_grad():  # an evaluation leaves the root unsharded
                loss_of(model, batch(0, 100))
            train(rank, model, optimizer, sync, 2)
            assert sync.common and alike(bits(model), group), (comm, config)
            with torch.no_grad():
                loss = loss_of(model, batch(0, 100))
            # What travels as differences inside a replica is kept by each in its own way.
            assert comm == "w4g4" or alike(loss), comm
            found = [torch.empty_like(loss) for _ in range(4)]
            dist.all_gather(found, loss)
            assert max(found) - min(found) <= 0.02 * min(found), comm


def case_replicas_of_ddp(rank: int) -> None:
    mesh = mesh_2x2()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=mesh["shard"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = CONFIGS["fragments, overlap"]
    group = mesh["replicate"].get_group()
    sync = ReplicaSync(model, optimizer, group, config, total_steps=9)
    train(rank, model, optimizer, sync, 8)
    assert alike(bits(model), mesh["shard"].get_group()) and not alike(bits(model))
    train(rank, model, optimizer, sync, 1)
    assert alike(bits(model))


def case_an_evaluation_of_the_average_leaves_replicas_as_they_were(rank: int) -> None:
    for name, config in CONFIGS.items():
        model, optimizer, sync = one_rank(config, WithBuffers)
        train(rank, model, optimizer, sync, 4)
        before = copy.deepcopy(model.state_dict())
        with sync.average():
            assert alike(bits(model)), name
            assert alike(model.batch_norm.running_var), name
        assert all(torch.equal(before[n], value) for n, value in model.state_dict().items()), name
        mesh = mesh_2x2()
        model, optimizer, sync = sharded(mesh, config)
        train(rank, model, optimizer, sync, 4)
        before_bits = bits(model)
        with sync.average():
            assert alike(bits(model), mesh["replicate"].get_group())
        assert torch.equal(bits(model), before_bits)


def case_a_training_without_an_end_is_finished_by_hand(rank: int) -> None:
    for config in (CONFIGS["4 bits"], CONFIGS["fragments, overlap"]):
        model, optimizer, sync = one_rank(config)
        train(rank, model, optimizer, sync, 5)
        sync.finish()
        assert alike(bits(model))
        assert sync.round.first == 5


def case_low_precision_weights(rank: int) -> None:
    """bfloat16 weights: what they cannot hold stays in the anchor."""
    torch.manual_seed(0)
    model = nn.Linear(64, 48, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        model.weight.fill_(1.0)
    sync = ReplicaSync(model, optimizer, dist.group.WORLD, SyncConfig(outer=OuterStep(1e-3, 0.0)))
    for _ in range(100):
        with torch.no_grad():
            model.weight += 0.0625
        sync.step()
    anchor = sync.state_dict()["anchor.weight"]
    assert torch.allclose(anchor, torch.full_like(anchor, 1.00625), atol=1e-5)
    assert torch.equal(model.weight.detach(), anchor.bfloat16())


def case_what_does_not_fit_is_refused_on_every_rank(rank: int) -> None:
    world = dist.group.WORLD
    torch.manual_seed(rank == 2)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the same weights at the start on all ranks"):
        ReplicaSync(model, optimizer, world, SyncConfig())
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = SyncConfig(SyncSchedule(base=2 + (rank == 1)))
    with pytest.raises(ValueError, match="same SyncConfig.schedule.base on all ranks"):
        ReplicaSync(model, optimizer, world, config)
    exact = ("*.nothing",) if rank == 3 else ()
    with pytest.raises(ValueError, match="matches no parameter"):
        ReplicaSync(model, optimizer, world, SyncConfig(exact=exact))
    with pytest.raises(TypeError, match="process group"):
        ReplicaSync(model, optimizer, None, SyncConfig())
    mesh = mesh_2x2()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    with pytest.raises(ValueError, match="belong to this rank's own replica"):
        ReplicaSync(model, optimizer, world, SyncConfig())
    model, optimizer, sync = one_rank(SyncConfig(EVERY_3))
    train(rank, model, optimizer, sync, 2)
    sync.steps += rank == 1  # one that has counted another step
    with pytest.raises(ValueError, match="same step on all ranks"):
        if rank == 1:
            sync.steps = 5
            sync.round = sync.round._replace(first=3)
        sync.step()


def case_a_warning_is_not_given_for_nothing(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, sync = one_rank(CONFIGS["outer"])
        train(rank, model, optimizer, sync, 3)
        sync.load_state_dict(sync.state_dict())


CASES: dict[str, Callable[[int], None]] = {
    name: case for name, case in globals().items() if name.startswith("case_")
}
