"""What every part takes from its command line."""

from __future__ import annotations

import argparse

import torch


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """With ``--device``."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same, in small"
    )
    return parser


def device_of(text: str | None, argv: list[str] | None = None) -> torch.device:
    """Of a part that takes nothing else."""
    return torch.device(parser_of(text).parse_args(argv).device)
