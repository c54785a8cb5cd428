"""The last line of a job: its steps, the cost of its incidents, and the report."""

from __future__ import annotations

import shlex
from pathlib import Path

from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.wording import duration, plural
from checkpointless.system.errands import Errands

_PATIENCE_S = 5.0  # for a disk that has stopped


def closing_line(run_dir: Path, status: int) -> str:
    """Return the line, with the figures of the report.

    There is none ("") for a job that had no incident and made no step that is known.

    Args:
        run_dir: the run directory.
        status: the job's exit status.
    """
    try:
        facts = Errands(_PATIENCE_S).run(lambda: _facts(run_dir), "its log was not read in time")
    except OSError as error:
        facts = f"its log cannot be read: {error.strerror}"
    how = "failed" if status else "done"
    return f"{how}: {facts}; report: checkpointless report {shlex.quote(str(run_dir))}" if facts else ""


def _facts(run_dir: Path) -> str:
    events = read_events(run_dir)
    report = build_report(str(run_dir), events)
    begun = [
        event.fields["step"]
        for event in events
        if event.stage == EventName.FIRST_STEP and event.edge == "end" and isinstance(event.fields.get("step"), int)
    ]
    said = []
    if report.run.last_step is not None and report.run.last_step > 0:
        first = min(begun, default=1)
        said.append(plural(report.run.last_step - first + 1, "step"))
    if report.incidents and report.spent is not None:
        lost_s = report.spent.recovery_s + (report.spent.repeated_s or 0.0)
        inexact = report.outcomes[Outcome.INEXACT]
        count = plural(len(report.incidents), "incident") + (f" ({inexact} not exact)" if inexact else "")
        said += [count, f"{duration(lost_s)} lost"]
    elif said:
        said.append("no incidents")
    return ", ".join(said)
