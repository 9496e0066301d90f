"""`qsdp report RUN...`: a table that compares runs, and plots of them.

Reads what `qsdp train` left in the run folders; starts neither ranks nor torch.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from rich.table import Table

from qsdp.arguments import require_packages
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.metrics import METRICS, RESULT, format_bytes, read_metrics, step_medians
from qsdp.trainer.tables import new_table, print_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Compare runs: a table, and plots of loss, bytes and step time."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folders."""
    out: Path | None = None
    """Folder of the plots; default: the folder that the first run lies in."""
    json: bool = False
    """Print the comparison as JSON in place of the table, and draw nothing."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("give at least one run folder: qsdp report RUN...")


class RunReport(NamedTuple):
    """What one run folder says."""

    name: str
    comm: str
    steps: int
    """Steps that were taken; fewer than planned where the run is not finished."""
    planned_steps: int
    perplexity_decoded: float | None
    """Validation perplexity on the weights that training sees: the last one there is."""
    perplexity_master: float | None
    """On the full-precision masters, measured at the end of a run."""
    medians: dict[str, float]
    """Of the training steps; see `step_medians`."""
    records: list[dict[str, Any]]

    @property
    def finished(self) -> bool:
        return self.perplexity_master is not None

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than stock FSDP2."""
        sent = self.medians.get("sent", 0)
        return self.medians["stock_sent"] / sent if sent else 1.0


def run(argv: list[str]) -> int:
    """Exit status of `qsdp report argv`. Raises ValueError and OSError on bad use."""
    config = tyro.cli(ReportConfig, prog="qsdp report", args=argv)
    if not config.json:
        require_packages("matplotlib")
    reports = read_runs(config.runs)
    if config.json:
        print(json.dumps([summary(report) for report in reports], indent=1))
        return 0
    print_table(comparison(reports))
    out = config.out or config.runs[0].resolve().parent
    drawable = [report for report in reports if report.medians]
    if drawable:
        from qsdp.trainer.plots import draw

        for path in draw(drawable, out):
            print(_shortest(path))
    return 0


def read_runs(folders: tuple[Path, ...]) -> list[RunReport]:
    """Reports under names that tell the runs apart. Raises ValueError on a folder that holds no
    run."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> RunReport:
    config = _read_json(folder / "config.json")
    if config is None:
        raise FileNotFoundError(f"{folder} is no run folder of qsdp train: it has no config.json")
    records = read_metrics(folder / METRICS)
    result = _read_json(folder / RESULT) or {}
    validations = [r["valid_perplexity"] for r in records if "valid_perplexity" in r]
    try:
        return RunReport(
            name=name,
            comm=TrainConfig.from_json(config).comm_name,
            steps=max((r["step"] for r in records), default=0),
            planned_steps=config["steps"],
            perplexity_decoded=result.get("valid_perplexity_decoded", (validations or [None])[-1]),
            perplexity_master=result.get("valid_perplexity_master"),
            medians=step_medians(records),
            records=records,
        )
    except KeyError as error:
        raise ValueError(f"{folder} holds a damaged run: it lacks {error}") from error


def summary(report: RunReport) -> dict[str, Any]:
    """The report as JSON values, without the single steps."""
    values = report._asdict()
    del values["records"]
    return values | {"finished": report.finished, "ratio": report.ratio}


def comparison(reports: list[RunReport]) -> Table:
    """One row a run. Bytes are what rank 0 sends in a step, times are medians over steps."""
    table = new_table(
        "Validation perplexity, and bytes and milliseconds of a step",
        "decoded: weights as training sees them; masters: in full precision\n"
        "sent: by one rank; fewer: than stock FSDP2; coding: encode, decode",
        ("run", "steps", "decoded", "masters", "sent", "fewer", "step", "compute", "coding",
         "network"),
    )  # fmt: skip
    for report in reports:
        finished = report.finished
        row = [
            report.name if finished else f"{report.name}\n(unfinished)",
            str(report.steps) if finished else f"{report.steps}/{report.planned_steps}",
            _perplexity(report.perplexity_decoded),
            _perplexity(report.perplexity_master),
        ]
        if report.medians:
            m = report.medians
            times = (m["step_s"], m["compute_s"], m["encode_s"] + m["decode_s"], m["network_s"])
            row += [format_bytes(m["sent"]), f"{report.ratio:.2f}x"]
            row += [f"{seconds * 1000:.0f}" for seconds in times]
        table.add_row(*row)
    return table


def _perplexity(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _shortest(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return content
