"""Step times between hosts whose links are slowed down.

    python -m benchmarks.network      in a checkout, as root

Makes hosts out of network namespaces on this machine, starts torchrun in each, and times the
trainer's own step at one bandwidth after another: stock FSDP2 beside qsdp, in turn. Asks at each
what apply_qsdp(model, "auto") would choose. Needs Linux and root. The hosts and all processes in
them are gone afterwards, also after Ctrl-C or a failure.

The hosts share this machine's cores, so computation is what it would be on slow accelerators;
other work on the machine shows in every number.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.network import auto, report
from benchmarks.network.hosts import INTERFACE, Hosts, require_privileges
from benchmarks.network.remote import Control
from qsdp.bench.launch import torchrun
from qsdp.bench.steps import bench_config
from qsdp.plan.variant import HELP, parse_variant
from qsdp.trainer.launch import rank_environment

ROOT = Path(__file__).parents[2]
NAME = "python -m benchmarks.network"
CODED = str(Path(__file__).with_name("ways") / "w4g4-rice.json")
GBPS = (None, 10.0, 1.0, 0.5, 0.2, 0.1, 0.05)
FLAT_GBPS = (None, 0.2, 0.1)
VARIANTS = ("stock-fp32", "stock-bf16", "qsdp-fp32", "qsdp-bf16", "w8g8", "w4g4", "w8g8-bf16",
            "w4g4-bf16", "sdp4bit", "bitdp", CODED)  # fmt: skip
FLAT_VARIANTS = ("stock-fp32", "qsdp-fp32-flat", "qsdp-fp32", "w8g8-flat", "w8g8", "w4g4-flat",
                 "w4g4", "sdp4bit", "bitdp")  # fmt: skip
MASTER_PORT = 29500
NETWORK_SHARE = 0.75


class Layout(NamedTuple):
    """How many hosts, and ranks on each."""

    hosts: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.hosts}x{self.ranks}"


LAYOUTS = (Layout(2, 1), Layout(2, 2))


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write what was asked for; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        _check(options)
        require_privileges()
        found = measure_network(options)
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; hosts and processes are gone", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        return 1
    text = json.dumps(found, indent=1)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "network.json").write_text(text + "\n")
        (options.out / "network.txt").write_text(report.format_report(found) + "\n")
        report.plot(found, options.out / "network.png")
    print(text if options.json else report.format_report(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--layout", nargs="+", metavar="HxR", default=LAYOUTS, type=_layout,
        help="hosts (2 to 8) x ranks on each; default 2x1 2x2")  # fmt: skip
    add("--gbps", nargs="+", type=_gbps, metavar="G", help="limits in Gbit/s, none for no limit; "
        "default none 10 1 .5 .2 .1 .05, and with several ranks a host none .2 .1")  # fmt: skip
    add(
        "--variants",
        nargs="+",
        metavar="NAME",
        help=f"what to compare: {HELP}; default {' '.join(VARIANTS)}, and with several ranks a "
        f"host {' '.join(FLAT_VARIANTS)}",
    )
    add("--steps", type=int, default=5, help="measured steps of each variant; default 5")
    add("--warm-up", type=int, default=1, help="steps before them at each bandwidth; default 1")
    add("--layers", type=int, default=6, help="of the GPT-2; default 6, with the rest 11.1 M")
    add("--width", type=int, default=384, help="default 384")
    add("--heads", type=int, default=6, help="default 6")
    add("--vocab", type=int, default=1024, help="default 1024")
    add("--batch-size", type=int, default=8, help="sequences a step over all ranks; default 8")
    add("--sequence-length", type=int, default=128, help="default 128")
    add("--timeout", type=float, default=300.0, help="seconds a collective may take; default 300")
    add("--no-bars", action="store_true", help="leave out the bandwidth at which stock float32 "
        f"spends {NETWORK_SHARE:.0%} of its step in the network".replace("%", "%%"))  # fmt: skip
    add("--json", action="store_true", help="print JSON in place of tables")
    add("--out", type=Path, metavar="FOLDER", help="also write network.json, .txt and .png there")
    return parser


def _layout(text: str) -> Layout:
    hosts, _, ranks = text.partition("x")
    if not (hosts.isdigit() and ranks.isdigit() and 2 <= int(hosts) <= 8 and int(ranks) >= 1):
        raise argparse.ArgumentTypeError(
            f"must be HOSTSxRANKS with 2 to 8 hosts, such as 2x1, got {text}"
        )
    return Layout(int(hosts), int(ranks))


def _gbps(text: str) -> float | None:
    if text == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, or none, got {text}")
    return value


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError before anything is built."""
    for name in options.variants or ():
        parse_variant(name)
    for flag, given, least in (("--steps", options.steps, 1), ("--warm-up", options.warm_up, 0)):
        if given < least:
            raise ValueError(f"{flag} must be at least {least}, got {given}")
    for layout in options.layout:
        bench_config(**_model(options)).micro_batches(layout.hosts * layout.ranks)
        if options.batch_size % (layout.hosts * layout.ranks):
            raise ValueError(
                f"--batch-size must be a multiple of the {layout.hosts * layout.ranks} ranks of "
                f"layout {layout}, got {options.batch_size}"
            )


