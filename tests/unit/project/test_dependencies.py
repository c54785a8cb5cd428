"""Check that what is imported is declared and the reverse, and that Python 3.11.0 can install what is pinned."""

import ast
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.wheel.contents import FOLDERS
from tests.wheel.imports import imported, is_declared, normalised

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Extras for those who work on the package itself.
OWN = {"dev", "docs"}


def names(requirements: list[str]) -> set[str]:
    return {normalised(Requirement(each).name) for each in requirements}


BASE = names(PROJECT["dependencies"])
DECLARED = BASE | {
    name for extra, wanted in PROJECT["optional-dependencies"].items() if extra not in OWN for name in names(wanted)
}


def all_imports() -> Iterator[tuple[str, str]]:
    """Yield each module that is imported, and the file that does it."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in imported(ast.parse(path.read_text())):
                yield name, path.relative_to(ROOT).as_posix()


@pytest.mark.nemo  # only what is installed says which distribution a module is of
def test_everything_that_is_imported_is_declared() -> None:
    installed = packages_distributions()
    found = dict(all_imports())
    assert len(found) > 100
    undeclared = {name: path for name, path in found.items() if not is_declared(name, DECLARED, installed)}
    assert not undeclared, f"declare these in pyproject.toml: {undeclared}"


@pytest.mark.slow
def test_everything_that_the_base_declares_is_imported() -> None:
    installed = packages_distributions()
    tops = {name.partition(".")[0] for name, _ in all_imports()}
    assert len(BASE) > 10
    idle = {each for each in BASE if not any(is_declared(top, {each}, installed) for top in tops)}
    assert not idle, f"nothing imports {idle}"


PINNED = re.findall(
    r"^([\w.-]+)==([\w.+]+)",
    (Path(__file__).parents[3] / "constraints" / "nemo-cpu.txt").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.nemo  # NeMo brings most of them
def test_the_pinned_packages_install_with_the_first_python_3_11() -> None:
    looked_at = 0
    for name, version in PINNED:
        try:
            found = metadata(name)
        except PackageNotFoundError:
            continue
        if found["Version"].partition("+")[0] != version:
            continue  # another one is installed here
        looked_at += 1
        requires = str(found.json.get("requires_python", ""))
        assert SpecifierSet(requires).contains("3.11.0"), f"{name} {version} requires Python {requires}"
    assert looked_at > 100
