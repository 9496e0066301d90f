"""What runs of `qsdp train` would have taken on links, by what they measured themselves.

Ranks that share a machine have memory for a network, so they cannot show the time that fewer bytes
save. Here each rank gets a machine of its own: computation, coding and what gloo moves are the
runs', bytes are counted by the planner, and the link is given. Reads the run folders only.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qsdp.columns import format_columns
from qsdp.config import QSDPConfig
from qsdp.plan.cluster import Cluster, Gloo, gbps_of
from qsdp.plan.model import Prediction, Work, predict
from qsdp.plan.sizes import Model, gpt2
from qsdp.plan.variant import Variant

BANDWIDTHS = (0.1, 1.0, 10.0)
LATENCY_US = 50.0
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """A finished run, as the planner needs it.

    Attributes:
        step: medians of its steps, as metrics.jsonl names them.
        train_s: seconds that all its steps took where it ran.
    """

    name: str
    model: Model
    variant: Variant
    ranks: int
    micro_batches: int
    sync_every: bool
    steps: int
    step: Mapping[str, float]
    train_s: float


def run(folders: Sequence[Path], bandwidths: Sequence[float], latency_us: float, *, as_json: bool
        ) -> int:  # fmt: skip
    """Print a table of times by link; returns the exit status."""
    runs = [read_run(folder) for folder in folders]
    if len({each.ranks for each in runs}) > 1:
        found = ", ".join(f"{each.name} {each.ranks}" for each in runs)
        raise ValueError(f"--runs must have one number of ranks, got {found}")
    compute_s = statistics.median(each.step["compute_s"] for each in runs)
    answers = {
        gbps: [predict_run(each, compute_s, gbps, latency_us) for each in runs]
        for gbps in bandwidths
    }
    if as_json:
        print(json.dumps(_rows(runs, answers), indent=1))
    else:
        print(format_runs(runs, answers, compute_s, latency_us))
    return 0


def read_run(folder: Path) -> Run:
    """A run folder of `qsdp train`.

    Raises:
        OSError, ValueError: no finished run, or one that the planner does not know; in one line.
    """
    config, result = (_read(folder / name) for name in ("config.json", "result.json"))
    why = _unknown(config, result)
    if why is not None:
        raise ValueError(f"--runs: {folder} {why}")
    ranks, batch = result["num_ranks"], config["batch_size"]
    micro = config["micro_batch_size"]
    comm, keep = config["comm"], dict.fromkeys(config["keep_full_precision"])
    content = json.loads(comm) if comm.startswith("{") else {"preset": comm}
    content.pop("name", None)
    try:
        quantized = QSDPConfig.from_json(content).with_exceptions(keep)
        weights, gradients = (_DTYPES[config[name]] for name in ("precision", "reduce_precision"))
        model = gpt2(
            config["layers"], config["width"], vocab=config["vocab_size"],
            sequence=config["sequence_length"],
        )  # fmt: skip
        return Run(
            folder.resolve().name, model, Variant(comm, quantized, weights, gradients), ranks,
            batch // (ranks * micro) if micro else 1, config["sync_every_micro_batch"],
            result["steps"], result["median_step"], result["train_s"],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--runs: {folder} is damaged or of another version: {error}") from error


def _unknown(config: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Why the planner cannot tell what such a run sends or takes."""
    if config.get("model") is not None:
        return "trains a --model, and the planner knows the presets' GPT-2 only"
    if config.get("architecture") == "llama" or config.get("fake_quantize") is not None:
        return "trains a Llama or with --fake-quantize, and the planner knows GPT-2 only"
    if config.get("replicate", 1) > 1 or (config.get("ranks_per_node") or 1) > 1:
        return "has replicas or two levels, which ranks on machines of their own have not"
    if result.get("device", "cpu") != "cpu":
        return "ran on GPUs, where computation hides what the network takes; see --measure"
    return "has one rank, and so no network" if result.get("num_ranks") == 1 else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"--runs: {path.parent} holds no finished run: no {path.name}")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--runs: {path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--runs: {path} is damaged: it holds no JSON object")
    return content


def predict_run(found: Run, compute_s: float, gbps: float, latency_us: float) -> Prediction:
    """One step with every rank behind a link of ``gbps``.

    Args:
        compute_s: of a step. Encoding and decoding are added as the run measured them.
    """
    seconds = compute_s + found.step["encode_s"] + found.step["decode_s"]
    work = Work(0.0, found.micro_batches, sync_every=found.sync_every,
                compute_s=seconds / found.micro_batches)  # fmt: skip
    cluster = Cluster(
        "run", nodes=found.ranks, ranks_per_node=1, bandwidth_gbps=float("inf"),
        latency_us=latency_us, intra_gbps=float("inf"), intra_latency_us=0.0, tflops=1.0,
        codec_gbps=float("inf"), overlap=False, gloo=Gloo(),
    )  # fmt: skip
    quiet = predict(found.model, cluster, work, found.variant)
    # What gloo moves where memory is the network; on a link it takes that time, too.
    here = gbps_of(quiet.between_nodes, found.step["network_s"])
    cluster = replace(cluster, bandwidth_gbps=gbps, gloo=Gloo(stock_gbps=here, swap_gbps=here))
    return predict(found.model, cluster, work, found.variant)


def _rows(
    runs: Sequence[Run], answers: Mapping[float, Sequence[Prediction]]
) -> list[dict[str, Any]]:
    return [
        {"bandwidth_gbps": gbps, "run": each.name, "train_s": each.steps * step.step_s,
         "speedup": steps[0].step_s * runs[0].steps / (each.steps * step.step_s),
         **step._asdict()}
        for gbps, steps in answers.items()
        for each, step in zip(runs, steps, strict=True)
    ]  # fmt: skip


def format_runs(
    runs: Sequence[Run],
    answers: Mapping[float, Sequence[Prediction]],
    compute_s: float,
    latency_us: float,
) -> str:
    """What was taken, and minutes by link and run; the first run is compared with."""
    first, *others = runs
    steps = sorted({each.steps for each in runs})
    lines = [
        f"What these runs would take with each of the {first.ranks} ranks on a machine of its own:",
        f"minutes for {' or '.join(map(str, steps))} steps, and how many times faster than "
        f"{first.name}. Computation",
        f"({1000 * compute_s:.0f} ms a step, the median of the runs), coding and gloo's own speed "
        "are as",
        f"measured in the runs; bytes are counted; a message takes {latency_us:g} us to arrive.",
        "",
    ]
    header = ["link", first.name]
    for each in others:
        header += [each.name, "faster"]
    table = []
    for gbps, predictions in answers.items():
        times = [each.steps * p.step_s for each, p in zip(runs, predictions, strict=True)]
        cells = [_link(gbps), f"{times[0] / 60:.1f}"]
        for time in times[1:]:
            cells += [f"{time / 60:.1f}", f"{times[0] / time:.2f}x"]
        table.append(cells)
    cells = ["as measured here", f"{first.train_s / 60:.1f}"]
    for each in others:
        cells += [f"{each.train_s / 60:.1f}", f"{first.train_s / each.train_s:.2f}x"]
    return "\n".join([*lines, format_columns(header, [*table, cells])])


def _link(gbps: float) -> str:
    return f"{gbps:g} Gbit/s" if gbps >= 1 else f"{1000 * gbps:g} Mbit/s"
