"""The trainer's own step under several ways to communicate, taken in turn on one set of ranks.

All variants train models of one shape on the same random tokens. They take their steps in turn, in
another order each round, so that all of them meet the same disturbances.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

import qsdp
from qsdp.agreement import all_gather_json
from qsdp.plan.variant import Variant
from qsdp.trainer.comm import quantize_communication
from qsdp.trainer.config import PRESETS, TrainConfig
from qsdp.trainer.model import build_optimizer, new_model, shard
from qsdp.trainer.ranks import Ranks
from qsdp.trainer.step import Training, take_step

TIMES = ("step_s", "compute_s", "encode_s", "network_s", "decode_s")


class Contender(NamedTuple):
    """A variant and the training that communicates in its way."""

    variant: Variant
    training: Training


class Sample(NamedTuple):
    """One step of one variant, the same on every rank: means over ranks, sums of bytes.

    Attributes:
        between_nodes: bytes that left a node, as qsdp counts them, over all nodes.
        on_interface: what the nodes' interfaces sent meanwhile, or None where nobody reads them.
        sent: bytes that ranks sent to other ranks, over all ranks.
    """

    step_s: float
    compute_s: float
    encode_s: float
    network_s: float
    decode_s: float
    sent: int
    between_nodes: int
    on_interface: int | None


def bench_config(
    *, preset: str | None, layers: int, width: int, heads: int, **settings: Any
) -> TrainConfig:
    """The preset's shape and recipe, or a GPT-2 of the given shape in the tiny recipe."""
    if preset is not None:
        return replace(PRESETS[preset](), **settings)
    return replace(PRESETS["tiny"](), layers=layers, width=width, heads=heads, **settings)


def prepare(variant: Variant, base: TrainConfig, ranks: Ranks, per_node: int) -> Contender:
    """A sharded model, its optimizer and its communication; a collective call.

    A variant that begins in more bits (``warmup``) is measured as it goes on after that.

    Raises:
        ValueError: the variant was written for nodes of another size.
    """
    applied = variant.config_on(ranks.num_ranks // per_node, per_node)
    if not variant.is_stock:
        variant = replace(variant, config=replace(applied, warmup=None))
    config = replace(
        base,
        comm=variant.comm,
        ranks_per_node=applied.ranks_per_node,
        precision=_precision(variant.weight_dtype),
        reduce_precision=_precision(variant.gradient_dtype),
        prefetch=False,  # as FSDP2 does by itself on CPU, and so that nothing hides the network
    )
    torch.manual_seed(config.seed)
    model = new_model(config, config.vocab_size, eos_token_id=0)
    shard(model, config, ranks)
    optimizer = build_optimizer(model, config)
    quantize_communication(model, config)
    batches = _RandomBatches(config, ranks)
    return Contender(variant, Training(config, ranks, model, optimizer, batches))


def measure(
    contenders: Mapping[str, Contender],
    *,
    steps: int,
    warm_up: int,
    first_step: int,
    interface: Callable[[], int] | None = None,
) -> dict[str, list[Sample]]:
    """``steps`` steps of each contender in turn, after ``warm_up`` more; a collective call.

    Args:
        first_step: number of the first step, for the learning rate and the random numbers.
        interface: reads the bytes that this rank's node has sent.
    """
    order, shuffle = list(contenders), random.Random(first_step).shuffle
    found: dict[str, list[Sample]] = {name: [] for name in contenders}
    for round_ in range(warm_up + steps):
        shuffle(order)
        for name in order:
            sample = _sample(contenders[name], first_step + round_, interface)
            if round_ >= warm_up:
                found[name].append(sample)
    return found


def medians(samples: Sequence[Sample]) -> dict[str, Any]:
    """Median of every field; the parts of the step need not add up to it exactly."""
    columns = zip(Sample._fields, zip(*samples, strict=True), strict=True)
    return {name: None if None in values else statistics.median(values) for name, values in columns}


def ranks_per_node(local_size: int, num_ranks: int) -> int:
    """Ranks on each node; 1 where nodes differ, as two-level collectives need equal ones."""
    sizes = set(all_gather_json(local_size))
    return local_size if len(sizes) == 1 and num_ranks % local_size == 0 else 1


def _precision(dtype: torch.dtype) -> Literal["fp32", "bf16"]:
    return "bf16" if dtype == torch.bfloat16 else "fp32"


def _sample(contender: Contender, step: int, interface: Callable[[], int] | None) -> Sample:
    stock, training = contender.variant.is_stock, contender.training
    dist.barrier()
    before = interface() if interface else 0
    result = take_step(training, step)
    dist.barrier()
    sent = interface() - before if interface else None
    metrics, comm = result.metrics, result.comm
    mine = {
        **{key: metrics[key] for key in TIMES},
        "sent": comm.sent,
        "between": _between_nodes(stock, comm, training.ranks.device),
        "interface": sent,
        "local_rank": int(os.environ["LOCAL_RANK"]),
    }
    everyone = all_gather_json(mine)
    first_of_nodes = [rank for rank in everyone if rank["local_rank"] == 0]
    return Sample(
        **{key: statistics.mean(rank[key] for rank in everyone) for key in TIMES},
        sent=sum(rank["sent"] for rank in everyone),
        between_nodes=sum(rank["between"] for rank in (first_of_nodes if stock else everyone)),
        on_interface=(
            sum(rank["interface"] for rank in first_of_nodes) if interface is not None else None
        ),
    )


def _between_nodes(stock: bool, comm: qsdp.CommStats, device: torch.device) -> int:
    """Bytes that leave a node because of this rank; for stock, because of the whole node.

    Stock collectives are rings, over which each node passes on what one rank sends. gloo has no
    reduce-scatter: torch does an all-reduce and drops what it does not need, twice the bytes.
    """
    if not stock:
        return comm.inter_node_sent
    twice = 2 if device.type == "cpu" else 1
    return comm.all_gather_sent + twice * comm.reduce_scatter_sent


class _RandomBatches:
    """Tokens without meaning, which cost as much as any."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        micro = config.batch_size // (config.micro_batches(ranks.num_ranks) * ranks.num_ranks)
        self._shape = (micro, config.sequence_length + 1)
        self._vocab_size = config.vocab_size
        self._generator = torch.Generator().manual_seed(ranks.rank)

    def batch(self, step: int, micro_batch: int) -> torch.Tensor:
        return torch.randint(self._vocab_size, self._shape, generator=self._generator)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("a benchmark is not resumed")
