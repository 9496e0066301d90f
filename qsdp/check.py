"""`qsdp check`: does FSDP2 do what qsdp relies on, and which kernels run, why, and rightly.

The comparisons themselves are :mod:`qsdp.contract` and :mod:`qsdp.kernels.compare`. With
``--theory`` the claims of docs/theory.md are checked instead, which takes the source repository.
torch and what needs it are imported once the arguments are read, so that `--help` need not wait.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import qsdp

if TYPE_CHECKING:
    import torch

    from qsdp.kernels import Backend


def main(argv: list[str] | None = None) -> int:
    """Print what runs here; 1 if a backend or FSDP2 differs from what is right, or a theorem fails.

    Raises:
        ValueError: the theory is asked for, and this is no checkout.
    """
    text = (
        "Does FSDP2 of the torch here do what qsdp relies on? Which kernels run on this machine, "
        "and do they give the bytes of the reference?"
    )
    parser = argparse.ArgumentParser(prog="qsdp check", description=text)
    parser.add_argument(
        "--theory",
        action="store_true",
        help="check the convergence guarantees of docs/theory.md instead, on this library's "
        "quantizers (half a minute; in a checkout of the source repository)",
    )
    if parser.parse_args(argv).theory:
        return _theory()
    import torch

    print(f"torch        {torch.__version__}, Python {platform.python_version()}")
    good = _report_hooks()
    good &= _report(torch.device("cpu"))
    if torch.cuda.is_available():
        good &= _report(torch.device("cuda"))
    else:
        print("CUDA         no device")
    return 0 if good else 1


run = main


def _theory() -> int:
    """The status of ``research.theory.command``, which lies beside the package in a checkout."""
    root = Path(qsdp.__file__).parent.parent
    if not (root / "research" / "theory").is_dir():
        raise ValueError(
            "the theory is not installed with the package: it is the folder research/ of qsdp's "
            "source repository; git clone that and run `python -m qsdp check --theory` in it"
        )
    if str(root) not in sys.path:  # an editable install finds the package without it
        sys.path.insert(0, str(root))
    status: int = importlib.import_module("research.theory.command").main()
    return status


def _report_hooks() -> bool:
    """Whether FSDP2 does here what qsdp relies on; prints what it does not."""
    try:
        contract = importlib.import_module("qsdp.contract")
    except ImportError as error:
        print(f"FSDP2 hooks  missing: {error}")
        return False
    found: list[str] = contract.differences()
    print(f"FSDP2 hooks  {'DIFFER from what qsdp relies on. Not so:' if found else 'as expected'}")
    for difference in found:
        print(f"{'':<14} {difference}")
    return not found


def _report(device: torch.device) -> bool:
    from qsdp.kernels import backend_for, reference
    from qsdp.kernels.compare import compare, describe

    title = "CPU" if device.type == "cpu" else "CUDA"
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        backend = backend_for(device)
    print(f"{title:<12} {describe(backend)}{_why(backend, device, notes)}")
    if backend is reference and device.type == "cpu":
        return True
    start = time.perf_counter()
    comparison = compare(backend, device)
    seconds = time.perf_counter() - start
    verdict = f"equal to the reference in {comparison.cases} cases ({seconds:.1f} s)"
    if comparison.differences:
        verdict = f"DIFFERS from the reference in {len(comparison.differences)} results:"
    print(f"{'':<12} {verdict}")
    for difference in comparison.differences[:10]:
        print(f"{'':<14} {difference}")
    return not comparison.differences


def _why(backend: Backend, device: torch.device, notes: list[warnings.WarningMessage]) -> str:
    import torch

    from qsdp.kernels import reference

    if device.type == "cuda" and backend is not reference:
        triton = importlib.import_module("triton")
        return f" {triton.__version__} on {torch.cuda.get_device_name(device)}"
    if backend is reference:
        # The warning is given once a process; the CPU backend can tell again.
        reasons = [str(note.message) for note in notes]
        if not reasons and device.type == "cpu":
            reasons = [importlib.import_module("qsdp.kernels.cpu").why_unavailable()]
        return f": slow. {' '.join(reasons)}".rstrip()
    return ", built with the package; this machine's best instruction set"


if __name__ == "__main__":
    raise SystemExit(main())
