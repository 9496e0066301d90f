"""The command `qsdp`: a table of sub-commands, each imported when it is called.

A sub-command is a function `run(argv) -> exit status` in a module of its own. ValueError, OSError
and RuntimeError are for the user: one line on stderr and exit status 1. So is a package that the
extra `train` would bring. A sub-command imports what its work needs, torch above all, after it has
read its arguments, so that `--help` is there at once.
"""

from __future__ import annotations

import importlib
import os
import sys

from qsdp import __version__
from qsdp.arguments import did_you_mean, lacks, missing_package

COMMANDS = {
    "train": ("qsdp.trainer.command", "pretrain or continue a language model"),
    "report": ("qsdp.trainer.report", "compare runs: a table and plots"),
    "plan": ("qsdp.plan.command", "what quantizing would gain on a cluster, before renting it"),
    "sweep": ("qsdp.sweep.command", "train a grid of configurations and seeds, and compare"),
    "tune": ("qsdp.tune.command", "choose the bits of every parameter for a budget"),
    "domains": ("qsdp.domains.command", "quantized training on data from elsewhere (QT-DoG)"),
    "check": ("qsdp.check", "which kernels run here, and whether they match the reference"),
    "bench": ("qsdp.bench", "speed of the kernels, of training and of links, on your machines"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name == "--version":
        print(f"qsdp {__version__}")
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        print(f"qsdp: error: no command {name!r}{hint}", file=sys.stderr)
        return 2
    try:
        status: int = importlib.import_module(COMMANDS[name][0]).run(rest)
        return status
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        package = missing_package(error)
        if package is None:
            raise
        return _fail(name, lacks(package))
    except (ValueError, OSError, RuntimeError) as error:
        return _fail(name, str(error))


def _fail(name: str, message: str) -> int:
    print(f"qsdp {name}: error: {message}", file=sys.stderr)
    return 1


def _usage() -> str:
    lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: qsdp COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "`qsdp COMMAND --help` lists the options of a command.",
            "`qsdp --version` tells the version.",
        ]
    )
