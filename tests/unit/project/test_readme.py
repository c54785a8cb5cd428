"""Check what the README and the documents name: commands parse; files, modules, names and tests exist."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import checkpointless
from checkpointless.cli import command_line
from checkpointless.faults.spec import parse
from tests.unit.project.test_floors import MODULES

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
FILES_OF_THE_READER = {"train.py", "my_recipe.yaml"}


def commands_of(document: Path) -> Iterator[str]:
    """Yield every ``checkpointless ...`` command of a document's console blocks, also in a shell's loop or pipe."""
    for block in re.findall(r"^```(?:console|bash|sh)\n(.*?)^```", document.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ |for .*; do )?\s*(checkpointless [^|;]*)", line)
            if found is not None:
                words = shlex.split(found[1].replace("$seed", "1"), comments=True)
                yield shlex.join(words)


def quoted(document: Path) -> list[str]:
    """Return what stands between backticks, outside of code blocks."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", prose)


def source_of(module: str) -> Path | None:
    """Return the file of a module of this package, found without importing it."""
    return MODULES.get(f"{module}.__init__") or MODULES.get(module)


def names_in(source: Path | None) -> set[str]:
    """Return the names that a module defines or imports at its top, those that it loads when asked for included."""
    names: set[str] = set()
    top = ast.parse(source.read_text()).body if source is not None else []
    for node in [*top, *(inner for each in top if isinstance(each, ast.If) for inner in each.body)]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def test_every_command_parses() -> None:
    for command in sorted({command for document in DOCUMENTS for command in commands_of(document)}):
        words = shlex.split(command, comments=True)[1:]
        options, extra = command_line._parser().parse_known_args(words)
        assert all("=" in word and not word.startswith("-") for word in extra)
        for fault in getattr(options, "faults", []):
            parse(fault)
        script, recipe = getattr(options, "script", None) or "", getattr(options, "recipe", None) or ""
        if recipe and not recipe.endswith(".yaml"):
            recipe = f"recipes/{recipe}.yaml"
        for name in {script, recipe} - {"", *FILES_OF_THE_READER}:
            assert (ROOT / name).is_file()


def test_every_file_exists() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for target in re.findall(r"\]\(([^)#]+)", text):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
        for words in quoted(document):
            path = words.partition("::")[0]
            if re.fullmatch(r"[\w./-]+/[\w.-]+\.(py|yaml|md|txt|toml)", path):
                found = (ROOT / path).is_file() or (ROOT / "checkpointless" / path).is_file()
                assert found, f"{document.name} names {path}"


def test_every_test_that_is_named_exists() -> None:
    for document in DOCUMENTS:
        for words in quoted(document):
            if words.startswith("tests/") and "::" in words:
                path, _, name = words.partition("::")
                assert name in names_in(ROOT / path), f"{document.name} names {words}"


def test_every_import_exists() -> None:
    for document in DOCUMENTS:
        imports = re.findall(r"from (checkpointless[\w.]*) import (\([^)]*\)|[\w, ]+)", document.read_text())
        for module, names in imports:
            source = source_of(module)
            assert source is not None, f"{document.name} imports from {module}"
            known = set(checkpointless.__all__) if module == "checkpointless" else names_in(source)
            for name in re.findall(r"\w+", re.sub(r" as \w+", "", names)):
                assert name in known or source_of(f"{module}.{name}"), (
                    f"{document.name} imports {name} from {module}"
                )
        for words in quoted(document):
            if re.fullmatch(r"checkpointless(\.\w+)+", words):
                parent, _, name = words.rpartition(".")
                found = source_of(words) or name in names_in(source_of(parent))
                assert found, f"{document.name} names {words}"


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z]+)\b *(?:#|`|$)", "\n".join(map(Path.read_text, DOCUMENTS)), re.M))
    assert set() < named <= targets


def test_the_diffs_of_the_readme_are_those_of_the_examples() -> None:
    (block,) = re.findall(r"^```diff\n(.*?)^```", README.read_text(), re.M | re.S)
    diffs = re.findall(r"^ # .*?: (examples/\w+\.py)\n(.*?)(?:\n\n|\Z)", block, re.M | re.S)
    assert len(diffs) == 3
    for name, diff in diffs:
        example = (ROOT / name).read_text()
        added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
        assert len(added) > 3
        for line in added:
            assert line in example, f"{name} has no line {line}"


def test_the_readme_is_short_and_says_what_was_not_run() -> None:
    text = README.read_text()
    assert len(text.splitlines()) < 130
    status = text.partition("## Install")[0]
    assert "alpha" in status
    assert "**Not run:** NeMo, Lightning and Bridge on GPUs; several GPUs or nodes" in status


def test_the_readme_lists_what_is_tolerated() -> None:
    """Ten rows: each is a promise that users rely on."""
    table = README.read_text().partition("| what happens | what follows |")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) == 10


def test_every_public_name_is_there() -> None:
    for name in checkpointless.__all__:
        assert getattr(checkpointless, name).__name__ == name
    assert set(checkpointless.__all__) <= set(dir(checkpointless))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = checkpointless.nothing
