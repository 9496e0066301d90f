"""`qsdp plan`: what quantizing would gain on a cluster, before renting it.

A step is computation, encoding, decoding and transfers, overlapped as FSDP2 does it on GPUs. All
rates are in Gbit/s. docs/networks.md tells what the model knows and how well it predicts.

What computes is imported once the arguments are read, so that `--help` does not wait for torch. The
names that the help lists are written out here for the same reason.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsdp.arguments import did_you_mean, require_packages, require_writable
from qsdp.columns import format_columns

if TYPE_CHECKING:
    from qsdp.plan.clusters import Case
    from qsdp.plan.model import Prediction
    from qsdp.plan.sizes import Model
    from qsdp.plan.variant import Variant

DESCRIPTION = """\
What quantizing would gain on a cluster, before renting it.

  qsdp plan --model gpt2-1.3b --nodes 4 --ranks-per-node 8 --bandwidth 10 100
  qsdp plan --parameters 13e9 --layers 40 --nodes 64 --tflops 300
  qsdp plan --cluster qsdp-paper --json
  qsdp plan --runs runs/demo/w*   what runs would have taken on slower links
  qsdp plan --nodes 2 --bandwidth .05 --sync-every 100    nodes train alone
  qsdp plan --survey              where quantizing stops paying, 8 to 4096 ranks

A step is computation, encoding, decoding and transfers, overlapped as FSDP2
does it on GPUs. All rates are in Gbit/s. docs/networks.md tells what the model
knows and how well it predicts.
"""
CLUSTERS = ("cloud", "qsdp-paper", "sdp4bit-a100-1.3b", "sdp4bit-a100-2.7b", "sdp4bit-h800-1.3b",
            "sdp4bit-h800-2.7b")  # fmt: skip
MODELS = ("gpt2-125m", "gpt2-350m", "gpt2-1.3b", "gpt2-2.7b")
VARIANTS = (
    "stock-fp32, stock-bf16, stock-w{16|32}g{16|32} (FSDP2 as it is); qsdp-fp32, qsdp-bf16 (qsdp's "
    "transport, nothing quantized) or a preset (w8g8, qsgd4), both two-level where nodes have "
    "several ranks and with -flat for flat collectives; FILE.json with fields of QSDPConfig "
    "(two-level where it sets ranks_per_node); presets and files with -bf16 at the end to compute "
    "in bfloat16"
)
SYNC_BITS = 4
"""In which --sync-every synchronises where --sync-bits is not given."""
WORTHWHILE = 1.03
"""Below this speed-up the baseline is recommended."""
CLOSE = 1.05
"""Of steps that are this close to the fastest, the one with most bits is recommended."""


@dataclass(frozen=True)
class Answer:
    """One variant at one bandwidth."""

    bandwidth_gbps: float
    variant: Variant
    prediction: Prediction
    speedup: float
    recommended: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON values: the prediction's fields beside what it is for."""
        found = {"bandwidth_gbps": self.bandwidth_gbps, "config": self.variant.name}
        found |= {"collectives": self.variant.collectives, "speedup": self.speedup}
        return found | {"recommended": self.recommended, **self.prediction._asdict()}


def run(argv: list[str]) -> int:
    """Print the plan; returns the exit status."""
    options = _parser().parse_args(argv)
    if options.plot is not None:
        require_packages("matplotlib")
        require_writable("--plot", options.plot)
    if options.survey:
        from qsdp.plan import survey

        return survey.run(as_json=options.json, plot=options.plot)
    if options.runs:
        return _runs(options)
    chosen, measured = _case(options)
    answers = plan(chosen, _intervals(options, chosen), options.sync_bits)
    if options.plot is not None:
        from qsdp.plan.plots import plot_steps

        plot_steps(chosen, options.plot)
    if options.json:
        print(json.dumps([answer.to_json() for answer in answers], indent=1))
    else:
        print(format_plan(chosen, answers, measured))
    return 0


def _runs(options: argparse.Namespace) -> int:
    from qsdp.plan import runs

    bandwidths = options.bandwidth or runs.BANDWIDTHS
    latency_us = runs.LATENCY_US if options.latency_us is None else options.latency_us
    for name, value in (("latency-us", latency_us), *(("bandwidth", gbps) for gbps in bandwidths)):
        if not value > 0:
            raise ValueError(f"--{name} must be above 0, got {value:g}")
    return runs.run(options.runs, bandwidths, latency_us, as_json=options.json)


