"""Tables for the terminal with the output of the commands."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkpointless.doctor.findings import Finding, Severity, worst_first
from checkpointless.faults.spec import USUAL_PHASES, FaultKind, FaultPhase
from checkpointless.observability.report.goodput import CAUSES, Goodput
from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.report.summary import Job, Report, RunState, utc
from checkpointless.observability.report.verify import Quantity, Steps, Verdict
from checkpointless.observability.telemetry import wording
from checkpointless.observability.telemetry.event_names import PHASES
from checkpointless.observability.telemetry.scribe import TRACEBACKS_DIR
from checkpointless.observability.telemetry.steps import NO_LOSS

#: Width, in columns, if the output is a pipe or a file, which has no width.
_FILE_WIDTH = 160
_MOST_INCIDENTS = 30
_MOST_COLUMNS = 8
_MOST_LOSSES = 24
_LONGEST_CAUSE, _LONGEST_KIND = 120, 24
_LONGEST_LINE, _TRACEBACK_LINES = 600, 60
_BAR_WIDTH = 20
_LONG_BAR = 56
#: How the phases of an incident are drawn, on terminals with and without colours.
_MARKS = {
    "notice": ("!", "red"),
    "stop": ("x", "yellow"),
    "meet": ("=", "bright_yellow"),
    "rebuild": ("#", "blue"),
    "restore": ("<", "magenta"),
    "resume": (">", "green"),
}
_STAGE_TITLE = "seconds of each stage, on the rank that took longest"


def console(**more: Any) -> Console:  # Any: of different types
    """Return a console that shows text as it is; ``more`` are arguments of rich's."""
    plain = Console(markup=False, highlight=False, emoji=False, **more)
    if not plain.is_terminal:
        plain.width = _FILE_WIDTH
    return plain


def _table(title: str, *columns: str, show_header: bool = True) -> Table:
    return Table(*columns, title=title, title_justify="left", show_header=show_header)


def _show_report(report: Report, page: Console) -> None:
    run = report.run
    page.print(f"{run.path}: {wording.plural(len(report.incidents), 'incident')}; {run.state.value}")
    if run.reason:
        page.print(f"because: {wording.printable(run.reason, 500)}")
    for spec, times in (run.caused or {}).items():
        page.print(f"injected, {times} x: {wording.printable(spec)}")
    if run.lines_left_out:
        lines = wording.plural(run.lines_left_out, "line")
        why = "is torn or no event" if run.lines_left_out == 1 else "are torn or no events"
        page.print(f"{lines} of the log {why}, and left out")
    if run.state is RunState.EMPTY:
        return
    if report.incidents:
        page.print(_incident_table(report))
        page.print(_bar_table(report))
        page.print(_stage_table(report))
    for table in _other_tables(report):
        if table.row_count:
            page.print(table)
    _show_goodput(report.goodput, page)
    step = "" if run.step_s is None else f"; a step takes {wording.duration(run.step_s)}"
    tracebacks = Path(run.path) / TRACEBACKS_DIR
    if tracebacks.is_dir():
        page.print(f"tracebacks in full: {wording.printable(str(tracebacks))}")
    page.print(f"finished steps lost: {_number(report.steps_lost)}{step}")


def show_job(job: Job, page: Console) -> None:
    """Print the reports of a job's runs, after their sums if there are several runs."""
    if len(job.runs) > 1:
        page.print(f"{len(job.runs)} runs of a job")
        page.print(_run_table(job.runs))
        _show_goodput(job.goodput, page)
    for report in job.runs:
        _show_report(report, page)


def _show_goodput(goodput: Goodput | None, page: Console) -> None:
    if goodput is not None:
        page.print(_time_table(goodput))
        if goodput.lost:
            page.print(_lost_table(goodput))


def html_page(job: Job, tracebacks: Sequence[Mapping[str, str]]) -> str:
    """Return what the terminal shows, with the tracebacks of each run by incident, as a page of its own."""
    page = console(file=io.StringIO(), record=True, width=_FILE_WIDTH)  # whatever is a terminal to rich
    show_job(job, page)
    for report, known in zip(job.runs, tracebacks, strict=True):
        _show_tracebacks(report, known, page)
    return page.export_html()


