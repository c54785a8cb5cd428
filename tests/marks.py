"""Find which files of tests need not be imported at all, because every test in them is left out."""

import ast
import re
from pathlib import Path

#: What only tests with a mark may import.
IMPORTED = {"nemo": {"nemo", "megatron", "nemo_run"}, "lightning": {"lightning"}}


def left_out(expression: str) -> frozenset[str]:
    """Return the marks of no test that pytest's ``-m`` selects; only ``not a and not b ...`` says for certain."""
    found = [re.fullmatch(r"not (\w+)", part.strip()) for part in expression.split(" and ")]
    return frozenset(match[1] for match in found if match is not None) if all(found) else frozenset()


def marks_of(path: Path) -> frozenset[str]:
    """Return the marks in the ``pytestmark`` of a file of tests, found without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            return frozenset(re.findall(r"pytest\.mark\.(\w+)", ast.unparse(node.value)))
    return frozenset()
