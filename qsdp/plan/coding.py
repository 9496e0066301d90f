"""What the codec takes of a value on this machine, for one configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle

import torch

from qsdp.config import QSDPConfig
from qsdp.memory import KeptWeights
from qsdp.plan.measured import Coding
from qsdp.rows import compact_rows, decode_rows, encode_rows, expand_rows, sum_rows
from qsdp.ways import Differences, Way, kept_layout, row_layout
from qsdp.wire import WireLayout

FEW, MANY = 1 << 14, 1 << 18
REPEATS = 3
_NUM_ROWS = 2
_COLUMNS = 64  # of the matrix that values are taken for

Run = Callable[[], object]


def measure_coding(
    config: QSDPConfig,
    weight_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    device: torch.device,
    budget_s: float = 1.0,
) -> Coding:
    """Encode and decode one matrix as ``config`` says, with whatever is kept of it.

    Not a collective call. A direction that is not quantized is copied, as in rows that hold
    parameters in full precision.

    Args:
        weight_dtype, gradient_dtype: of the values.
        budget_s: about as many seconds are spent, but every part runs once with few values, and the
            kernels are compiled first where that is due.
    """
    fields = []
    for dtype, runs in ((weight_dtype, _weight_runs), (gradient_dtype, _gradient_runs)):
        for part in (0, 1):

            def prepare(
                numel: int, part: int = part, dtype: torch.dtype = dtype, runs: _Runs = runs
            ) -> Run:
                ways = config.ways_of(("weight",), (numel // _COLUMNS, _COLUMNS))
                return runs(ways["weights" if runs is _weight_runs else "gradients"], numel,
                            dtype, device)[part]  # fmt: skip

            rows = 1 if (runs, part) == (_weight_runs, 0) else _NUM_ROWS
            fields.append(_seconds_a_value(prepare, device, budget_s / 4) / rows)
    return Coding(*fields)


_Runs = Callable[[Way, int, torch.dtype, torch.device], tuple[Run, Run]]


def _weight_runs(way: Way, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Run, Run]:
    """What a gather does before rows are sent, and after they have arrived."""
    layout = row_layout([numel], [way], "weights", dtype, verify=False)
    rows = torch.randn(_NUM_ROWS, numel, device=device).to(dtype)
    wire = _wire(layout, device)
    if isinstance(way, Differences):
        return _difference_runs(way, layout, rows, wire)
    encode_rows(rows, layout, wire, key=1)
    own, sent = rows[:1].clone(), wire[:1].clone()
    return _with_coding(
        *(layout, wire, sent),
        lambda: encode_rows(own, layout, sent, key=1),
        lambda: decode_rows(wire, layout, rows),
    )


def _difference_runs(
    way: Differences, layout: WireLayout, rows: torch.Tensor, wire: torch.Tensor
) -> tuple[Run, Run]:
    """Differences are taken and encoded; then added to what is kept, and read for backward."""
    rows_kept = kept_layout([rows.shape[1]], [way], rows.dtype, verify=False)
    kept = KeptWeights(rows_kept, [way.quantizer], range(_NUM_ROWS), 0, rows.device)
    own = rows[0].clone()
    kept.start(rows)
    steps = cycle((own * 1.001, own))  # what has not changed is faster

    def before() -> None:
        kept.outgoing(next(steps), layout, wire[0], 1, 0, kept.on_host)

    def after() -> None:
        kept.arrived(wire, layout, rows, ())
        kept.read(rows)

    encode_rows(rows * 0.001, layout, wire, key=1)
    return _with_coding(layout, wire, wire[:1], before, after)


def _gradient_runs(
    way: Way, numel: int, dtype: torch.dtype, device: torch.device
) -> tuple[Run, Run]:
    """What a reduction does before rows are sent, and after they have arrived."""
    layout = row_layout([numel], [way], "gradients", dtype, verify=False)
    rows = torch.randn(_NUM_ROWS, numel, device=device).to(dtype)
    wire, out = _wire(layout, device), rows[0].clone()
    encode_rows(rows, layout, wire, key=1)
    return _with_coding(
        *(layout, wire, wire),
        lambda: encode_rows(rows, layout, wire, key=1),
        lambda: sum_rows(wire, layout, out),
    )


def _with_coding(
    layout: WireLayout, wire: torch.Tensor, sent: torch.Tensor, before: Run, after: Run
) -> tuple[Run, Run]:
    """What is done to rows where they are coded too, on their way out and in.

    Args:
        wire: rows that arrive, encoded.
        sent: rows that ``before`` encodes.
    """
    if not layout.coded_spans:
        return before, after
    parts, there = compact_rows(wire, layout), [*wire]

    def out() -> None:
        before()
        compact_rows(sent, layout)

    def into() -> None:
        expand_rows(parts, layout, there, range(len(parts)))
        after()

    return out, into


def _wire(layout: WireLayout, device: torch.device) -> torch.Tensor:
    return torch.zeros(_NUM_ROWS, layout.row_bytes, dtype=torch.uint8, device=device)


def _seconds_a_value(prepare: Callable[[int], Run], device: torch.device, budget_s: float) -> float:
    """The fastest of a few runs with many values, or with few where many would take too long."""
    run = prepare(FEW)
    run()  # kernels are compiled, memory is touched
    best, numel = seconds_of(run, device), FEW
    if 2 * best * MANY / FEW <= budget_s:
        run, numel = prepare(MANY), MANY
        run()
        best = seconds_of(run, device)
    for _ in range(min(REPEATS - 1, int(budget_s / max(best, 1e-9)) - 2)):
        best = min(best, seconds_of(run, device))
    return best / numel


def seconds_of(run: Run, device: torch.device) -> float:
    """Wall time on CPUs, and on accelerators the time of the current stream, waited for."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    began = time.perf_counter()
    kept = run()
    elapsed = time.perf_counter() - began
    del kept  # after the clock: giving memory back is not what is measured
    return elapsed
