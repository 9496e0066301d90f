"""The command `qsdp`: a table of sub-commands, each imported when it is called.

A sub-command is a function `run(argv) -> exit status` in a module of its own. ValueError, OSError
and RuntimeError are for the user: one line on stderr and exit status 1.
"""

from __future__ import annotations

import importlib
import os
import sys

COMMANDS = {
    "train": ("qsdp.trainer.command", "pretrain or continue a language model"),
    "report": ("qsdp.trainer.report", "compare runs: a table and plots"),
    "plan": ("qsdp.plan.command", "what quantizing would gain on a cluster, before renting it"),
    "sweep": ("qsdp.sweep.command", "train a grid of configurations and seeds, and compare"),
    "tune": ("qsdp.tune.command", "choose the bits of every parameter for a budget"),
    "check": ("qsdp.check", "which kernels run here, and whether they match the reference"),
    "bench": ("qsdp.bench", "speed of the kernels beside a copy and what others offer"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        print(f"qsdp: error: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[name][0])
    try:
        status: int = module.run(rest)
        return status
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        print(f"qsdp {name}: error: {error}", file=sys.stderr)
        return 1


def _usage() -> str:
    lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
    return "usage: qsdp COMMAND [OPTIONS]\n\n" + "\n".join(
        [*lines, "", "`qsdp COMMAND --help` lists the options of a command."]
    )