def _intervals(options: argparse.Namespace, chosen: Case) -> tuple[int, ...]:
    """What --sync-every gives. Raises ValueError where it cannot act."""
    intervals = tuple(options.sync_every or ())
    if options.sync_bits not in (*range(1, 9), 32):
        raise ValueError(f"--sync-bits must be 1 to 8, or 32, got {options.sync_bits}")
    if not intervals and options.sync_bits != SYNC_BITS:
        raise ValueError("--sync-bits needs --sync-every STEPS")
    if any(interval < 1 for interval in intervals):
        raise ValueError(f"--sync-every must be at least 1, got {min(intervals)}")
    if intervals and chosen.cluster.nodes < 2:
        raise ValueError("--sync-every needs --nodes of at least 2: each node is a replica")
    return intervals


def plan(chosen: Case, intervals: Sequence[int] = (), bits: int = SYNC_BITS) -> list[Answer]:
    """Every variant at every bandwidth, the first variant being the baseline.

    Args:
        intervals: steps between synchronisations of nodes that train on their own; inside a node
            the baseline. Never recommended: local steps change what is learned.
        bits: of these synchronisations.

    Raises:
        ValueError: a variant that cannot be applied to the case's model or cluster.
    """
    from qsdp.plan.local import predict_local
    from qsdp.plan.model import predict

    found: list[Answer] = []
    for gbps in chosen.bandwidths:
        cluster = replace(chosen.cluster, bandwidth_gbps=gbps)
        steps = [predict(chosen.model, cluster, chosen.work, each) for each in chosen.variants]
        here = [
            Answer(gbps, variant, step, steps[0].step_s / step.step_s)
            for variant, step in zip(chosen.variants, steps, strict=True)
        ]
        best = _recommended(here)
        found += [replace(answer, recommended=answer is best) for answer in here]
        for interval in intervals:
            base = chosen.variants[0]
            step = predict_local(chosen.model, cluster, chosen.work, base, interval, bits)
            local = replace(base, name=f"{base.name}, {bits} bits every {interval}")
            found.append(Answer(gbps, local, step, steps[0].step_s / step.step_s))
    return found


def _recommended(answers: Sequence[Answer]) -> Answer:
    fastest = min(answers, key=lambda answer: answer.prediction.step_s)
    if fastest.speedup < WORTHWHILE:
        return answers[0]
    limit = fastest.prediction.step_s * CLOSE
    close = [answer.prediction for answer in answers if answer.prediction.step_s <= limit]
    best = max(close, key=lambda found: (round(found.wire_bits), -found.step_s))
    return next(answer for answer in answers if answer.prediction is best)


