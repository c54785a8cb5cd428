"""Every event has one name in one place, and every name is one that something emits."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.observability.monitoring.metrics import MEASURED_STAGES
from checkpointless.observability.telemetry.event_names import STAGES, EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog, read_events
from checkpointless.observability.telemetry.scribe import scribe

ROOT = Path(__file__).parents[3]
FOLDERS = ("checkpointless", "callbacks", "strategies", "recipes", "benchmarks", "examples")
EMITTERS = {"emit", "emit_event", "span", "_begin_stage"}


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    """Yield all nodes of the syntax trees of the sources that may name an event, each with its file."""
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        if path.name != "event_names.py" and re.search(rf"\b({'|'.join(EMITTERS)}|stage)\b", text):
            yield from ((path.relative_to(ROOT), node) for node in ast.walk(ast.parse(text)))


def last_name(expression: ast.expr) -> str | None:
    """Return ``c`` of ``a.b.c``, and of ``c``."""
    return getattr(expression, "attr", None) or getattr(expression, "id", None)


def emitted(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what is given to the log as an event's name."""
    if isinstance(node, ast.Call) and node.args and last_name(node.func) in EMITTERS:
        yield node.args[0]
    elif isinstance(node, ast.Dict):
        yield from (value for key, value in zip(node.keys, node.values) if getattr(key, "value", None) == "stage")


def compared(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what an event's name is compared with."""
    if isinstance(node, ast.Compare) and last_name(node.left) == "stage":
        yield from node.comparators


def has_literal(expression: ast.AST) -> bool:
    return any(isinstance(node, ast.Constant) and isinstance(node.value, str) for node in ast.walk(expression))


def test_every_name_is_emitted_and_no_module_writes_or_looks_for_one_of_its_own() -> None:
    written, looked_for = [], []
    for path, node in nodes():
        written += [(path, name) for name in emitted(node)]
        looked_for += [(path, name) for name in compared(node)]
    assert {ast.unparse(name) for _, name in written} >= {f"EventName.{member.name}" for member in EventName}
    assert not [f"{path}:{name.lineno}" for path, name in (*written, *looked_for) if has_literal(name)]


@pytest.mark.parametrize("name", EventName)
def test_a_member_is_written_as_its_name_and_read_as_itself(tmp_path: Path, name: EventName) -> None:
    EventLog(tmp_path / EVENTS_FILE).emit(name, "point", generation=0, again=name)
    assert scribe.flush()
    line = (tmp_path / EVENTS_FILE).read_bytes()
    assert re.search(rb'"incident":null,"stage":"([a-z_]+)","edge":"point","again":"\1"}\n$', line)
    assert json.loads(line)["stage"] == name.value == str(name) == f"{name}"
    (event,) = read_events(tmp_path)
    assert event.stage is name


@pytest.mark.parametrize(
    ("page", "names"), [("architecture", STAGES), ("concepts", STAGES), ("operations", MEASURED_STAGES)]
)
def test_the_docs_name_the_stages(page: str, names: tuple[EventName, ...]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert not [name for name in names if f"`{name}`" not in text]
