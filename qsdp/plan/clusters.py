"""Named cases: a model, a cluster and the work of a step, with the assumptions behind each number.

The published cases do not tell everything. What is assumed stands beside the number; what was
fitted to the result that is predicted is called so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from qsdp.plan.model import Cluster, Config, Gloo, Work, parse_config
from qsdp.plan.sizes import Model, gpt2

GPT_VOCAB = 50257
GPT_SEQUENCE = 2048
GPT_SHAPES = {"gpt2-125m": (12, 768), "gpt2-350m": (24, 1024), "gpt2-1.3b": (24, 2048),
              "gpt2-2.7b": (32, 2560)}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What `qsdp plan` answers for; the first config is the baseline."""

    model: Model
    cluster: Cluster
    work: Work
    configs: tuple[Config, ...]
    bandwidths: tuple[float, ...]
    notes: tuple[str, ...] = ()


def preset_model(name: str, *, blocks_per_unit: int = 1, sequence: int = GPT_SEQUENCE) -> Model:
    """A GPT-2 of the trainer's presets, or of 2.7B parameters."""
    layers, width = GPT_SHAPES[name]
    return gpt2(layers, width, vocab=GPT_VOCAB, sequence=sequence, name=name,
                blocks_per_unit=blocks_per_unit)  # fmt: skip


def qsdp_paper() -> Case:
    """QSDP's cluster: 4 nodes of 8 V100 with NVLink, GPT of 1.3B, network slowed down to 10 Gbit/s.

    Published: 2.25 times faster at 10 Gbit/s, 1.15 times at 100 Gbit/s.
    """
    cluster = Cluster("qsdp-paper", 4, 8, 100.0, 30.0, 400.0, 5.0, 39.0, 400.0, overlap=False)
    work = Work(tokens=4 * GPT_SEQUENCE, micro_batches=4, sync_every=True, recompute=True)
    return Case(
        # FSDP wraps at least 2e8 parameters: four blocks of 50 M each.
        preset_model("gpt2-1.3b", blocks_per_unit=4),
        cluster,
        work,
        tuple(parse_config(name) for name in ("stock-w32g16", "w8g8", "w4g4")),
        (10.0, 50.0, 100.0),
        (
            "baseline: weights in float32, gradients in float16, which is FSDP under autocast",
            "512 sequences of 2048 in 4 micro-batches, gradients reduced after each",
            "39 TFLOP/s a V100, the published rate of Megatron-LM for 1.2B parameters on one",
            "activations are recomputed: 24 layers do not fit into 32 GB otherwise",
            "no overlap of communication and computation; with FSDP2's overlap see --overlap",
            "qsdp crosses nodes in two levels, NVLink at 50 GB/s a rank, codec at 400 GB/s",
        ),
    )


def _sdp4bit(name: str, nodes: int, per_node: int, gbps: float, intra: float, tflops: float,
             model: str) -> Case:  # fmt: skip
    """SDP4Bit's set-up as far as it can be expressed: one gather a step, nothing else parallel."""
    cluster = Cluster(name, nodes, per_node, gbps, 10.0, intra, 5.0, tflops, 1000.0, overlap=False)
    ours = Config("sdp4bit", 4, 4, "two-level", 2048, 128, intra_gradient_bits=8)
    return Case(
        preset_model(model, blocks_per_unit=64),
        cluster,
        Work(tokens=GPT_SEQUENCE, gathers=1),
        (Config("megatron", 16, 32, "stock"), ours),
        (gbps,),
        (
            "weights gathered once a step in bfloat16, gradients reduced in float32 as one buffer",
            "4-bit weights in blocks of 2048, gradients 8 bits in the node and 4 across, of 128",
            "2048 tokens a rank: what its throughput and its 379 ms of reduction imply together",
            f"{tflops:g} TFLOP/s a rank: fitted to the throughput with SDP4Bit of the 1.3B model",
        ),
    )


