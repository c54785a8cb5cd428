"""Write the tables of ``docs/settings.md`` from the code: ``python docs/tables.py``.

Each stands between two comments, ``<!-- table: NAME -->`` and ``<!-- end -->``. A test fails when they are stale.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "docs" / "settings.md"
RECIPE = ROOT / "recipes" / "tiny_gpt_cpu.yaml"
_UNSET = ("None", "False", "()", "''", "MappingProxyType({})")
_NO_MEANING = "Accepted without a meaning; one line says why"

# Those of which a user may want to give an argument, and where they are. The second ones share a table.
CLASSES = {
    "HPWrapper": "checkpointless/inprocess/wrap.py",
    "CheckpointlessCallback": "callbacks/checkpointless_callback.py",
    "CheckpointlessMegatronStrategy": "strategies/megatron_strategy.py",
    "CheckpointlessModelParallelStrategy": "strategies/torch_strategies.py",
    "CheckpointManager": "checkpointless/recovery/manager.py",
    "PlainTraining": "checkpointless/integrations/torch/plain.py",
    "LocalCheckpointManager": "checkpointless/replication/local_checkpoint.py",
}
OTHER_CLASSES = {
    "LazyCliqueReplicationStrategy": "checkpointless/replication/local_checkpoint.py",
    "CliqueReplicationStrategy": "checkpointless/replication/local_checkpoint.py",
    "CudaHealthCheck": "checkpointless/inprocess/health_check.py",
    "MemoryChecksumManager": "checkpointless/state/serialization/digest.py",
    "HPFaultInjectionCallback": "callbacks/fault_injection.py",
}


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    from checkpointless.cli import command_line

    (choices,) = (
        action for action in command_line._parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return dict(choices.choices)


def command_table(name: str) -> str:
    """Return a table of a command's options. Options with the same text share a row, and so do those of ``run``."""
    rows, others = option_rows(name), set() if name == "run" else set(option_rows("run"))
    by_text: dict[str, list[str]] = {}
    for words, text in sorted(rows, key=lambda row: row not in others):
        if (words, text) in others:
            words, text = re.sub(r" [A-Z][\w:\[\],.]*`", "`", words), "As for `run`"
        by_text.setdefault(text, []).append(words)
    lines = (f"| {', '.join(words)} | {text} |" for text, words in by_text.items())
    return "\n".join(["| option | what |", "| --- | --- |", *lines])


def option_rows(name: str) -> list[tuple[str, str]]:
    """Return every option of a command, and its help with its default."""
    from checkpointless.launcher.agent.launch_config import LaunchConfig

    known = {
        field.name.removesuffix("_s"): field.default
        for field in fields(LaunchConfig)
        if field.default is not MISSING
    }
    rows = []
    for action in commands()[name]._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        words = [option for option in action.option_strings if "_" not in option] or [action.metavar]
        value = f" {action.metavar}" if action.option_strings and action.metavar else ""
        default = action.default if action.default not in (None, False, [], "") else known.get(action.dest)
        named = "(default" in (action.help or "") or default in (None, False, [], (), "") or not value
        text = _cell(action.help) + ("" if named else f" (default: {default:g})")
        text = _NO_MEANING if text.startswith("No meaning") else text
        rows.append((f"`{', '.join(map(str, words))}{value}`", text))
    return rows


def parameter_table(name: str) -> str:
    """Return a table of the parameters of a class's constructor, from its docstring and defaults."""
    rows = (f"| `{parameter}` | {text} |" for parameter, text in parameters(name, ROOT / CLASSES[name]))
    return "\n".join(["| parameter | what |", "| --- | --- |", *rows])


def other_classes_table() -> str:
    """Return a table of the parameters of all classes in ``OTHER_CLASSES``."""
    rows = (
        f"| `{name}({parameter}=)` | {text} |"
        for name, path in OTHER_CLASSES.items()
        for parameter, text in parameters(name, ROOT / path)
    )
    return "\n".join(["| parameter | what |", "| --- | --- |", *rows])


