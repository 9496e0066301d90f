"""Codec and link rates of this machine, for `qsdp plan --measure`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

import torch

from qsdp.config import QSDPConfig
from qsdp.plan.cluster import gbps_of
from qsdp.plan.coding import measure_coding
from qsdp.quantizer import Quantizer


class Rates(NamedTuple):
    """Fields of a Cluster, and lines that say how they came about."""

    settings: dict[str, Any]
    lines: list[str]


def measure_rates() -> Rates:
    """Encode and decode float32 at 8 bits, and the link between two ranks on this machine.

    Raises:
        RuntimeError: the link could not be measured.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codec = _codec_gbps(device)
    command = [sys.executable, "-m", "qsdp", "bench", "link", "--nproc", "2", "--mib", "4"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"qsdp bench link failed: {done.stderr.strip().splitlines()[-1]}")
    link = json.loads(done.stdout)[0]
    gbps, latency = link["gbps"], link["latency_us"]
    return Rates(
        {"codec_gbps": codec, "intra_gbps": gbps, "intra_latency_us": latency},
        [
            f"measured: encode and decode at {codec:.0f} Gbit/s of float32 values on {device.type}",
            f"measured: {gbps:.2f} Gbit/s and {latency:.0f} us between ranks here",
        ],
    )


def _codec_gbps(device: torch.device) -> float:
    """Gbit/s of float32 values, the mean of encoding and decoding."""
    eight = QSDPConfig(Quantizer(8), None)
    coding = measure_coding(eight, torch.float32, torch.float32, device)
    return gbps_of(2 * torch.float32.itemsize, coding.own_weights + coding.every_weights)
