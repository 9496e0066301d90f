"""What a collective costs the host beside the collective: microseconds a call, by configuration.

    python -m benchmarks.host_time [--steps 200] [--out benchmarks/results/host-time.txt]

On a GPU the host only launches; what it takes for that is lost where the device waits for it. Two
gloo ranks gather and reduce small units of nine parameters, as a Llama block has. Time inside
torch.distributed is taken off. Where that of the kernels is taken off, too, what is left is
layouts, keys, memory and Python; on a GPU launches come on top.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.gpu.models import quantize, shard, stack_of_blocks
from qsdp.bench.output import commit, date, load, machine
from qsdp.columns import format_columns
from qsdp.kernels import Backend, backend_for
from qsdp.param_group import ParamGroup, find_param_groups

CONFIGURATIONS = ("stock", "w8g8", "w4g4", "w3g3")
CALLS = ("forward gather", "backward gather", "reduce-scatter")
RANKS, DEPTH = 2, 4
CPU = torch.device("cpu")
# Every way in which a transfer may be started, by the names of several versions of torch.
TRANSFERS = (
    *("all_to_all_single", "all_to_all", "batch_isend_irecv", "isend", "irecv", "all_reduce"),
    *("all_gather_into_tensor", "all_gather_single", "all_gather"),
    *("reduce_scatter_tensor", "reduce_scatter_single"),
)


class Clock(NamedTuple):
    """Seconds that this thread computed, and that passed."""

    busy: float
    wall: float

    @classmethod
    def now(cls) -> Clock:
        """At this moment."""
        return cls(time.thread_time(), time.perf_counter())

    def __sub__(self, other: Clock) -> Clock:
        return Clock(self.busy - other.busy, self.wall - other.wall)

    def plus(self, other: Clock) -> Clock:
        """The sum; ``+`` is a tuple's own."""
        return Clock(self.busy + other.busy, self.wall + other.wall)


class Meter:
    """Times calls of comm objects, and what torch.distributed and kernels take inside them."""

    def __init__(self) -> None:
        self.transfers = self.kernels = Clock(0.0, 0.0)
        self._depth = 0
        self.calls: defaultdict[str, list[tuple[Clock, Clock]]] = defaultdict(list)

    def count(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """``function`` with its time counted as ``kind``; what it calls itself is part of it."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = Clock.now()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    setattr(self, kind, getattr(self, kind).plus(Clock.now() - start))

        return timed

    def watch(self, comm: Any, name: Callable[[], str]) -> None:
        """Time every call of a comm object from now on: with its kernels, and without."""
        kind, meter = type(comm), self

        class Timed(kind):  # type: ignore[misc, valid-type]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                called, transfers, kernels = name(), meter.transfers, meter.kernels
                start = Clock.now()
                result = kind.__call__(self, *args, **kwargs)
                own = Clock.now() - start - (meter.transfers - transfers)
                meter.calls[called].append((own, own - (meter.kernels - kernels)))
                return result

        comm.__class__ = Timed


class Breathing(torch.optim.Optimizer):
    """Changes weights a little, up and down: steps are all of one kind."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._factor = 1.0 + 2.0**-14

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Up, and down at the next call."""
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], self._factor)
        self._factor = 1.0 / self._factor


Medians = dict[str, tuple[Clock, Clock]]  # microseconds by call, with kernels and without


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_time",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200, help="of each configuration (200)")
    parser.add_argument("--width", type=int, default=32, help="of a block (32)")
    parser.add_argument("--configurations", nargs="+", default=CONFIGURATIONS)
    parser.add_argument("--out", type=Path, help="write the table there, too")
    options = parser.parse_args(argv)
    load_before = load()
    with tempfile.TemporaryDirectory() as folder:
        job = (options.configurations, options.steps, options.width, Path(folder))
        mp.spawn(_rank, job, nprocs=RANKS)
        found = torch.load(Path(folder) / "found", weights_only=False)
    text = f"{_header(options, load_before)}\n\n{format_results(found)}\n"
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)
    return 0


def _header(options: argparse.Namespace, load_before: str) -> str:
    facts = {
        "date": date(),
        "commit": commit(),
        "machine": machine(),
        "load": load_before,
        "torch": torch.__version__,
        "ranks": f"{RANKS}, gloo; units of 9 parameters, {options.width} wide; "
        f"medians of {options.steps} steps of {DEPTH} units",
        "numbers": "microseconds a call outside torch.distributed: of this thread, and (passed)",
    }
    return "\n".join(f"{name:<9}{fact}" for name, fact in facts.items())


def format_results(found: dict[str, Medians]) -> str:
    """Two lines for each configuration that has kernels."""
    rows = []
    for name, medians in found.items():
        for index, what in enumerate(("-",) if name == "stock" else ("with", "without")):
            of = [medians[call][index] for call in CALLS]
            rows.append((name, what, *(f"{micros.busy:.0f} ({micros.wall:.0f})" for micros in of)))
    return format_columns(("", "kernels", *CALLS), rows)


def _rank(rank: int, names: tuple[str, ...], steps: int, width: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS
    )
    meter = Meter()
    with _timed_transfers(meter), _timed_kernels(meter):
        found = {name: measure(name, steps, width, meter) for name in names}
    if rank == 0:
        torch.save(found, folder / "found")
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, steps: int, width: int, meter: Meter) -> Medians:
    """Train for some steps, then time this many."""
    model = shard(stack_of_blocks(DEPTH, width), CPU)
    quantize(model, name)
    optimizer = Breathing(model.parameters(), {})

    def step(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        model(torch.randn(4, width, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    warm_ups = max(steps // 5, 3)
    for index in range(warm_ups):
        step(index)
    for handle in find_param_groups(model):
        if handle.path != "(root)":  # which holds nothing
            _watch(handle, meter)
    meter.calls.clear()
    for index in range(steps):
        step(warm_ups + index)
    return {call: (_median(meter, call, 0), _median(meter, call, 1)) for call in CALLS}


def _median(meter: Meter, call: str, index: int) -> Clock:
    clocks = [both[index] for both in meter.calls[call]]
    return Clock(*(1e6 * statistics.median(of) for of in zip(*clocks, strict=True)))


def _watch(handle: ParamGroup, meter: Meter) -> None:
    meter.watch(handle.all_gather_comm, lambda: CALLS[handle.in_backward])
    meter.watch(handle.reduce_scatter_comm, lambda: CALLS[2])


@contextmanager
def _timed_transfers(meter: Meter) -> Iterator[None]:
    """Count the time of torch.distributed, whoever has taken its functions by name."""
    with ExitStack() as stack:
        for name in TRANSFERS:
            if not hasattr(dist, name):
                continue
            function = getattr(dist, name)
            timed = meter.count(function, "transfers")
            for module in list(sys.modules.values()):
                if not getattr(module, "__name__", "").startswith(("qsdp", "torch.distributed")):
                    continue
                for alias in [key for key, value in vars(module).items() if value is function]:
                    stack.enter_context(mock.patch.object(module, alias, timed))
        timed = meter.count(dist.Work.wait, "transfers")
        stack.enter_context(mock.patch.object(dist.Work, "wait", timed))
        yield


@contextmanager
def _timed_kernels(meter: Meter) -> Iterator[None]:
    """Count the time of the backend's functions."""
    backend = backend_for(CPU)
    with ExitStack() as stack:
        for name, value in vars(Backend).items():
            if callable(value) and not name.startswith("_") and hasattr(backend, name):
                timed = meter.count(getattr(backend, name), "kernels")
                stack.enter_context(mock.patch.object(backend, name, timed))
        yield


if __name__ == "__main__":
    sys.exit(main())
