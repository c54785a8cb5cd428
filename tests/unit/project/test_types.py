"""Seams say what they take and give: where one is annotated with the bare ``Any``, its line says why.

A seam is a parameter, a return value or an attribute that others use: its own name and its class's are public. What
``*args`` and ``**kwargs`` take is no seam, and neither is a method that overrides one of a framework's.
"""

import ast
import re
from collections.abc import Iterator

from tests.unit.project.test_floors import MODULES, tree_of

# No more seams than this may be annotated with Any.
MOST = 5

CALLED_BY_OTHERS = {"__init__", "__call__", "__enter__", "__exit__"}
REASON = re.compile(r"# Any: \w")


def seams_in(scope: ast.Module | ast.ClassDef) -> Iterator[ast.expr]:
    """Yield the annotation of each seam that is annotated with the bare ``Any``."""
    for node in scope.body:
        annotations: list[ast.expr | None] = []
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from seams_in(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if _is_public(node.name) and not _overrides(node):
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                annotations = [*(each.annotation for each in arguments), node.returns]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_public(node.target.id):
            annotations = [node.annotation]
        for annotation in annotations:
            if isinstance(annotation, ast.Name) and annotation.id == "Any":
                yield annotation


def _is_public(name: str) -> bool:
    return name in CALLED_BY_OTHERS or not name.startswith("_")


def _overrides(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "override" for each in function.decorator_list)


def test_few_seams_take_or_give_anything_and_each_says_why() -> None:
    lines = [
        f"{module}: {path.read_text().splitlines()[seam.lineno - 1]}"
        for module, path in MODULES.items()
        for seam in seams_in(tree_of(path))
    ]
    unexplained = [line for line in lines if not REASON.search(line)]
    assert not unexplained, "give each a type, or end its line with '# Any: ' and the reason"
    assert 0 < len(lines) <= MOST, lines
