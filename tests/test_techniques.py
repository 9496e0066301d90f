"""Learned levels, overrides, differences, error feedback and new formats, on two gloo ranks."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from technique_cases import CASES, run_cases

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, str | None]]:
    return run_ranks(run_cases, 2, tuple(CASES))


@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(two_ranks: list[dict[str, str | None]], name: str) -> None:
    for rank, results in enumerate(two_ranks):
        assert results[name] is None, f"rank {rank}:\n{results[name]}"
