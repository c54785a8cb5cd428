"""Write down what the suite found, after each test, so that a run that is cut off leaves its table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

LINES = "results.jsonl"
TABLE = "results.md"
JSON = "results.json"
MACHINE = "machine.json"
_DETAIL = 160  # characters of a reason in the table; the JSON has all of it


class Outcome(str, Enum):
    """What became of a test or a measurement."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    CUT = "not finished"


@dataclass(frozen=True)
class Figure:
    """Represents a figure that was measured several times, and what it is compared with in the same run."""

    name: str
    unit: str
    values: tuple[float, ...]
    against: str = ""
    reference: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        against = statistics.median(self.reference or (0.0,))
        return statistics.median(self.values) / against if against else None


@dataclass(frozen=True)
class Result:
    """Represents what became of one test or one measurement."""

    part: str
    name: str
    outcome: Outcome
    seconds: float
    detail: str = ""  # why it failed or was skipped; of a failure the whole report, with stacks
    notes: Mapping[str, Any] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()


def add(folder: Path, result: Result) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LINES).open("a") as lines:
        lines.write(json.dumps(asdict(result)) + "\n")
    write(folder)


def write(folder: Path) -> None:
    machine, results = read_machine(folder), read(folder)
    (folder / TABLE).write_text(report(machine, results))
    found = {"machine": machine, "results": [asdict(each) for each in results]}
    (folder / JSON).write_text(json.dumps(found, indent=1) + "\n")


def read_machine(folder: Path) -> dict[str, str]:
    """Return what is known of the machine; nothing before it was looked at."""
    path = folder / MACHINE
    return json.loads(path.read_text()) if path.exists() else {}


def read(folder: Path) -> list[Result]:
    """Return the results of a folder, in the order in which they came; of two with one name, the later."""
    path = folder / LINES
    found: dict[tuple[str, str], Result] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        made = json.loads(line)
        figures = tuple(
            Figure(**{**each, "values": tuple(each["values"]), "reference": tuple(each["reference"])})
            for each in made.pop("figures")
        )
        result = Result(**{**made, "outcome": Outcome(made["outcome"]), "figures": figures})
        found[result.part, result.name] = result
    return list(found.values())


def report(machine: Mapping[str, str], results: Sequence[Result]) -> str:
    """Return the whole report in Markdown: the machine, the tests, the figures, and the failures."""
    parts = ["# One GPU", _rows(("", ""), list(machine.items()))]
    tests = [each for each in results if not each.figures]
    figures = [figure for each in results for figure in each.figures]
    if tests:
        rows = [(each.part, each.name, each.outcome.value, f"{each.seconds:.1f}", _what(each)) for each in tests]
        parts += ["## Tests", _rows(("part", "test", "result", "seconds", "what was seen"), rows)]
    if figures:
        heads = ("figure", "unit", "n", "median", "smallest to largest", "ratio", "against")
        parts += ["## Figures", _rows(heads, [_figure(each) for each in figures])]
    for each in results:
        if each.outcome in (Outcome.FAILED, Outcome.CUT):
            parts += [f"## {each.part}: {each.name}", f"```text\n{each.detail.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def summary(results: Sequence[Result]) -> str:
    """Return how many tests had each outcome, in one line."""
    counts = {outcome: sum(each.outcome is outcome for each in results) for outcome in Outcome}
    return ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count) or "nothing ran"


def has_failed(results: Sequence[Result]) -> bool:
    return any(each.outcome in (Outcome.FAILED, Outcome.CUT) for each in results)


def _what(result: Result) -> str:
    if result.outcome is Outcome.PASSED:
        return ", ".join(f"{name}: {_shown(value)}" for name, value in result.notes.items())
    lines = [line.strip() for line in result.detail.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[0].removeprefix("E ").strip()[:_DETAIL]


def _figure(figure: Figure) -> tuple[str, ...]:
    ratio = figure.ratio
    return (
        figure.name,
        figure.unit,
        str(len(figure.values)),
        _shown(statistics.median(figure.values)),
        f"{_shown(min(figure.values))} to {_shown(max(figure.values))}",
        "" if ratio is None else _shown(ratio),
        figure.against,
    )


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
