"""Check that tests whose marks leave them out are not imported, and that only tests with its mark import NeMo."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.marks import IMPORTED, left_out, marks_of
from tests.unit.project.test_floors import MODULES, ROOT, tree_of

TESTS = sorted((ROOT / "tests" / "unit").rglob("test_*.py"))


@pytest.mark.parametrize(
    ("expression", "marks"),
    [
        ("", set()),
        ("not long", {"long"}),
        ("not nemo and not long", {"nemo", "long"}),
        ("not nemo or not long", set()),
        ("not (nemo or long)", set()),
        ("long", set()),
        ("nemo and not long", set()),
    ],
)
def test_only_what_is_left_out_for_certain_is_not_imported(expression: str, marks: set[str]) -> None:
    assert left_out(expression) == marks


@pytest.mark.parametrize(
    ("line", "marks"),
    [
        ("pytestmark = pytest.mark.nemo", {"nemo"}),
        ("pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]", {"ranks", "timeout"}),
        ("@pytest.mark.nemo\ndef test() -> None: ...", set()),
    ],
)
def test_the_marks_of_a_file_are_those_of_all_its_tests(line: str, marks: set[str], tmp_path: Path) -> None:
    path = tmp_path / "test_something.py"
    path.write_text(f"import pytest\n\n{line}\n")
    assert marks_of(path) == marks


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return what a file imports whenever it is imported itself, with the packages that each of these lies in."""
    found: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{each.name}" for each in node.names)}
    return frozenset(
        ".".join(parts[: at + 1]) for parts in (name.split(".") for name in found) for at in range(len(parts))
    )


def _heavy(path: Path, packages: set[str]) -> set[str]:
    """Return what of ``packages`` is loaded when a file is imported, by itself or by our own modules."""
    left, known, heavy = set(_imports(path)), set[str](), set[str]()
    while left:
        name = left.pop()
        known.add(name)
        if name.partition(".")[0] in packages:
            heavy.add(name)
        own = MODULES.get(name, MODULES.get(f"{name}.__init__"))
        left |= _imports(own) - known if own is not None else set()
    return heavy


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_a_file_that_imports_a_framework_has_its_mark(path: Path) -> None:
    heavy = {mark: _heavy(path, packages) for mark, packages in IMPORTED.items()}
    missing = {mark: names for mark, names in heavy.items() if names and not {mark, "nemo"} & marks_of(path)}
    assert not missing, "NeMo's mark covers Lightning's"
