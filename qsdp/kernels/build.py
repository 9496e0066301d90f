"""Compile cpu.cpp, which includes native/*.h, to the shared library that cpu.py loads.

Used by setup.py when the package is installed and by the fuzz script; standard library only,
because torch is not there yet when a wheel is built.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu.cpp")
LIBRARY = Path(__file__).with_name("_cpu.so")

# Behind CXXFLAGS, so that they win: the result must be one rounding an operation, whatever a
# distribution's defaults are. No -march: the source picks the instruction set at run time.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti"),
    *("-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX, or c++."""
    return shlex.split(os.environ.get("CXX") or "c++")


def compile_library(output: Path, extra_flags: Sequence[str] = ()) -> None:
    """Compile with $CXXFLAGS; with OpenMP where the compiler has it.

    The output appears complete or not at all: another process may be loading it.

    Raises:
        OSError, subprocess.CalledProcessError: no compiler, or it failed; it printed why.
    """
    flags = [*shlex.split(os.environ.get("CXXFLAGS", "")), *FLAGS, *extra_flags]
    partial = output.with_name(f"{output.name}.{os.getpid()}")
    command = [*compiler(), *flags, str(SOURCE), "-o", str(partial)]
    try:
        try:
            subprocess.run([*command, "-fopenmp"], check=True, capture_output=True)
        except subprocess.CalledProcessError:
            subprocess.run(command, check=True)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
