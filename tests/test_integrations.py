"""The recipes of examples/ and docs/integrations.md, with qsdp and without, on two gloo ranks.

``pytest -s tests/test_integrations.py`` prints what was measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from integration_cases import EXAMPLES, LAUNCHES, run_cases
from ranks import run_ranks

pytestmark = pytest.mark.ranks

PACKAGES = {
    "case_accelerate": ("accelerate", "transformers"),
    "case_trainer": ("transformers", "accelerate"),
    "case_lightning": ("lightning",),
    "case_torchtitan": ("torchtitan",),
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What the ranks of a launch returned; each is started once."""

    @lru_cache(maxsize=len(LAUNCHES))
    def start(index: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("frameworks")
        return run_ranks(run_cases, 2, LAUNCHES[index], str(folder))

    return start


@pytest.mark.parametrize(
    ("index", "name"), [(i, name) for i, names in enumerate(LAUNCHES) for name in names]
)
def test_on_two_ranks(launch: Callable[[int], list[dict[str, Any]]], index: int, name: str) -> None:
    for rank, results in enumerate(launch(index)):
        assert not isinstance(results[name], str), f"rank {rank}:\n{results[name]}"
    measured = launch(index)[0][name]
    if measured is not None:
        versions = ", ".join(f"{p} {version(p)}" for p in PACKAGES.get(name, ("torch",)))
        numbers = " ".join(
            f"{key}={value:.5g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in measured.items()
        )
        print(f"\n{name.removeprefix('case_')} ({versions}): {numbers}")


def test_the_script_of_the_readme_runs_under_torchrun() -> None:
    script = EXAMPLES / "plain.py"
    assert len(script.read_text().splitlines()) <= 72
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        + ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    loss, sent, stock = map(float, done.stdout.split())
    assert loss < 2.5 and 3.5 < stock / sent < 4
