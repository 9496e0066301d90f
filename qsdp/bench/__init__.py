"""Benchmarks: `qsdp bench kernels`."""

from __future__ import annotations

import sys

USAGE = """usage: qsdp bench kernels [OPTIONS]

  kernels   speed of encode, decode and decode_sum beside a copy and what else there is

`qsdp bench kernels --help` lists the options."""


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["kernels"]:
        from qsdp.bench.kernels import main as kernels

        return kernels(argv[1:])
    asked = argv[:1] in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


run = main
