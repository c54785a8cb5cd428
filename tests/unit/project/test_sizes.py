"""The budgets of the project: what is measured, so that each commit that adds code says so."""

import ast
from pathlib import Path

from tests.unit.project.private_names import private_names
from tests.unit.project.test_floors import MODULES, ROOT, tree_of

#: The aim is 45,000 lines in 280 modules with 600 public names, and 200 KB of documentation.
BUDGETS = {
    "lines of the product": 44_875,
    "modules of the product": 207,
    "public names of the product": 594,
    "private names of other packages": 104,
    "lines of the tests": 44_875,
    "bytes of docs/": 202_243,
    "bytes of docs/architecture.md": 34_860,
    "bytes of docs/guarantees.md": 13_393,
    "lines of README.md": 129,
}
FUNCTION_LINES = 60


def lines(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def public_names(path: Path) -> int:
    defined = (node for node in tree_of(path).body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return sum(not node.name.startswith("_") for node in defined)


def measured() -> dict[str, int]:
    docs = ROOT / "docs"
    return {
        "lines of the product": lines(*MODULES.values()),
        "modules of the product": len(MODULES),
        "public names of the product": sum(map(public_names, MODULES.values())),
        "private names of other packages": sum(map(len, private_names().values())),
        "lines of the tests": lines(*(ROOT / "tests").rglob("*.py")),
        "bytes of docs/": sum(path.stat().st_size for path in docs.rglob("*.md")),
        "bytes of docs/architecture.md": (docs / "architecture.md").stat().st_size,
        "bytes of docs/guarantees.md": (docs / "guarantees.md").stat().st_size,
        "lines of README.md": lines(ROOT / "README.md"),
    }


def test_the_budgets_are_kept() -> None:
    over = {what: found for what, found in measured().items() if found > BUDGETS[what]}
    assert not over, (
        "too many: what can go? Private names belong in integrations/compat, with the versions that have them"
    )


def test_functions_are_of_a_readable_size() -> None:
    long = [
        f"{node.name} in {path.relative_to(ROOT)}"
        for path in MODULES.values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or node.lineno) - node.lineno + 1 > FUNCTION_LINES
    ]
    assert long == []
