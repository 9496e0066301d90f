"""Every recipe in every sequence that users go through."""

from __future__ import annotations

import crossing_cases as cases
import pytest
from ranks import check_case, run_cases, run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module", params=list(cases.SEQUENCES))
def found(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, str | None]]]:
    names = tuple(name for name in cases.CROSSINGS if name.startswith(f"{request.param}:"))
    return request.param, run_ranks(run_cases, 2, cases.CROSSINGS, names)


@pytest.mark.parametrize("recipe", cases.RECIPES)
def test_on_two_ranks(found: tuple[str, list[dict[str, str | None]]], recipe: str) -> None:
    sequence, results = found
    check_case(results, f"{sequence}: {recipe}")
