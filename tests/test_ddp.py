"""DistributedDataParallel with the quantized hook against DDP without, on gloo ranks."""

from __future__ import annotations

import traceback

import pytest
import torch.distributed as dist
from ddp_cases import CASES
from ranks import run_ranks

pytestmark = pytest.mark.ranks

Results = list[dict[str, str | None]]

# Uneven pieces and a division by three; the rest says nothing new there.
ON_THREE_RANKS = (
    "case_off_and_warmup_are_bitwise_ddp",
    "case_gradients_are_identical_and_within_the_bound",
    "case_bytes_counted_are_bytes_sent",
)


def run(rank: int, names: tuple[str, ...]) -> dict[str, str | None]:
    results: dict[str, str | None] = {}
    for name in names:
        try:
            CASES[name](rank)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(run, 2, tuple(CASES))


@pytest.fixture(scope="module")
def three_ranks() -> Results:
    return run_ranks(run, 3, ON_THREE_RANKS)


@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(two_ranks: Results, name: str) -> None:
    for rank, results in enumerate(two_ranks):
        assert results[name] is None, f"rank {rank}:\n{results[name]}"


@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_on_three_ranks(three_ranks: Results, name: str) -> None:
    for rank, results in enumerate(three_ranks):
        assert results[name] is None, f"rank {rank}:\n{results[name]}"
