"""What the report was made on; fails where the device is not there."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import sys

import torch

from benchmarks.gpu.options import device_of
from qsdp.bench.output import commit, date
from qsdp.kernels import backend_for
from qsdp.kernels.compare import describe


def main(argv: list[str] | None = None) -> int:
    """Print one fact a line; 1 without a GPU, where one is asked for."""
    device = device_of(__doc__, argv)
    facts = {"date": date(), "commit": commit()}
    facts["torch"] = f"{torch.__version__}, Python {platform.python_version()}"
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print("torch sees no CUDA device; --device cpu runs the same in small")
            return 1
        facts |= _gpu()
    facts["kernels"] = describe(backend_for(device))
    facts["on the CPU"] = describe(backend_for(torch.device("cpu")))
    print("\n".join(f"{name:<12}{fact}" for name, fact in facts.items()))
    return 0


def _gpu() -> dict[str, str]:
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    facts = {
        "GPU": f"{found.name}, {found.multi_processor_count} multiprocessors, capability "
        f"{found.major}.{found.minor}",
        "memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        "CUDA": str(torch.version.cuda or torch.version.hip),
    }
    if torch.distributed.is_nccl_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        facts["Triton"] = str(importlib.import_module("triton").__version__)
    except ImportError as error:
        facts["Triton"] = f"missing: {error}"
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True
        )
        facts["driver"] = f"{done.stdout.strip()} (version, clocks, power, temperature)"
    return facts


if __name__ == "__main__":
    sys.exit(main())
