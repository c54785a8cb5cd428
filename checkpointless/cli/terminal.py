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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as OutOfTimeError
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from checkpointless.observability.report.goodput import REPEATED
from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.event_names import LIVING, EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, Event, LineTail, read_events
from checkpointless.observability.telemetry.scribe import in_thread, scribe, traceback_path
from checkpointless.observability.telemetry.wording import INCIDENT, duration, numbered, plural, size

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
        self._narrator = _Narrator(run_dir, node, os.getpid(), logs)
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
            self._waiting = [(min(at_ns, complete_ns), line) for at_ns, line in self._waiting]  # a clock put back
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


# --- The lines of an incident between its first and its last, which are told while it happens ---------------------

#: Stages of the generation that begins; each is told as soon as all ranks have finished it. A loop of one's own has
#: no `init` and no `rebuild`, and ranks that nobody decides for have no `transfer`: such a stage is left out.
_STARTING = (EventName.INIT, EventName.REBUILD, EventName.DECIDE, EventName.TRANSFER, EventName.FIRST_STEP)
#: Stages of the generation that ended; they are told when all ranks have met again.
_ENDING = (EventName.ABORT, EventName.FINALIZE, EventName.HAND_OVER)
#: Stages that are usually too short for a separate line, and the stages whose lines mention them.
_BRIEF: Mapping[str, EventName] = {
    EventName.HEALTH: EventName.FINALIZE,
    EventName.ENTER: EventName.INIT,
    EventName.VERIFY: EventName.TRANSFER,
    EventName.DATA: EventName.TRANSFER,
}
_BRIEF_S = 0.5
_SILENCE_S = 5.0
_IMPORTING_S = 2.0  # an import that takes longer is told of
_STILL_IMPORTING_S = 15.0
_GENERATIONS_KEPT = 2
_INDENT = "  "


@dataclass
class _Generation:
    """What the ranks said about a generation; times are of the coordinator's clock (-1: of another node)."""

    seconds: defaultdict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    began: set[str] = field(default_factory=set)
    went: int = -1
    began_to_wait: dict[int, int] = field(default_factory=dict)
    target: int | None = None
    reason: str = ""
    nbytes: int = 0
    filled: set[int] = field(default_factory=set)
    sources: set[int] = field(default_factory=set)
    tiers: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    steps_lost: int = 0
    step: int | None = None


@dataclass
class _Incident:
    id: str
    ended: int  # the generation that the incident ended
    noticed: int  # by the coordinator's monotonic clock, in nanoseconds
    began: int | None = None  # the generation after it
    told: list[EventName] = field(default_factory=list)
    respawned: set[int] = field(default_factory=set)
    last_words_s: float = 0.0
    is_over: bool = False  # and only ranks have still to report


