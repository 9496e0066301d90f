"""Benchmarks: `qsdp bench kernels`, `network`, `train` and `link`."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "kernels": "speed of encode, decode and decode_sum beside a copy and what else there is",
    "network": "step times between hosts on this machine whose links are slowed down (root)",
    "train": "step times of stock FSDP2 and qsdp on your cluster, under torchrun",
    "link": "latency and bandwidth between ranks, under torchrun",
}
USAGE = "\n".join(
    [
        "usage: qsdp bench NAME [OPTIONS]",
        "",
        *(f"  {name:<10}{text}" for name, text in BENCHMARKS.items()),
        "",
        "`qsdp bench NAME --help` lists the options of a benchmark.",
    ]
)


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in BENCHMARKS:
        status: int = importlib.import_module(f"qsdp.bench.{argv[0]}").main(argv[1:])
        return status
    asked = argv[:1] in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


run = main
