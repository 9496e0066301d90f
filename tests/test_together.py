"""qsdp beside other parts of PyTorch; docs/compatibility.md names these cases."""

from __future__ import annotations

import pytest
import together_cases as cases
from ranks import check_case, run_cases, run_ranks

pytestmark = pytest.mark.ranks

Results = list[dict[str, str | None]]


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(run_cases, 2, cases.TWO, tuple(cases.TWO))


@pytest.fixture(scope="module")
def four_ranks() -> Results:
    return run_ranks(run_cases, 4, cases.FOUR, tuple(cases.FOUR))


@pytest.fixture(scope="module")
def in_debug_mode() -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        return run_ranks(run_cases, 2, cases.DEBUG, tuple(cases.DEBUG))


@pytest.mark.parametrize("name", cases.TWO)
def test_on_two_ranks(two_ranks: Results, name: str) -> None:
    check_case(two_ranks, name)


@pytest.mark.parametrize("name", cases.FOUR)
def test_on_four_ranks(four_ranks: Results, name: str) -> None:
    check_case(four_ranks, name)


@pytest.mark.parametrize("name", cases.DEBUG)
def test_with_wrapped_process_groups(in_debug_mode: Results, name: str) -> None:
    check_case(in_debug_mode, name)
