"""The planner on results of `qsdp bench network`: few cells calibrate it, the others are predicted.

What calibrates: the cells without a limit give seconds of computation and of the codec, and what
gloo moves where the link is not the limit; stock's cell at the slowest limit gives how many times
bytes over bandwidth its collectives take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from qsdp.plan.cluster import Cluster, Gloo, gbps_of, seconds_at
from qsdp.plan.model import Prediction, Work, predict
from qsdp.plan.sizes import Model, gpt2
from qsdp.plan.variant import is_variant, parse_variant


def predict_benchmark(
    found: Mapping[str, Any],
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], Prediction]]:
    """Layout, cell and prediction of every cell of a benchmark's JSON.

    Cells without a limit calibrate; they are predicted on links without one, for their bytes.
    Variants that were files are left out: results have only their names.
    """
    for layout in found["layouts"]:
        for cell in layout["cells"]:
            name, gbps = cell["variant"], cell["bandwidth_gbps"]
            if not is_variant(name):
                continue
            model, cluster, work = _calibrated(found["model"], layout, name)
            cluster = replace(cluster, bandwidth_gbps=float("inf") if gbps is None else gbps)
            yield layout, cell, predict(model, cluster, work, parse_variant(name))


def _calibrated(
    settings: Mapping[str, Any], layout: Mapping[str, Any], name: str
) -> tuple[Model, Cluster, Work]:
    """The benchmark's model, hosts and step for the variant ``name``."""
    cells = {(c["variant"], c["bandwidth_gbps"]): c for c in layout["cells"]}
    half = parse_variant(name).is_bf16 and ("stock-bf16", None) in cells
    stock, own = cells["stock-bf16" if half else "stock-fp32", None], cells[name, None]
    nodes = layout["hosts"]
    slowest = min(gbps for _, gbps in cells if gbps is not None)
    limited = cells[stock["variant"], slowest]
    ideal = seconds_at(limited["between_nodes"] / nodes, slowest)
    gloo = Gloo(
        stock_gbps=gbps_of(stock["between_nodes"] / nodes, stock["network_s"]),
        stock_slowdown=max(1.0, (limited["network_s"] - stock["network_s"]) / ideal),
        swap_gbps=gbps_of(own["between_nodes"] / nodes, own["network_s"]),
    )
    cluster = Cluster(
        "benchmark", nodes=nodes, ranks_per_node=layout["ranks_per_host"], bandwidth_gbps=1.0,
        latency_us=50.0, intra_gbps=10.0, intra_latency_us=50.0, tflops=1.0,
        codec_gbps=float("inf"), overlap=False, gloo=gloo,
    )  # fmt: skip
    model = gpt2(
        settings["layers"], settings["width"], vocab=settings["vocab_size"],
        sequence=settings["sequence_length"],
    )  # fmt: skip
    # Encoding and decoding are part of what was measured, and so take nothing more.
    compute_s = own["compute_s"] + own["encode_s"] + own["decode_s"]
    return model, cluster, Work(tokens=0.0, compute_s=compute_s)