def _model(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "preset": None,
        "layers": options.layers,
        "width": options.width,
        "heads": options.heads,
        "vocab_size": options.vocab,
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
    }


def measure_network(options: argparse.Namespace) -> dict[str, Any]:
    """All layouts, one after another; what `--json` prints."""
    found: dict[str, Any] = {
        "facts": report.facts(),
        "model": _model(options),
        "steps": options.steps,
        "layouts": [],
    }
    for layout in options.layout:
        several = layout.ranks > 1
        gbps = options.gbps or (FLAT_GBPS if several else GBPS)
        variants = options.variants or (FLAT_VARIANTS if several else VARIANTS)
        with Hosts(layout.hosts) as hosts, _ranks(hosts, layout, options) as control:
            found["layouts"].append(
                _measure_layout(hosts, control, layout, gbps, variants, options)
            )
        found["parameters"] = found["layouts"][0]["parameters"]
    return found


def _measure_layout(
    hosts: Hosts,
    control: Control,
    layout: Layout,
    gbps: Sequence[float | None],
    variants: Sequence[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    say(f"{layout}: starting {layout.hosts * layout.ranks} ranks")
    prepared = control.ask({"do": "prepare", "variants": list(variants)})
    links = control.ask({"do": "links", "mib": 4})["links"]
    cells: list[dict[str, Any]] = []
    decided: list[dict[str, Any]] = []

    def measure(limit: float | None) -> None:
        hosts.limit(limit)
        started = time.monotonic()
        decided.extend(control.ask({"do": "decide", "gbps": limit}).values())
        request = {"do": "steps", "steps": options.steps, "warm_up": options.warm_up}
        cells.extend(report.cells(limit, control.ask(request)))
        times = "  ".join(f"{c['variant']} {c['step_s']:.2f}" for c in cells[-len(variants) :])
        say(f"{layout}: {report.speed(limit)}: {times} s  ({time.monotonic() - started:.0f} s)")

    for limit in gbps:
        measure(limit)
    at = report.gbps_of_network_share(cells, NETWORK_SHARE) if not options.no_bars else None
    if at is not None:
        measure(at)
    control.ask({"do": "end"})
    return {
        "layout": str(layout),
        "hosts": layout.hosts,
        "ranks_per_host": layout.ranks,
        "parameters": prepared["parameters"],
        "links_without_limit": links,
        "gbps_of_network_share": at,
        "cells": report.with_speedups(cells),
        "auto": auto.with_steps(decided, cells),
    }


@contextmanager
def _ranks(hosts: Hosts, layout: Layout, options: argparse.Namespace) -> Iterator[Control]:
    """torchrun on every host, and the connection to their rank 0."""
    settings = json.dumps({"model": _model(options), "timeout_s": options.timeout})
    environment = rank_environment(layout.hosts * layout.ranks) | {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
        # The ranks find this package wherever the benchmark was started.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qsdp-")))
        socket_path = str(folder / "control")
        processes: list[subprocess.Popen[bytes]] = []
        logs = [folder / f"host{host}.log" for host in range(layout.hosts)]

        def alive() -> None:
            for host, process in enumerate(processes):
                if process.poll():
                    raise RuntimeError(
                        f"the ranks of host {host} ended with status {process.returncode}: "
                        + _last_error(logs[host])
                    )

        control = Control(socket_path, alive)
        stack.callback(control.close)
        for host, log in enumerate(logs):
            command = torchrun(
                "--nnodes", str(layout.hosts), "--nproc-per-node", str(layout.ranks),
                "--node-rank", str(host), "--master-addr", hosts.address(0),
                "--master-port", str(MASTER_PORT), "-m", "benchmarks.network.remote",
                socket_path, settings,
            )  # fmt: skip
            processes.append(
                subprocess.Popen(
                    hosts.inside(host, command),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stack.enter_context(log.open("wb")),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the benchmark, which ends them
                )
            )
        yield control
        # Launchers wait for each other's end, and now and then in vain. All is measured by now, and
        # what lingers ends with the hosts.
        deadline = time.monotonic() + 30
        with suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))


def _last_error(log: Path) -> str:
    """The last line of a log that looks like an exception, or the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line and "ChildFailed" not in line]
    return (errors or lines or ["it wrote nothing"])[-1]


def say(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
