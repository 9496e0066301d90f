"""`qsdp domains --out FOLDER`: leave one domain out at a time, then the table and the plot.

Every target and seed is a file of its own, so that an interrupted command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from qsdp.arguments import did_you_mean, require_package, require_packages

_SETTINGS = "settings.json"
_NOT_SETTINGS = ("out", "report", "json", "targets", "seeds", "folder")


def run(argv: list[str]) -> int:
    """Exit status of `qsdp domains argv`. Raises ValueError, OSError, RuntimeError on bad use."""
    options = _parser().parse_args(argv)
    _check(options)
    require_packages("numpy", "matplotlib", "safetensors")
    if options.data == "glyphs":
        require_package("--data glyphs", "sklearn", "'qsdp[domains]'")
    if options.folder is not None and options.data != "fashion":
        raise ValueError("--folder is of --data fashion; leave it out")
    import torch

    torch.set_num_threads(1)  # layers are small: more threads wait more than they compute
    from qsdp.domains.data import FASHION_FOLDER, SETS
    from qsdp.domains.runs import missing, read_runs, take

    extra = (options.folder or FASHION_FOLDER,) if options.data == "fashion" else ()
    domains = SETS[options.data](options.images, 0, *extra)
    names = [domain.name for domain in domains]
    for target in options.targets:
        if target not in names:
            raise ValueError(
                f"--targets: {options.data} has no domain {target!r}"
                f"{did_you_mean(target, names) or ', but ' + ', '.join(names)}"
            )
    targets = options.targets or names
    _settle(options)
    if not options.report:
        wanted = missing(options.out, targets, options.seeds)
        for number, (target, seed) in enumerate(wanted, 1):
            print(f"[{number}/{len(wanted)}] {target} left out, seed {seed}", flush=True)
            take(options, domains, target, seed)
    runs = read_runs(options.out, targets, options.seeds)
    _report(options, domains, runs)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qsdp domains",
        description="Train on all domains but one, with and without quantized weights (QT-DoG), "
        "and test on that one.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the runs, the table and the plot")
    add("--data", choices=("glyphs", "fashion"), default="glyphs",
        help="digits in typefaces and by hand, or Fashion-MNIST in six angles")  # fmt: skip
    add("--folder", type=Path, help="where Fashion-MNIST lies; default: of the Debian package")
    add("--images", type=int, default=500, help="images of each domain; default 500")
    add("--targets", nargs="+", default=[], metavar="NAME", help="domains to leave out; all")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], metavar="N")
    add("--bits", nargs="+", type=int, default=[8, 7, 6, 5, 4, 3, 2], metavar="N")
    add("--steps", type=int, default=800, help="training steps; default 800")
    add("--switch", type=int, default=400, help="step at which quantization begins; default 400")
    add("--batch", type=int, default=16, help="images of each source in a step; default 16")
    add("--lr", type=float, default=3e-3, help="learning rate of Adam; default 0.003")
    add("--check-every", type=int, default=100, help="steps between validations; default 100")
    add("--gamma", type=float, default=1.0, help="radius at which flatness is measured; default 1")
    add("--samples", type=int, default=10, help="draws of the flatness; 0 for none; default 10")
    add("--report", action="store_true", help="train nothing: compare what is there")
    add("--json", action="store_true", help="print the rows as JSON")
    return parser


def _check(options: argparse.Namespace) -> None:
    for name in ("images", "steps", "batch", "check_every"):
        low = 5 if name == "images" else 1
        if getattr(options, name) < low:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be at least {low}, got {getattr(options, name)}")
    if not 0 <= options.switch < options.steps:
        raise ValueError(
            f"--switch must be from 0 to below --steps {options.steps}, got {options.switch}"
        )
    for name in ("lr", "gamma"):
        if not 0 < getattr(options, name) < float("inf"):
            raise ValueError(f"--{name} must be a positive number, got {getattr(options, name)}")
    if options.samples < 0:
        raise ValueError(f"--samples must be at least 0, got {options.samples}")
    for name, low, high in (("bits", 2, 8), ("seeds", 0, 1 << 31)):
        values = getattr(options, name)
        if len(set(values)) < len(values) or not all(low <= value <= high for value in values):
            raise ValueError(
                f"--{name} must be different numbers from {low} to {high}, got "
                f"{' '.join(map(str, values))}"
            )


def _settle(options: argparse.Namespace) -> None:
    """The folder keeps one set of settings.

    Raises:
        ValueError: it has runs of other ones.
    """
    own: dict[str, Any] = {k: v for k, v in vars(options).items() if k not in _NOT_SETTINGS}
    path = options.out / _SETTINGS
    if path.is_file():
        saved = json.loads(path.read_text())
        for name, value in own.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"{options.out} was run with --{name.replace('_', '-')} {saved.get(name)}, "
                    f"got {value}: give the same, or another --out"
                )
    elif options.report:
        raise FileNotFoundError(f"--report: {options.out} holds no runs of qsdp domains")
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(own, indent=1) + "\n")


def _report(options: argparse.Namespace, domains: Any, runs: Any) -> None:
    """Print the table; write it as text, JSON and a plot beside the runs."""
    from qsdp.domains.plot import draw
    from qsdp.domains.table import summarise, text_of

    if not runs:
        raise ValueError(f"{options.out} holds no run of these targets and seeds yet")
    labels = {domain.name: domain.labels for domain in domains}
    rows = summarise(runs, labels, options.bits)
    as_json = json.dumps([row._asdict() for row in rows], indent=1)
    (options.out / "domains.json").write_text(as_json + "\n")
    text = text_of(rows, runs)
    (options.out / "domains.txt").write_text(text)
    draw(rows, options.out / "domains.png")
    print(as_json if options.json else f"{text}\n{options.out / 'domains.png'}")
