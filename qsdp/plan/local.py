"""A step where each node is a replica that synchronises now and then (qsdp.ReplicaSync)."""

from __future__ import annotations

from dataclasses import replace

import torch

from qsdp.config import FULL_PRECISION, QSDPConfig, difference_quantizer
from qsdp.plan.cluster import Cluster
from qsdp.plan.model import Prediction, Work, predict
from qsdp.plan.sizes import Model
from qsdp.plan.variant import Variant
from qsdp.stages import piece_layout
from qsdp.wire import Segment, wire_layout


def sync_row_bytes(model: Model, ranks: int, replicas: int, bits: int) -> int:
    """Bytes of the row that a rank sends to one replica in each half of a synchronisation.

    Args:
        ranks: that shard a replica.
        bits: of the differences, 32 for full precision, as ``qsdp train --sync-bits``.
    """
    config = QSDPConfig(None, difference_quantizer(bits))
    segments = tuple(
        Segment(
            parameter.shard_numel(ranks),
            config.ways_of(parameter.names, parameter.shape)["gradients"],  # type: ignore[arg-type]
        )
        for unit in model.units
        for parameter in unit
        if parameter.trains
    )
    return piece_layout(wire_layout(segments, torch.float32), replicas).row_bytes


def predict_local(
    model: Model, cluster: Cluster, work: Work, variant: Variant, interval: int, bits: int
) -> Prediction:
    """The mean step over a round of ``interval`` steps; the synchronisation waits for its average.

    Inside a node ``variant``; between nodes the model once a round, in ``bits``, which all ranks of
    a node send over its link at once, to every other node twice: contributions, then averages.
    """
    alone = predict(model, replace(cluster, nodes=1), work, variant)
    ranks, others = cluster.ranks_per_node, cluster.nodes - 1
    row = sync_row_bytes(model, ranks, cluster.nodes, bits)
    leaves = 2 * others * row * ranks
    network_s = 8 * leaves / (cluster.bandwidth_gbps * 1e9) + 2e-6 * cluster.latency_us
    # Differences are encoded and decoded on each way, and so are contributions and averages.
    coded = 0 if bits == FULL_PRECISION else 4 * 32 * model.numel / ranks
    codec_s = coded / (cluster.codec_gbps * 1e9)
    parts = (
        (alone.compute_s, "compute"),
        (alone.network_s + network_s / interval, "network"),
        (alone.codec_s + codec_s / interval, "codec"),
    )
    return alone._replace(
        step_s=alone.step_s + (network_s + codec_s) / interval,
        network_s=parts[1][0],
        codec_s=parts[2][0],
        between_nodes=round(leaves / interval),
        limit=max(parts)[1],
    )
