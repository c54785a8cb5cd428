"""Test, on a CPU, what the GPU suite does in its processes, as far as it needs no GPU, and that calls fit it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.gpu import figures
from benchmarks.gpu import run as benchmark
from tests.gpu import single
from tests.gpu.isolated import ROOT

CALLS = ("run", "run_ranks")
OWN = {"env", "ranks"}  # keyword arguments of the callers themselves


def calls(path: Path) -> list[tuple[str, set[str]]]:
    """Return the functions that a test module has run in processes, and the keyword arguments that they get."""
    tree = ast.parse(path.read_text())
    (bodies,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BODIES"
    ] or [""]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            # A literal, or an f-string that begins with BODIES.
            name = str(ast.literal_eval(ast.unparse(node.args[0]).replace("{BODIES}", bodies).lstrip("f")))
            found.append((name, {str(each.arg) for each in node.keywords} - OWN))
    return found


TESTS = [path for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")) if path.stem != "test_jobs"]


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_what_a_test_runs_in_a_process_exists_and_takes_its_arguments(path: Path) -> None:
    for function, arguments in calls(path):
        module, _, name = function.partition(":")
        body = getattr(importlib.import_module(module), name)
        inspect.signature(body).bind(**dict.fromkeys(arguments))


@pytest.mark.parametrize("measurement", benchmark.MEASUREMENTS, ids=lambda each: each.name)
def test_a_measurement_takes_its_arguments(measurement: benchmark.Measurement) -> None:
    parameters = set(inspect.signature(getattr(figures, measurement.name)).parameters)
    assert set(measurement.on_gpu) == parameters
    assert measurement.on_cpu is None or set(measurement.on_cpu) == parameters


@pytest.fixture
def no_group_is_left() -> Iterator[None]:
    yield
    dist.destroy_process_group()


def test_a_held_state_is_whole_and_adopted_after_a_reentry(no_group_is_left: None) -> None:
    found = single.reentry(32, 2, "cpu")
    assert found["is_whole"]
    assert found["are_adopted"]
    assert found["kept"] == found["bytes"]
    assert found["parameters"] == 2 * 32 * 32
