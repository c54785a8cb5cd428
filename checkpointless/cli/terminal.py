"""Terminal output of a job next to that of its ranks: one block of lines per incident."""

from __future__ import annotations

import functools
import logging
import os
import queue
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as OutOfTimeError
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from checkpointless.observability.report.goodput import REPEATED
from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.events import EVENTS_FILE, Event, LineTail, parse_event, read_events
from checkpointless.observability.telemetry.narration import INCIDENT, Narrator
from checkpointless.observability.telemetry.scribe import in_thread, scribe
from checkpointless.observability.telemetry.wording import duration, plural

logger = logging.getLogger(__name__)

_DISK_PATIENCE_S = 1.0
_CALM_S = 0.25
_TELLING_S = 0.05
_PORTION_BYTES = 64 * 1024  # per read: a few milliseconds of this process, whose other thread runs the job
_FLUSH_S = 0.5
_LAST_WORDS_S = 0.5  # for what ranks have still to report of an incident that is over
_CLOSE_S = 5.0


class Terminal:
    """Shows the agent's lines and, between them, how each incident proceeds according to the job's event log.

    A separate thread writes, so that a blocked terminal holds up nothing else.

    Args:
        node: index of this agent's node; -1 for a coordinator in a separate process.
        logs: directory of the logs; None: the usual one in ``run_dir``.
    """

    def __init__(self, write: Callable[[str], None], run_dir: Path, node: int, logs: Path | None = None) -> None:
        self._write = write
        self._said: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()  # with times, as in events
        self._tail = LineTail(run_dir / EVENTS_FILE, _PORTION_BYTES)
        self._reading: Future[list[bytes]] | None = None  # what the log's disk still owes
        self._narrator = Narrator(run_dir, node, os.getpid(), logs)
        # An incident's first and last line come from the agent and from the event log; the first to come is shown.
        self._from_agent: Counter[str] = Counter()
        self._from_log: Counter[str] = Counter()
        self._closing = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)

    def say(self, line: str) -> None:
        """Show a line of the agent; never wait."""
        self._said.put((time.time_ns(), line))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._said.put((time.time_ns(), None))
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closing:
            self._survive(self._turn)
        self._survive(lambda: self._look([]))
        self._survive(lambda: self._show(self._narrator.close()))

    def _survive(self, work: Callable[[], None]) -> None:
        """Do a part of the work; an error in it costs that part, and not the lines that come later."""
        try:
            work()
        except Exception:
            if not self._has_failed:
                logger.exception("something of the job is not shown")
            self._has_failed = True

    def _turn(self) -> None:
        """Show what has come, in the order in which it came."""
        said = []
        try:
            said.append(self._said.get(timeout=_TELLING_S if self._narrator.is_telling else _CALM_S))
            while True:
                said.append(self._said.get_nowait())
        except queue.Empty:
            pass
        self._closing = any(line is None for _, line in said)
        self._look([(at_ns, line) for at_ns, line in said if line is not None])
        self._survive(lambda: self._show(self._narrator.tick(time.monotonic())))

    def _look(self, said: Iterable[tuple[int, str]]) -> None:
        """Show the agent's lines and, between them, the lines for new events of the log."""
        both: list[tuple[int, str | Event]] = [*said]
        if both:  # events that this process emitted before these lines are to be shown before them
            scribe.flush(_FLUSH_S)
        self._survive(lambda: both.extend((event.ts, event) for event in self._events()))
        for _, each in sorted(both, key=lambda item: item[0]):
            self._survive(functools.partial(self._show_next, each))

    def _show_next(self, each: str | Event) -> None:
        if isinstance(each, Event):
            self._show(self._narrator.take(each, time.monotonic()))
        else:
            self._wait_for_last_words(each)
            self._show_once(each, self._from_agent, self._from_log)

    def _events(self) -> list[Event]:
        """Return the new events; while the log's disk stalls, none, so that the agent's lines are still shown."""
        patience_s = _DISK_PATIENCE_S if self._reading is None else 0.0
        reading = self._reading = self._reading or in_thread(self._tail.lines, "terminal-log")
        if not wait((reading,), patience_s).done:
            return []
        self._reading = None
        return [event for event in map(parse_event, reading.result()) if event is not None]

    def _wait_for_last_words(self, line: str) -> None:
        """If ``line`` is the last line of an incident, wait for the ranks' lines, which belong before it."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while self._narrator.closing == line and time.monotonic() < deadline_s:
            time.sleep(_TELLING_S / 5)
            self._look([])
        if self._narrator.closing == line:
            self._show(self._narrator.close())

    def _show(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._show_once(line, self._from_log, self._from_agent)

    def _show_once(self, line: str, source: Counter[str], other: Counter[str]) -> None:
        if other[line] > 0:
            other[line] -= 1
            return
        if line.startswith(INCIDENT):
            source[line] += 1
        self._write(line)


# --- The last line of a job: its steps, the cost of its incidents, and the report ---------------------------------

_PATIENCE_S = 5.0  # for a disk that has stopped


def closing_line(run_dir: Path, status: int) -> str:
    """Return the line, with the figures of the report.

    There is none ("") for a job that had no incident and made no step that is known.
    """
    try:
        facts = in_thread(lambda: _facts(run_dir), "closing-line").result(_PATIENCE_S)
    except OutOfTimeError:
        facts = "its log was not read in time"
    except (OSError, RuntimeError) as error:  # RuntimeError: there are no more threads
        facts = f"its log cannot be read: {getattr(error, 'strerror', error)}"
    how = "failed" if status else "done"
    return f"{how}: {facts}; report: checkpointless report {shlex.quote(str(run_dir))}" if facts else ""


def _facts(run_dir: Path) -> str:
    report = build_report(str(run_dir), read_events(run_dir))
    first, last = report.run.first_step, report.run.last_step
    said = []
    if last is not None and last > 0:
        said.append(plural(last - (first or 1) + 1, "step"))
    if report.incidents and report.goodput is not None:
        lost_s = report.goodput.incidents_s + report.goodput.seconds.get(REPEATED, 0.0)
        inexact = report.outcomes[Outcome.INEXACT]
        count = plural(len(report.incidents), "incident") + (f" ({inexact} not exact)" if inexact else "")
        said += [count, f"{duration(lost_s)} lost"]
    elif said:
        said.append("no incidents")
    return ", ".join(said)
