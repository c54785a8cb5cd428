"""Check that environment variables have their names in one place: ``checkpointless/system/environment.py``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.system import environment
from checkpointless.system.environment import JOB_RESTART_COUNT_ENV, RANK_ENV, RUN_DIR_ENV, WORLD_SIZE_ENV
from tests.unit.project.test_floors import MODULES, tree_of


def literals(source: Path) -> Iterator[str]:
    """Yield every string in a file that is not documentation, with the parts of f-strings."""
    tree = tree_of(source)
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    documentation = {id(value) for value in alone if isinstance(value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def test_only_one_module_names_our_variables() -> None:
    for source in (path for name, path in MODULES.items() if name != environment.__name__):
        found = {name for text in literals(source) for name in re.findall(r"CHECKPOINTLESS_[A-Z_]+", text)}
        assert not found, f"{source} names {', '.join(sorted(found))}: take it from system.environment"


def test_no_variable_has_two_names() -> None:
    variables = {name: value for name, value in vars(environment).items() if name.endswith("_ENV")}
    assert len(variables) > 20
    assert len(set(variables.values())) == len(variables)
    for name, value in variables.items():
        short = name.removesuffix("_ENV")
        assert value in (short, f"CHECKPOINTLESS_{short}") or value.startswith("HYPERPOD_")


def place() -> tuple[object, ...]:
    return tuple(getattr(environment, f"own_{what}")() for what in ("rank", "world_size", "generation", "run_dir"))


def test_a_process_outside_of_a_job_is_alone_and_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (RANK_ENV, WORLD_SIZE_ENV, JOB_RESTART_COUNT_ENV, RUN_DIR_ENV):
        monkeypatch.delenv(name, raising=False)
    assert place() == (0, 1, 0, None)
    monkeypatch.setenv(RUN_DIR_ENV, "")
    assert place() == (0, 1, 0, None)


def test_a_rank_reads_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in ((RANK_ENV, "3"), (WORLD_SIZE_ENV, "8"), (JOB_RESTART_COUNT_ENV, "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    assert place() == (3, 8, 2, tmp_path)
    monkeypatch.setenv(RANK_ENV, "three")
    with pytest.raises(ValueError, match="three"):
        place()
