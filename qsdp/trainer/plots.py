"""Plots of `qsdp report`: loss against steps and time, bytes a step, where a step's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from qsdp.trainer.metrics import format_bytes, step_parts

if TYPE_CHECKING:
    from qsdp.trainer.report import RunReport

# Okabe and Ito's colours, which colour-blind readers tell apart; markers and dashes help them, too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", "-.", ":")
_SPLIT = (
    ("compute", ("compute_s",), "#999999"),
    ("encode and decode", ("encode_s", "decode_s"), "#E69F00"),
    ("network", ("network_s",), "#0072B2"),
)


def draw(reports: list[RunReport], out: Path) -> list[Path]:
    """Write the plots as PNG files; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "loss_steps.png": _loss(reports, "step", "step"),
        "loss_time.png": _loss(reports, "elapsed_s", "time in training steps (s)"),
        "bytes.png": _bytes(reports),
        "step_time.png": _step_time(reports),
    }
    for name, figure in figures.items():
        figure.savefig(out / name, dpi=150)
    return [out / name for name in figures]


def _figure(height: float, title: str, xlabel: str) -> tuple[Figure, Any]:
    with matplotlib.rc_context({"font.size": 11}):
        figure = Figure(figsize=(8, height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left", fontsize=12)
        axes.set_xlabel(xlabel)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _loss(reports: list[RunReport], x: str, xlabel: str) -> Figure:
    """Smoothed training loss over the raw one, and validations as markers."""
    figure, axes = _figure(5, "Training loss (line) and validation loss (markers)", xlabel)
    axes.set_ylabel("cross-entropy (nats a token)")
    axes.grid(color="#dddddd", linewidth=0.6)
    smooth_losses = []
    for index, report in enumerate(reports):
        colour = _COLOURS[index % len(_COLOURS)]
        steps = [r for r in report.records if "loss" in r]
        valid = [r for r in report.records if "valid_loss" in r]
        losses = np.array([r["loss"] for r in steps])
        smooth = smoothed(losses, window=max(1, len(losses) // 20))
        smooth_losses.append(smooth)
        xs = [r[x] for r in steps]
        axes.plot(xs, losses, color=colour, alpha=0.15, linewidth=0.8)
        dashes, marker = _DASHES[index % len(_DASHES)], _MARKERS[index % len(_MARKERS)]
        axes.plot(xs, smooth, color=colour, linestyle=dashes, linewidth=1.8)
        # Hollow, for runs validate at the same steps and often to nearly the same loss.
        hollow = {"marker": marker, "markersize": 8, "fillstyle": "none", "markeredgewidth": 1.6}
        axes.plot(
            [r[x] for r in valid], [r["valid_loss"] for r in valid], linestyle="none",
            color=colour, zorder=3, **hollow,
        )  # fmt: skip
        axes.plot(
            [], [], color=colour, linestyle=dashes, linewidth=1.8, label=_label(report), **hollow
        )
    # The first steps fall steeply from the logarithm of the vocabulary; what differs comes later.
    highest = max(float(np.quantile(s, 0.97)) for s in smooth_losses)
    lowest = min(float(s.min()) for s in smooth_losses)
    margin = 0.08 * (highest - lowest) or 0.1
    axes.set_ylim(lowest - 2 * margin, highest + margin)
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    return figure


def _bytes(reports: list[RunReport]) -> Figure:
    figure, axes = _figure(
        1.6 + 0.55 * len(reports), "Bytes that one rank sends in a step", "MB (1,000,000 bytes)"
    )
    names = [report.name for report in reports]
    sent = [report.medians["sent"] / 1e6 for report in reports]
    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(reports))]
    bars = axes.barh(names, sent, color=colours, height=0.6)
    labels = [
        f"{format_bytes(report.medians['sent'])}, {report.ratio:.2f}x fewer than stock FSDP2"
        if report.ratio > 1.005
        else format_bytes(report.medians["sent"])
        for report in reports
    ]
    _label_bars(axes, bars, labels, sent)
    return figure


def _step_time(reports: list[RunReport]) -> Figure:
    title = "Median time of a step, divided as all steps together"
    figure, axes = _figure(2.0 + 0.55 * len(reports), title, "milliseconds")
    names = [report.name for report in reports]
    shares = [step_parts(report.records) for report in reports]
    left = np.zeros(len(reports))
    for label, parts, colour in _SPLIT:
        widths = np.array([sum(each[part] for part in parts) * 1e3 for each in shares])
        bars = axes.barh(names, widths, left=left, height=0.6, color=colour, label=label)
        left += widths
    labels = [f"{report.medians['step_s'] * 1e3:.0f} ms" for report in reports]
    _label_bars(axes, bars, labels, left.tolist())
    figure.legend(loc="outside lower center", ncols=len(_SPLIT), frameon=False)
    return figure


def _label_bars(axes: Any, bars: Any, labels: list[str], ends: list[float]) -> None:
    """Write a label behind each bar, with room for it, first run on top."""
    axes.bar_label(bars, labels, padding=5)
    letter = 0.0125  # width of a letter, as a part of the axis
    room = [end / (1 - letter * (len(text) + 2)) for end, text in zip(ends, labels, strict=True)]
    axes.set_xlim(0, max(room) or 1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def _label(report: RunReport) -> str:
    end = report.perplexity_decoded
    perplexity = f", validation perplexity {end:.1f}" if end is not None else ""
    return report.name + perplexity + ("" if report.finished else " (unfinished)")


def smoothed(values: npt.NDArray[np.float64], *, window: int) -> npt.NDArray[np.float64]:
    """Mean over the `window` values around each; fewer at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low = np.maximum(index - window // 2, 0)
    high = np.minimum(index + window // 2 + 1, len(values))
    means: npt.NDArray[np.float64] = (sums[high] - sums[low]) / (high - low)
    return means
