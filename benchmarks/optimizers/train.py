"""One training: an optimizer, a way of the gradients, a seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import qsdp
from benchmarks.optimizers.tasks import Task, sizes
from qsdp.trainer.ranks import Ranks

OPTIMIZERS = ("adamw", "sgd", "muon")
FROZEN = "bitdp, frozen"
# What gradients travel as; weights travel in full precision throughout.
CASES = {
    "float32": "w32g32",
    "4 bits": "w32g4",
    "bitdp": "bitdp",
    FROZEN: "bitdp",
    "1 bit, unbiased": "w32g1",
}
_BETAS = (0.9, 0.95)
_LEAST_FROZEN = 90  # steps that bring a second moment of this beta2 to 99 % of its size
_FINAL_LR = 0.02
_CLIP = 1.0


def cases_of(optimizer: str) -> list[str]:
    return [case for case in CASES if case != FROZEN or optimizer == "adamw"]


def train(
    task: Task,
    optimizer: str,
    lr: float,
    case: str,
    seed: int,
    ranks: Ranks,
    *,
    steps: int | None = None,
    damage: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """Train and validate.

    Of the result, validation is of all ranks, and losses of batches are of this one.

    Args:
        damage: from steps to what fills all gradients of the last rank then, before they travel.
    """
    steps, damage = steps or task.steps, damage or {}
    config = replace(qsdp.QSDPConfig.preset(CASES[case]), seed=seed)
    if config.warmup is not None:
        config = replace(config, warmup=replace(config.warmup, steps=steps // 10))
    share = sizes(task.plain(seed), config, ranks.num_ranks, task.hops)
    running = task.start(seed, config)
    stepper = Optimizers(running.model, optimizer, lr, task.ends)
    if case == FROZEN:
        at_step = max(steps // 10, _LEAST_FROZEN)
        qsdp.freeze_second_moment(stepper.optimizers[0], at_step, config=config)
    sent, stock, skipped, losses, last = 0, 0, [], [], 0
    running.sent()
    for step in range(1, steps + 1):
        hurt = step in damage and ranks.rank == ranks.num_ranks - 1
        with damaged(running.model, damage[step]) if hurt else nullcontext():
            loss = running.loss(step)
            loss.backward()
        losses.append(float(loss.detach()))
        now = running.sent()
        sent, stock, last = sent + now.sent, stock + now.stock, now.sent
        norm = torch.nn.utils.clip_grad_norm_(running.model.parameters(), _CLIP)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # As GradScaler does: a step whose gradients are not finite is left out.
        if math.isfinite(float(norm)):
            stepper.step(schedule(step, steps, task.warmup_steps))
        else:
            skipped.append(step)
        stepper.zero_grad()
    return running.validate() | {
        "sent": sent / steps,
        "fewer": stock / sent,
        "fewer_own": share.own / (last - share.others) if share.own else 1.0,
        "skipped": skipped,
        "finite": all(map(math.isfinite, losses)),
        "largest_loss_of_second_half": max(losses[steps // 2 :]),
        "train_loss": statistics.mean(losses[-100:]),
        "parameters": sum(p.numel() for p in running.model.parameters()),
    }


def schedule(step: int, steps: int, warmup_steps: int) -> float:
    """Share of the learning rate: linear warm-up, then a cosine to the end."""
    if step <= warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return _FINAL_LR + (1 - _FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizers:
    """AdamW; SGD with momentum; or Muon with AdamW for vectors, the first layer and the last.

    torch's Muon takes matrices alone: a convolution is one of its output channels here. With FSDP2
    every rank gathers the gradients of Muon's matrices as they were reduced and steps on whole
    matrices. Muon runs on FSDP2's shards too, but there each of its products communicates. It takes
    the learning rate of AdamW, by ``match_rms_adamw``.
    """

    def __init__(self, model: nn.Module, name: str, lr: float, ends: tuple[str, ...]) -> None:
        named = [(n.removeprefix("module."), p) for n, p in model.named_parameters()]
        hidden = [p for n, p in named if p.ndim > 1 and n not in ends] if name == "muon" else []
        others = [p for _, p in named if not any(p is of for of in hidden)]
        self._matrices = [(p, nn.Parameter(_matrix(p).clone())) for p in hidden]
        self.optimizers: list[torch.optim.Optimizer] = []
        if name == "sgd":
            self.optimizers.append(torch.optim.SGD(others, lr=lr, momentum=0.9))
        else:
            adamw = torch.optim.AdamW(others, lr=lr, betas=_BETAS, weight_decay=0.0, fused=True)
            self.optimizers.append(adamw)
        if hidden:
            whole = [matrix for _, matrix in self._matrices]
            muon = torch.optim.Muon(whole, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            self.optimizers.append(muon)
        self._model, self._lr = model, lr

    @torch.no_grad()
    def step(self, share: float) -> None:
        for param, matrix in self._matrices:
            assert param.grad is not None
            matrix.grad = _matrix(param.grad)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._lr * share
            optimizer.step()
        for param, matrix in self._matrices:
            whole = matrix.detach().view(param.shape)
            if isinstance(param, DTensor):
                mesh = param.device_mesh
                everywhere = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
                param.copy_(everywhere.redistribute(mesh, param.placements))
            else:
                param.copy_(whole)

    def zero_grad(self) -> None:
        self._model.zero_grad()


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Whole, and of two dimensions."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).flatten(1)


@contextmanager
def damaged(model: nn.Module, value: float) -> Iterator[None]:
    """All gradients that this rank computes meanwhile are ``value``, before they are reduced.

    The parameters are asked for in forward, when FSDP2 has put the whole ones in their places.
    """
    handles, seen = [], set()

    def fill(module: nn.Module, _: Any) -> None:
        for param in module.parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                handles.append(param.register_hook(lambda grad: torch.full_like(grad, value)))

    handles += [module.register_forward_pre_hook(fill) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
