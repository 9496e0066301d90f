"""FSDP2 with quantized communication against stock FSDP2, on two, three and four gloo ranks."""

from __future__ import annotations

import pytest
from fsdp_cases import CASES, FOUR
from ranks import check_case, run_cases, run_ranks

pytestmark = pytest.mark.ranks

Results = list[dict[str, str | None]]

# Uneven shards and a division by three; the rest of the cases say nothing new there.
ON_THREE_RANKS = (
    "case_w32g32_is_bitwise_stock",
    "case_all_ranks_decode_the_same_weights",
    "case_gradients_match_stock_within_the_bound",
    "case_divide_factor_and_sum",
    "case_bytes_counted_are_bytes_sent",
    "case_flat_collectives",
    "case_disagreement_is_named_on_every_rank",
)


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(run_cases, 2, CASES, tuple(CASES))


@pytest.fixture(scope="module")
def three_ranks() -> Results:
    return run_ranks(run_cases, 3, CASES, ON_THREE_RANKS)


@pytest.fixture(scope="module")
def four_ranks() -> Results:
    return run_ranks(run_cases, 4, FOUR, tuple(FOUR))


@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(two_ranks: Results, name: str) -> None:
    check_case(two_ranks, name)


@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_on_three_ranks(three_ranks: Results, name: str) -> None:
    check_case(three_ranks, name)


@pytest.mark.parametrize("name", FOUR)
def test_on_four_ranks(four_ranks: Results, name: str) -> None:
    check_case(four_ranks, name)
