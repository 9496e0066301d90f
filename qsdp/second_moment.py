"""Freezing Adam's second moment, as 1-bit Adam does: see :func:`freeze_second_moment`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from qsdp.config import QSDPConfig
from qsdp.ways import quantizer_of

_ENOUGH = 0.99  # of its final size, which the second moment must have reached


def freeze_second_moment(
    optimizer: torch.optim.Optimizer,
    at_step: int,
    floor: float = 0.1,
    *,
    config: QSDPConfig | str | None = None,
) -> None:
    """From its step ``at_step + 1`` on, Adam divides by the second moment of then (1-bit Adam).

    What is divided by is corrected for its bias then, and at least ``floor`` times the mean of its
    parameter, so that values which had next to no gradient make no leaps. All of it lies in the
    optimizer's own state, so its ``state_dict`` resumes: call this again, with the same arguments.
    Once frozen, this and not the optimizer changes the parameters. Where the optimizer has taken
    more steps already, the second moment of now is frozen. A parameter that had no gradient at all
    until then is left to Adam.

    ``step(closure)`` and GradScaler work as without it; one closure call a step.

    Args:
        optimizer: torch.optim.Adam or AdamW, changed in place.
        at_step: steps that the second moment is learned in.
        floor: share of the mean, from 0 to 1.
        config: of the communication, to be checked: rotated gradients do not go with it.

    Raises:
        TypeError, ValueError: another optimizer or option of it, too few steps for its beta2, or a
            configuration that rotates gradients.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise TypeError(
            "freeze_second_moment takes a torch.optim.Adam or AdamW, got "
            f"{type(optimizer).__name__}"
        )
    if not isinstance(at_step, int) or isinstance(at_step, bool) or at_step < 1:
        raise ValueError(f"freeze_second_moment(at_step=...) must be at least 1, got {at_step!r}")
    if not 0 <= floor <= 1:
        raise ValueError(f"freeze_second_moment(floor=...) must be from 0 to 1, got {floor!r}")
    for group in optimizer.param_groups:
        _check_group(group, at_step)
    if config is not None:
        _check_rotation(QSDPConfig.of(config, "freeze_second_moment(config=...)"))
    frozen = _Frozen(optimizer, at_step, floor)
    optimizer.register_step_pre_hook(frozen.step)
    optimizer.register_step_post_hook(frozen.give_back)


class _Frozen:
    """The steps of parameters whose second moment is frozen, before the optimizer's own."""

    def __init__(self, optimizer: torch.optim.Optimizer, at_step: int, floor: float) -> None:
        self._optimizer, self._at_step, self._floor = optimizer, at_step, floor
        self._decoupled = type(optimizer) is torch.optim.AdamW
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._known: dict[torch.Tensor, bool] = {}

    @torch.no_grad()
    def step(self, _: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Take them, and hide their gradients from the optimizer, which then leaves them alone."""
        args, kwargs = _with_gradients(args, kwargs)
        if getattr(self._optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "freeze_second_moment: a GradScaler leaves gradients scaled for a fused optimizer: "
                "give it fused=False"
            )
        # A fused optimizer is told by GradScaler that it has to skip the step, and so are we.
        found_inf = getattr(self._optimizer, "found_inf", None)
        skip = found_inf is not None and bool(found_inf)
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                state = self._optimizer.state.get(param)
                if param.grad is None or not state:
                    continue
                if self._is_frozen(param, state, group["betas"][1]):
                    if not skip:
                        _step(param, param.grad, state, group, self._decoupled)
                    self._taken.append((param, param.grad))
                    param.grad = None
        return args, kwargs

    def give_back(self, *_: Any) -> None:
        for param, grad in self._taken:
            param.grad = grad
        self._taken.clear()

    def _is_frozen(self, param: torch.Tensor, state: dict[str, Any], beta2: float) -> bool:
        """Whether a parameter's second moment stays; it is frozen here where it is time."""
        step, at_step = int(state["step"]), self._at_step
        if step < at_step:
            self._known.pop(param, None)  # also after an earlier state was loaded
            return False
        if step == at_step or param not in self._known:
            second = state["exp_avg_sq"]
            self._known[param] = _freeze(second, step, at_step, beta2, self._floor)
        return self._known[param]


def _with_gradients(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of ``step``, whose closure, if there is one, has been called.

    Args:
        args: the optimizer, then what ``step`` was given.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:1], {**kwargs, "closure": lambda: loss}


def _check_group(group: dict[str, Any], at_step: int) -> None:
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(option):
            raise ValueError(
                f"freeze_second_moment does not go with the optimizer's {option}=True: leave it out"
            )
    beta2 = float(group["betas"][1])
    if 1 - beta2**at_step < _ENOUGH:
        needed = 1
        while 1 - beta2**needed < _ENOUGH and needed < 1 << 24:
            needed += 1
        raise ValueError(
            f"freeze_second_moment(at_step={at_step}): with beta2={beta2} the second moment has "
            f"reached {1 - beta2**at_step:.2f} of its size, {_ENOUGH} are needed: at_step={needed} "
            "or a smaller beta2"
        )


def _check_rotation(config: QSDPConfig) -> None:
    ways = (*config.ways("gradients"), config.inside_node, config.replicas)
    for quantizer in map(quantizer_of, ways):
        if quantizer is not None and quantizer.transform is not None:
            raise ValueError(
                f"freeze_second_moment: gradients travel with transform={quantizer.transform!r}, "
                "whose errors a frozen second moment does not weigh: take a quantizer without it"
            )


def _freeze(second: torch.Tensor, step: int, at_step: int, beta2: float, floor: float) -> bool:
    """To what is divided by: corrected, and not below ``floor`` times its mean.

    False, and as it was, if it is all zeros: nothing is known of such a parameter. A second moment
    that an earlier run has frozen stays; it is known by having no values below the floor.
    """
    mean = _whole(second.mean())
    if mean == 0:
        return False
    # The floor was taken of the mean before it raised that.
    least = mean * floor / (1 + floor) * 0.999
    if step > at_step and not _whole((second < least).sum()):
        return True
    second /= 1 - beta2**step
    least = _whole(second.mean()) * floor
    _local(second).clamp_(min=least)
    return True


def _whole(number: torch.Tensor) -> float:
    """A number of all shards, on every rank of them."""
    return float(number.full_tensor() if isinstance(number, DTensor) else number)


def _step(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    decoupled: bool,
) -> None:
    """Adam's, with a second moment that is as it is."""
    state["step"] += 1
    values, lr, decay = _local(param), float(group["lr"]), float(group["weight_decay"])
    gradient = _local(grad).to(values.dtype)
    if group.get("decoupled_weight_decay", decoupled):
        values.mul_(1 - lr * decay)
    elif decay:
        gradient = gradient + decay * values
    beta1 = float(group["betas"][0])
    first = _local(state["exp_avg"])
    first.lerp_(gradient, 1 - beta1)
    size = lr / (1 - beta1 ** int(state["step"]))
    values.addcdiv_(first, _local(state["exp_avg_sq"]).sqrt().add_(group["eps"]), value=-size)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
