"""Named cases: a model, a cluster and the work of a step, with the assumptions behind each number.

The published cases do not tell everything. What is assumed stands beside the number; what was
fitted to the result that is predicted is called so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from qsdp.config import QSDPConfig
from qsdp.plan.cluster import Cluster
from qsdp.plan.model import Work
from qsdp.plan.sizes import Model, gpt2
from qsdp.plan.variant import Variant, parse_variant
from qsdp.quantizer import Quantizer
from qsdp.ways import Differences

GPT_VOCAB = 50257
GPT_SEQUENCE = 2048
GPT_SHAPES = {"gpt2-125m": (12, 768), "gpt2-350m": (24, 1024), "gpt2-1.3b": (24, 2048),
              "gpt2-2.7b": (32, 2560)}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What `qsdp plan` answers for; the first variant is the baseline."""

    model: Model
    cluster: Cluster
    work: Work
    variants: tuple[Variant, ...]
    bandwidths: tuple[float, ...]
    notes: tuple[str, ...] = ()


def preset_model(name: str, *, blocks_per_unit: int = 1) -> Model:
    """A GPT-2 of the trainer's presets, or of 2.7B parameters."""
    layers, width = GPT_SHAPES[name]
    return gpt2(layers, width, vocab=GPT_VOCAB, sequence=GPT_SEQUENCE, name=name,
                blocks_per_unit=blocks_per_unit)  # fmt: skip


def cloud() -> Case:
    """Eight H100-class ranks a node on Ethernet, for `qsdp plan` without --cluster."""
    names = ("stock-bf16", "stock-fp32", "w8g8", "w4g4", "w8g8-flat", "w4g4-flat")
    return Case(
        preset_model("gpt2-1.3b"),
        Cluster(
            "cloud", nodes=4, ranks_per_node=8, bandwidth_gbps=100.0, latency_us=20.0,
            intra_gbps=2400.0, intra_latency_us=3.0, tflops=400.0, codec_gbps=32000.0,
        ),
        Work(tokens=8 * GPT_SEQUENCE),
        tuple(map(parse_variant, names)),
        (1.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0),
        ("400 TFLOP/s a rank; 2400 Gbit/s inside a node; codec at 32000 Gbit/s of float32 values",),
    )  # fmt: skip


def qsdp_paper() -> Case:
    """QSDP's cluster: 4 nodes of 8 V100 with NVLink, GPT of 1.3B, network slowed to 10 Gbit/s."""
    return Case(
        # FSDP wraps at least 2e8 parameters: four blocks of 50 M each.
        preset_model("gpt2-1.3b", blocks_per_unit=4),
        Cluster(
            "qsdp-paper", nodes=4, ranks_per_node=8, bandwidth_gbps=100.0, latency_us=30.0,
            intra_gbps=400.0, intra_latency_us=5.0, tflops=39.0, codec_gbps=3200.0, overlap=False,
        ),
        Work(tokens=4 * GPT_SEQUENCE, micro_batches=4, sync_every=True, recompute=True),
        tuple(map(parse_variant, ("stock-w32g16", "w8g8", "w4g4"))),
        (10.0, 50.0, 100.0),
        (
            "baseline: weights in float32, gradients in float16, which is FSDP under autocast",
            "512 sequences of 2048 in 4 micro-batches, gradients reduced after each",
            "39 TFLOP/s a V100, the published rate of Megatron-LM for 1.2B parameters on one",
            "activations are recomputed: 24 layers do not fit into 32 GB otherwise",
            "no overlap of communication and computation; with FSDP2's overlap see --overlap",
            "qsdp crosses nodes in two levels, NVLink at 400 Gbit/s a rank, codec at 3200 Gbit/s",
        ),
    )  # fmt: skip


def _sdp4bit(name: str, ranks_per_node: int, gbps: float, tflops: float, model: str) -> Case:
    """SDP4Bit on 16 nodes, as far as it can be expressed: nothing else parallel."""
    symmetric = partial(Quantizer, scaling="symmetric")
    config = QSDPConfig(
        Differences(symmetric(4, 2048, "nearest"), kept=None),
        symmetric(4, 128, "stochastic"),
        ranks_per_node=ranks_per_node,
        inside_node=symmetric(8, 128, "stochastic"),
    )
    baseline = Variant("megatron", None, torch.bfloat16)
    return Case(
        preset_model(model, blocks_per_unit=64),
        Cluster(
            name, nodes=16, ranks_per_node=ranks_per_node, bandwidth_gbps=gbps, latency_us=10.0,
            intra_gbps=1600.0, intra_latency_us=5.0, tflops=tflops, codec_gbps=8000.0,
            overlap=False,
        ),
        Work(tokens=GPT_SEQUENCE, reshard=False),
        (baseline, Variant("sdp4bit", config, torch.bfloat16, two_level=True)),
        (gbps,),
        (
            "weights gathered once a step in bfloat16, gradients reduced in float32 as one buffer",
            "4-bit weights in blocks of 2048, gradients 8 bits in the node and 4 across, of 128",
            "2048 tokens a rank: what its throughput and its 379 ms of reduction imply together",
            f"{tflops:g} TFLOP/s a rank: fitted to the throughput with SDP4Bit of the 1.3B model",
        ),
    )  # fmt: skip


CASES: dict[str, Callable[[], Case]] = {
    "cloud": cloud,
    "qsdp-paper": qsdp_paper,
    **{
        f"{cluster[0]}-{model.removeprefix('gpt2-')}": partial(_sdp4bit, *cluster, model)
        for cluster in (("sdp4bit-a100", 4, 100.0, 75.0), ("sdp4bit-h800", 8, 3200.0, 110.0))
        for model in ("gpt2-1.3b", "gpt2-2.7b")
    },
}

# Speed-ups over the baseline: case, variant, Gbit/s of a node's link, times.
PUBLISHED = (
    ("qsdp-paper", "w8g8", 10.0, 2.25),
    ("qsdp-paper", "w8g8", 100.0, 1.15),
    ("sdp4bit-a100-1.3b", "sdp4bit", 100.0, 2.39),
    ("sdp4bit-a100-2.7b", "sdp4bit", 100.0, 2.43),
    ("sdp4bit-h800-1.3b", "sdp4bit", 3200.0, 1.53),
    ("sdp4bit-h800-2.7b", "sdp4bit", 3200.0, 1.63),
)


def case(name: str) -> Case:
    """The case of a name.

    Raises:
        ValueError: no such case.
    """
    if name not in CASES:
        raise ValueError(f"--cluster must be one of {', '.join(CASES)}, got {name}")
    return CASES[name]()
