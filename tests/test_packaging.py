"""What the distribution promises: extras, pins, public names, root links."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tidegate

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_malicious_lightning_releases_are_excluded_L16(project: dict[str, Any]) -> None:
    (lightning,) = map(Requirement, project["optional-dependencies"]["lightning"])
    assert not lightning.specifier.contains("2.6.2")
    assert not lightning.specifier.contains("2.6.3")
    assert lightning.specifier.contains("2.6.6")


def test_all_takes_every_extra_of_a_user(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.name == "tidegate"
    assert everything.extras == set(extras) - {"all", "dev"}


def test_the_core_needs_few_packages(project: dict[str, Any]) -> None:
    assert {Requirement(line).name for line in project["dependencies"]} == {"torch", "rich", "typer"}


def test_every_package_of_the_test_environment_is_pinned(project: dict[str, Any], pins: dict[str, str]) -> None:
    if importlib.metadata.version("torch").partition("+")[0] != pins["torch"]:
        pytest.skip("not the pinned environment: what its packages need is another list")
    missing, seen = [], set()
    queue = [Requirement(line) for line in [*project["dependencies"], *project["optional-dependencies"]["dev"]]]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        if name == "tidegate":
            for extra in requirement.extras:
                queue += map(Requirement, project["optional-dependencies"][extra])
            continue
        if name not in pins:
            missing.append(name)
        if name != "torch":  # a CUDA build of torch pins its own libraries
            queue += _requirements_of(name, requirement.extras)
    assert not missing


def _requirements_of(name: str, extras: set[str]) -> list[Requirement]:
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found.append(requirement)
    return found


def test_the_torch_pin_leaves_the_build_open(pins: dict[str, str]) -> None:
    assert pins["torch"] == "2.13.0"
    assert not [name for name in pins if name.startswith(("nvidia-", "cuda-"))]


@pytest.mark.parametrize("module", [tidegate, tidegate.strategies], ids=lambda module: module.__name__)
def test_every_public_name_is_there(module: Any) -> None:
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_the_version_has_a_changelog_entry() -> None:
    assert re.search(rf"^## \[{re.escape(tidegate.__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(tidegate.__file__).parent / "py.typed").is_file()


def test_root_links_lead_into_the_package() -> None:
    links = [path for path in ROOT.iterdir() if path.is_symlink() and not path.name.startswith(".")]
    assert links
    for link in links:
        assert link.resolve() == ROOT / "src" / "tidegate" / link.name
