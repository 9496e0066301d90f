"""Local steps over a slow link beside methods that talk every step: loss, bytes and time.

    python -m benchmarks.local_steps --out benchmarks/results      in a checkout, as root

Two hosts out of network namespaces on this machine (benchmarks/network), one rank on each, joined
by a link of 20 Mbit/s. Every method trains the same GPT-2 on the plays of Shakespeare with the same
batches. Methods with local steps train over the slow link; those that talk every step would take
too long there, so that they train without a limit, and a few of their steps are timed over the
link. Times without a network are those of the same steps less what they spent in the network.

The hosts share this machine's cores; other work on it shows in every time, but not in bytes or
losses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.network.hosts import INTERFACE, Hosts, require_privileges
from qsdp.bench.launch import torchrun
from qsdp.columns import format_columns
from qsdp.trainer.comm import quantize_communication
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.data import Data, prepare_data
from qsdp.trainer.evaluate import validation_loss
from qsdp.trainer.launch import rank_environment
from qsdp.trainer.local import averaged, make_local
from qsdp.trainer.metrics import step_medians
from qsdp.trainer.model import build_model, build_optimizer, num_parameters, shard
from qsdp.trainer.ranks import Ranks, process_group
from qsdp.trainer.step import Training, take_step

ROOT = Path(__file__).parents[1]
PORT = 29511
TIMED = 8  # steps of a method that talks every step, over the slow link

Method = dict[str, Any]
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}
EVERY_STEP: dict[str, Method] = {
    "stock FSDP2": {"comm": "w32g32"},
    "w8g8": {"comm": "w8g8"},
    "w4g4": {"comm": "w4g4"},
}
LOCAL: dict[str, Method] = {
    "average, H 10, 4 bits": {"sync_every": 10, "sync_bits": 4},
    "average, H 10, 1 bit": {"sync_every": 10, "sync_bits": 1},
    "QSR, raw": {"sync_every": 4, "sync_alpha": 0.004375},
    "QSR, 4 bits": {"sync_every": 4, "sync_alpha": 0.004375, "sync_bits": 4},
    "DiLoCo, H 10, 4 bits": {"sync_every": 10, "sync_bits": 4, **DILOCO},
    "DiLoCo, H 30, 4 bits": {"sync_every": 30, "sync_bits": 4, **DILOCO},
    "DiLoCo, H 30, 2 bits": {"sync_every": 30, "sync_bits": 2, **DILOCO},
    "DiLoCo, H 100, 4 bits": {"sync_every": 100, "sync_bits": 4, **DILOCO},
    "streaming, H 30, 4 bits": {
        "sync_every": 30, "sync_bits": 4, "sync_fragments": 3, "sync_overlap": 5, **DILOCO,
    },
    "streaming, H 10, 1 bit": {
        "sync_every": 10, "sync_bits": 1, "sync_fragments": 2, "sync_overlap": 4,
    },
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.worker:
        _work(json.loads(options.worker))
        return 0
    require_privileges()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"settings": _settings(options), "methods": {}}
    with tempfile.TemporaryDirectory(prefix="qsdp-") as folder, Hosts(2) as hosts:
        for mbit, methods, steps, validate in (
            (options.mbit, LOCAL, options.steps, True),
            (options.mbit, EVERY_STEP, TIMED, False),
            (None, EVERY_STEP, options.steps, True),
        ):
            hosts.limit(None if mbit is None else mbit / 1000)
            chosen = {n: m for n, m in methods.items() if n in (options.methods or methods)}
            work = {"folder": folder, "methods": chosen, "take": steps, "validate": validate}
            answers = _run(hosts, _settings(options) | work)
            for name, answer in answers.items():
                entry = found["methods"].setdefault(name, {})
                # Of what talks every step the time counts over the link, the loss without it.
                entry |= {n: v for n, v in answer.items() if mbit or n in ("loss", "train_loss")}
            (options.out / "local-steps.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(found, options.out / "local-steps.png")
    text = format_found(found)
    (options.out / "local-steps.txt").write_text(text + "\n")
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local_steps", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    add("--steps", type=int, default=1400, help="of every training; default 1400")
    add("--mbit", type=float, default=20.0, help="of the link, each way; default 20")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--seed", type=int, default=17)
    add("--methods", nargs="+", metavar="NAME", choices=[*EVERY_STEP, *LOCAL],
        help="only these: " + "; ".join([*EVERY_STEP, *LOCAL]))  # fmt: skip
    add("--worker", help=argparse.SUPPRESS)
    return parser


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("steps", "mbit", "layers", "width", "seed")
    return {name: getattr(options, name) for name in names}


def _run(hosts: Hosts, work: dict[str, Any]) -> dict[str, Any]:
    """torchrun on both hosts; what rank 0 wrote, by method."""
    answer = Path(work["folder"]) / "answer.json"
    answer.unlink(missing_ok=True)
    environment = rank_environment(2) | {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    processes = []
    for host in range(2):
        command = torchrun(
            "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(host),
            "--master-addr", hosts.address(0), "--master-port", str(PORT),
            "-m", "benchmarks.local_steps", "--worker", json.dumps(work),
        )  # fmt: skip
        log = (Path(work["folder"]) / f"host{host}.log").open("w")
        processes.append(
            subprocess.Popen(
                hosts.inside(host, command), env=environment, stdout=log, stderr=log, cwd=ROOT
            )
        )
    statuses = [process.wait(timeout=3600) for process in processes]
    if any(statuses):
        print((Path(work["folder"]) / "host0.log").read_text()[-3000:], file=sys.stderr)
        raise RuntimeError(f"the ranks ended with status {statuses}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _work(work: dict[str, Any]) -> None:
    """One rank of one training after another; rank 0 writes what each gave."""
    with process_group("cpu", 1800.0) as ranks:
        base = _config(work)
        data = prepare_data(base, ranks)
        answers = {}
        for name, method in work["methods"].items():
            local_steps = "sync_every" in method
            config = dataclasses.replace(base, replicate=2 if local_steps else 1, **method)
            training = _prepare(config, ranks, data)
            records = [take_step(training, step).metrics for step in range(1, work["take"] + 1)]
            answers[name] = _answer(records, training)
            if work["validate"]:
                arguments = (training.model, data.valid, config, ranks)
                with averaged(training.local):
                    loss = validation_loss(*arguments, limit=config.final_eval_windows)
                answers[name]["loss"] = loss
            if ranks.rank == 0:
                print(name, answers[name], flush=True)
                (Path(work["folder"]) / "answer.json").write_text(json.dumps(answers))


def _config(work: dict[str, Any]) -> TrainConfig:
    heads = max(1, work["width"] // 32)
    return TrainConfig(
        folder=Path(work["folder"]) / "run", steps=work["steps"], seed=work["seed"],
        layers=work["layers"], width=work["width"], heads=heads, lr=2e-3, final_lr_fraction=0.02,
        warmup_steps=min(100, work["steps"] // 14), timeout=1800.0, log_every=10**9,
    )  # fmt: skip


def _prepare(config: TrainConfig, ranks: Ranks, data: Data) -> Training:
    model = build_model(config, data.tokenizer)
    mesh = shard(model, config, ranks)
    optimizer = build_optimizer(model, config)
    quantize_communication(model, config)
    local = make_local(model, optimizer, mesh, config, 0)
    return Training(config, ranks, model, optimizer, data.batches, local)


def _answer(records: list[dict[str, Any]], training: Training) -> dict[str, Any]:
    """Means over the training; of what talks every step, medians of the steps."""
    medians = step_medians(records)
    return {
        "parameters": num_parameters(training.model),
        "sent": medians["sent"],
        "step_s": medians["step_s"],
        "network_s": medians["network_s"],
        "rounds": sum(bool(record.get("synchronised")) for record in records),
        "train_loss": statistics.mean(record["loss"] for record in records[-50:]),
    }


def plot(found: dict[str, Any], path: Path) -> None:
    """Loss against bytes a step, and against the time of a step; both scales logarithmic in x."""
    from matplotlib import ticker
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=80, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    labels = (("sent", 1e3, "kB a rank sends a step"), ("step_s", 1e-3, "ms a step"))
    for axes, (key, unit, label) in zip(panels, labels, strict=True):
        for name, of in found["methods"].items():
            if "loss" in of and key in of:
                x = of[key] / unit
                axes.plot(x, of["loss"], "o" if name in EVERY_STEP else "s", label=name)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss")
    panels[1].legend(fontsize=7)
    figure.savefig(path)


def format_found(found: dict[str, Any]) -> str:
    """A table by method; bytes and time beside stock FSDP2's."""
    methods, settings = found["methods"], found["settings"]
    stock = methods.get("stock FSDP2", {})
    header = ("method", "loss", "to stock", "kB a step", "fewer", "step ms", "network ms",
              "network share", "synchronised")  # fmt: skip
    rows = []
    for name, of in methods.items():
        loss, base = of.get("loss"), stock.get("loss")
        step_s, network_s = of.get("step_s", 0.0), of.get("network_s", 0.0)
        fewer = stock["sent"] / of["sent"] if stock.get("sent") and of.get("sent") else None
        rows.append(
            (
                name,
                "-" if loss is None else f"{loss:.4f}",
                "-" if loss is None or base is None else f"{100 * (loss / base - 1):+.2f} %",
                f"{of.get('sent', 0) / 1e3:.1f}",
                "-" if fewer is None else f"{fewer:.0f}x",
                f"{1e3 * step_s:.0f}",
                f"{1e3 * network_s:.1f}",
                f"{100 * network_s / step_s:.1f} %" if step_s else "-",
                f"{of['rounds']} times" if of.get("rounds") else "every step",
            )
        )
    parameters = next(iter(methods.values()))["parameters"]
    return "\n".join(
        [
            f"GPT-2 of {parameters:,} parameters, {settings['steps']} steps of 8 x 128 tokens over "
            f"two hosts of one rank, link {settings['mbit']:g} Mbit/s, seed {settings['seed']}.",
            "Validation loss at the end; bytes and times of rank 0, means over whole rounds (every "
            "step: medians).",
            "",
            format_columns(header, rows),
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
