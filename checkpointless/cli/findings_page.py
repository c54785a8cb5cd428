"""The page of ``checkpointless doctor``: findings to act on, the worst first, and in short the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from checkpointless.cli.tables import console
from checkpointless.doctor.findings import Finding, Severity, worst_first
from checkpointless.observability.telemetry import wording

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.ADVICE: "cyan"}
_COUNTED = (Severity.ERROR, Severity.WARNING)
_LONGEST = 600  # characters of a text from a machine


def show(findings: Sequence[Finding]) -> None:
    """Print the page."""
    page = console()
    counts = Counter(each.severity for each in findings)
    words = [
        wording.plural(counts[each], each.value) if each in _COUNTED else f"{counts[each]} {each.value}"
        for each in Severity
        if counts[each]
    ]
    page.print(f"this machine: {', '.join(words)}")
    change = [each for each in worst_first(findings) if each.severity is not Severity.OK]
    if change:
        page.print(_change_table(change))
    right = _right(findings)
    if right:
        table = Table(title="what is right", title_justify="left", show_header=False)
        for family, seen in right:
            table.add_row(family, wording.printable(seen))
        page.print(table)
    if not any(each.is_to_change for each in change):
        page.print("nothing has to be changed")


def _change_table(findings: Sequence[Finding]) -> Table:
    table = Table(title="what to change, the worst first", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("what was seen", "where", "what to do"):
        table.add_column(name, overflow="fold")
    for each in findings:
        table.add_row(
            Text(each.severity.value, _COLOURS.get(each.severity, "")),
            wording.printable(each.seen, _LONGEST),
            wording.printable(each.source, _LONGEST),
            wording.printable(each.todo, _LONGEST),
        )
    return table


def _right(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return what is right, one line per family, and per source where one source has several findings."""
    families: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for each in worst_first(findings):
        if each.severity is Severity.OK:
            families[each.family.value][each.source].append(each.seen)
    return [
        (
            family,
            "; ".join(
                ", ".join(seen) + (f" ({source})" if source and len(seen) > 1 else "")
                for source, seen in sources.items()
            ),
        )
        for family, sources in families.items()
    ]
