"""What ``apply_qsdp(model, "auto")`` would have chosen at each bandwidth, beside what was measured.

A row is one bandwidth in one precision: a JSON object of the decision and of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qsdp.auto import Decision
from qsdp.columns import format_columns

PRECISIONS = ("fp32", "bf16")
WITHIN = 1.05


def precision_of(variant: str) -> str:
    """In which precision the benchmark's variants compute."""
    return "bf16" if "bf16" in variant else "fp32"


def variant_of(choice: str, precision: str) -> str:
    """The benchmark's name of a decision's."""
    level, flat = choice.removesuffix("-flat"), "-flat" * choice.endswith("-flat")
    if level in ("stock", "unquantized"):
        return f"{'stock' if level == 'stock' else 'qsdp'}-{precision}{flat}"
    return choice + "-bf16" * (precision == "bf16")


def row(gbps: float | None, precision: str, decision: Decision) -> dict[str, Any]:
    """A decision at a limit."""
    found = decision.to_json()
    return {
        "bandwidth_gbps": gbps,
        "precision": precision,
        "variant": variant_of(decision.name, precision),
        "line": str(decision),
        "link": found["link"],
        "measured_s": decision.measured_s,
        "predicted_s": {
            variant_of(name, precision): seconds for name, seconds in decision.predicted_s.items()
        },
    }


def with_steps(
    rows: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Each row beside the step of the way that it chose, None where nobody measured that, and the
    best step of its precision among the ways that it chose from; no row where none of these was
    measured."""
    found = []
    for each in rows:
        steps = {
            cell["variant"]: cell["step_s"]
            for cell in cells
            if cell["bandwidth_gbps"] == each["bandwidth_gbps"]
            and precision_of(cell["variant"]) == each["precision"]
            and cell["variant"] in each["predicted_s"]
        }
        if not steps:
            continue
        best = min(steps, key=steps.__getitem__)
        own = steps.get(each["variant"])
        over = None if own is None else own / steps[best]
        found.append(
            {**each, "step_s": own, "best": best, "best_step_s": steps[best], "over_best": over}
        )
    return found


def format_rows(rows: Sequence[Mapping[str, Any]], speed: Any) -> str:
    """A table, and how many of its rows are within 5 % of the best."""
    header = ("bandwidth", "in", "Mbit/s", "ms", "auto chose", "predicted s", "step", "best",
              "its step", "over best", "within 5 %")  # fmt: skip
    lines = [
        (
            speed(each["bandwidth_gbps"]),
            each["precision"],
            f"{each['link']['mbit_per_s']:.0f}",
            f"{each['link']['latency_ms']:.2f}",
            each["variant"],
            f"{each['predicted_s'][each['variant']]:.3f}",
            "-" if each["step_s"] is None else f"{each['step_s']:.3f}",
            each["best"],
            f"{each['best_step_s']:.3f}",
            "-" if each["over_best"] is None else f"{each['over_best']:.2f}",
            "not measured" if each["step_s"] is None else "yes" if _holds(each) else "NO",
        )
        for each in rows
    ]
    table = format_columns(header, lines)
    return f"{table}\n\n{sum(map(_holds, rows))} of {len(rows)} within {WITHIN - 1:.0%} of the best"


def _holds(each: Mapping[str, Any]) -> bool:
    return each["over_best"] is not None and each["over_best"] <= WITHIN
