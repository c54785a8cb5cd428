"""Check that tests whose marks leave them out are not imported, and that only tests with its mark import NeMo."""

import ast
from functools import cache
from pathlib import Path

from tests.marks import IMPORTED, marks_of
from tests.unit.project.test_floors import MODULES, ROOT, tree_of


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


def test_a_file_that_imports_a_framework_has_its_mark() -> None:
    files = sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
    missing = {
        (str(path.relative_to(ROOT)), mark): heavy
        for path in files
        for mark, packages in IMPORTED.items()
        if not {mark, "nemo"} & marks_of(path) and (heavy := _heavy(path, packages))
    }
    assert len(files) > 100
    assert not missing, "NeMo's mark covers Lightning's"
