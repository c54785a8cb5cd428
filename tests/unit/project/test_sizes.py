"""No module, function or folder is larger than a reader can hold."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tests.unit.project.test_floors import FOLDERS, MODULES, ROOT, tree_of

MODULE_LINES = 450
FUNCTION_LINES = 60
FOLDER_MODULES = 16

SOURCES = sorted({*MODULES.values(), *(ROOT / "tests").rglob("*.py")})


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_and_its_functions_are_of_a_readable_size(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MODULE_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it by subject"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"{node.name} in {path.relative_to(ROOT)} has {lines} lines"


def test_no_folder_of_the_package_has_too_many_modules() -> None:
    modules: dict[Path, list[str]] = defaultdict(list)
    for path in MODULES.values():
        if path.name != "__init__.py":
            modules[path.parent].append(path.stem)
    assert modules.keys() >= set(FOLDERS.values())
    crowded = {str(folder.relative_to(ROOT)): len(names) for folder, names in modules.items()}
    assert {folder: count for folder, count in crowded.items() if count > FOLDER_MODULES} == {}
