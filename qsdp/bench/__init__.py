"""Benchmarks for one's own machine or cluster: `qsdp bench kernels`, `train` and `link`."""

from __future__ import annotations

import importlib
import sys

from qsdp.arguments import did_you_mean

BENCHMARKS = {
    "kernels": "speed of the kernels on this machine beside a copy",
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


def run(argv: list[str]) -> int:
    """Run one benchmark; returns the exit status.

    Raises:
        ValueError: the benchmark is one of the source repository's.
    """
    if argv and argv[0] in BENCHMARKS:
        from qsdp.bench.parsers import PARSERS

        # Here already, so that --help and mistakes need not wait for torch.
        PARSERS[argv[0]]().parse_args(argv[1:])
        status: int = importlib.import_module(f"qsdp.bench.{argv[0]}").main(argv[1:])
        return status
    if argv[:1] == ["network"]:
        raise ValueError(
            "the benchmark between network namespaces is not installed with the package: run "
            "`python -m benchmarks.network` in a checkout of qsdp's source repository"
        )
    asked = argv[:1] in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    if argv and not asked:
        print(f"\nno benchmark {argv[0]!r}{did_you_mean(argv[0], BENCHMARKS)}", file=sys.stderr)
    return 0 if asked else 2
