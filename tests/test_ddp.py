"""DistributedDataParallel with the quantized hook against DDP without, on gloo ranks."""

from __future__ import annotations

import pytest
from ddp_cases import CASES
from ranks import check_case, run_cases, run_ranks

pytestmark = pytest.mark.ranks

Results = list[dict[str, str | None]]


# Uneven pieces and a division by three; the rest says nothing new there.
ON_THREE_RANKS = (
    "case_off_and_warmup_are_bitwise_ddp",
    "case_gradients_are_identical_and_within_the_bound",
    "case_bytes_counted_are_bytes_sent",
)


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(run_cases, 2, CASES, tuple(CASES))


@pytest.fixture(scope="module")
def three_ranks() -> Results:
    return run_ranks(run_cases, 3, CASES, ON_THREE_RANKS)


@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(two_ranks: Results, name: str) -> None:
    check_case(two_ranks, name)


@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_on_three_ranks(three_ranks: Results, name: str) -> None:
    check_case(three_ranks, name)
