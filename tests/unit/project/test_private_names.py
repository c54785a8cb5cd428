"""Test that private names of other packages stand in ``integrations/compat``, but for those of a falling list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.unit.project.test_floors import MODULES, ROOT, tree_of

COMPAT = "checkpointless/integrations/compat/"
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
_DOCUMENTED = {"_exit", "_value_"}  # of os and enum

#: How many private names of other packages a module still has. The list is edited downwards only.
LEFT = {
    "callbacks/checkpointless_callback.py": 4,
    "callbacks/fault_injection.py": 1,
    "callbacks/step_recorder.py": 2,
    "callbacks/trainer_parts.py": 2,
    "checkpointless/cli/command_line.py": 1,
    "checkpointless/cli/job.py": 1,
    "checkpointless/inprocess/communicators/process_groups.py": 4,
    "checkpointless/inprocess/communicators/waits.py": 2,
    "checkpointless/inprocess/finalize.py": 1,
    "checkpointless/inprocess/abort.py": 11,
    "checkpointless/inprocess/fault_responder.py": 1,
    "checkpointless/inprocess/wrap.py": 1,
    "checkpointless/inprocess/worker_streams.py": 3,
    "checkpointless/integrations/lightning/boundary/epoch_metrics.py": 9,
    "checkpointless/integrations/lightning/boundary/step_keeper.py": 2,
    "checkpointless/integrations/lightning/boundary/loops.py": 4,
    "checkpointless/integrations/lightning/checkpoints/saves.py": 2,
    "checkpointless/integrations/lightning/data/loaders.py": 7,
    "checkpointless/integrations/lightning/frameworks/nemo.py": 2,
    "checkpointless/integrations/lightning/recoverable_strategy.py": 2,
    "checkpointless/integrations/megatron/cleanup.py": 1,
    "checkpointless/integrations/megatron/cpu_platform.py": 1,
    "checkpointless/integrations/megatron/state.py": 1,
    "checkpointless/integrations/megatron/warm.py": 6,
    "checkpointless/integrations/torch/loop.py": 1,
    "checkpointless/integrations/torch/plain.py": 1,
    "checkpointless/integrations/torch/torch_tensors.py": 3,
    "checkpointless/integrations/transformers.py": 3,
    "checkpointless/launcher/agent/ranks/rank_process.py": 2,
    "checkpointless/launcher/agent/ranks/zygote.py": 1,
    "checkpointless/replication/exchange.py": 2,
    "checkpointless/replication/parts.py": 1,
    "checkpointless/state/module_tensors.py": 2,
    "checkpointless/state/serialization/digest.py": 1,
    "checkpointless/state/serialization/state_tree.py": 1,
    "checkpointless/doctor/forking.py": 1,
    "checkpointless/system/process_tree.py": 1,
    "checkpointless/testing/demo/text.py": 1,
    "recipes/runner.py": 1,
    "strategies/megatron_strategy.py": 2,
    "strategies/torch_strategies.py": 9,
}


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
                found |= (
                    {node.attr} if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else set()
                )
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
            yield from (
                each.value
                for each in node.args[1:2]
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


def private_names(path: Path, own: set[str]) -> list[str]:
    return sorted({name for name in names_in(tree_of(path)) if is_private(name)} - own - _DOCUMENTED)


def test_private_names_of_other_packages_stand_in_one_place() -> None:
    own = own_names()
    places = {str(path.relative_to(ROOT)): path for path in MODULES.values()}
    found = {place: private_names(path, own) for place, path in places.items() if not place.startswith(COMPAT)}
    more = {place: names for place, names in found.items() if len(names) > LEFT.get(place, 0)}
    assert not more, "name it in checkpointless/integrations/compat/, with the versions that have it"
    fewer = {place for place, number in LEFT.items() if len(found.get(place, ())) < number}
    assert not fewer, "lower their numbers in the list"
