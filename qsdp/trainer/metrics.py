"""What a run writes and shows while it trains, all on rank 0: metrics.jsonl, boards, console.

metrics.jsonl holds one JSON object a line, of two kinds: a training step (with "loss") and a
validation (with "valid_loss"). Bytes and times are those of rank 0.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from qsdp.trainer.boards import Board, metrics_of

METRICS = "metrics.jsonl"
RESULT = "result.json"
SPLIT = ("compute_s", "encode_s", "decode_s", "network_s")
_WARM_UP = 3  # steps that allocate buffers and start threads, left out of medians


class Metrics:
    """Records of one run; `resume_step` drops what a former process wrote after that step.

    Args:
        boards: get all numbers, too, and are closed with this.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        total_steps: int,
        resume_step: int,
        log_every: int,
        boards: Sequence[Board] = (),
    ) -> None:
        path = run_folder / METRICS
        kept = [line for line in read_metrics(path) if line["step"] <= resume_step]
        # Replaced as a whole, so that an interruption here cannot lose lines that are to be kept.
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, path)
        self._file = path.open("a", buffering=1)
        self._boards = boards
        self._console = Console(highlight=False)
        self._log_every = log_every
        self._total_steps = total_steps
        self._steps_here = 0
        self._started = time.monotonic()
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=resume_step)
            self._progress.start()

    def step(self, record: dict[str, Any]) -> None:
        """Write one training step, and show it."""
        self._write(record)
        self._steps_here += 1
        step = record["step"]
        status = (
            f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s  "
            f"{format_bytes(record['sent'])} sent a step"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=status)
        elif step % self._log_every == 0 or step in (1, self._total_steps):
            left = (time.monotonic() - self._started) / self._steps_here
            left *= self._total_steps - step
            print(
                f"step {step}/{self._total_steps}  {status}  {format_time(left)} left", flush=True
            )

    def validation(self, record: dict[str, Any]) -> None:
        self._write(record)
        perplexity = record["valid_perplexity"]
        self.say(
            f"step {record['step']}/{self._total_steps}  validation perplexity {perplexity:.2f}"
        )

    def say(self, text: str) -> None:
        """A line for the user, above the progress bar where there is one."""
        if self._progress is not None:
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._file.close()
        for board in self._boards:
            board.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        for board in self._boards:
            board.add(record["step"], metrics_of(record))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl. A last line cut short by a crash is left out; other damage raises
    ValueError."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record.get("step"), int):
                raise ValueError("no step")
        except (ValueError, AttributeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path} is damaged in line {number}: {error}") from error
        records.append(record)
    return records


def step_medians(records: list[dict[str, Any]]) -> dict[str, float]:
    """Median over training steps, without the first few, of each time and byte count.

    Where replicas synchronise now and then (--sync-every) the mean over whole rounds: of most steps
    the median would be that nothing was sent.
    """
    rounds = _whole_rounds(records)
    steps, middle = (
        (rounds, statistics.mean) if rounds else (_warm_steps(records), statistics.median)
    )
    names = ("step_s", *SPLIT, "tokens_per_s", "sent", "stock_sent")
    return {name: middle([s[name] for s in steps]) for name in names} if steps else {}


def _whole_rounds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps from after the first synchronisation to the last one; none where all steps do it."""
    steps = [record for record in records if "loss" in record]
    ends = [place for place, step in enumerate(steps, 1) if step.get("synchronised")]
    if not any("synchronised" in step for step in steps):
        return []
    return steps[ends[0] : ends[-1]] if len(ends) > 1 else steps


def step_parts(records: list[dict[str, Any]]) -> dict[str, float]:
    """The median time of a step, divided as all of these steps together were.

    The medians of the parts do not add up to that of the whole; these parts do.
    """
    steps = _warm_steps(records)
    sums = {name: sum(step[name] for step in steps) for name in SPLIT}
    whole = sum(sums.values()) or 1.0
    median = step_medians(records)["step_s"]
    return {name: median * value / whole for name, value in sums.items()}


def _warm_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = [record for record in records if "loss" in record]
    return steps[_WARM_UP:] or steps


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write under another name first: a file that is there is whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def format_bytes(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}"


def format_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
