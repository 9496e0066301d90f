"""Quantized all-reduce for DistributedDataParallel, as a communication hook.

DDP hands the hook one bucket of gradients after another. Each becomes one row whose segments are
the bucket's parameters, so the rules for single parameters hold inside a bucket, and travels as our
reduce-scatter followed by our all-gather: all ranks end with bit-identical gradients.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from qsdp.agreement import require_agreement
from qsdp.collectives import Feedback, all_reduce_stages, piece_layout
from qsdp.comms import ranks_per_node
from qsdp.config import QSDPConfig
from qsdp.kernels import VALUE_DTYPES
from qsdp.kernels.philox import derive_key
from qsdp.quantizer import Quantizer
from qsdp.stats import CommMeter, CommStats
from qsdp.wire import Segment, WireLayout, wire_layout

_DDP = 3  # for keys, beside those of fsdp.py

Result = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True)
class _Known:
    """What the hook needs to know of a parameter: its name, and how it travels (None: raw)."""

    name: str
    quantizer: Quantizer | None


class QuantizedDDPState:
    """The state of :func:`quantized_ddp_hook`: configuration, step, errors to feed back, counters.

    Make it on every rank, before or after ``model`` is wrapped with DistributedDataParallel; the
    ranks compare their configurations.

    Args:
        model: whose gradients are reduced; named in errors and matched by patterns without DDP's
            own prefix ``module.``.
        config: equal on all ranks. ``gradients``, where None leaves all to DDP's own all-reduce;
            ``min_numel``, ``keep_full_precision``, ``overrides``, ``seed``, ``verify``, and
            ``error_feedback``: of this rank's contribution and of the sums that it forwards, which
            takes 4 * (1 + 1 / ranks) bytes an element. What is for FSDP must be None.
        group: DDP's ``process_group``; None is the model's, if it is wrapped, or the default group.
        warmup_steps: as many steps first in full precision, bit for bit as without the hook.

    Raises:
        TypeError, ValueError: a model or a configuration that does not fit; on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        config: QSDPConfig,
        *,
        group: dist.ProcessGroup | None = None,
        warmup_steps: int = 0,
    ) -> None:
        _check_model(model)
        if group is None and isinstance(model, DistributedDataParallel):
            group = model.process_group
        self.group: dist.ProcessGroup = _default_group() if group is None else group
        self.config, self.warmup_steps = config, warmup_steps
        self.step = 0
        named = _named_parameters(model)
        error = _error_in(
            config, warmup_steps, [name for names in named.values() for name in names]
        )
        device = next(iter(named)).device if named else torch.device("cpu")
        facts = {
            "torch": torch.__version__,
            "QSDPConfig": asdict(config) if isinstance(config, QSDPConfig) else None,
            "parameters": {names[0]: str(tuple(p.shape)) for p, names in named.items()},
            "warmup_steps": warmup_steps,
        }
        require_agreement(facts, error, self.group, device)
        self._known = {
            param: _Known(names[0], config.quantizer("gradients", names, param))
            for param, names in named.items()
        }
        self._key = derive_key(config.seed, _DDP)
        self._meter = CommMeter(ranks_per_node(self.group))
        self._in_flight: list[Iterator[None]] = []
        # By parameter name, because DDP rebuilds its buckets after the first step. Views into one
        # flat pair a bucket, kept in _feedback by the names in it.
        self._contribution: dict[str, torch.Tensor] = {}
        self._reduced: dict[str, torch.Tensor] = {}
        self._feedback: dict[tuple[str, ...], Feedback] = {}

    def stats(self, reset: bool = False) -> CommStats:
        """What this rank sent and received so far, or since the last reset.

        ``stock_all_reduce`` is what a ring all-reduce of the gradients sends.
        """
        meter = self._meter
        stats = CommStats(
            all_reduce_sent=meter.sent,
            all_reduce_received=meter.received,
            stock_all_reduce=meter.stock,
            inter_node_sent=meter.inter_node,
            encode_s=meter.seconds("encode"),
            decode_s=meter.seconds("decode"),
            network_s=meter.seconds("network"),
        )
        if reset:
            meter.reset()
        return stats

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, tensors and numbers only. Every rank has its own to save."""
        return {
            "step": self.step,
            "rank": dist.get_rank(self.group),
            "num_ranks": dist.get_world_size(self.group),
            "contribution": {name: error.clone() for name, error in self._contribution.items()},
            "reduced": {name: error.clone() for name, error in self._reduced.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave on this rank.

        Raises:
            ValueError: it is of another rank, another number of ranks, or another model.
        """
        own = (dist.get_rank(self.group), dist.get_world_size(self.group))
        if (state["rank"], state["num_ranks"]) != own:
            raise ValueError(
                f"this state was saved by rank {state['rank']} of {state['num_ranks']} and this is "
                f"rank {own[0]} of {own[1]}: save and load one file a rank, and on another number "
                "of ranks start with a fresh QuantizedDDPState"
            )
        sizes = {known.name: param.numel() for param, known in self._known.items()}
        for name, error in state["contribution"].items():
            if sizes.get(name) != error.numel():
                raise ValueError(
                    f"this state has {error.numel()} errors of parameter {name!r}, which has "
                    f"{sizes.get(name, 'no')} elements here: load the state saved with this model"
                )
        self.step = state["step"]
        self._feedback.clear()
        self._contribution = {name: error.clone() for name, error in state["contribution"].items()}
        self._reduced = {name: error.clone() for name, error in state["reduced"].items()}

    def _layout(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> tuple[tuple[str, ...], WireLayout]:
        """Names of a bucket's parameters in the order of its values, and the layout of these."""
        names, segments = [], []
        for param in bucket.parameters():
            known = self._known.get(param)
            if known is None:
                raise ValueError(
                    f"the bucket holds a parameter of shape {tuple(param.shape)} that "
                    "QuantizedDDPState does not know: pass it the model that register_comm_hook is "
                    "called on, after its last parameter is made"
                )
            names.append(known.name)
            quantizer, numel = known.quantizer, param.numel()
            segments.append(Segment(numel) if quantizer is None else quantizer.segment(numel))
        dtype = bucket.buffer().dtype
        return tuple(names), wire_layout(tuple(segments), dtype, self.config.verify)

    def _feedback_of(
        self, names: tuple[str, ...], layout: WireLayout, device: torch.device
    ) -> Feedback:
        if names not in self._feedback:
            # Buckets that overlap are those of before a rebuild.
            self._feedback = {
                other: pair for other, pair in self._feedback.items() if not {*other} & {*names}
            }
            pieces = piece_layout(layout, dist.get_world_size(self.group))
            self._feedback[names] = Feedback(
                _join(self._contribution, names, layout, device),
                _join(self._reduced, names, pieces, device),
            )
        return self._feedback[names]


def quantized_ddp_hook(
    state: QuantizedDDPState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Result:
    """Average a bucket of gradients over all ranks, quantized: for ``register_comm_hook``.

    1. Encode this rank's gradients and start the reduce-scatter; backward goes on meanwhile.
    2. At the next bucket, take the bucket before one step further (to its all-gather, to its end).
    3. At the last bucket, finish all.

    The steps of all buckets come in the same order on all ranks. Buckets without a quantized
    parameter, and all in the warm-up, take DDP's own all-reduce.
    """
    if not isinstance(state, QuantizedDDPState):
        raise TypeError(
            "quantized_ddp_hook needs a qsdp.QuantizedDDPState: "
            "model.register_comm_hook(qsdp.QuantizedDDPState(model, config), "
            f"qsdp.quantized_ddp_hook), got {type(state).__name__}"
        )
    if bucket.index() == 0:
        state._in_flight.clear()  # of a backward that raised
    names, layout = state._layout(bucket)
    buffer = bucket.buffer()
    _advance(state)
    if dist.get_world_size(state.group) == 1:
        result = _future(buffer.device)
        result.set_result(buffer)
    elif _is_quantized(layout) and state.step >= state.warmup_steps:
        result = _future(buffer.device)
        stages = _quantized_stages(state, buffer, names, layout, result)
        next(stages)
        state._in_flight.append(stages)
    else:
        result = _stock_all_reduce(state, buffer)
    if bucket.is_last():
        while state._in_flight:
            _advance(state)
        state.step += 1
    return result


def _advance(state: QuantizedDDPState) -> None:
    """Take every bucket that is under way one stage further, the oldest first."""
    ended = object()
    state._in_flight = [stages for stages in state._in_flight if next(stages, ended) is not ended]


def _quantized_stages(
    state: QuantizedDDPState,
    buffer: torch.Tensor,
    names: tuple[str, ...],
    layout: WireLayout,
    result: Result,
) -> Iterator[None]:
    feedback = None
    if state.config.error_feedback:
        feedback = state._feedback_of(names, layout, buffer.device)
    yield from all_reduce_stages(
        buffer, state.group, quantizer=layout, key=state._key, meter=state._meter, feedback=feedback
    )
    result.set_result(buffer)


def _stock_all_reduce(state: QuantizedDDPState, buffer: torch.Tensor) -> Result:
    """What DDP does without a hook, bit for bit; counted as a ring."""
    num_ranks = dist.get_world_size(state.group)
    row_bytes = -(-buffer.numel() // num_ranks) * buffer.element_size()
    for _ in range(2):  # around the ring once to reduce, once to gather
        state._meter.count_rows(row_bytes, num_ranks, stock=(num_ranks - 1) * row_bytes)
    buffer.mul_(1.0 / num_ranks)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    result: Result = work.get_future().then(lambda future: future.value()[0])
    return result


def _future(device: torch.device) -> Result:
    """Set on the current stream; whoever waits for it on CUDA waits for that stream."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def _is_quantized(layout: WireLayout) -> bool:
    quantized = any(span.segment.bits is not None for span in layout.spans)
    return quantized and layout.dtype in VALUE_DTYPES


def _join(
    errors: dict[str, torch.Tensor],
    names: tuple[str, ...],
    layout: WireLayout,
    device: torch.device,
) -> torch.Tensor:
    """One flat tensor of the errors of ``names``, zero where there are none yet; ``errors`` then
    holds views into it."""
    flat = torch.zeros(layout.numel, device=device)
    views = flat.split([span.segment.numel for span in layout.spans])
    for name, view in zip(names, views, strict=True):
        if name in errors:
            view.copy_(errors[name])
        errors[name] = view
    return flat


def _named_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter with all its names (tied ones have several), without DDP's prefix."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(param, []).append(name.removeprefix("module."))
    return found


def _default_group() -> dist.ProcessGroup:
    if dist.group.WORLD is None:
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group before QuantizedDDPState"
        )
    return dist.group.WORLD


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"QuantizedDDPState takes the model first, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            raise TypeError(
                "QuantizedDDPState is for DistributedDataParallel and this model is sharded by "
                f"FSDP ({type(module).__name__}): after fully_shard, call qsdp.apply_qsdp instead"
            )


def _error_in(config: QSDPConfig, warmup_steps: int, names: list[str]) -> str | None:
    """One line on what is wrong with the arguments; None if nothing is."""
    if not isinstance(config, QSDPConfig):
        return f'QuantizedDDPState takes a QSDPConfig, e.g. .preset("w32g8"), got {config!r}'
    for name in ("weights", "intra_node", "all_reduce"):
        if getattr(config, name) is not None:
            return (
                f"DDP reduces gradients only: QSDPConfig({name}=...) must be None for "
                f'QuantizedDDPState, as in QSDPConfig.preset("w32g8"), got {getattr(config, name)}'
            )
    overrides = [override for _, override in config._override_pairs]
    if any(override.weights is not None for override in overrides):
        return (
            "DDP reduces gradients only: in QSDPConfig(overrides=...) for QuantizedDDPState name "
            "presets such as w32g4, or qsdp.Override(weights=None, gradients=...)"
        )
    quantizers = [config.gradients, *(override.gradients for override in overrides)]
    if any(quantizer is not None and quantizer.learns for quantizer in quantizers):
        return (
            "QuantizedDDPState does not learn levels: set Quantizer(levels=...) to a table or "
            'None, got "learned"'
        )
    if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < 0:
        return (
            "QuantizedDDPState(warmup_steps=...) must be an integer of at least 0, "
            f"got {warmup_steps!r}"
        )
    try:
        config.require_matches(names)
    except ValueError as error:
        return str(error)
    return None