def format_plan(chosen: Case, answers: Sequence[Answer], measured: Sequence[str]) -> str:
    """The assumptions, a table and the recommendation for each bandwidth."""
    cluster, work = chosen.cluster, chosen.work
    overlap = "overlapped as FSDP2 does" if cluster.overlap else "communication not overlapped"
    lines = [
        f"{chosen.model.name}, {chosen.model.numel / 1e9:.3g}B parameters; {cluster.nodes} nodes "
        f"of {cluster.ranks_per_node} ranks; {overlap}",
        f"{work.tokens * work.micro_batches:,.0f} tokens a rank and step in {work.micro_batches} "
        f"micro-batches; {cluster.tflops:g} TFLOP/s, codec {cluster.codec_gbps:g} Gbit/s",
        *(f"assumed: {note}" for note in chosen.notes),
        *measured,
        "",
    ]
    header = ("Gbit/s", "config", "step s", "speed-up", "GB out of node", "compute", "network",
              "codec", "largest", "")  # fmt: skip
    rows = []
    for answer in answers:
        found = answer.prediction
        times = (f"{value:.3f}" for value in (found.compute_s, found.network_s, found.codec_s))
        rows.append(
            (f"{answer.bandwidth_gbps:g}", answer.variant.name, f"{found.step_s:.3f}",
             f"{answer.speedup:.2f}", f"{found.between_nodes / 1e9:.2f}", *times, found.limit,
             "recommended" if answer.recommended else "")
        )  # fmt: skip
    return "\n".join([*lines, format_columns(header, rows)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qsdp plan", description=DESCRIPTION)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--cluster",
        default="cloud",
        metavar="NAME",
        help=f"start from a case: {', '.join(CLUSTERS)}",
    )
    add("--model", metavar="NAME", help=f"a GPT-2 of this size: {', '.join(MODELS)}")
    add("--parameters", type=float, metavar="N", help="or a model by its size, with --layers")
    add("--layers", type=int, metavar="N", help="layers of the model of --parameters")
    add("--nodes", type=int, metavar="N")
    add("--ranks-per-node", type=int, metavar="N")
    add(
        "--bandwidth",
        type=float,
        nargs="+",
        metavar="GBPS",
        help="Gbit/s of a node's link, one way",
    )
    add("--latency-us", type=float, metavar="US", help="between nodes")
    add("--intra-gbps", type=float, metavar="GBPS", help="Gbit/s of a rank inside its node")
    add("--intra-latency-us", type=float, metavar="US", help="inside a node")
    add("--tflops", type=float, metavar="T", help="that a rank achieves, forward and backward")
    add(
        "--codec-gbps",
        type=float,
        metavar="GBPS",
        help="Gbit/s of float32 values that a rank "
        "encodes or decodes: 8 times the GB/s of qsdp bench kernels",
    )
    add("--tokens", type=float, metavar="N", help="of a micro-batch on one rank")
    add("--micro-batches", type=int, metavar="N", help="forwards in a step")
    add("--sync-every-micro-batch", action="store_true", help="reduce after each of them")
    add("--recompute", action="store_true", help="activation checkpointing")
    add("--overlap", action=argparse.BooleanOptionalAction, help="of collectives and computation")
    _add_local(add)
    add("--configs", nargs="+", metavar="NAME", help=f"the first is the baseline: {VARIANTS}")
    add("--measure", action="store_true", help="take codec and link rates from this machine")
    add("--survey", action="store_true", help="8 to 4096 ranks, 1B to 70B, 1 to 400 Gbit/s")
    add(
        "--runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="instead: what these runs of qsdp train would have taken with each rank on a machine "
        "of its own, by what they measured; takes --bandwidth, --latency-us and --json",
    )
    add("--plot", type=Path, metavar="FILE", help="also draw step time against bandwidth (PNG)")
    add("--json", action="store_true", help="print a list of objects in place of the table")
    return parser


def _add_local(add: Callable[..., argparse.Action]) -> None:
    add("--sync-every", type=int, nargs="+", metavar="STEPS",
        help="also nodes that train on their own, each a replica, and synchronise their weights "
        "after so many steps (docs/local_steps.md)")  # fmt: skip
    add("--sync-bits", type=int, default=SYNC_BITS, metavar="B", help="of these, 1 to 8 or 32")


def _case(options: argparse.Namespace) -> tuple[Case, list[str]]:
    """The case that the flags describe, and lines about what was measured for it."""
    from qsdp.plan.clusters import Case, case

    try:
        chosen = case(options.cluster)
    except ValueError as error:
        raise ValueError(f"{error}{did_you_mean(options.cluster, CLUSTERS)}") from error
    work, cluster, lines = chosen.work, chosen.cluster, []
    if options.measure:
        from qsdp.plan.measure import measure_rates

        rates = measure_rates()
        cluster = replace(cluster, **rates.settings)
        lines = rates.lines
    names = ("nodes", "ranks_per_node", "latency_us", "intra_gbps", "intra_latency_us", "tflops",
             "codec_gbps", "overlap")  # fmt: skip
    cluster = replace(cluster, **_given(options, names))
    work = replace(work, **_given(options, ("tokens", "micro_batches")))
    work = replace(
        work,
        sync_every=work.sync_every or options.sync_every_micro_batch,
        recompute=work.recompute or options.recompute,
    )
    bandwidths = tuple(options.bandwidth or chosen.bandwidths)
    for name, value in (*vars(cluster).items(), ("tokens", work.tokens),
                        ("micro_batches", work.micro_batches),
                        *(("bandwidth", gbps) for gbps in bandwidths)):  # fmt: skip
        if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    model = _model(options) or chosen.model
    variants = _variants(options.configs or ()) or chosen.variants
    return Case(model, cluster, work, variants, bandwidths, chosen.notes), lines


def _model(options: argparse.Namespace) -> Model | None:
    """The model that the flags name or describe; None where they say nothing of it."""
    from qsdp.plan.clusters import preset_model
    from qsdp.plan.sizes import from_counts

    if (options.parameters is None) != (options.layers is None):
        raise ValueError("--parameters and --layers belong together: give both or neither")
    if options.parameters is not None:
        if options.model is not None or options.parameters < 1e6 or options.layers < 1:
            raise ValueError(
                "--parameters must be at least 1e6 and --layers at least 1, without --model; got "
                f"{options.parameters:g}, {options.layers} and {options.model}"
            )
        return from_counts(options.parameters, options.layers, sequence=2048)
    if options.model is None:
        return None
    if options.model not in MODELS:
        raise ValueError(
            f"--model must be one of {', '.join(MODELS)}, got {options.model}"
            + did_you_mean(options.model, MODELS)
        )
    return preset_model(options.model)


def _variants(names: Sequence[str]) -> tuple[Variant, ...]:
    from qsdp.plan.variant import parse_variant

    try:
        return tuple(map(parse_variant, names))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--configs: there is no file {error.filename}") from error


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
