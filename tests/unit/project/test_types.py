"""Seams say what they take and give: where one is annotated with the bare ``Any``, its line says why.

A seam is a parameter, a return value or an attribute that others use: its own name and its class's are public. What
``*args`` and ``**kwargs`` take is no seam, and neither is a method that overrides one of a framework's.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("checkpointless", "callbacks", "strategies", "recipes")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

# No more seams than this may be annotated with Any, with a reason or without.
MOST = 5

CALLED_BY_OTHERS = {"__init__", "__call__", "__enter__", "__exit__"}
REASON = re.compile(r"# Any: \w")


@dataclass(frozen=True)
class Seam:
    """Represents a seam that is annotated with the bare ``Any``.

    Attributes:
        name: the name of the function or the attribute.
        line: the number of the line with the annotation, from 1.
    """

    name: str
    line: int


@cache
def seams(source: str) -> list[Seam]:
    """Return the seams of a module that are annotated with the bare ``Any``."""
    return list(_seams_in(ast.parse(source)))


def _seams_in(scope: ast.Module | ast.ClassDef) -> Iterator[Seam]:
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            if not node.name.startswith("_"):
                yield from _seams_in(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if _is_public(node.name) and not _overrides(node):
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                yield from _bare(node.name, *(each.annotation for each in arguments), node.returns)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_public(node.target.id):
            yield from _bare(node.target.id, node.annotation)


def _is_public(name: str) -> bool:
    return name in CALLED_BY_OTHERS or not name.startswith("_")


def _overrides(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "override" for each in function.decorator_list)


def _bare(name: str, *annotations: ast.expr | None) -> Iterator[Seam]:
    for annotation in annotations:
        if isinstance(annotation, ast.Name) and annotation.id == "Any":
            yield Seam(name, annotation.lineno)


def without_reason(source: str) -> list[Seam]:
    """Return the seams of a module that are annotated with ``Any`` and do not say why."""
    lines = source.splitlines()
    return [seam for seam in seams(source) if not REASON.search(lines[seam.line - 1])]


@pytest.mark.parametrize("source", SOURCES)
def test_a_seam_that_takes_or_gives_anything_says_why(source: str) -> None:
    found = without_reason((ROOT / source).read_text())
    assert not found, f"{source}: give each a type, or end its line with '# Any: ' and the reason"


def test_few_seams_take_or_give_anything() -> None:
    found = {source: len(seams((ROOT / source).read_text())) for source in SOURCES}
    assert sum(found.values()) <= MOST, {source: count for source, count in found.items() if count}
