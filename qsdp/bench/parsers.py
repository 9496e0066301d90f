"""The options of the benchmarks. Nothing here imports torch, so `--help` does not wait for it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from qsdp.plan.command import VARIANTS
from qsdp.trainer.config import PresetName

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_VARIANTS = ("stock-fp32", "stock-bf16", "w8g8", "w4g4", "w8g8-bf16", "w4g4-bf16")

KERNELS = """\
Speed of the kernels beside a copy of the same tensor. They are compared with
the reference first; on any difference no speed is shown.

What others offer is measured beside them by `python -m benchmarks.kernel_peers`
in a checkout of qsdp's repository.
"""
LINK = """\
Latency and bandwidth between ranks.

  torchrun ... -m qsdp bench link     between your torchrun's ranks
  qsdp bench link --nproc 4           between ranks on this machine

Latency is half of a round trip of one small message. Bandwidth is that of one
direction while both are busy, as in FSDP2's collectives: two ranks swap
messages of --mib each. Pairs are measured one after another, and then all ranks
of every node at once, each with its place on the next node: what a node's ranks
get together is what a two-level collective can use.
"""
TRAIN = """\
Step times of stock FSDP2 and of qsdp on your own cluster.

  torchrun ... -m qsdp bench train --preset gpt2-125m   on your torchrun's ranks
  qsdp bench train --nproc 2                            on ranks of this machine

The trainer's own step on random tokens, with one way to communicate after
another in turn, each round in another order. Nothing is shaped: the network is
what it is.
"""


def kernels_parser() -> Parser:
    """The options of `qsdp bench kernels`."""
    return new_parser("qsdp bench kernels", KERNELS)


def new_parser(command: str, description: str | None) -> Parser:
    """The options of a benchmark of kernels: ours, and the one that compares with what others
    offer."""
    parser = _new(command, description)
    add = parser.add_argument
    add("--json", action="store_true", help="print a list of objects in place of the table")
    add("--mib", type=float, help="size of the values; default: 64, on a GPU 1024")
    add("--threads", type=int, nargs="+", default=[1, 2], help="thread counts, on CPU; default 1 2")
    add("--bits", type=int, nargs="+", choices=range(1, 9), metavar="B",
        help="1 to 8; default: 2 to 8, quick 8 4")  # fmt: skip
    add("--dtypes", nargs="+", choices=DTYPES, metavar="DTYPE",
        help=f"{', '.join(DTYPES)}; default: all, quick float32")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    add("--quick", action="store_true", help="fewer settings and runs: seconds, not minutes")
    add("--out", type=Path, metavar="FILE", help="also write the dated report to a file")
    return parser


def train_parser() -> Parser:
    """The options of `qsdp bench train`."""
    parser = _with_ranks("qsdp bench train", TRAIN)
    add = parser.add_argument
    add("--variants", nargs="+", metavar="NAME", default=list(DEFAULT_VARIANTS), help=VARIANTS)
    presets = get_args(PresetName)
    text = f"a model of the trainer, {', '.join(presets)}; else a GPT-2 of:"
    add("--preset", choices=presets, metavar="NAME", help=text)
    add("--layers", type=int, default=6)
    add("--width", type=int, default=384)
    add("--heads", type=int, default=6)
    add("--batch-size", type=int, help="sequences in a step over all ranks")
    add("--sequence-length", type=int)
    add("--steps", type=int, default=5, help="measured steps of each variant; default 5")
    add("--warm-up", type=int, default=2, help="steps before them; default 2")
    add("--timeout", type=float, default=600.0, help="seconds a collective may take")
    add("--json", action="store_true", help="print a list of objects")
    return parser


def link_parser() -> Parser:
    """The options of `qsdp bench link`."""
    parser = _with_ranks("qsdp bench link", LINK)
    add = parser.add_argument
    add("--mib", type=float, default=16.0, help="size of a large message; default 16")
    add("--timeout", type=float, default=120.0, help="seconds that a message may take")
    add("--json", action="store_true", help="print a list of objects in place of the table")
    return parser


Parser = argparse.ArgumentParser
PARSERS: dict[str, Callable[[], Parser]] = {
    "kernels": kernels_parser,
    "train": train_parser,
    "link": link_parser,
}


def _new(command: str, description: str | None) -> Parser:
    parser = Parser(prog=command, description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _with_ranks(command: str, description: str) -> Parser:
    parser = _new(command, description)
    add = parser.add_argument
    add("--nproc", type=int, metavar="N", help="ranks to start here; not under torchrun")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs if any")
    return parser
