"""Learned levels, overrides, differences, error feedback and new formats, on two gloo ranks."""

from __future__ import annotations

import pytest
from ranks import check_case, run_cases, run_ranks
from technique_cases import CASES

pytestmark = pytest.mark.ranks

Results = list[dict[str, str | None]]


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(run_cases, 2, CASES, tuple(CASES))


@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(two_ranks: Results, name: str) -> None:
    check_case(two_ranks, name)
