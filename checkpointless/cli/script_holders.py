"""What a script says, without being run, about how many ranks hold each part of its state."""

from __future__ import annotations

import ast
from dataclasses import dataclass

_INSTANCES = "num_distributed_optimizer_instances"
_LOST = "a rank that dies could not be restored from memory; set {}, or keep copies: CheckpointManager(tiers=...)"
#: Calls by the last part of their name: the argument that says how many hold each part, what it is by default, and
#: which tensors have no other holders.
_HOLDERS = {
    "CheckpointlessModelParallelStrategy": ("replicas", 1, "divided parameters"),
    "CheckpointlessMegatronStrategy": (_INSTANCES, 2, "the optimizer's shards"),
    "DistributedDataParallelConfig": (_INSTANCES, 1, "the optimizer's shards"),
}
_WHOLE = ("CheckpointlessDDPStrategy", "DistributedDataParallel")


@dataclass(frozen=True)
class Finding:
    """What one call in a script says.

    Attributes:
        text: one sentence, with the number of the line.
        is_alone: whether each part of the state has one holder.
    """

    text: str
    is_alone: bool = False


def holders_in(source: str) -> list[Finding]:
    """Find what a script says about the holders of its state.

    Only arguments that are written as numbers are known; meshes, groups and what other modules make are not.

    Args:
        source: the text of the script.

    Returns:
        What is known, in the order of the lines; nothing if the script says nothing, or is no Python.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return []
    imported = (alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names)
    names = {alias.asname: alias.name for alias in imported if alias.asname}  # such as DDP
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    for call in calls:
        if isinstance(call.func, ast.Name):
            call.func.id = names.get(call.func.id, call.func.id)
    calls.sort(key=lambda call: call.lineno)
    has_copies = any(_name(call) == "CheckpointManager" and _argument(call, "tiers") is not None for call in calls)
    found = [finding for call in calls if (finding := _said_by(call, has_copies)) is not None]
    return list(dict.fromkeys(found))


def _said_by(call: ast.Call, has_copies: bool) -> Finding | None:
    name, where = _name(call), f"line {call.lineno}: {_name(call)}"
    if name in _WHOLE:
        return Finding(f"{where}: every rank holds the whole state.")
    if name not in _HOLDERS or (name == "DistributedDataParallelConfig" and not _is_sharded(call)):
        return None
    keyword, holders, what = _HOLDERS[name]
    given = _argument(call, keyword)
    if given is None and any(each.arg is None for each in call.keywords):
        return None  # it may be in a dict
    if given is not None:
        if not isinstance(given, ast.Constant) or type(given.value) is not int:
            return None
        holders = given.value
    if holders > 1:
        return Finding(f"{where}({keyword}={holders}): {holders} ranks hold each part of the state.")
    if has_copies:
        return Finding(f"{where}({keyword}={holders}): one rank holds each part, and copies are kept in tiers.")
    lost = _LOST.format(f"{keyword}=2")
    return Finding(f"{where}({keyword}={holders}): no replicas of {what}, {lost}", is_alone=True)


def _is_sharded(call: ast.Call) -> bool:
    given = _argument(call, "use_distributed_optimizer")
    return isinstance(given, ast.Constant) and given.value is True


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)
