"""Find which files of tests need not be imported at all, because every test in them is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

#: What only tests with a mark may import.
IMPORTED = {"nemo": {"nemo", "megatron", "nemo_run"}, "lightning": {"lightning"}}


def left_out(expression: str) -> frozenset[str]:
    """Return the marks that no selected test has.

    Args:
        expression: what pytest's ``-m`` takes. Only ``not a and not b ...`` says for certain what is left out.
    """
    found = [re.fullmatch(r"not (\w+)", part.strip()) for part in expression.split(" and ")]
    return frozenset(match[1] for match in found if match is not None) if all(found) else frozenset()


def marks_of(path: Path) -> frozenset[str]:
    """Return the marks that all tests of a file have, found without importing it.

    Args:
        path: a module of tests, whose ``pytestmark`` names them.
    """
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            return frozenset(re.findall(r"pytest\.mark\.(\w+)", ast.unparse(node.value)))
    return frozenset()
