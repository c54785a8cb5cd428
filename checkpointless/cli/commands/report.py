"""The commands that show something: ``report``, ``verify``, ``faults`` and ``doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.cli.command import STDOUT, Command, UsageError, modules, out, positive, say

if TYPE_CHECKING:
    from checkpointless.observability.report.summary import Report
    from checkpointless.observability.telemetry.events import Event

_REPORT_EPILOG = """\
examples:
  checkpointless report runs/20260101T120000Z-train
  checkpointless report runs/1 --html report.html       the same as one page, with tracebacks
  checkpointless report runs/1 runs/2 --html job.html   all runs of a job, and its goodput
  checkpointless report runs/1 --json - | jq .goodput.seconds
  checkpointless report runs/1 --trace trace.json       for ui.perfetto.dev or chrome://tracing

A run can be reported while it is in progress.
"""


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="run directory; several: those of one job")
    add("--json", type=Path, metavar="FILE", help="write JSON (-: to standard output, and nothing else)")
    add("--html", type=Path, metavar="FILE", help="write a web page")
    add("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or Chrome")


def _check_run_dir(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise UsageError(f"there is no run directory {run_dir}")


def _report_command(options: argparse.Namespace) -> int:
    from checkpointless.observability.report.summary import Job

    if len(options.run_dirs) > 1 and options.trace is not None:
        raise UsageError("--trace is of one run: name one run directory")
    built = [_read(run_dir) for run_dir in options.run_dirs]
    try:
        job = Job.of(report for report, _ in built)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.json is not None:
        _write(options.json, job.as_json() + "\n")
    if options.html is not None:
        from checkpointless.cli.tables import html_page

        _write(options.html, html_page(job, [_tracebacks(Path(each.run.path), each) for each in job.runs]))
    if options.trace is not None:
        from checkpointless.observability.report.trace import write_trace

        _write(options.trace, write_trace(*built[0]))
    if STDOUT not in (options.json, options.html, options.trace):
        from checkpointless.cli.tables import console, show_job

        show_job(job, console())
    return 0


def _read(run_dir: Path) -> tuple[Report, Sequence[Event]]:
    from checkpointless.faults.ledger import fired
    from checkpointless.observability.report.summary import build_report
    from checkpointless.observability.telemetry.events import EVENTS_FILE, read_events

    _check_run_dir(run_dir)
    log = run_dir / EVENTS_FILE
    if not log.is_file():
        raise UsageError(f"{run_dir} has no {EVENTS_FILE}: it is not a run directory")
    try:
        events = read_events(run_dir)
        lines = sum(1 for line in log.read_bytes().split(b"\n") if line.strip())
        caused = fired(run_dir)
    except OSError as error:
        raise UsageError(f"cannot read {run_dir}: {error.strerror}") from error
    left_out = max(0, lines - len(events))
    return build_report(str(run_dir), events, caused=caused, lines_left_out=left_out), events


def _write(path: Path, text: str) -> None:
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _tracebacks(run_dir: Path, report: Report) -> dict[str, str]:
    """Return the tracebacks of the ranks that failed, as far as they raised anything, by incident."""
    from checkpointless.observability.telemetry.scribe import traceback_path

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


REPORT = Command(
    "report", "show a run's incidents and where its time went", _add_report_options, _report_command, _REPORT_EPILOG
)


# --- A comparison of two runs ------------------------------------------------------------------------------------


def _add_verify_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_a", type=Path, metavar="RUN_A", help="run directory of a run with --record-steps")
    add("run_b", type=Path, metavar="RUN_B", help="run directory of another one")


def _verify(options: argparse.Namespace) -> int:
    """Compare two runs and show the first difference; return 0 if they are equal, 1 if not."""
    from checkpointless.cli.tables import console, verdict_table
    from checkpointless.observability.report.incidents import gone_back
    from checkpointless.observability.report.verify import compare
    from checkpointless.observability.telemetry.events import read_events
    from checkpointless.observability.telemetry.steps import read_steps

    steps, again = [], []
    for run_dir in (options.run_a, options.run_b):
        _check_run_dir(run_dir)
        try:
            steps.append(read_steps(run_dir))
            again.append(gone_back(read_events(run_dir)))
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from error
    verdict = compare(steps[0], steps[1], gone_back=(again[0], again[1]))
    console().print(verdict_table(verdict, steps[0], steps[1], (str(options.run_a), str(options.run_b))))
    out(verdict.sentence)
    return 0 if verdict.equal else 1


VERIFY = Command("verify", "compare two recorded runs, bit by bit", _add_verify_options, _verify)


# --- The faults that can be injected -----------------------------------------------------------------------------


def _faults(_options: argparse.Namespace) -> int:
    from checkpointless.cli.tables import console, support_table
    from checkpointless.faults.spec import FaultPhase

    console().print(support_table())
    out(f"phases: {', '.join(phase.value for phase in FaultPhase)}")
    out("for example: --fault exception@forward:rank=2,step=7 --fault sigkill@optimizer:rank=1,step=5")
    return 0


FAULTS = Command("faults", "list the faults that can be injected", lambda _: None, _faults)


# --- What a node lacks -------------------------------------------------------------------------------------------

_DOCTOR_EPILOG = """\
examples:
  checkpointless doctor                                  this machine
  checkpointless doctor --nproc-per-node 8 --script train.py    can a fork server import this and fork ranks?
  checkpointless doctor --nproc-per-node 8 --preload nemo.collections.llm
  checkpointless doctor --run-dir /shared/runs           can a run be recorded there?
  checkpointless doctor --json - | jq .worst

Exit status: 0 if all is ok or advice, 1 if there is a warning or an error, 2 if an option is wrong.
"""


def _add_doctor_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nproc-per-node", "--nproc_per_node", type=positive, default=1, metavar="N", help="ranks (default: 1)")
    add("--run-dir", type=Path, metavar="D", help="check that a run can be recorded there")
    add("--cpu", action="store_true", help="check for a job on CPUs")
    add(
        "--preload",
        type=modules,
        default=(),
        metavar="MODULE,...",
        help="check these imports of the fork server, as for `run`",
    )
    add("--script", metavar="SCRIPT", help="check what the fork server imports for this script")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as with `python -m`")
    add("--json", type=Path, metavar="FILE", help="write JSON (-: to standard output, and nothing else)")


def _doctor(options: argparse.Namespace) -> int:
    from checkpointless.doctor import findings
    from checkpointless.doctor.node import examine
    from checkpointless.launcher.agent.ranks.rank_process import Script

    if options.module and options.script is None:
        raise UsageError("-m requires --script")
    if options.script is not None and not options.module and not Path(options.script).is_file():
        raise UsageError(f"there is no script {options.script!r}")
    if options.run_dir is not None and options.run_dir.exists() and not options.run_dir.is_dir():
        raise UsageError(f"run directory {options.run_dir} is a file: name another")
    found = examine(
        ranks=options.nproc_per_node,
        run_dir=options.run_dir,
        cpu=options.cpu,
        preload=options.preload,
        script=None if options.script is None else Script(options.script, (), options.module),
        progress=say,
    )
    if options.json is not None:
        _write(options.json, findings.as_json(found) + "\n")
    if options.json != STDOUT:
        from checkpointless.cli.tables import show_findings

        show_findings(found)
    return int(any(each.is_to_change for each in found))


DOCTOR = Command("doctor", "check what a node lacks for recoveries", _add_doctor_options, _doctor, _DOCTOR_EPILOG)
