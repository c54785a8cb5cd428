"""What the commands show, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from checkpointless.faults.spec import EXPECTED, SUPPORT, VARIANTS, FaultPhase
from checkpointless.telemetry.events import STAGES
from checkpointless.telemetry.incidents import IncidentSummary
from checkpointless.telemetry.verify import Quantity, Steps, Verdict

#: Columns where the output is a pipe or a file, which has no width of its own.
_FILE_WIDTH = 160


def console(record: bool = False) -> Console:
    """A console that shows text as it is.

    Args:
        record: keep what is shown, so that it can be saved.
    """
    plain = Console(record=record, markup=False, highlight=False, emoji=False)
    if not plain.is_terminal:
        plain.width = _FILE_WIDTH
    return plain


def incident_table(summaries: Sequence[IncidentSummary]) -> Table:
    """What each incident was and how it ended."""
    table = Table(
        "#", "gen.", "rank", "cause", "rung", "outcome", "after step", "filled from", "seconds", title="incidents"
    )
    for number, summary in enumerate(summaries, start=1):
        sources = ", ".join(map(str, summary.sources))
        table.add_row(
            str(number),
            str(summary.generation),
            "" if summary.culprit is None else str(summary.culprit),
            f"{summary.cause} ({summary.how})" if summary.how else summary.cause,
            "; ".join((summary.rung.label, *summary.steps_up)),
            summary.outcome.value + (f": {summary.reason}" if summary.reason else ""),
            "" if summary.target is None else str(summary.target),
            f"ranks {sources}: {summary.nbytes:,} B" if sources else "",
            "" if summary.headline_s is None else f"{summary.headline_s:.3f}",
        )
    return table


def stage_table(summaries: Sequence[IncidentSummary]) -> Table:
    """Seconds of each stage (rows) of each incident (columns)."""
    table = Table("stage", title="seconds of each stage, on the rank that took longest")
    for number in range(1, len(summaries) + 1):
        table.add_column(f"#{number}", justify="right")
    for stage in STAGES:
        seconds = [summary.stages_s.get(stage) for summary in summaries]
        if any(each is not None for each in seconds):
            table.add_row(stage, *("" if each is None else f"{each:.3f}" for each in seconds))
    return table


def verdict_table(verdict: Verdict, a: Steps, b: Steps, names: tuple[str, str]) -> Table:
    """What was compared, and the two values of the first difference."""
    table = Table("", *names)
    table.add_row("ranks", str(len(a)), str(len(b)))
    table.add_row("steps recorded", *(str(sum(len(records) for records in run.values())) for run in (a, b)))
    where = verdict.difference
    if where is not None:
        values = [where.a, where.b]
        if where.quantity is Quantity.LOSS:
            values = [f"{float.fromhex(value):.9g} ({value})" for value in values]
        table.add_row(f"{where.quantity.value}, step {where.step}, rank {where.rank}", *values)
    return table


def support_table() -> Table:
    """Which kinds of fault can be caused in which phases, and what is expected of each."""
    table = Table(
        "kind",
        "how=",
        "phases",
        "what is expected",
        title="KIND[@PHASE][:rank=R,step=S,times=N,prob=P,seed=N,how=H,seconds=T]",
        title_justify="left",
    )
    for kind, phases in SUPPORT.items():
        table.add_row(kind.value, ", ".join(VARIANTS.get(kind, ())), _phases(phases), EXPECTED[kind])
    return table


def _phases(phases: frozenset[FaultPhase]) -> str:
    """Phases by name, or those that are missing if they are fewer."""
    there, missing = (
        [phase.value for phase in FaultPhase if (phase in phases) is wanted] for wanted in (True, False)
    )
    if not missing:
        return "all"
    return ", ".join(there) if len(there) <= len(missing) else f"all but {', '.join(missing)}"
