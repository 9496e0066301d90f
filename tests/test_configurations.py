"""qsdp in every configuration that FSDP2 has; docs/compatibility.md names these cases."""

from __future__ import annotations

import traceback

import configuration_cases as cases
import pytest
import torch.distributed as dist
from ranks import run_ranks

pytestmark = pytest.mark.ranks

Results = list[dict[str, str | None]]


def run(rank: int, names: tuple[str, ...]) -> dict[str, str | None]:
    results: dict[str, str | None] = {}
    for name in names:
        try:
            cases.ALL[name](rank)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def one_rank() -> Results:
    return run_ranks(run, 1, tuple(cases.ONE))


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(run, 2, tuple(cases.TWO))


@pytest.fixture(scope="module")
def four_ranks() -> Results:
    return run_ranks(run, 4, tuple(cases.FOUR))


def check(results: Results, name: str) -> None:
    for rank, of_rank in enumerate(results):
        assert of_rank[name] is None, f"rank {rank}:\n{of_rank[name]}"


@pytest.mark.parametrize("name", cases.ONE)
def test_on_one_rank(one_rank: Results, name: str) -> None:
    check(one_rank, name)


@pytest.mark.parametrize("name", cases.TWO)
def test_on_two_ranks(two_ranks: Results, name: str) -> None:
    check(two_ranks, name)


@pytest.mark.parametrize("name", cases.FOUR)
def test_on_four_ranks(four_ranks: Results, name: str) -> None:
    check(four_ranks, name)
