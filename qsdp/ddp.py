"""Quantized all-reduce for DistributedDataParallel, as a communication hook.

DDP hands the hook one bucket of gradients after another. Each becomes one row whose segments are
the bucket's parameters, so the rules for single parameters hold inside a bucket, and travels as our
reduce-scatter followed by our all-gather: all ranks end with bit-identical gradients.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from qsdp.agreement import require_agreement
from qsdp.collectives import all_reduce_quantized
from qsdp.comms import ranks_per_node
from qsdp.config import QSDPConfig
from qsdp.exchange import Pending
from qsdp.kernels.philox import derive_key
from qsdp.quantizer import Quantizer
from qsdp.residuals import Residuals
from qsdp.stages import piece_layout
from qsdp.stats import CommMeter, CommStats
from qsdp.streams import Beside, Turns
from qsdp.ways import Feedback, quantizer_of, schedule_of
from qsdp.wire import VALUE_DTYPES, Segment, WireLayout, wire_layout

_DDP = 3  # for keys, beside those of unit.py

Result = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True)
class _Known:
    """What the hook needs to know of a parameter: its name, and how it travels (None: raw)."""

    name: str
    numel: int
    quantizer: Quantizer | None
    feedback: Feedback | None = None


Kept = tuple[list[_Known], WireLayout]  # a bucket of which something is remembered


class QuantizedDDPState:
    """The state of :func:`quantized_ddp_hook`: configuration, step, errors to feed back, counters.

    Make it on every rank, before or after ``model`` is wrapped with DistributedDataParallel; the
    ranks compare their configurations.

    Args:
        model: whose gradients are reduced; named in errors and matched by patterns without DDP's
            own prefix ``module.``.
        config: equal on all ranks, or the name of a preset (``"w32g8"``). ``gradients``, where None
            leaves all to DDP's own all-reduce, ``exceptions``, ``min_numel``, ``seed`` and
            ``verify``. :class:`qsdp.Feedback` is of this rank's contribution and of the sums that
            it forwards, which takes 4 * (1 + 1 / ranks) bytes an element. What is for FSDP must be
            None.
        group: DDP's ``process_group``; None is the model's, if it is wrapped, or the default group.
        warmup_steps: as many steps first in full precision, bit for bit as without the hook; with
            ``warmup`` of the configuration, in its format.

    Raises:
        TypeError, ValueError: a model or a configuration that does not fit; on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        config: QSDPConfig | str,
        *,
        group: dist.ProcessGroup | None = None,
        warmup_steps: int = 0,
    ) -> None:
        _check_model(model)
        if group is None and isinstance(model, DistributedDataParallel):
            group = model.process_group
        self.group: dist.ProcessGroup = _default_group() if group is None else group
        named = _named_parameters(model)
        error, config = _checked(
            config, warmup_steps, [n for names in named.values() for n in names]
        )
        self.config, self.warmup_steps = config, warmup_steps
        self.step = 0
        device = next(iter(named)).device if named else torch.device("cpu")
        facts = {
            "torch": torch.__version__,
            "QSDPConfig": config.to_json(),
            "parameters": {names[0]: str(tuple(p.shape)) for p, names in named.items()},
            "warmup_steps": warmup_steps if error is None else None,
        }
        require_agreement(facts, error, self.group, device)
        ways = {p: config.ways_of(names, p.shape)["gradients"] for p, names in named.items()}
        self._known = {
            p: _Known(
                *(names[0], p.numel(), quantizer_of(way)),
                way if isinstance(way, Feedback) else None,
            )
            for (p, names), way in zip(named.items(), ways.values(), strict=True)
        }
        self._key = derive_key(config.seed, _DDP)
        self._meter = CommMeter(ranks_per_node(self.group))
        self._in_flight: list[tuple[Pending, Result, torch.Tensor, Kept]] = []
        # Of what this rank contributes, and of the sums that it forwards.
        fed_back = {k.name: k.feedback for k in self._known.values() if k.feedback is not None}
        self._sent, self._forwarded = Residuals(fed_back), Residuals(fed_back)
        self._turns = Turns(device)

    def stats(self, reset: bool = False) -> CommStats:
        """What this rank sent and received so far, or since the last reset.

        ``stock_all_reduce`` is what a ring all-reduce of the gradients sends.
        """
        stats = self._meter.read("all_reduce")
        if reset:
            self._meter.reset()
        return stats

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a resumed run needs, as copies. Every rank has its own to save.

        Names of what belongs to one rank end with ``.rankR``; sizes are those of a fresh state, as
        torch.distributed.checkpoint wants them for loading.
        """
        rank, num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        with self._turns:
            known = {f"sent.{name}": part for name, part in self._sent.state().items()}
            known |= {f"forwarded.{name}": part for name, part in self._forwarded.state().items()}
        state = {"progress": torch.tensor([self.step, num_ranks])}
        for name, blank in self._blank_residuals().items():
            state[f"{name}.rank{rank}"] = known.get(name, blank)
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what :meth:`state_dict` gave on this rank.

        Raises:
            ValueError: it is of another rank, another number of ranks, or another model.
        """
        rank, num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        step, saved_ranks = state["progress"].tolist()
        suffix, parts = f".rank{rank}", {}
        for name, blank in self._blank_residuals().items():
            part = state.get(name + suffix)
            if saved_ranks != num_ranks or part is None:
                raise ValueError(
                    f"this state was saved by {saved_ranks} ranks and holds nothing of {name!r} "
                    f"for rank {rank} of {num_ranks}: save and load every rank's own, and on "
                    "another number of ranks start with a fresh QuantizedDDPState"
                )
            if part.shape != blank.shape or part.dtype != blank.dtype:
                raise ValueError(
                    f"this state has errors of shape {tuple(part.shape)} for {name!r}, which has "
                    f"{tuple(blank.shape)} of {blank.dtype} here: load the state saved with this "
                    "model"
                )
            parts[name] = part
        self.step = step
        for kind, residuals in (("sent", self._sent), ("forwarded", self._forwarded)):
            start = f"{kind}."
            residuals.load(
                {n.removeprefix(start): p for n, p in parts.items() if n.startswith(start)}
            )

    def __getstate__(self) -> Any:
        raise TypeError(
            "a QuantizedDDPState cannot be pickled, because it holds a process group: save its "
            "state_dict(), and give that to load_state_dict() of a new one"
        )

    def _blank_residuals(self) -> dict[str, torch.Tensor]:
        """Every residual, by its name in a state, as of a fresh one."""
        found, num_ranks, device = {}, dist.get_world_size(self.group), torch.device("cpu")
        for known in self._known.values():
            if known.feedback is not None:
                piece, name = -(-known.numel // num_ranks), known.name
                found[f"sent.{name}"] = self._sent.blank(name, num_ranks, piece, device)
                found[f"forwarded.{name}"] = self._forwarded.blank(name, 1, piece, device)
        return found

    def _known_of(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> list[_Known]:
        """A bucket's parameters, in the order of its values."""
        found = []
        for param in bucket.parameters():
            known = self._known.get(param)
            if known is None:
                raise ValueError(
                    f"the bucket holds a parameter of shape {tuple(param.shape)} that "
                    "QuantizedDDPState does not know: pass it the model that register_comm_hook is "
                    "called on, after its last parameter is made"
                )
            found.append(known)
        return found

    def _residuals(
        self, bucket: list[_Known], layout: WireLayout, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        names, pieces = self._fed_back(bucket, layout)
        if not any(names):
            return None
        num_ranks = dist.get_world_size(self.group)
        return (
            self._sent.together(names, pieces, num_ranks, device),
            self._forwarded.together(names, pieces, 1, device),
        )

    def _fed_back(
        self, bucket: list[_Known], layout: WireLayout
    ) -> tuple[tuple[str | None, ...], WireLayout]:
        names = tuple(known.name if known.feedback else None for known in bucket)
        return names, piece_layout(layout, dist.get_world_size(self.group))

    def _keep(self, kept: Kept) -> None:
        """Pack what is kept in few bits of a bucket that is reduced."""
        names, pieces = self._fed_back(*kept)
        if any(names):
            self._sent.keep(names, pieces)
            self._forwarded.keep(names, pieces)


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
    known, buffer = state._known_of(bucket), bucket.buffer()
    warmup = state.config.warmup
    warm = warmup is not None and state.step < warmup.steps
    segments = tuple(
        Segment(k.numel, k.quantizer and warmup.gradients if warmup and warm else k.quantizer)
        for k in known
    )
    layout = wire_layout(segments, buffer.dtype, state.config.verify, zeros=True)
    quantized = layout.quantized and layout.dtype in VALUE_DTYPES
    _advance(state)
    if dist.get_world_size(state.group) == 1:
        result = _future(buffer.device)
        result.set_result(buffer)
    elif quantized and state.step >= state.warmup_steps:
        result = _future(buffer.device)
        with state._turns:
            residuals = None if warm else state._residuals(known, layout, buffer.device)
        pending = all_reduce_quantized(
            buffer,
            state.group,
            quantizer=layout,
            key=state._key,
            residuals=residuals,
            async_op=True,
            meter=state._meter,
        )
        if isinstance(pending, Beside):
            # All is launched. Whoever waits for the result waits for the stream that sets it.
            with torch.cuda.stream(pending.stream), state._turns:
                result.set_result(buffer)
                if not warm:
                    state._keep((known, layout))
        else:
            assert isinstance(pending, Pending)
            kept: Kept = ([] if warm else known), layout
            state._in_flight.append((pending, result, buffer, kept))
    else:
        result = _stock_all_reduce(state, buffer)
    if bucket.is_last():
        while state._in_flight:
            _advance(state)
        state.step += 1
    return result


def _advance(state: QuantizedDDPState) -> None:
    """Take every bucket that is under way one stage further, the oldest first."""
    under_way = []
    for pending, result, buffer, kept in state._in_flight:
        if pending.advance():
            state._keep(kept)
            result.set_result(buffer)
        else:
            under_way.append((pending, result, buffer, kept))
    state._in_flight = under_way


def _stock_all_reduce(state: QuantizedDDPState, buffer: torch.Tensor) -> Result:
    """What DDP does without a hook, bit for bit; counted as a ring."""
    num_ranks = dist.get_world_size(state.group)
    row_bytes = -(-buffer.numel() // num_ranks) * buffer.element_size()
    for _ in range(2):  # around the ring once to reduce, once to gather
        state._meter.count_ring((num_ranks - 1) * row_bytes, num_ranks)
    buffer.mul_(1.0 / num_ranks)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    result: Result = work.get_future().then(lambda future: future.value()[0])
    return result


def _future(device: torch.device) -> Result:
    """Set on the current stream; whoever waits for it on CUDA waits for that stream."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


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


def _checked(
    config: QSDPConfig | str, warmup_steps: int, names: list[str]
) -> tuple[str | None, QSDPConfig]:
    """One line on what is wrong with the arguments, None if nothing is, and the configuration."""
    try:
        config = QSDPConfig.of(config, "QuantizedDDPState")
        config.require_matches(names)
    except (TypeError, ValueError) as error:
        return str(error), QSDPConfig()
    for name in ("ranks_per_node", "inside_node", "replicas"):
        if getattr(config, name) not in (None, 1):
            return f"DDP has no such collectives: QSDPConfig({name}=...) must be None", config
    if any(way is not None for way in config.ways("weights")):
        return (
            "DDP reduces gradients only: QSDPConfig(weights=...) must be None for "
            'QuantizedDDPState, as in the preset "w32g8", and so must the weights of exceptions',
            config,
        )
    if any(schedule_of(way) is not None for way in config.ways("gradients")):
        return "QuantizedDDPState does not learn levels: give it a Quantizer, not Learned", config
    if warmup_steps and config.warmup is not None:
        return "QSDPConfig(warmup=...) and warmup_steps are two clocks: give one of them", config
    if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < 0:
        return (
            "QuantizedDDPState(warmup_steps=...) must be an integer of at least 0, "
            f"got {warmup_steps!r}",
            config,
        )
    return None, config
