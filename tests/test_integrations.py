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
import torch
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
    assert len(script.read_text().splitlines()) <= 74
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


# What torch says in a build for CUDA, on a machine without GPUs: an accelerator that is not there,
# and of all backends only gloo. (Meshes on "cuda" fail here as they do there.)
CUDA_BUILD = """
import runpy, sys, torch, torch.distributed as dist
def accelerator(check_available=False):
    return None if check_available else torch.device("cuda")
torch.accelerator.current_accelerator = accelerator
torch._C._get_accelerator = accelerator  # for fully_shard's own mesh
join = dist.init_process_group
def only_gloo(backend=None, **others):
    assert backend == "gloo", f"the backend {backend} is only supported with GPUs"
    join(backend, **others)
dist.init_process_group = only_gloo
sys.argv = [sys.argv[1]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_alone(script: str, *python: str) -> subprocess.CompletedProcess[str]:
    """As torchrun's only rank."""
    lone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    return subprocess.run(
        [sys.executable, *python, str(EXAMPLES / script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **lone, "MASTER_PORT": "0", "PYTHONPATH": str(EXAMPLES)},
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without GPUs")
@pytest.mark.parametrize("script", ["plain.py", "ddp.py"])
def test_a_cuda_build_without_gpus_trains_on_cpus(script: str) -> None:
    done = run_alone(script, "-c", CUDA_BUILD)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) < 3.5


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without accelerators")
@pytest.mark.parametrize("script", ["accelerate_fsdp2.py", "hf_trainer.py"])
def test_what_needs_accelerators_says_so(script: str) -> None:
    done = run_alone(script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Accelerate offers FSDP on accelerators only")
    assert "Traceback" not in done.stderr
