"""The command ``checkpointless report``: its options, and what it writes where."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.cli.command import STDOUT, Command, write
from checkpointless.cli.run_directory import check_run_dir
from checkpointless.cli.values import UsageError, seconds

if TYPE_CHECKING:
    from checkpointless.observability.report.summary import Report

_EPILOG = """\
examples:
  checkpointless report runs/20260101T120000Z-train
  checkpointless report runs/1 --html report.html       the same as one page, with tracebacks
  checkpointless report runs/1 --json - | jq .time.ettr
  checkpointless report runs/1 --trace trace.json       for ui.perfetto.dev or chrome://tracing
  checkpointless report runs/1 --restart-startup 420 --restart-load 90 --checkpoint-interval 1800

The cost of restarts from a checkpoint is an estimate that shows where each of its figures comes from.
A run can be reported while it is in progress.
"""


#: What a restart would cost, for the estimate.
_RESTART_OPTIONS = {
    "--restart-detect": "from a fault to a restart (default: as in this run)",
    "--restart-requeue": "in the scheduler's queue (default: 0)",
    "--restart-startup": "from a start to the first step (default: as in this run)",
    "--restart-load": "to load a checkpoint (default: 0)",
    "--checkpoint-interval": "of training between two checkpoints (default: 900)",
}


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report``."""
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    add("--json", type=Path, metavar="FILE", help="write JSON (-: to standard output, and nothing else)")
    add("--html", type=Path, metavar="FILE", help="write a web page")
    add("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or Chrome")
    for option, text in _RESTART_OPTIONS.items():
        kind = seconds if option == "--checkpoint-interval" else _at_least_zero
        add(option, type=kind, metavar="S", help=f"seconds {text}")


def _report_command(options: argparse.Namespace) -> int:
    """Show the report and write it to files.

    Raises:
        UsageError: there is no run, or a file cannot be read or written.
    """
    from checkpointless.observability.report.summary import as_json, build_report
    from checkpointless.observability.telemetry.events import EVENTS_FILE, read_events

    run_dir: Path = options.run_dir
    check_run_dir(run_dir)
    log = run_dir / EVENTS_FILE
    if not log.is_file():
        raise UsageError(f"{run_dir} has no {EVENTS_FILE}: it is not a run directory")
    from checkpointless.faults.ledger import fired

    try:
        events = read_events(run_dir)
        lines = sum(1 for line in log.read_bytes().split(b"\n") if line.strip())
        caused = fired(run_dir)
    except OSError as error:
        raise UsageError(f"cannot read {run_dir}: {error.strerror}") from error
    named = {option: getattr(options, option[2:].replace("-", "_")) for option in _RESTART_OPTIONS}
    given = {option: value for option, value in named.items() if value is not None}
    report = build_report(
        str(run_dir),
        events,
        caused=caused,
        lines_left_out=max(0, lines - len(events)),
        given=given,
    )
    if options.json is not None:
        write(options.json, as_json(report) + "\n")
    if options.html is not None:
        from checkpointless.cli.tables import html_page

        write(options.html, html_page(report, _tracebacks(run_dir, report)))
    if options.trace is not None:
        from checkpointless.observability.report.trace import write_trace

        write(options.trace, write_trace(report, events))
    if STDOUT not in (options.json, options.html, options.trace):
        from checkpointless.cli.tables import console, show_report

        show_report(report, console())
    return 0


def _tracebacks(run_dir: Path, report: Report) -> dict[str, str]:
    """Return the tracebacks of the ranks that failed, as far as they raised anything, by incident."""
    from checkpointless.observability.telemetry.tracebacks import traceback_path

    found = {}
    for incident in report.incidents:
        if incident.culprit is not None:
            path = traceback_path(run_dir, incident.generation, incident.culprit)
            try:
                found[incident.incident] = path.read_text(errors="backslashreplace")
            except FileNotFoundError:
                continue  # the rank raised nothing
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return found


def _at_least_zero(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else seconds(text)


COMMAND = Command(
    "report",
    "show a run's incidents and where its time went",
    _add_report_options,
    _report_command,
    _EPILOG,
)
