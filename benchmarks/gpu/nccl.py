"""Part 5: NCCL with one rank, and CUDA graphs of kernels and collectives.

    python -m benchmarks.gpu.nccl

NCCL takes bytes in the shapes that qsdp sends, and encoding, exchange and decoding can be captured
in a graph whose replays follow what their inputs hold.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import qsdp
from benchmarks.gpu.checks import Checks, require
from benchmarks.gpu.options import device_of
from qsdp import QSDPConfig
from qsdp.kernels import backend_for
from qsdp.kernels.compare import KEY
from qsdp.wire import tensor_layout

NUMEL = 1_000_000
DEVICE = torch.device("cuda")


def main(argv: list[str] | None = None) -> int:
    """Run the checks; 1 if one fails."""
    if device_of(__doc__, argv).type == "cpu":
        print("skipped: NCCL needs a GPU")
        return 0
    checks, names = Checks(), ("w8g8", "w4g4")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            checks.run("uint8 all-gather", partial(moves_bytes, gather))
            checks.run("uint8 all-to-all", partial(moves_bytes, swap))
            checks.run("uint8 all-to-all of lists", partial(moves_bytes, swap_lists))
            for name in names:
                checks.run(f"{name}: quantized collectives", partial(collectives, name))
            # A capture that fails may leave its stream unusable: last.
            for name in names:
                checks.run(f"{name}: graph of encode and decode", partial(captures_kernels, name))
            checks.run("graph of an all-gather of bytes", partial(captures, gather))
            checks.run("graph of an all-to-all of bytes", partial(captures, swap))
            for name in names:
                checks.run(f"{name}: graph of quantized collectives", partial(captured, name))
        finally:
            dist.destroy_process_group()
    return checks.status


def gather(output: torch.Tensor, input: torch.Tensor) -> None:
    """By the name that this torch has for it."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(output, input)


def swap(output: torch.Tensor, input: torch.Tensor) -> None:
    """One tensor cut into equal parts."""
    dist.all_to_all_single(output, input)


def swap_lists(output: torch.Tensor, input: torch.Tensor) -> None:
    """One tensor a rank."""
    dist.all_to_all([output], [input])


def moves_bytes(collective: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Also of an odd number of bytes that begin at an odd address."""
    for start, end in ((0, 1 << 20), (1, 12_346)):
        input = torch.randint(0, 256, (1 << 20,), device=DEVICE).to(torch.uint8)[start:end]
        output = torch.zeros_like(input)
        collective(output, input)
        require(torch.equal(output, input), f"bytes {start} to {end} changed on the way")


def captures(collective: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Captured, and replayed with other bytes."""
    input = torch.randint(0, 256, (1 << 20,), device=DEVICE).to(torch.uint8)
    output = torch.zeros_like(input)
    replay = _capture(lambda: collective(output, input))
    input.bitwise_not_()
    replay()
    require(torch.equal(output, input), "a replay moves other bytes")


def captures_kernels(name: str) -> None:
    """A replay encodes and decodes what its input holds then, as a call without a graph does."""
    backend = backend_for(DEVICE)
    for form in _formats(name):
        layout = tensor_layout(NUMEL, form, torch.float32)
        values = torch.randn(1, NUMEL, device=DEVICE)
        wire = torch.zeros(1, layout.row_bytes, dtype=torch.uint8, device=DEVICE)
        out = torch.zeros_like(values)

        def work(layout=layout, values=values, wire=wire, out=out) -> None:
            backend.encode(values, layout, wire, key=KEY)
            backend.decode(wire, layout, out)

        replay = _capture(work)
        values.normal_()
        replay()
        found = wire.clone(), out.clone()
        work()
        require(torch.equal(found[0], wire), f"{form}: a replay encodes otherwise")
        require(torch.equal(found[1], out), f"{form}: a replay decodes otherwise")


def collectives(name: str) -> None:
    """With one rank, what arrives is what the kernels give alone."""
    weights, gradients = _formats(name)
    values = torch.randn(NUMEL, device=DEVICE)
    for async_op in (False, True):
        out, total = torch.zeros_like(values), torch.zeros_like(values)
        works = (
            qsdp.all_gather_quantized(out, values, quantizer=weights, key=KEY, async_op=async_op),
            qsdp.reduce_scatter_quantized(
                total, values, quantizer=gradients, key=KEY, async_op=async_op
            ),
        )
        for work in works:
            if work is not None:
                work.wait()
        for got, form in ((out, weights), (total, gradients)):
            error = (got - values).abs().max().item()
            require(0 < error < 4, f"{form}: largest error {error}")


def captured(name: str) -> None:
    """A graph of both collectives gives what calls give."""
    weights, gradients = _formats(name)
    values = torch.randn(NUMEL, device=DEVICE)
    out, total = torch.zeros_like(values), torch.zeros_like(values)

    def work() -> None:
        qsdp.all_gather_quantized(out, values, quantizer=weights, key=KEY)
        qsdp.reduce_scatter_quantized(total, values, quantizer=gradients, key=KEY)

    replay = _capture(work)
    values.normal_()
    replay()
    found = out.clone(), total.clone()
    work()
    require(torch.equal(found[0], out), "a replayed gather gives other values")
    require(torch.equal(found[1], total), "a replayed reduction gives other values")


def _formats(name: str) -> list[qsdp.Quantizer]:
    config = QSDPConfig.preset(name)
    return [getattr(config.weights, "quantizer", config.weights), config.gradients]


def _capture(work: Callable[[], None]) -> Callable[[], None]:
    """Run it in a stream of its own to warm up, capture it, and return what replays it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL has a thread that looks at events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


if __name__ == "__main__":
    sys.exit(main())