def _show_tracebacks(report: Report, tracebacks: Mapping[str, str], page: Console) -> None:
    for number, incident in enumerate(report.incidents, start=1):
        lines = tracebacks.get(incident.incident, "").splitlines()[-_TRACEBACK_LINES:]
        if lines:
            page.print(f"\ntraceback of incident {number}", style="bold")
        for line in lines:
            indentation = line[: len(line) - len(line.lstrip(" "))]
            page.print(indentation + wording.printable(line, _LONGEST_LINE), soft_wrap=True)


def _run_table(runs: Sequence[Report]) -> Table:
    table = Table("run", "began", "steps", "incidents", "wall clock", "goodput", "ended", title="runs")
    for report in runs:
        run, goodput = report.run, report.goodput
        wall, share = ("", "") if goodput is None else (wording.duration(goodput.wall_s), _share(goodput.ratio))
        table.add_row(
            wording.printable(run.path, _LONGEST_CAUSE),
            utc(run.begin_ns) or "",
            "" if run.last_step is None else f"{run.first_step} to {run.last_step}",
            str(len(report.incidents)),
            wall,
            share,
            run.state.value,
        )
    return table


def _number(value: int | None) -> str:
    """Format a number: ``12,345``, or that it is not known."""
    return wording.UNKNOWN if value is None else f"{value:,}"


def _share(value: float | None) -> str:
    """Format a ratio as a percentage: ``98.7 %``; never 100 % if a little is missing."""
    if value is None:
        return wording.UNKNOWN
    percent = 100 * value
    digits = next((n for n in (1, 2, 3) if value >= 1 or round(percent, n) < 100), 4)
    return f"{percent:.{digits}f} %"


def _time_table(goodput: Goodput) -> Table:
    table = _table("time by cause", "time", "", "share", "")
    for cause, spent_s in goodput.seconds.items():
        of = spent_s / goodput.wall_s if goodput.wall_s > 0 else None
        name, what = wording.printable(cause, _LONGEST_KIND), CAUSES.get(cause, "incidents")
        table.add_row(name, wording.duration(spent_s), _share(of), what)
    table.add_row("wall clock", wording.duration(goodput.wall_s), "", "from the start of the command to the end")
    table.add_section()
    table.add_row("goodput", "", _share(goodput.ratio), "training / wall clock")
    table.add_row("ETTR", "", _share(goodput.ettr), "training, saves and stragglers / wall clock")
    ratio = _share(goodput.ettr_while_training)
    table.add_row("ETTR while training", "", ratio, "without start-up, shutdown and idle time")
    return table


def _lost_table(goodput: Goodput) -> Table:
    """Return a table of the ranks and nodes for which the job lost time; of many, only the longest times."""
    hidden = max(0, len(goodput.lost) - _MOST_INCIDENTS)
    title = "time lost for one rank or node" + (f" ({hidden} shorter ones are in --json)" if hidden else "")
    table = _table(title, "cause", "for", "", "")
    for each in goodput.lost[:_MOST_INCIDENTS]:
        on = "" if each.node is None else f" on node {each.node}"
        who = each.who or f"rank {each.rank}{on}"
        share = _share(each.seconds / goodput.wall_s if goodput.wall_s > 0 else None)
        shown = wording.printable(each.cause, _LONGEST_KIND), wording.printable(who, _LONGEST_CAUSE)
        table.add_row(*shown, wording.duration(each.seconds), share)
    return table


def _other_tables(report: Report) -> Iterator[Table]:
    """Yield the tables of what is no incident, each of which may have no rows."""
    yield _filled(
        _table("failed device checks", "node", "rank", "why", "remedy"),
        ((each["node"], str(each["rank"]), each["why"], each["remedy"]) for each in report.devices),
    )
    yield _filled(
        _table("not saved", "checkpoint", "ranks", "why"),
        ((each["path"], ", ".join(map(str, each["ranks"])), each["reason"]) for each in report.failed_saves),
    )
    table = _table(
        "slow ranks", "rank", "node", "slow in", "found after step", "work of a step", "usually", "lasted"
    )
    for each in report.stragglers:
        lasted = "to the end" if each.lasted_s is None else wording.duration(each.lasted_s)
        where = (str(each.rank), str(each.node), each.why, str(each.step))
        table.add_row(*where, wording.duration(each.own_s), wording.duration(each.usual_s), lasted)
    yield table
    table = _table("computed wrongly", "rank", "step", "gradient of", "the step")
    for wrong in report.corrupted:
        more = f" and {wrong['parameters'] - 1} more" if wrong["parameters"] > 1 else ""
        what = wording.printable(wrong["parameter"], _LONGEST_CAUSE) + more
        table.add_row(
            str(wrong["rank"]), str(wrong["step"]), what, "was redone" if wrong["redone"] else "was right"
        )
    yield table


