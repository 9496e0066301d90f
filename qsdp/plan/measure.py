"""Codec and link rates of this machine, for `qsdp plan --measure`. Imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

VALUES = 1 << 22
REPETITIONS = 7


class Rates(NamedTuple):
    """Fields of a Cluster, and lines that say how they came about."""

    settings: dict[str, Any]
    lines: list[str]


def measure_rates() -> Rates:
    """Encode and decode at 8 bits, and the link between two ranks on this machine."""
    import torch

    from qsdp.bench.timing import median_seconds
    from qsdp.kernels import backend_for
    from qsdp.wire import Segment, wire_layout

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = backend_for(device)
    layout = wire_layout((Segment(VALUES, 8, 1024, "shift"),), torch.float32)
    values = torch.randn(1, VALUES, device=device)
    wire = torch.empty(1, layout.row_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(values)
    seconds = median_seconds(
        {
            "encode": lambda: backend.encode(values, layout, wire, key=1),
            "decode": lambda: backend.decode(wire, layout, target),
        },
        device,
        repetitions=REPETITIONS,
    )
    codec = 2 * values.nbytes * 1e-9 / sum(seconds.values())
    done = subprocess.run(
        [sys.executable, "-m", "qsdp", "bench", "link", "--nproc", "2", "--mib", "4", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"qsdp bench link failed: {done.stderr.strip().splitlines()[-1]}")
    link = json.loads(done.stdout)[0]
    settings = {
        "codec_gbps": codec,
        "intra_gbps": link["gbps"],
        "intra_latency_us": link["latency_us"],
    }
    lines = [
        f"measured: encode and decode at {codec:.1f} GB/s of float32 values on {device.type}",
        f"measured: {link['gbps']:.2f} Gbit/s and {link['latency_us']:.0f} us between ranks here",
    ]
    return Rates(settings, lines)
