"""`qsdp bench kernels` beside what else there is, and the speeds that the kernels promise.

    python -m benchmarks.kernel_peers [--bars] [--compile]      in a checkout

Takes the options of `qsdp bench kernels`, too. On CPU the process starts itself again with an
allocator that keeps freed memory: several peers allocate their output in every call, and page
faults would cost them four fifths of their speed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

from benchmarks.kernel_peers import bars
from benchmarks.kernel_peers.peers import candidates
from qsdp.bench import kernels

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
NAME = "python -m benchmarks.kernel_peers"


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 1 if a kernel differs from the reference, and then no speed."""
    argv = sys.argv[1:] if argv is None else argv
    parser = kernels.new_parser(NAME, __doc__)
    parser.add_argument("--compile", action="store_true", help="also torch.compile's reference")
    parser.add_argument(
        "--bars", action="store_true", help="show the promised speeds, pass or FAIL"
    )
    options = parser.parse_args(argv)
    settings = kernels.settings_of(options)
    is_set = all(os.environ.get(name) == value for name, value in ALLOCATOR.items())
    on_cpu = settings.device.type == "cpu"
    if on_cpu and platform.system() == "Linux" and not is_set:
        command = [sys.executable, "-m", "benchmarks.kernel_peers", *argv]
        return subprocess.run(command, env=os.environ | ALLOCATOR).returncode
    memory = "torch's caching allocator; qsdp's outputs are reused"
    if on_cpu and is_set:
        memory = f"freed memory is kept ({', '.join(ALLOCATOR)}): all sides reuse it"
    elif on_cpu:
        memory = "the system's allocator as it is: peers that allocate pay page faults"
    return kernels.report(
        options,
        settings,
        memory=memory,
        peers=candidates(settings, compiled=options.compile),
        judge=(lambda rows: bars.format_verdicts(bars.verdicts(rows))) if options.bars else None,
    )


if __name__ == "__main__":
    raise SystemExit(main())