def _filled(table: Table, rows: Iterable[Sequence[str]]) -> Table:
    for row in rows:
        table.add_row(*(wording.printable(text, _LONGEST_CAUSE) for text in row))
    return table


def _incident_table(report: Report) -> Table:
    incidents = report.incidents
    hidden = max(0, len(incidents) - _MOST_INCIDENTS)
    title = "incidents" + (f" ({hidden} earlier ones are in --json)" if hidden else "")
    table = _table(title, "#")
    table.add_column("fault", no_wrap=True)
    table.add_column("cause", overflow="fold")
    table.add_column("level")
    table.add_column("resumed after")
    table.add_column("steps lost", justify="right")
    table.add_column("filled from")
    table.add_column("took", no_wrap=True, justify="right")
    for number, incident in list(enumerate(incidents, start=1))[hidden:]:
        ended = incident.outcome.value
        if incident.has_resumed and incident.resumed_after is not None:
            ended = f"step {incident.resumed_after}" + (", not exact" if incident.inexact else "")
        why = incident.reason or incident.inexact
        table.add_row(
            str(number),
            wording.printable(incident.kind, _LONGEST_KIND),
            wording.printable(incident.cause or "unknown", _LONGEST_CAUSE),
            _level(incident),
            ended + (f": {wording.printable(why, _LONGEST_CAUSE)}" if why else ""),
            _number(incident.steps_lost) if incident.has_resumed else "",
            _sources(incident),
            "" if incident.headline_s is None else wording.duration(incident.headline_s),
        )
    return table


def _bar_table(report: Report) -> Table:
    """Return a table with each incident's time as a bar of its stages, on one scale; of many, only the newest."""
    key = "  ".join(f"{_MARKS[phase][0]} {phase}" for phase in PHASES)
    marks = {str(stage): _MARKS[phase] for phase, stages in PHASES.items() for stage in stages}
    table = _table("stages of each incident", "#", key, "took")
    shown = list(enumerate(report.incidents, start=1))[-_MOST_INCIDENTS:]
    longest_s = max((sum(incident.tiles_s.values()) for _, incident in shown), default=0.0) or 1.0
    for number, incident in shown:
        bar, at_s = Text(), 0.0
        for stage, seconds in incident.tiles_s.items():
            mark, colour = marks[stage]
            at_s += seconds
            bar.append(mark * (round(_LONG_BAR * at_s / longest_s) - len(bar)), colour)
        took = incident.outcome.value if incident.headline_s is None else wording.duration(incident.headline_s)
        table.add_row(str(number), bar, took)
    return table


def _stage_table(report: Report) -> Table:
    single = report.incidents if len(report.incidents) <= _MOST_COLUMNS else ()
    table = _table(_STAGE_TITLE, "stage", "share of the time")
    for name in ("median", "longest", *(f"#{number}" for number in range(1, len(single) + 1))):
        table.add_column(name, justify="right")
    total_s = sum(stage.tile_s for stage in report.stages) or 1.0
    for stage in report.stages:
        of = stage.tile_s / total_s
        table.add_row(
            stage.stage,
            f"{'█' * round(_BAR_WIDTH * of):<{_BAR_WIDTH}} {of:4.0%}",
            f"{stage.median_s:.3f}",
            f"{stage.longest_s:.3f}",
            *(f"{took:.3f}" if (took := each.stages_s.get(stage.stage)) is not None else "" for each in single),
        )
    return table


def _sources(incident: IncidentSummary) -> str:
    ranks = wording.numbered("rank", incident.sources)
    filled = [f"{ranks}: {wording.size(incident.nbytes)}"] if incident.sources else []
    copies = [f"{tier}: {wording.numbered('rank', filled)}" for tier, filled in incident.tiers.items()]
    return "; ".join([*filled, *copies])


