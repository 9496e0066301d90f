"""`qsdp tune RUN --bits B --out FILE`: choose the width of every parameter; write a --comm file.

Arguments are read here; what measures and chooses is imported afterwards.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from qsdp.arguments import require_packages, require_writable
from qsdp.tune.allocate import WIDTHS


def run(argv: list[str]) -> int:
    """Exit status of `qsdp tune argv`. Raises ValueError and OSError on bad use."""
    options = _parser().parse_args(argv)
    narrow, wide = WIDTHS[0], WIDTHS[-1]
    if not narrow <= options.bits <= wide:
        raise ValueError(f"--bits must be between {narrow} and {wide}, got {options.bits:g}")
    if options.max_loss is not None and not 0 <= options.max_loss < math.inf:
        raise ValueError(f"--max-loss must be at least 0, got {options.max_loss:g}")
    if options.batches < 1:
        raise ValueError(f"--batches must be at least 1, got {options.batches}")
    if not options.run.is_dir():
        raise FileNotFoundError(f"there is no run folder {options.run}")
    require_packages("transformers", "tokenizers", "safetensors", "numpy", "rich")
    require_writable("--out", options.out)
    from qsdp.tune.choose import tune

    tune(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qsdp tune",
        description="Measure what quantizing each parameter of a model does; choose bit widths.",
    )
    add = parser.add_argument
    add("run", type=Path, help="folder of a run with a checkpoint")
    add("--bits", type=float, default=4.0, help="bits a value on average, each way; default 4")
    add("--max-loss", type=float, help="for weights, in place of --bits: nats the loss may rise")
    add(
        "--base",
        help="preset or JSON file whose quantizers get other widths; default: those of w4g4, with "
        "weights as values",
    )
    add("--batches", type=int, default=4, help="batches of training text to measure on; default 4")
    add("--out", type=Path, required=True, help="JSON file to write")
    return parser
