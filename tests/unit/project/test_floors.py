"""Imports point down: what docs/architecture.md draws is what the code does."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = "checkpointless"
FOLDERS = {f"{PACKAGE}.{name}": ROOT / name for name in ("callbacks", "recipes", "strategies")}
FOLDERS[PACKAGE] = ROOT / PACKAGE

# Lower is further down. A part may import its own floor (but see the test for cycles) and those below. The
# package's own __init__ gathers what has no framework in it; `agent`, `bridge` and `megatron` are public names
# only.
FLOORS = {
    "system": 0,
    "observability": 0,
    "observability.telemetry": 0,
    "launcher": 0,
    "launcher.protocol": 0,
    "integrations": 0,
    "integrations.compat": 0,
    "testing": 12,
    "observability.report": 1,
    "launcher.coordinator": 1,
    "faults": 2,
    "launcher.client": 2,
    "state.serialization": 2,
    "observability.monitoring": 3,
    "transfer": 3,
    "launcher.agent": 4,
    "inprocess": 4,
    "doctor": 5,
    "state": 5,
    "replication": 4,
    "replication.handover": 6,
    "replication.tiers": 6,
    "replication.local_checkpoint": 6,
    "recovery": 7,
    "integrations.torch": 8,
    "__init__": 8,
    "integrations.transformers": 9,
    "integrations.torchtitan": 9,
    "integrations.megatron": 9,
    "callbacks": 9,
    "integrations.megatron_bridge": 10,
    "integrations.lightning": 10,
    "strategies": 12,
    "agent": 12,
    "bridge": 12,
    "megatron": 12,
    "recipes": 12,
    "cli": 13,
    "__main__": 14,
}
FRAMEWORKS = {"lightning", "pytorch_lightning", "nemo", "megatron", "nemo_run", "transformer_engine"}
# msgspec is a few hundred kilobytes, and loads in milliseconds
TYPED_MESSAGES = ("launcher.protocol", "launcher.coordinator", "observability.telemetry")
STANDARD_LIBRARY_ONLY = ("system", "launcher", "observability", "integrations", "faults", *TYPED_MESSAGES)
NO_FRAMEWORK = {part for part, floor in FLOORS.items() if floor <= FLOORS["__init__"]} - {"integrations.compat"}


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *parts)), path


MODULES = dict(modules())

# Commands load these only when they have something to show.
LOADED_LATER = {f"{PACKAGE}.cli.{name}" for name in ("tables", "terminal")}
LIGHT = [module for module in MODULES if module.startswith(f"{PACKAGE}.cli.") and module not in LOADED_LATER]


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is kept since many tests look at it."""
    return ast.parse(path.read_text())


def part_of(module: str) -> str:
    """Return the part of the package that a module belongs to; ``__init__`` for the package itself."""
    parts = module.split(".")[1:]
    named = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in named if name in FLOORS), parts[0] if parts else "__init__")


def imports(module: str) -> Iterator[str]:
    """Yield every name that a module imports, wherever in the file, as an absolute dotted name."""
    package = module.rpartition(".")[0]
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            origin = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (origin, node.module)))
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
            yield from (
                each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


def own_parts(module: str) -> set[str]:
    return {
        part_of(name) if part_of(name) in FLOORS else "__init__"
        for name in imports(module)
        if name.partition(".")[0] == PACKAGE
    }


def test_every_module_has_a_floor() -> None:
    assert len(MODULES) > 20
    assert {part_of(module) for module in MODULES} <= FLOORS.keys()


def test_imports_point_down() -> None:
    for module in MODULES:
        mine = part_of(module)
        upwards = {part for part in own_parts(module) - {mine} if FLOORS[part] > FLOORS[mine]}
        if FLOORS[mine] < FLOORS["cli"]:
            upwards |= own_parts(module) & {"__init__"} - {mine}
        assert not upwards, f"{module} imports {', '.join(sorted(upwards))} from above it"


def require_no_circle(imported: Iterable[tuple[str, set[str]]]) -> set[str]:
    """Require that no parts import each other in a circle; return those that import or are imported."""
    edges: dict[str, set[str]] = {}
    for part, theirs in imported:
        edges.setdefault(part, set()).update(theirs - {part})
    TopologicalSorter(edges).prepare()  # this raises CycleError, with the circle
    return edges.keys() | set().union(*edges.values())


def test_no_parts_import_each_other_in_a_circle() -> None:
    assert require_no_circle((part_of(module), own_parts(module)) for module in MODULES) <= FLOORS.keys()


def test_no_rooms_of_the_lightning_engine_import_each_other_in_a_circle() -> None:
    house = f"{PACKAGE}.integrations.lightning."

    def rooms_in(names: Iterable[str]) -> set[str]:
        return {name.removeprefix(house).partition(".")[0] for name in names if name.startswith(house)}

    rooms = rooms_in(MODULES)
    found = require_no_circle(
        (room, rooms & rooms_in(imports(each))) for each in MODULES for room in rooms_in([each])
    )
    assert {"data", "boundary", "checkpoints", "frameworks"} <= found


def test_what_parts_may_import() -> None:
    """The engine knows no framework, and what runs outside of ranks uses the standard library only."""
    for module in MODULES:
        part, names = part_of(module), set(imports(module))
        allowed = {*sys.stdlib_module_names, PACKAGE, *(("msgspec",) if part in TYPED_MESSAGES else ())}
        wrong = {
            name
            for name in names
            if (part in NO_FRAMEWORK and name.partition(".")[0] in FRAMEWORKS)
            or (part in STANDARD_LIBRARY_ONLY and name.partition(".")[0] not in allowed)
        }
        assert not wrong, f"{module} imports {', '.join(sorted(wrong))}"


@pytest.mark.slow
def test_the_command_that_starts_a_coordinator_loads_no_torch() -> None:
    parts = "launcher.agent.launch", "launcher.agent.watch", "launcher.coordinator.hosting"
    imported = ", ".join(f"{PACKAGE}.{part}" for part in (*parts, "observability.monitoring.http_status"))
    code = f"import sys, {imported}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "False"


def strings(module: str) -> Iterator[str]:
    """Yield every string in a module that is on one line, which leaves out most documentation."""
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            yield node.value


def test_every_module_of_ours_that_a_string_names_exists() -> None:
    rooms = {name.partition(".")[0] for name in FLOORS if not name.startswith("_")}
    for module, text in ((name, text) for name in MODULES for text in strings(name)):
        path = text.removeprefix("/").removeprefix(f"{PACKAGE}/")
        if re.fullmatch(r"[\w/]+/\w+\.py", path) and path.partition("/")[0] in rooms:
            assert any((root / path).is_file() for root in (ROOT, ROOT / PACKAGE)), f"{module} names {text}"
        named = re.fullmatch(rf"({PACKAGE}(?:\.[a-z_]+)+)(?:\.[A-Z]\w+)?(?::\w+)?", text)
        if named is not None and part_of(named[1]).partition(".")[0] in rooms:
            assert named[1] in MODULES or f"{named[1]}.__init__" in MODULES, f"{module} names {text}"


def test_the_command_line_imports_nothing_heavy_before_it_must() -> None:
    light = {"cli", "observability.report", *STANDARD_LIBRARY_ONLY}
    for module in LIGHT:
        body = tree_of(MODULES[module]).body
        names = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
        ours = {name for name in names if name.startswith(f"{PACKAGE}.")}
        assert not ours & LOADED_LATER, module
        assert {part_of(name) for name in ours} <= light, module
        assert {name.partition(".")[0] for name in names - ours} <= {*sys.stdlib_module_names}, module