def cloud(ranks_per_node: int = 8) -> Case:
    """Eight H100-class ranks a node on Ethernet, for `qsdp plan` without --cluster."""
    cluster = Cluster("cloud", 4, ranks_per_node, 100.0, 20.0, 2400.0, 3.0, 400.0, 4000.0)
    return Case(
        preset_model("gpt2-1.3b"),
        cluster,
        Work(tokens=8 * GPT_SEQUENCE),
        tuple(parse_config(name) for name in
              ("stock-bf16", "stock-fp32", "w8g8", "w4g4", "w8g8-flat", "w4g4-flat")),
        (1.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0),
        ("400 TFLOP/s a rank; 300 GB/s inside a node; codec at 4 TB/s of float32 values",),
    )  # fmt: skip


CASES: dict[str, Callable[[], Case]] = {
    "cloud": cloud,
    "qsdp-paper": qsdp_paper,
    **{
        f"sdp4bit-{gpu}-{model.removeprefix('gpt2-')}": partial(_sdp4bit, *setup, model)
        for gpu, setup in {
            "a100": ("sdp4bit-a100", 16, 4, 100.0, 1600.0, 75.0),
            "h800": ("sdp4bit-h800", 16, 8, 3200.0, 1600.0, 110.0),
        }.items()
        for model in ("gpt2-1.3b", "gpt2-2.7b")
    },
}


def case(name: str) -> Case:
    """Raises ValueError on a name that is none."""
    if name not in CASES:
        raise ValueError(f"--cluster must be one of {', '.join(CASES)}, got {name}")
    return CASES[name]()


def from_benchmark(
    found: Mapping[str, Any], layout: Mapping[str, Any], variant: str
) -> tuple[Model, Cluster, Work]:
    """The benchmark's hosts as a cluster, calibrated by a few of its cells for ``variant``.

    From the cells without a limit: seconds of computation in the variant's precision, the codec's
    rate, and what gloo moves where the link is not the limit. From stock's cell at the slowest
    limit: how many times gloo's stock collectives take bytes / bandwidth. All other cells are
    predicted.
    """
    settings = found["model"]
    cells = {(c["variant"], c["bandwidth_gbps"]): c for c in layout["cells"]}
    half = variant.endswith("bf16")
    stock = cells["stock-bf16" if half and ("stock-bf16", None) in cells else "stock-fp32", None]
    own, nodes = cells[variant, None], layout["hosts"]
    model = gpt2(settings["layers"], settings["width"], vocab=settings["vocab_size"],
                 sequence=settings["sequence_length"])  # fmt: skip
    gloo = Gloo(
        stock_gbps=_gbps(stock, nodes),
        swap_gbps=_gbps(own, nodes),
        **_stock_passes(cells, stock, nodes),
    )
    cluster = Cluster("benchmark", nodes, layout["ranks_per_host"], 1.0, 50.0, 10.0, 50.0, 1.0,
                      1.0, overlap=False, gloo=gloo)  # fmt: skip
    work = Work(tokens=0.0, compute_s=own["compute_s"] + own["encode_s"] + own["decode_s"])
    # Encoding and decoding are part of what was measured without a limit.
    return model, replace(cluster, codec_gbps=float("inf")), work


def _gbps(cell: Mapping[str, Any], nodes: int) -> float:
    return float(cell["between_nodes"] / nodes * 8e-9 / cell["network_s"])


def _stock_passes(
    cells: Mapping[Any, Any], stock: Mapping[str, Any], nodes: int
) -> dict[str, float]:
    slowest = min(gbps for _, gbps in cells if gbps is not None)
    cell = cells[stock["variant"], slowest]
    ideal = cell["between_nodes"] / nodes * 8e-9 / slowest
    passes = max(1.0, (cell["network_s"] - stock["network_s"]) / ideal)
    return {"gather_passes": passes, "reduce_passes": passes}


def bench_config(variant: str) -> Config:
    """The planner's config for a variant of `qsdp bench network`."""
    if variant == "qsdp-fp32":
        return Config(variant, 32, 32, "two-level")
    if variant.startswith("stock"):
        return parse_config(variant)
    return parse_config(variant.removesuffix("-bf16"))


def measured(cases: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the published cases."""
    return tuple(name for name in CASES if name not in ("cloud", *cases))
