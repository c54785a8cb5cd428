"""Terminal output of a job next to that of its ranks: one block of lines per incident."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import shlex
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as OutOfTimeError
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from checkpointless.observability.report.goodput import REPEATED
from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.events import EVENTS_FILE, Event, LineTail, read_events
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
_PATIENCE_S = 5.0  # for a disk that has stopped


class Terminal:
    """Shows the agent's lines and what the event log says of incidents, in a thread, which a terminal may block."""

    def __init__(self, write: Callable[[str], None], run_dir: Path, node: int, logs: Path | None = None) -> None:
        self._write = write
        self._said: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()  # with times, as in events
        self._run_dir = run_dir
        self._tail = LineTail(run_dir / EVENTS_FILE, _PORTION_BYTES)
        self._reading: Future[list[bytes]] | None = None  # what the log's disk still owes
        self._narrator = Narrator(run_dir, node, os.getpid(), logs)
        self._waiting: list[tuple[int, str | None]] = []  # taken out of that, and not shown yet
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

    def closing_line(self, status: int) -> str:
        """Return the last line of a job; "" if it had no incident and made no step that is known."""
        try:
            facts = in_thread(lambda: _facts(self._run_dir), "closing-line").result(_PATIENCE_S)
        except OutOfTimeError:
            facts = "its log was not read in time"
        except (OSError, RuntimeError) as error:  # RuntimeError: there are no more threads
            facts = f"its log cannot be read: {getattr(error, 'strerror', error)}"
        how, run_dir = "failed" if status else "done", shlex.quote(str(self._run_dir))
        return f"{how}: {facts}; report: checkpointless report {run_dir}" if facts else ""

    def _run(self) -> None:
        while not self._closing:
            self._survive(self._turn)
        self._survive(lambda: self._show(self._events()))

    def _survive(self, work: Callable[[], None]) -> None:
        """Do a part of the work; an error in it costs that part, and not the lines that come later."""
        try:
            work()
        except Exception:
            if not self._has_failed:
                logger.exception("something of the job is not shown")
            self._has_failed = True

    def _turn(self) -> None:
        """Show what has come, in the order in which it came: the agent's lines and those for events of the log."""
        with contextlib.suppress(queue.Empty):
            pause_s = _TELLING_S if self._narrator.is_telling else _CALM_S
            self._waiting.append(self._said.get(timeout=0 if self._waiting else pause_s))
        complete_ns = time.time_ns()  # what came until now is in what is read next
        if self._waiting:
            scribe.flush(_FLUSH_S)
        events: list[Event] = []
        self._survive(lambda: events.extend(self._events()))
        while not self._said.empty():
            self._waiting.append(self._said.get_nowait())
        until_ns = max([complete_ns, *(event.ts for event in events)])
        due = [each for each in self._waiting if each[0] <= until_ns]
        self._waiting = [each for each in self._waiting if each[0] > until_ns]
        self._closing = any(line is None for _, line in due)
        self._show(events, [(at_ns, line) for at_ns, line in due if line is not None])
        self._survive(lambda: self._write_all(self._narrator.tick(time.monotonic())))

    def _events(self) -> list[Event]:
        """Return the new events; while the log's disk stalls, none, so that the agent's lines are still shown."""
        patience_s = _DISK_PATIENCE_S if self._reading is None else 0.0
        reading = self._reading = self._reading or in_thread(self._tail.lines, "terminal-log")
        if not wait((reading,), patience_s).done:
            return []
        self._reading = None
        return [event for event in map(Event.parse, reading.result()) if event is not None]

    def _show(self, events: Iterable[Event], said: Iterable[tuple[int, str]] = ()) -> None:
        both: list[tuple[int, str | Event]] = [*said, *((event.ts, event) for event in events)]
        for _, each in sorted(both, key=lambda item: item[0]):
            self._survive(functools.partial(self._show_next, each))

    def _show_next(self, each: str | Event) -> None:
        if isinstance(each, Event):
            self._write_all(self._narrator.take(each, time.monotonic()))
            return
        if each.startswith(INCIDENT):
            self._wait_for_last_words()
        self._write(each)

    def _wait_for_last_words(self) -> None:
        """If an incident is over, wait for what the ranks report, which belongs before its last line."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while self._narrator.is_over and time.monotonic() < deadline_s:
            time.sleep(_TELLING_S / 5)
            self._show(self._events())
        if self._narrator.is_over:
            self._narrator.close()

    def _write_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._write(line)


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
