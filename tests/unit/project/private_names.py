"""Find private names of other packages, which are to stand in ``integrations/compat``."""

import ast
from collections.abc import Iterator

from tests.unit.project.test_floors import MODULES, ROOT, tree_of

COMPAT = "checkpointless/integrations/compat/"
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
_DOCUMENTED = {"_exit", "_value_"}  # of os and enum


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """Return the names that the product defines, of functions, classes, variables and attributes."""
    found: set[str] = set()
    for path in MODULES.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names of attributes, of what is imported from other packages, and of attributes given as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("checkpointless"):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            named = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
            yield from (each for each in named if isinstance(each, str))


def private_names() -> dict[str, list[str]]:
    """Return the private names of other packages that each module has, outside of ``integrations/compat``."""
    own = own_names() | _DOCUMENTED
    places = {str(path.relative_to(ROOT)): path for path in MODULES.values()}
    return {
        place: sorted(names)
        for place, path in places.items()
        if not place.startswith(COMPAT)
        and (names := {each for each in names_in(tree_of(path)) if is_private(each)} - own)
    }


if __name__ == "__main__":
    print(*(f"{place}: {', '.join(names)}" for place, names in private_names().items()), sep="\n")