class _Narrator:
    """Turns the events of a job, whose coordinator is the process ``pid``, into a dozen lines per incident."""

    def __init__(self, run_dir: Path, node: int, pid: int, logs: Path | None = None) -> None:
        self._run_dir, self._logs = run_dir, logs or run_dir / "logs"
        self._coordinator = (node, pid)
        self._world = 0
        self._generations: dict[int, _Generation] = {}
        self._incident: _Incident | None = None
        self._importing_since_s: float | None = None  # None: nothing is imported for the ranks now
        self._next_word_s = 0.0

    @property
    def is_telling(self) -> bool:
        """Whether an incident is open or lines of it are still to come."""
        return self._incident is not None

    @property
    def is_over(self) -> bool:
        """Whether lines are still to come of an incident that is over."""
        return self._incident is not None and self._incident.is_over

    def take(self, event: Event, now_s: float) -> Iterator[str]:
        """Process one event, and yield the lines that can be shown now."""
        if event.stage == EventName.JOB and event.edge == "begin":
            self._world = int(event.fields.get("nproc", 0))
            self._importing_since_s, self._next_word_s = now_s, now_s + _IMPORTING_S
        elif event.stage == EventName.SAVE_FAILED:
            where = f"{numbered('rank', event.fields.get('ranks') or [event.rank])}: {event.fields.get('reason')}"
            yield f"checkpoint {event.fields.get('path')} could not be saved ({where}); training goes on"
        elif event.stage == EventName.CORRUPTED and not event.fields.get("redone"):
            step = event.fields.get("step")
            yield f"rank {event.rank}: a check of step {step} was computed wrongly, not the step itself"
        elif event.rank is not None:
            self._importing_since_s = None
            self._rank_said(event, event.rank)
        elif event.stage == EventName.PRELOAD:
            self._importing_since_s = None
        elif (event.node, event.pid) == self._coordinator:
            yield from self._coordinator_said(event, now_s)
        incident = self._incident
        if incident is not None and incident.began is not None:
            for line in self._starting(incident, incident.began):
                incident.last_words_s = now_s
                yield line
            heard = self._of(incident.began).seconds
            is_told = EventName.FIRST_STEP in incident.told or not any(heard[each] for each in _STARTING)
            if incident.is_over and is_told:
                self.close()

    def tick(self, now_s: float) -> Iterator[str]:
        """Yield a line if imports take long, or if nothing was shown of an open incident for some time."""
        if self._importing_since_s is not None and now_s >= self._next_word_s:
            self._next_word_s, seconds = now_s + _STILL_IMPORTING_S, now_s - self._importing_since_s
            yield f"importing what the ranks need, once for all of them: {seconds:.0f} s so far"
        incident = self._incident
        if incident is None or incident.is_over or now_s - incident.last_words_s < _SILENCE_S:
            return
        incident.last_words_s = now_s
        if incident.began is None:
            old, new = self._of(incident.ended), self._of(incident.ended + 1)  # a new process waits for the latter
            here = len(old.began_to_wait.keys() | new.began_to_wait.keys())
            of = f" of {self._world}" if self._world else ""
            yield f"{_INDENT}barrier: {here}{of} ranks are here; waiting for the others"
        else:
            generation = self._of(incident.began)
            stage = next((each for each in _STARTING if each not in incident.told), EventName.FIRST_STEP)
            if stage not in generation.began and EventName.ENTER in generation.began:
                stage = EventName.ENTER  # in the script, before the framework or the loop says anything
            through = len(generation.seconds[stage])
            yield f"{_INDENT}{stage}: {plural(through, 'rank')} {'is' if through == 1 else 'are'} through"

    def close(self) -> None:
        """Forget the incident, even if not all ranks have reported their times."""
        self._incident = None

    def _coordinator_said(self, event: Event, now_s: float) -> Iterator[str]:
        incident = self._incident
        if event.stage == EventName.DETECT and event.incident is not None:
            if incident is None or incident.id != event.incident:
                incident = self._incident = _Incident(event.incident, event.generation, event.mono)
            incident.last_words_s = now_s
            yield from self._where_to_look(event)
        elif event.stage == EventName.GO:
            if incident is not None:
                incident.began = event.generation
                incident.last_words_s = now_s
                yield from self._ending(incident, event)
            generation = self._of(event.generation)
            generation.went = event.mono
            generation.began_to_wait.clear()  # the ranks no longer wait for it
        elif incident is None:
            return
        elif event.stage == EventName.RECOVERED and event.incident == incident.id:
            incident.is_over = True

    def _rank_said(self, event: Event, rank: int) -> None:
        if event.stage == EventName.RESPAWN:
            if self._incident is not None:
                self._incident.respawned.add(rank)
            return
        generation = self._of(event.generation)
        fields = event.fields
        if event.edge == "begin":
            generation.began.add(event.stage)
        if event.stage == EventName.BARRIER and event.edge == "begin":
            is_here = event.node == self._coordinator[0]
            if not is_here or event.mono > generation.went:  # else a late word of the wait for this generation
                generation.began_to_wait[rank] = event.mono if is_here else -1
        if event.stage == EventName.HAND_OVER and event.edge == "begin":
            generation.began_to_wait.pop(rank, None)  # its successor comes
        if event.stage == EventName.FALLBACK:
            generation.reason = str(fields.get("reason") or "")
        if event.edge != "end" or "error" in fields:
            return
        spent = generation.seconds[event.stage]
        spent[rank] = spent.get(rank, 0.0) + float(fields.get("seconds") or 0.0)
        if event.stage == EventName.DECIDE and isinstance(fields.get("target"), int):
            generation.target = fields["target"]
        elif event.stage == EventName.COPIES and "tier" in fields:
            generation.tiers[str(fields["tier"])].add(rank)
            generation.steps_lost = int(fields.get("steps_lost") or 0)
        elif event.stage == EventName.TRANSFER and fields.get("sources"):
            generation.filled.add(rank)
            generation.sources.update(fields["sources"])
            generation.nbytes += int(fields.get("bytes") or 0)
        elif event.stage == EventName.FIRST_STEP:
            generation.step = fields.get("step")

    def _where_to_look(self, event: Event) -> Iterator[str]:
        rank = event.fields.get("culprit")
        if not isinstance(rank, int):
            return
        traceback = traceback_path(self._run_dir, event.generation, rank)
        log = self._logs / f"rank-{rank}.log"
        if traceback.is_file():
            yield f"{_INDENT}its traceback: {traceback}"
        elif log.is_file():
            yield f"{_INDENT}its last output: {log}"

    def _ending(self, incident: _Incident, go: Event) -> Iterator[str]:
        ended = self._of(incident.ended)
        for stage in _ENDING:
            if ended.seconds[stage]:
                yield self._line(ended, stage)
        here = ended.began_to_wait
        note = f"{self._world or len(here)} ranks are together again, generation {go.generation}"
        if incident.respawned:
            note += f"; new: {numbered('rank', incident.respawned)}"
        first = max(incident.noticed, min((at for at in here.values() if at >= 0), default=go.mono))
        yield _line(EventName.BARRIER, (go.mono - first) / 1e9, note)

    def _starting(self, incident: _Incident, number: int) -> Iterator[str]:
        generation = self._of(number)
        for stage in _STARTING:
            if stage in incident.told:
                continue
            later = _STARTING[_STARTING.index(stage) + 1 :]
            if not generation.seconds[stage] and any(generation.seconds[each] for each in later):
                incident.told.append(stage)  # each rank's words come in order: no rank has this stage
                continue
            if len(generation.seconds[stage]) < max(self._world, 1):
                return
            incident.told.append(stage)
            yield self._line(generation, stage, self._note(generation, stage))

    def _note(self, generation: _Generation, stage: EventName) -> str:
        if stage == EventName.DECIDE:
            if generation.reason:
                return f"not from memory: {generation.reason}"
            return "" if generation.target is None else f"resume after step {generation.target}"
        if stage == EventName.TRANSFER:
            if generation.tiers:
                return _from_copies(generation)
            if not generation.filled:
                return "every rank has kept its own state"
            filled, sources = (numbered("rank", ranks) for ranks in (generation.filled, generation.sources))
            if not generation.nbytes:  # a torn update had not changed a byte
                return f"{filled} compared with {sources}: the same bytes, none were sent"
            return f"{filled} filled with {size(generation.nbytes)} from {sources}"
        if stage == EventName.FIRST_STEP and generation.step is not None:
            return f"step {generation.step} is made"
        return ""

    def _line(self, generation: _Generation, stage: EventName, note: str = "") -> str:
        more = [note] if note else []
        for name, seconds in generation.seconds.items():
            slowest_s = max(seconds.values(), default=0.0)
            if _BRIEF.get(name) == stage and slowest_s >= _BRIEF_S:
                more.append(f"{name} {slowest_s:.2f} s")
        return _line(stage, max(generation.seconds[stage].values(), default=0.0), "; ".join(more))

    def _of(self, number: int) -> _Generation:
        if number not in self._generations:
            self._generations[number] = _Generation()
            for old in [each for each in self._generations if each < number - _GENERATIONS_KEPT]:
                del self._generations[old]
        return self._generations[number]


def _line(stage: str, seconds: float, note: str) -> str:
    return f"{_INDENT}{stage:<10} {seconds:6.2f} s  {note}".rstrip()


def _from_copies(generation: _Generation) -> str:
    """Return which ranks were filled from copies, and what that cost."""
    tiers = sorted(generation.tiers.items(), key=lambda each: (each[0] == LIVING, each[0]))
    names = [
        f"{numbered('rank', ranks)} {'kept their state' if tier == LIVING else f'from {tier}'}"
        for tier, ranks in tiers
    ]
    lost = {0: "", 1: "; 1 finished step is lost"}.get(
        generation.steps_lost, f"; {generation.steps_lost} finished steps are lost"
    )
    return f"after step {generation.target}: {', '.join(names)}{lost}"
