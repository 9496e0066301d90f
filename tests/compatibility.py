"""`make compatibility`: the distributed tests on other versions of torch, and a table of results.

Each version gets an environment of its own, .venv-torch-VERSION, made once. The package is taken
from this checkout; its native library does not depend on torch. Rows of docs/compatibility.md that
are not run again stay.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
# The oldest with FSDP2's custom collectives, two between, the newest; .ci/run tests 2.13 whole.
VERSIONS = ("2.9.1", "2.12.1", "2.14.1", "2.15.0")
TESTS = ("fsdp", "configurations", "techniques", "ddp", "contract")
PACKAGES = ("numpy", "pytest", "pytest-timeout", "hypothesis", "safetensors")
HEAD = (
    "| torch | Python | date | passed | failed | skipped | minutes | failed tests |",
    "|---|---|---|---|---|---|---|---|",
)
TIMEOUT_S = 900


def main() -> int:
    """Run, print and write the table; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="of torch")
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    parser.add_argument("--with", dest="ready", help="an interpreter that has all, and no other")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="test_NAME.py of each")
    args = parser.parse_args()
    failed = 0
    for version in [args.ready] if args.ready else args.versions:
        row, failures = measured(args.ready or environment(version, args.python), args.tests)
        print(row, flush=True)
        write(row)
        failed += failures
    return min(failed, 1)


def environment(version: str, python: str) -> str:
    """The interpreter of an environment with this torch, made if it is not there.

    Raises:
        subprocess.CalledProcessError: pip cannot install it; a machine that caps versions of torch
            needs PIP_CONSTRAINT=/dev/null.
    """
    folder = ROOT / f".venv-torch-{version}"
    found = folder / "bin" / "python"
    if not (folder / "made").exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
        packages = (f"torch=={version}", *PACKAGES)
        subprocess.run([found, "-m", "pip", "install", "-q", *packages], check=True)
        (folder / "made").touch()
    return str(found)


def measured(python: str, tests: list[str]) -> tuple[str, int]:
    """The row of the table, and how many tests failed."""
    asked = "import platform, torch; print(torch.__version__, platform.python_version())"
    said = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True)
    version, of_python = said.stdout.split()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [f"tests/test_{name}.py" for name in tests]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, env=environ, timeout=TIMEOUT_S, check=False)
        cases = [*ElementTree.parse(report).iter("testcase")]
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = ", ".join(sorted(re.sub(r".*\[(.*)\]", r"\1", str(case.get("name"))) for case in bad))
    minutes = (time.monotonic() - start) / 60
    counts = f"{len(cases) - len(bad) - skipped} | {len(bad)} | {skipped} | {minutes:.1f}"
    row = f"| {version} | {of_python} | {date.today()} | {counts} | {names} |"
    return row, len(bad)


def write(row: str) -> None:
    """Put a row into the page, in place of the one of the same torch and Python."""
    before, rest = PAGE.read_text().split("<!-- versions -->\n")
    table, after = rest.split("<!-- /versions -->\n")
    rows = {tuple(line.split("|")[1:3]): line for line in [*table.splitlines()[2:], row]}
    ordered = sorted(rows.values(), key=lambda line: [int(n) for n in re.findall(r"\d+", line)[:6]])
    text = "\n".join([*HEAD, *ordered])
    PAGE.write_text(f"{before}<!-- versions -->\n{text}\n<!-- /versions -->\n{after}")


if __name__ == "__main__":
    raise SystemExit(main())
