"""Part 3: FSDP2's steps of one of 8 ranks: time, host time, memory, trace, and no waiting.

    python -m benchmarks.gpu.steps [--device cpu] [--out FOLDER]

A GPT of 1.3 billion parameters in bfloat16 on the fake process group. Step: from the first call
until the device is done; host: until the last call has returned. A trace of one step of each
configuration goes to FOLDER.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import qsdp
from benchmarks.gpu.checks import Checks
from benchmarks.gpu.fake import HostReads, fake_ranks
from benchmarks.gpu.models import GPT_1_3B, TINY, Shape, gpt, quantize, shard
from benchmarks.gpu.options import parser_of
from qsdp.columns import format_columns

CONFIGURATIONS = ("stock", "w8g8", "w4g4")
WARM_UPS = 3
LARGEST_TRACE = 15 << 20


class Run(NamedTuple):
    """A step ready to run, of one configuration; ``backward`` is it without the optimizer."""

    name: str
    model: torch.nn.Module
    backward: Callable[[], torch.Tensor]
    step: Callable[[], torch.Tensor]


class Times(NamedTuple):
    """Medians in milliseconds; memory in GiB, None on CPU."""

    step: float
    host: float
    host_busy: float
    peak: float | None
    reserved: float | None


def main(argv: list[str] | None = None) -> int:
    """Measure every configuration; 1 if one fails or waits for the device."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, help="folder for traces")
    options = parser.parse_args(argv)
    checks = Checks()
    found: dict[str, Times] = {}
    with fake_ranks(8):
        for name in CONFIGURATIONS:
            checks.run(f"{name}: runs", partial(_look_at, name, options, checks, found))
            if options.device == "cuda":
                torch.cuda.empty_cache()
    print(format_times(found), flush=True)
    return checks.status


def _look_at(name: str, options: Any, checks: Checks, found: dict[str, Times]) -> None:
    """Everything about one configuration, the model of which is gone afterwards."""
    device = torch.device(options.device)
    shape, batch, repeats = (GPT_1_3B, 8, 8) if device.type == "cuda" else (TINY, 2, 3)
    run = prepare(name, shape, batch, device)
    checks.run(f"{name}: times", partial(_times, run, device, repeats, found))
    checks.run(f"{name}: the host waits for nothing", partial(never_waits, run, device))
    checks.run(f"{name}: trace", partial(trace, run, device, options.out))


def prepare(
    name: str,
    shape: Shape,
    batch: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Run:
    """A sharded model and its step, which has run a few times; ``changes`` of the preset."""
    model = gpt(shape, device)
    shard(model, device, param_dtype=dtype)
    quantize(model, name, **changes)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu or None)
    size = (batch, shape.sequence + 1)
    tokens = torch.randint(0, shape.vocab, size, generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device)

    def backward() -> torch.Tensor:
        loss: torch.Tensor = model(tokens)
        loss.backward()
        return loss.detach()

    def step() -> torch.Tensor:
        loss = backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(WARM_UPS):
        step()
    return Run(name, model, backward, step)


def _times(run: Run, device: torch.device, repeats: int, found: dict[str, Times]) -> str:
    found[run.name] = measure(run, device, repeats)
    sent = (
        "" if run.name == "stock" else f", {qsdp.comm_stats(run.model).ratio:.2f} times fewer bytes"
    )
    return f"{found[run.name].step:.1f} ms a step{sent}"


def measure(run: Run, device: torch.device, repeats: int) -> Times:
    """Medians over steps, the device idle before each."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    steps, hosts, busy = [], [], []
    for _ in range(repeats):
        start, used = time.perf_counter(), time.process_time()
        run.step()
        hosts.append(time.perf_counter() - start)
        busy.append(time.process_time() - used)
        if on_gpu:
            torch.cuda.synchronize()
        steps.append(time.perf_counter() - start)
    medians = [1e3 * statistics.median(values) for values in (steps, hosts, busy)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    reserved = torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None
    return Times(*medians, peak, reserved)


def never_waits(run: Run, device: torch.device) -> str:
    """On a GPU torch raises where the host would wait; on CPU reads of values are counted.

    A count is no failure: code may read on CPU what it leaves alone on a GPU.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        return "one step"
    with HostReads() as reads:
        run.backward()
    places = ", ".join(f"{count} {name}" for name, count in reads.found.most_common())
    return f"on CPU, reads of values: {places or 'none'}"


def trace(run: Run, device: torch.device, folder: Path | None) -> str:
    """Tables of one step: kernels on the device, operators on the host, launches."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as seen:
        run.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    averages = seen.key_averages()
    print(f"\n{run.name}, one step:")
    if device.type == "cuda":
        print(_table(averages, lambda e: e.self_device_time_total, "device ms", on_device=True))
    print(_table(averages, lambda e: e.self_cpu_time_total, "host ms", on_device=False))
    launches = sum(e.count for e in averages if "LaunchKernel" in e.key)
    return f"{launches} launches{_export(seen, folder, run.name)}"


def _table(averages: Any, of: Callable[[Any], float], title: str, *, on_device: bool) -> str:
    """The twenty that take longest."""
    kinds = [e for e in averages if str(e.device_type).endswith("CPU") != on_device]
    rows = [
        (e.key[:70], str(e.count), f"{of(e) / 1e3:.3f}")
        for e in sorted(kinds, key=of, reverse=True)[:20]
        if of(e) > 0
    ]
    total = sum(map(of, kinds)) / 1e3
    return format_columns(("name", "calls", title), [*rows, ("all", "", f"{total:.3f}")])


def _export(seen: Any, folder: Path | None, name: str) -> str:
    if folder is None:
        return ""
    path = folder / f"trace-{name}.json.gz"
    seen.export_chrome_trace(str(path))
    if path.stat().st_size > LARGEST_TRACE:
        path.unlink()
        return ", a trace too large to keep"
    return f", {path.name}"


def format_times(found: dict[str, Times]) -> str:
    """One line a configuration."""
    header = ("", "step ms", "host ms", "host busy ms", "peak GiB", "reserved GiB")
    rows = [
        (name, *("-" if value is None else f"{value:.2f}" for value in times))
        for name, times in found.items()
    ]
    return format_columns(header, rows)


if __name__ == "__main__":
    raise SystemExit(main())
