"""Terminal output of a job next to that of its ranks: one block of lines per incident.

Disk operations that an agent's loop needs but must not wait for long.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import shlex
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTimeError
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.events import EVENTS_FILE, Event, LineTail, parse_event, read_events
from checkpointless.observability.telemetry.narration import INCIDENT, Narrator
from checkpointless.observability.telemetry.scribe import scribe
from checkpointless.observability.telemetry.wording import duration, plural

logger = logging.getLogger(__name__)

_DISK_PATIENCE_S = 1.0

Result = TypeVar("Result")


class _Errands:
    """Runs functions in a thread and waits for their results, but only for a moment.

    As long as one function has not returned, no other is started: a disk that has stopped costs one wait, not one
    per rank.

    Args:
        patience_s: how many seconds to wait for a result.
    """

    def __init__(self, patience_s: float = _DISK_PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._last: Future[Any] | None = None

    def run(
        self,
        errand: Callable[[], Result],
        otherwise: Result,
        late: Callable[[Result], object] = lambda result: None,
    ) -> Result:
        """Return what ``errand`` returns, or ``otherwise`` if that is not known in time.

        Args:
            errand: the function to run, which may take long.
            late: called in the errand's thread with a result that came too late.

        Raises:
            Exception: what ``errand`` raised in time; what it raises later is logged.
        """
        if self._last is not None and not self._last.done():
            return otherwise
        result: Future[Result] = Future()
        self._last = result

        def run() -> None:
            try:
                result.set_result(errand())
            except Exception as error:  # noqa: BLE001 - the edge of the thread: whoever waits raises it
                result.set_exception(error)

        try:
            threading.Thread(target=run, name="checkpointless-errand", daemon=True).start()
        except RuntimeError as error:  # no more threads: it is as if the disk did not answer
            self._last = None
            logger.warning("%s: what needs the disk is left out", error)
            return otherwise
        try:
            return result.result(self._patience_s)
        except OutOfTimeError:
            result.add_done_callback(lambda done: _take_late(done, late))
            return otherwise


def _take_late(done: Future[Result], late: Callable[[Result], object]) -> None:
    error = done.exception()
    if error is None:
        late(done.result())
    else:
        logger.warning("what took too long has failed, too: %s", error)


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
        self._errands = _Errands()  # the agent's lines are shown even while the log's disk stalls
        self._late: deque[bytes] = deque()
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
        nothing: list[bytes] = []
        lines = self._errands.run(self._tail.lines, nothing, late=self._late.extend)
        late = [self._late.popleft() for _ in range(len(self._late))]
        found = [parse_event(line) for line in (*late, *lines)]
        return [event for event in found if event is not None]

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
        facts = _Errands(_PATIENCE_S).run(lambda: _facts(run_dir), "its log was not read in time")
    except OSError as error:
        facts = f"its log cannot be read: {error.strerror}"
    how = "failed" if status else "done"
    return f"{how}: {facts}; report: checkpointless report {shlex.quote(str(run_dir))}" if facts else ""


def _facts(run_dir: Path) -> str:
    report = build_report(str(run_dir), read_events(run_dir))
    first, last = report.run.first_step, report.run.last_step
    said = []
    if last is not None and last > 0:
        said.append(plural(last - (first or 1) + 1, "step"))
    if report.incidents and report.spent is not None:
        lost_s = report.spent.recovery_s + (report.spent.repeated_s or 0.0)
        inexact = report.outcomes[Outcome.INEXACT]
        count = plural(len(report.incidents), "incident") + (f" ({inexact} not exact)" if inexact else "")
        said += [count, f"{duration(lost_s)} lost"]
    elif said:
        said.append("no incidents")
    return ", ".join(said)
