"""Write the tables of ``docs/settings.md`` from the code: ``python docs/tables.py``.

Each stands between two comments, ``<!-- table: NAME -->`` and ``<!-- end -->``. A test fails when they are stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "docs" / "settings.md"
RECIPE = ROOT / "recipes" / "tiny_gpt_cpu.yaml"
MANY = 20  # options of ``run`` in one row
_NO_MEANING = "Accepted without a meaning; one line says why"


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    from checkpointless.cli import command_line

    (choices,) = (
        action for action in command_line._parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return dict(choices.choices)


def command_table(name: str) -> str:
    """Return a table of a command's options. Options with the same text share a row, and so do those of ``run``."""
    rows, others = option_rows(name), [] if name == "run" else option_rows("run")
    by_text: dict[str, list[str]] = {}
    for words, text in sorted(rows, key=lambda row: row not in others):
        if (words, text) in others:
            words, text = _name(words), "As for `run`"
        words = _name(words) if text == _NO_MEANING else words
        by_text.setdefault(text, []).append(words)
    by_text = {text: _but_few(words, rows) if len(words) > MANY else words for text, words in by_text.items()}
    lines = (f"| {', '.join(words)} | {text} |" for text, words in by_text.items())
    return "\n".join(["| option | what |", "| --- | --- |", *lines])


def _name(words: str) -> str:
    """Return an option without its value."""
    return re.sub(r" [A-Z][\w:=\[\],.]*`", "`", words)


def _but_few(names: list[str], rows: list[tuple[str, str]]) -> list[str]:
    """Return ``names`` as all options of ``run`` but those that the command has not."""
    (torchruns,) = (group for group in commands()["run"]._action_groups if str(group.title).startswith("torchrun"))
    options = {option for action in torchruns._group_actions for option in action.option_strings}
    known = {_name(words) for words, _ in rows}
    few = [_name(words) for words, _ in option_rows("run") if words.startswith("`-")]
    few = [words for words in few if words not in known and not options & set(words.strip("`").split(", "))]
    return [f"Those of `run`, but not {', '.join(few)} or torchrun's"]


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


def _cell(text: str | None) -> str:
    """Return help text for a cell of a Markdown table."""
    text = (text or "").replace("|", "\\|")
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
