"""qsdp in every configuration that FSDP2 has; docs/compatibility.md names these cases."""

from __future__ import annotations

import configuration_cases as cases
import pytest
from ranks import check_case, run_cases, run_ranks

pytestmark = pytest.mark.ranks

Results = list[dict[str, str | None]]


@pytest.fixture(scope="module")
def one_rank() -> Results:
    return run_ranks(run_cases, 1, cases.ONE, tuple(cases.ONE))


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(run_cases, 2, cases.TWO, tuple(cases.TWO))


@pytest.fixture(scope="module")
def four_ranks() -> Results:
    return run_ranks(run_cases, 4, cases.FOUR, tuple(cases.FOUR))


@pytest.mark.parametrize("name", cases.ONE)
def test_on_one_rank(one_rank: Results, name: str) -> None:
    check_case(one_rank, name)


@pytest.mark.parametrize("name", cases.TWO)
def test_on_two_ranks(two_ranks: Results, name: str) -> None:
    check_case(two_ranks, name)


@pytest.mark.parametrize("name", cases.FOUR)
def test_on_four_ranks(four_ranks: Results, name: str) -> None:
    check_case(four_ranks, name)
