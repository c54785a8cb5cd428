"""Check that what the documents say of the code is so: tables, variables, messages; and compile their Python."""

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.unit.project.test_floors import MODULES, tree_of
from tests.unit.project.test_readme import DOCUMENTS, ROOT

DOCS = ROOT / "docs"
SOURCES = MODULES.values()
MESSAGES = (DOCS / "troubleshooting.md").read_text()


def test_the_tables_of_settings_are_those_of_the_code() -> None:
    tables = runpy.run_path(str(DOCS / "tables.py"))
    text = tables["SETTINGS"].read_text()
    assert tables["filled"](text) == text, "run `python docs/tables.py`"


def _variables() -> set[str]:
    """Return the names of the environment variables that the code reads."""
    names: set[str] = set()
    for source in SOURCES:
        text = source.read_text()
        names |= set(re.findall(r'environ(?:\.get|\.pop|\.setdefault)?[\[(]\s*"([A-Z_]+)"', text))
        names |= set(re.findall(r'^(?:\w*ENV\w*) = "([A-Z_]+)"', text, re.M))
    return names


def test_every_variable_is_in_settings() -> None:
    said = set(re.findall(r"`([A-Z_]+)`", (DOCS / "settings.md").read_text()))
    assert len(_variables()) > 10
    assert _variables() <= said
    assert {name for name in said if name.startswith("CHECKPOINTLESS_")} <= {
        *_variables(),
        *re.findall(r"CHECKPOINTLESS_\w+", "".join(source.read_text() for source in SOURCES)),
    }


def test_python_compiles_and_every_name_is_defined(tmp_path: Path) -> None:
    for document in DOCUMENTS:
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)):
            (tmp_path / f"{document.stem}-{number}.py").write_text(block)
    assert len(list(tmp_path.iterdir())) > 5
    checks = ["--isolated", "--no-cache", "--select", "F821,F811,E9"]
    command = [sys.executable, "-m", "ruff", "check", *checks, str(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout


def _texts() -> Iterator[str]:
    """Yield every string of the code; an f-string also comes as one, with ``{}`` for each value in it."""
    for source in SOURCES:
        for node in ast.walk(tree_of(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def test_every_message_of_troubleshooting_is_in_the_code() -> None:
    messages = re.findall(r"^\| `(.+?)` \|", MESSAGES, re.M)
    assert len(messages) > 40
    code = "\n".join(_texts())
    assert [message for message in messages if message not in code] == []


def test_every_page_is_in_the_navigation() -> None:
    index = (DOCS / "index.md").read_text()
    listed = {
        line for block in re.findall(r"```{toctree}\n(.*?)```", index, re.S) for line in block.splitlines() if line
    }
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert pages <= listed
    assert {name for name in listed if not name.startswith(":")} <= pages


def test_the_drawing_is_what_its_script_draws(tmp_path: Path) -> None:
    script = DOCS / "images" / "draw_incident.py"
    (tmp_path / script.name).write_text(script.read_text())
    subprocess.run([sys.executable, str(tmp_path / script.name)], check=True, capture_output=True, timeout=30)
    assert (tmp_path / "incident.svg").read_text() == script.with_name("incident.svg").read_text()