def parameters(name: str, source: Path) -> Iterator[tuple[str, str]]:
    """Yield each parameter of a class's constructor, and its docstring with its default.

    Raises:
        ValueError: the docstring names a parameter that the constructor does not take.
    """
    (cls,) = (
        node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    (init,) = (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    documented = dict(_arguments(ast.get_docstring(cls) or ""))
    for parameter, default in _parameters(init):
        text = _cell(documented.pop(parameter, "see the text"))
        value = "" if re.search("[Dd]efault|None:", text) else _default(default, source)
        yield parameter, text + (f" Default: {value}." if value else "")
    if documented:
        raise ValueError(f"{name} does not take {', '.join(documented)}, which its docstring names")


def recipe_table() -> str:
    """Return a table of the keys of the ``checkpointless:`` block of a recipe."""
    block = re.search(r"^checkpointless:\n((?:  .*\n)+)", RECIPE.read_text(), re.M)
    assert block is not None
    rows = []
    for line in block[1].splitlines():
        key, _, rest = line.strip().partition(":")
        value, _, what = rest.partition("#")
        rows.append(f"| `{key}` | `{value.strip()}` | {_cell(what.strip() or 'false: plain NeMo')} |")
    return "\n".join(["| key | there | what |", "| --- | --- | --- |", *rows])


def filled(text: str) -> str:
    """Return ``text`` with its tables rewritten from the code.

    Raises:
        ValueError: a table is unknown or missing.
    """
    tables = {f"command {name}": lambda name=name: command_table(name) for name in commands() if option_rows(name)}
    tables |= {f"class {name}": lambda name=name: parameter_table(name) for name in CLASSES}
    tables["other classes"] = other_classes_table
    tables["recipe"] = recipe_table
    seen = set(re.findall(r"<!-- table: (.+?) -->", text))
    if seen != tables.keys():
        raise ValueError(f"{SETTINGS.name}: missing or unknown tables: {', '.join(sorted(seen ^ tables.keys()))}")
    return re.sub(
        r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{tables[found[2]]()}\n\n{found[3]}",
        text,
        flags=re.S,
    )


def _parameters(init: ast.FunctionDef) -> Iterator[tuple[str, ast.expr | None]]:
    arguments = init.args
    positional = arguments.args[1:]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    for argument, default in zip(positional, [*missing, *arguments.defaults]):
        yield argument.arg, default
    if arguments.vararg is not None:
        yield f"*{arguments.vararg.arg}", None
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        yield argument.arg, default
    if arguments.kwarg is not None:
        yield f"**{arguments.kwarg.arg}", None


def _default(default: ast.expr | None, source: Path) -> str:
    """Return a default for a table; nothing for one that is empty, None or False."""
    if default is None or ast.unparse(default) in _UNSET:
        return ""
    value: Any = ast.unparse(default)
    if isinstance(default, ast.Name):
        parts = source.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts if parts[0] == "checkpointless" else ("checkpointless", *parts))
        value = getattr(import_module(module), default.id)
        value = value.__name__ if isinstance(value, type) else value
    return f"`{value}`"


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the entries of a docstring's ``Args:``."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", docstring + "\n", re.M)
    for entry in re.split(r"\n    (?=\S)", "\n" + section[1].rstrip()) if section else ():
        name, colon, what = entry.strip().partition(":")
        if colon:
            yield name.strip(), " ".join(what.split())


def _cell(text: str | None) -> str:
    """Return docstring or help text for a cell of a Markdown table."""
    text = re.sub(r":\w+:`(?:~[\w.]*\.)?([^`]+)`", r"`\1`", text or "").replace("``", "`").replace("|", "\\|")
    return text[:1].upper() + text[1:] if text[:1].isalpha() and not text.startswith("e.g.") else text


def main() -> int:
    """Rewrite the tables in the page."""
    text = SETTINGS.read_text()
    new = filled(text)
    SETTINGS.write_text(new)
    sys.stdout.write(f"{SETTINGS.name}: {'unchanged' if new == text else 'rewritten'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
