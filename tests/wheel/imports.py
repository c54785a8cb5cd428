"""Import every module of the installed package, and compare what they import with what it declares.

``python imports.py`` in an environment without extras: the only modules that may fail lack a distribution of an
extra, and what the others import while they are imported belongs to the base.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions, requires
from pathlib import Path

OURS = "checkpointless"


def normalised(name: str) -> str:
    """Return the name of a distribution as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(tree: ast.AST, lazily: bool = True) -> Iterator[str]:
    """Yield the names of the modules that a file imports, without ours and the standard library's."""
    for node in ast.walk(tree) if lazily else ast.iter_child_nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = [node.module]
        yield from (name for name in names if name.partition(".")[0] not in {OURS, *sys.stdlib_module_names})


def is_declared(module: str, declared: set[str], installed: Mapping[str, list[str]]) -> bool:
    """Return whether a distribution that has ``module`` is among those that are declared."""
    top = module.partition(".")[0]
    if top in installed:
        return any(normalised(each) in declared for each in installed[top])
    return any(each == normalised(top) or each.startswith(f"{normalised(top)}-") for each in declared)


def _declared() -> tuple[set[str], set[str]]:
    """Return the distributions that the installed package declares: those of the base, and those of extras."""
    base, extras = set[str](), set[str]()
    for requirement in requires(OURS) or ():
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert name is not None, requirement
        (extras if "extra ==" in requirement else base).add(normalised(name[0]))
    return base, extras


def main() -> int:
    """Check the installed package."""
    package = importlib.import_module(OURS)
    base, extras = _declared()
    installed = packages_distributions()
    wrong: list[str] = []
    done, lacking = 0, 0
    for found in pkgutil.walk_packages(package.__path__, f"{OURS}.", onerror=lambda name: None):
        if found.name.endswith(".__main__"):  # would run it
            continue
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            lacking += 1
            if error.name is None or not is_declared(error.name, extras - base, installed):
                wrong.append(f"{found.name} needs {error.name}, which no extra brings")
            continue
        except Exception as error:
            wrong.append(f"{found.name} cannot be imported: {error!r}")
            continue
        done += 1
        names = imported(ast.parse(Path(str(module.__file__)).read_text()), lazily=False)
        wrong += [
            f"{found.name} imports {name}, which the base does not declare"
            for name in names
            if not is_declared(name, base, installed)
        ]
    print(f"{done} modules imported from {package.__path__[0]}; {lacking} need an extra")
    for each in wrong:
        print(f"error: {each}")
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main())
