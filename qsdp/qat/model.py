"""Fake quantization on a model's weights, by torch's parametrization, and the handle to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from qsdp.config import QSDPConfig
from qsdp.qat.grid import (
    codes_and_steps,
    groups_of,
    initial_log2_step,
    largest_steps,
    learned_steps,
    not_yet,
)
from qsdp.qat.quantizer import FakeQuantizer
from qsdp.qat.together import begin_alike, put, whole
from qsdp.quantizer import BLOCK_MULTIPLE, MAX_BLOCK
from qsdp.ways import Ways

if TYPE_CHECKING:
    from qsdp.local.sync import ReplicaSync

# Layers whose first dimension is that of the output channels.
LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ORIGINAL = "parametrizations.weight.original"
_STEP = "parametrizations.weight.0.log2_step"


class CodedWeight(NamedTuple):
    """A weight as it is deployed: ``codes * steps``, with steps repeated over what shares them.

    ``codes`` is int8 in the weight's shape. ``steps`` is float32: (channels, 1), (1, 1), or
    (rows, blocks of a row). Of weights in bfloat16 they are numbers of bfloat16, and the product,
    rounded to bfloat16, is the weight.
    """

    codes: torch.Tensor
    steps: torch.Tensor


class _OnGrid(nn.Module):
    """The parametrization of one weight."""

    def __init__(self, weight: torch.Tensor, quantizer: FakeQuantizer, active: bool) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.active = active
        if quantizer.step == "learned":
            count = groups_of(weight, quantizer).shape[0]
            steps = torch.zeros(count, dtype=torch.float32, device=weight.device)
            self.log2_step = nn.Parameter(steps)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if self.quantizer.step == "learned":
            if self.active:
                return learned_steps(weight, self.log2_step, self.quantizer)
            return not_yet(weight, self.log2_step)
        return largest_steps(weight, self.quantizer) if self.active else weight

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


class FakeQuantization:
    """A handle to the fake quantization of a model; see :func:`fake_quantize`.

    Attributes:
        quantizer: what was asked for.
        names: of the modules whose weights are quantized, in module order.
    """

    def __init__(
        self, model: nn.Module, quantizer: FakeQuantizer, layers: Mapping[str, nn.Module]
    ) -> None:
        self.quantizer, self.names = quantizer, tuple(layers)
        self._model, self._layers = model, dict(layers)
        self._steps_taken = 0

    @property
    def active(self) -> bool:
        """Whether weights are quantized now, or training is still before ``start_step``."""
        return self._steps_taken >= self.quantizer.start_step

    def parameters(self) -> list[nn.Parameter]:
        """log2 of the learned steps, a vector a weight; sharded like the weights after
        ``fully_shard``. For an optimizer group of their own, without weight decay. They are among
        ``model.parameters()``, too."""
        if self.quantizer.step != "learned":
            return []
        return [grid.log2_step for _, _, grid in self._grids()]

    def step(self, sync: ReplicaSync | None = None) -> None:
        """Count an optimizer step; call it after each. At ``start_step`` weights become quantized.

        The call at the switch is collective under FSDP2: steps are taken from the weights.

        Args:
            sync: of replicas that take steps of their own; call this after ``sync.step()``. They
                switch with equal learned steps, those of their average; collective for all of them.
                ValueError where it has counted other steps.
        """
        self._steps_taken += 1
        if self._steps_taken == self.quantizer.start_step:
            if sync is None or self.quantizer.step != "learned":
                self.initialize()
            else:
                steps = {f"{name}.{_STEP}": grid.log2_step for name, _, grid in self._grids()}
                begin_alike(sync, steps, self.initialize, self._steps_taken)
            self._set_active(True)

    @torch.no_grad()
    def initialize(self) -> None:
        """Take learned steps from the weights as they are now, in place.

        For weights that were loaded after :func:`fake_quantize`, such as into a model that was made
        on the meta device. A collective call under FSDP2, one weight after another. Nothing is to
        do with ``step="largest"``.
        """
        if self.quantizer.step != "learned":
            return
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what is gathered would be thrown away
        for _, weight, grid in self._grids():
            groups = groups_of(whole(weight), self.quantizer)
            found = initial_log2_step(groups, self.quantizer)
            put(found, grid.log2_step)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model computes with its full-precision masters."""
        self._set_active(False)
        try:
            yield
        finally:
            self._set_active(self.active)

    def state_dict(self) -> dict[str, int]:
        """How many steps were counted. Learned steps are in the model's own state."""
        return {"steps_taken": self._steps_taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another training stood; the model's own state is to be loaded as well.

        Raises:
            ValueError: ``state`` is not what :meth:`state_dict` gave.
        """
        taken = state.get("steps_taken")
        if set(state) != {"steps_taken"} or not isinstance(taken, int) or taken < 0:
            raise ValueError(
                "FakeQuantization.load_state_dict takes what state_dict gave, "
                f"{{'steps_taken': a count}}, got {dict(state)!r}"
            )
        self._steps_taken = taken
        self._set_active(self.active)

    @torch.no_grad()
    def export(self, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, CodedWeight]:
        """Codes and steps of every quantized weight, by the weight's name in the plain model.

        Of whole tensors, on the device of the state. Counts the weights as quantized also before
        ``start_step``, with steps as they would be taken now: that is quantization after training.

        Args:
            state: whole masters and steps by the model's names, such as from
                ``qsdp.decoded_state_dict(model, full=True)``. Left out, the model's own: a
                collective call under FSDP2.
        """
        coded = {}
        for name, weight, log2_step in self._states(state):
            groups = groups_of(weight, self.quantizer)
            codes, steps = codes_and_steps(groups, self.quantizer, log2_step)
            if self.quantizer.per == "block":
                steps = steps.reshape(weight.shape[0], -1)
            coded[name] = CodedWeight(codes.reshape(weight.shape).to(torch.int8), steps)
        return coded

    @torch.no_grad()
    def quantized_state_dict(
        self, state: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """A state dict of the plain model: quantized weights under their usual names, no steps.

        Whole tensors as in :meth:`export`. What is not fake quantized is taken over as it is.

        Args:
            state: as for :meth:`export`.
        """
        own = self._model.state_dict() if state is None else state
        folded = {}
        for name, value in own.items():
            if name.endswith(f".{_STEP}") and name[: -len(_STEP) - 1] in self._layers:
                continue
            folded[self.plain_name(name)] = whole(value) if state is None else value
        for name, weight, log2_step in self._states(state):
            codes, steps = codes_and_steps(
                groups_of(weight, self.quantizer), self.quantizer, log2_step
            )
            folded[name] = (codes * steps).reshape(weight.shape).to(weight.dtype)
        return folded

    def plain_name(self, name: str) -> str:
        """What a parameter is called in the plain model."""
        owner = name.removesuffix(f".{_ORIGINAL}")
        return f"{owner}.weight" if owner != name and owner in self._layers else name

    def on_the_wire(self, config: QSDPConfig) -> QSDPConfig:
        """``config``, with fake-quantized weights sent in their own bits and without any error.

        What every rank decodes is then bit for bit the fake-quantized weight, whatever the number
        of ranks, and the forward pass changes nothing more about it, in float32 as in bfloat16.
        Gradients travel as ``config`` says. To be given to :func:`qsdp.apply_qsdp`.

        Raises:
            ValueError: the fake quantizer's grid is none of the wire's, or weights are not
                quantized yet (``start_step``).
        """
        if not self.active:
            raise ValueError(
                f"weights are in full precision until step {self.quantizer.start_step}: set "
                "FakeQuantizer(start_step=0), or apply on_the_wire after the switch"
            )
        exceptions = {}
        for name, weight, _ in self._grids():
            size = self.quantizer.block_size or weight[0].numel()
            if self.quantizer.per == "tensor" or size % BLOCK_MULTIPLE or size > MAX_BLOCK:
                what = "a tensor" if self.quantizer.per == "tensor" else f"{size} values"
                raise ValueError(
                    f"{name}.weight has a step for {what}, and the wire has one for a multiple of "
                    f"{BLOCK_MULTIPLE} up to {MAX_BLOCK}: give FakeQuantizer(per='block', "
                    "block_size=...), or keep this layer in full precision"
                )
            exceptions[f"{name}.{_ORIGINAL}"] = Ways(self.quantizer.wire(size), config.gradients)
        return config.with_exceptions(exceptions)

    def remove(self, *, quantized: bool = True) -> nn.Module:
        """Make the model plain again, in place; returns it. Its parameters stay the same objects.

        Args:
            quantized: leave the quantized weights in it, otherwise the masters.

        Raises:
            ValueError: the model is sharded; see :meth:`quantized_state_dict`.
        """
        if any(isinstance(weight, DTensor) for _, weight, _ in self._grids()):
            raise ValueError(
                "remove() takes a model that is not sharded: load quantized_state_dict() into a "
                "plain one"
            )
        for layer in self._layers.values():
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=quantized)
        self._layers, self.names = {}, ()
        return self._model

    def _grids(self) -> Iterator[tuple[str, torch.Tensor, _OnGrid]]:
        """Name of the module, its master weight, its parametrization."""
        for name, layer in self._layers.items():
            parametrization = layer.get_submodule("parametrizations.weight")
            grid = parametrization.get_submodule("0")
            assert isinstance(grid, _OnGrid)
            yield name, parametrization.get_parameter("original"), grid

    def _states(
        self, state: Mapping[str, torch.Tensor] | None
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Name in the plain model, whole master and whole steps, one weight after another."""
        learned = self.quantizer.step == "learned"
        own = self._model.state_dict() if state is None else state
        for name in self.names:
            weight = whole(own[f"{name}.{_ORIGINAL}"])
            log2_step = None
            if learned and self.active:
                log2_step = whole(own[f"{name}.{_STEP}"])
            elif learned:
                log2_step = initial_log2_step(groups_of(weight, self.quantizer), self.quantizer)
            yield f"{name}.weight", weight, log2_step

    def _set_active(self, active: bool) -> None:
        for _, _, grid in self._grids():
            grid.active = active


def fake_quantize(
    model: nn.Module,
    quantizer: FakeQuantizer | None = None,
    *,
    modules: Sequence[type[nn.Module]] = LAYERS,
    keep: Sequence[str] = (),
) -> FakeQuantization:
    """Let layers of ``model`` compute with quantized weights (QT-DoG section 3.2), in place.

    Call it when the weights are there and before ``fully_shard`` or ``DistributedDataParallel``.
    Parameters stay the same objects under another name (``X.weight`` becomes
    ``X.parametrizations.weight.original``), so an optimizer that was made before keeps its state;
    learned steps are new parameters. Until ``start_step`` the model computes bit for bit what it
    did. All ranks must call it alike.

    Where weights are gathered in bfloat16, the grid is that of the gathered weights, and its steps
    and points are numbers of bfloat16; training computes with
    ``handle.quantized_state_dict(qsdp.decoded_state_dict(model, full=True))`` then.

    Args:
        quantizer: the grid; default 7 bits with a learned step for each output channel.
        modules: types of the layers whose ``weight`` is quantized; the output channels must be its
            first dimension.
        keep: glob patterns over module names that stay in full precision, such as a first layer and
            a head. Each must match such a layer.

    Returns:
        The handle, whose ``step()`` is to be called after each optimizer step.

    Raises:
        TypeError, ValueError: bad arguments, a layer that does not fit, or a sharded model.
    """
    quantizer = quantizer or FakeQuantizer()
    if not isinstance(quantizer, FakeQuantizer):
        raise TypeError(f"fake_quantize takes a qsdp.FakeQuantizer, got {quantizer!r}")
    layers = _chosen(model, tuple(modules), keep)
    for name, layer in layers.items():
        _check(model, name, layer, quantizer)
    active = quantizer.start_step == 0
    for layer in layers.values():
        weight = layer.get_parameter("weight")
        grid = _OnGrid(weight, quantizer, active)
        # Without torch's trial run, which would compute with steps that are not yet set.
        parametrize.register_parametrization(layer, "weight", grid, unsafe=True)
    handle = FakeQuantization(model, quantizer, layers)
    if active:
        handle.initialize()
    return handle


def _chosen(
    model: nn.Module, modules: tuple[type[nn.Module], ...], keep: Sequence[str]
) -> dict[str, nn.Module]:
    """Layers to quantize, by name."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, modules)}
    kinds = ", ".join(kind.__name__ for kind in modules)
    if not found:
        raise ValueError(
            f"fake_quantize found no layer of {kinds} in {type(model).__name__}: give modules=..."
        )
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ValueError(
                f"fake_quantize(keep=...): {pattern!r} matches no layer of {kinds}; there are "
                f"{len(found)}, such as {', '.join(list(found)[:3])}"
            )
    chosen = {
        name: module
        for name, module in found.items()
        if not any(fnmatchcase(name, pattern) for pattern in keep)
    }
    if not chosen:
        raise ValueError(f"fake_quantize(keep=...) keeps all {len(found)} layers: name fewer")
    return chosen


def _check(model: nn.Module, name: str, layer: nn.Module, quantizer: FakeQuantizer) -> None:
    """Raises ValueError for a layer that cannot be quantized."""
    if parametrize.is_parametrized(layer, "weight"):
        raise ValueError(f"{name}.weight is parametrized already: name it in keep")
    weight = layer.get_parameter("weight")
    if isinstance(weight, DTensor):
        raise ValueError(
            f"{name}.weight is sharded: call fake_quantize before fully_shard, which otherwise "
            "mixes sharded and whole tensors"
        )
    if weight.is_meta and quantizer.step == "learned" and quantizer.start_step == 0:
        raise ValueError(
            f"{name}.weight is on the meta device, and learned steps are taken from its values: "
            "load the model first, or set FakeQuantizer(start_step=...)"
        )
    if weight.dtype != torch.float32:
        raise ValueError(
            f"{name}.weight is {weight.dtype}, and masters are trained in float32: call "
            "model.float(); MixedPrecisionPolicy computes in bfloat16"
        )
    block = quantizer.block_size
    if block is not None and weight[0].numel() % block:
        raise ValueError(
            f"{name}.weight has rows of {weight[0].numel()} values, which blocks of {block} do not "
            "divide: lower FakeQuantizer(block_size=...), or name it in keep"
        )
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if parameter is weight and other != f"{name}.weight":
            raise ValueError(
                f"{name}.weight is also {other}: quantized it would no longer be the same; name "
                f"{name} in keep"
            )
