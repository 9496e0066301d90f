"""`qsdp check --theory`: every claim of docs/theory.md that can be checked in seconds, as a table.

``PARTS`` is the list of checks; each is a function without arguments that returns a Part.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from qsdp.columns import format_columns
from research.theory import differences, drift, exhaustive, feedback, floors, guarantee
from research.theory.claims import Claim, Part

PARTS: tuple[Callable[[], Part], ...] = (
    exhaustive.unbiasedness,
    exhaustive.second_moments,
    guarantee.theorem,
    guarantee.corollary,
    guarantee.degenerate,
    floors.stationary,
    floors.contrast,
    floors.data_dependent,
    guarantee.masters,
    differences.theorem,
    differences.counterexample,
    drift.local_steps,
    feedback.contraction,
    feedback.descent,
)
HEADER = ("claim", "setting", "measured", "+-", "", "reference", "")


def main(parts: tuple[Callable[[], Part], ...] = PARTS) -> int:
    """Print the claims part by part; 1 if one of them does not hold."""
    start, claims, failed, incomplete = time.perf_counter(), 0, 0, 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
    try:
        for number, make in enumerate(parts, 1):
            part = make()
            claims += len(part.claims)
            incomplete += part.skipped is not None
            failed += sum(not claim.holds for claim in part.claims)
            print(f"{number}. {format_part(part)}\n", flush=True)
    finally:
        torch.set_num_threads(threads)
    seconds = time.perf_counter() - start
    verdict = f"{failed} of {claims} claims FAIL" if failed else f"all {claims} claims hold"
    if incomplete:
        verdict += f", {incomplete} parts without their logistic regression"
    print(
        f"{verdict} ({seconds:.0f} s). '+-': 4 standard errors of a mean over trials; '-': exact."
    )
    return 1 if failed else 0


def format_part(part: Part) -> str:
    """Title, what the columns are, the table, and what was skipped."""
    rows = [_cells(claim) for claim in part.claims]
    lines = [part.title, part.text, format_columns(HEADER, rows)]
    return "\n".join(lines if part.skipped is None else [*lines, part.skipped])


def _cells(claim: Claim) -> tuple[str, ...]:
    mean, error = claim.measured
    return (
        claim.about,
        claim.setting,
        f"{mean:.4g}",
        f"{error:.2g}" if error else "-",
        claim.relation,
        f"{claim.reference:.4g}",
        "holds" if claim.holds else "FAILS",
    )