def _level(incident: IncidentSummary) -> str:
    whys = (wording.printable(why, _LONGEST_CAUSE) for why in incident.steps_up if why != incident.cause)
    return "; ".join((incident.rung.label, *whys))


def verdict_table(verdict: Verdict, a: Steps, b: Steps, names: tuple[str, str]) -> Table:
    """Return a table of the size of two recordings and the two values of the first difference."""
    table = Table("", *names)
    table.add_row("ranks", str(len(a)), str(len(b)))
    table.add_row("steps recorded", *(str(sum(len(records) for records in run.values())) for run in (a, b)))
    where = verdict.difference
    if where is not None:
        table.add_row(where.place, *(_with_decimal(value, where.quantity) for value in (where.a, where.b)))
    return table


def loss_table(a: Steps, b: Steps) -> Table:
    """Return a table of the losses of two runs, undisturbed and with faults; of many steps, only the last."""
    table = _table("losses", "step", "undisturbed", "with faults", "same bits")
    left, right = _losses(a), _losses(b)
    for step in sorted({*left, *right})[-_MOST_LOSSES:]:
        shown = (f"{each[step]:.6f}" if step in each else "-" for each in (left, right))
        table.add_row(str(step), *shown, "yes" if left.get(step) == right.get(step) else "no")
    return table


def _losses(steps: Steps) -> dict[int, float]:
    """Return the losses by step of the first rank with any but zeros (pipeline stages in between report none)."""
    for rank in sorted(steps):
        losses = {each.step: float.fromhex(each.loss) for each in steps[rank] if each.loss != NO_LOSS}
        if any(losses.values()):
            return losses
    return {}


def _with_decimal(value: str, quantity: Quantity) -> str:
    """Return a value as recorded, after the decimal form of any hexadecimal numbers in it."""
    numbers = value.split()
    if quantity not in (Quantity.LOSS, Quantity.LR, Quantity.METRIC) or not all(map(_is_number, numbers)):
        return value
    return f"{' '.join(f'{float.fromhex(each):.9g}' for each in numbers)} ({value})"


def _is_number(text: str) -> bool:
    """Return whether ``text`` is what ``float.hex()`` gives; a digest has digits only."""
    return "0x" in text or text.lstrip("-") in ("nan", "inf")


def support_table() -> Table:
    """Return a table of which kinds of fault can be caused in which phases, and what is expected of each kind."""
    title = "KIND[@PHASE][:rank=R,step=S,times=N,prob=P,seed=N,how=H,seconds=T]"
    table = _table(title, "kind", "how=", "phases", "what is expected")
    for kind in FaultKind:
        table.add_row(kind.value, ", ".join(kind.variants), _phases(kind.phases), kind.expected)
    return table


def _phases(phases: frozenset[FaultPhase]) -> str:
    """List the phases by name, or the missing ones of the usual if they are fewer."""
    there, missing, more = (
        [phase.value for phase in FaultPhase if phase in group]
        for group in (phases & USUAL_PHASES, USUAL_PHASES - phases, phases - USUAL_PHASES)
    )
    most = ", ".join(there)
    if len(missing) < len(there):
        most = f"all but {', '.join(missing)}" if missing else "all"
    return f"{most}; and {', '.join(more)}" if more else most


# --- The page of ``checkpointless doctor``: findings to act on, the worst first, and in short the others ----------

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.ADVICE: "cyan"}
_COUNTED = (Severity.ERROR, Severity.WARNING)
_LONGEST = 600  # characters of a text from a machine


def show_findings(findings: Sequence[Finding]) -> None:
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
    table = _table("what is right", show_header=False)
    right = [each for each in worst_first(findings) if each.severity is Severity.OK]
    for family, found in groupby(right, key=lambda each: each.family.value):
        by_source: dict[str, list[str]] = defaultdict(list)
        for each in found:
            by_source[each.source].append(each.seen)
        lines = (
            ", ".join(seen) + (f" ({source})" if source and len(seen) > 1 else "")
            for source, seen in by_source.items()
        )
        table.add_row(family, wording.printable("; ".join(lines)))
    if right:
        page.print(table)
    if not any(each.is_to_change for each in change):
        page.print("nothing has to be changed")


def _change_table(findings: Sequence[Finding]) -> Table:
    table = _table("what to change, the worst first")
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
