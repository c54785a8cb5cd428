"""Write the tables of ``docs/settings.md`` from the code: ``python docs/tables.py``.

Each stands between two comments, ``<!-- table: NAME -->`` and ``<!-- end -->``. A test says so when they are stale.
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

# Those of which a user may want to give an argument, and where they are.
CLASSES = {
    "HPWrapper": "checkpointless/inprocess/wrap.py",
    "CheckpointlessCallback": "callbacks/checkpointless_callback.py",
    "CheckpointlessMegatronStrategy": "strategies/megatron_strategy.py",
    "CheckpointlessModelParallelStrategy": "strategies/torch_strategies.py",
    "CheckpointManager": "checkpointless/recovery/manager.py",
    "PlainTraining": "checkpointless/integrations/torch/plain.py",
    "LocalCheckpointManager": "checkpointless/replication/local_checkpoint/manager.py",
    "LazyCliqueReplicationStrategy": "checkpointless/replication/local_checkpoint/replication.py",
    "CliqueReplicationStrategy": "checkpointless/replication/local_checkpoint/replication.py",
    "CheckpointlessFinalizeCleanup": "checkpointless/inprocess/finalize.py",
    "CudaHealthCheck": "checkpointless/inprocess/health_check.py",
    "MemoryChecksumManager": "checkpointless/state/serialization/digest.py",
    "HPFaultInjectionCallback": "callbacks/fault_injection.py",
}


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    from checkpointless.cli import command_line

    (choices,) = (
        action for action in command_line._parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return dict(choices.choices)


def command_table(name: str) -> str:
    """Every option of a command."""
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
        told = "(default" in (action.help or "") or default in (None, False, [], (), "") or not value
        rows.append((f"`{', '.join(map(str, words))}{value}`", action.help, "" if told else f"{default:g}"))
    lines = (
        f"| {words} | {_cell(help_text)}{f' (default: {default})' if default else ''} |"
        for words, help_text, default in rows
    )
    return "\n".join(["| option | what |", "| --- | --- |", *lines])


def parameter_table(name: str) -> str:
    """Every parameter of a class's constructor, with its default and what its docstring says."""
    source = ROOT / CLASSES[name]
    (cls,) = (
        node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    (init,) = (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    said = dict(_arguments(ast.get_docstring(cls) or ""))
    rows = [
        f"| `{parameter}` | {_default(default, source)} | {_cell(said.pop(parameter, 'see the text'))} |"
        for parameter, default in _parameters(init)
    ]
    if said:
        raise ValueError(f"{name}: the docstring speaks of {', '.join(said)}, which the constructor does not take")
    return "\n".join(["| parameter | default | what |", "| --- | --- | --- |", *rows])


def recipe_table() -> str:
    """Every key of the ``checkpointless:`` block of a recipe."""
    block = re.search(r"^checkpointless:\n((?:  .*\n)+)", RECIPE.read_text(), re.M)
    assert block is not None
    rows = []
    for line in block[1].splitlines():
        key, _, rest = line.strip().partition(":")
        value, _, what = rest.partition("#")
        rows.append(f"| `{key}` | `{value.strip()}` | {_cell(what.strip() or 'false: train without it')} |")
    return "\n".join(["| key | there | what |", "| --- | --- | --- |", *rows])


def filled(text: str) -> str:
    """``text`` with each of its tables as the code says.

    Raises:
        ValueError: it has a table that nobody knows, or lacks one.
    """
    tables = {f"command {name}": lambda name=name: command_table(name) for name in commands()}
    tables |= {f"class {name}": lambda name=name: parameter_table(name) for name in CLASSES}
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
    if default is None:
        return ""
    value: Any = ast.unparse(default)
    if isinstance(default, ast.Name):
        parts = source.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts if parts[0] == "checkpointless" else ("checkpointless", *parts))
        value = getattr(import_module(module), default.id)
        value = value.__name__ if isinstance(value, type) else value
    return f"`{value}`"


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """The entries of a docstring's ``Args:``."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", docstring + "\n", re.M)
    for entry in re.split(r"\n    (?=\S)", "\n" + section[1].rstrip()) if section else ():
        name, colon, what = entry.strip().partition(":")
        if colon:
            yield name.strip(), " ".join(what.split())


def _cell(text: str | None) -> str:
    """Docstring or help text in a cell of a Markdown table."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text or "").replace("``", "`").replace("|", "\\|")
    return text[:1].upper() + text[1:] if text[:1].isalpha() and not text.startswith("e.g.") else text


def main() -> int:
    """Write the tables."""
    text = SETTINGS.read_text()
    new = filled(text)
    SETTINGS.write_text(new)
    sys.stdout.write(f"{SETTINGS.name}: {'as it was' if new == text else 'written anew'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
