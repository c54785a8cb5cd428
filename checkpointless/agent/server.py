"""The agent's event loop: one thread that hears the ranks and regroups them after every fault."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from checkpointless.agent.board import NO_STEP
from checkpointless.agent.hangs import Inquiry, judge, stalled
from checkpointless.agent.incidents import (
    STILLBORN_LIMIT,
    Cause,
    CauseKind,
    History,
    attribute,
    culprit,
    exception_cause,
    exit_cause,
    signal_name,
)
from checkpointless.agent.protocol import (
    Answer,
    Barrier,
    Done,
    FaultNotice,
    FaultReport,
    Finish,
    GiveUp,
    Go,
    Hello,
    Inquire,
    LineBuffer,
    ProtocolError,
    RankMessage,
    Replace,
    Sender,
    decode,
)
from checkpointless.agent.rendezvous import Rendezvous
from checkpointless.agent.workers import (
    Descriptors,
    Exited,
    Order,
    Ready,
    Started,
    Starter,
    StarterLostError,
    Worker,
    WorkerState,
)
from checkpointless.telemetry.events import Edge, EventLog

logger = logging.getLogger(__name__)

TICK_S = 0.05
TERM_GRACE_S = 5.0
EXIT_GRACE_S = 1.0  # for a process that hung up, or that said it would exit, to be gone
_IN_BLOCK = (WorkerState.RUNNING, WorkerState.DONE)
_COUNTED = (WorkerState.READY, WorkerState.RUNNING, WorkerState.LEAVING, WorkerState.DONE)
FAILED = 1  # as torchrun: whatever the reason


@dataclass(frozen=True)
class ServerSettings:
    """The limits that the agent holds the ranks to."""

    heartbeat_timeout_s: float
    regroup_timeout_s: float
    max_incidents: int | None


@dataclass(frozen=True)
class Outcome:
    """How the job ended.

    Attributes:
        code: for the agent's process to exit with.
        last_words: lines to be said when everything else has been.
    """

    code: int
    last_words: tuple[str, ...]


@dataclass
class OpenIncident:
    """An incident whose ranks are not together again."""

    id: str
    opened_at_s: float
    causes: list[Cause] = field(default_factory=list)
    said: Cause | None = None
    target: int = NO_STEP
    killed_the_late: bool = False
    stillborn: int = 0


class AgentServer:
    """Regroups the ranks of one node until the job is over.

    Args:
        settings: the limits.
        starter: starts the processes.
        fresh_starter: makes the starter to be used if the zygote must not be forked.
        workers: the ranks, in order, none of them started.
        rank_env: what every rank's environment gets besides its rank.
        events: the job's event log.
        say: takes lines for the terminal.
        signals: the signals that the agent got; a handler appends to it.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        starter: Starter,
        fresh_starter: Callable[[], Starter],
        workers: Sequence[Worker],
        rank_env: dict[str, str],
        events: EventLog,
        say: Callable[[str], None],
        signals: list[int],
    ) -> None:
        self.settings = settings
        self.workers = list(workers)
        self.generation = -1
        self._starter = starter
        self._starter_lost = False
        self._fresh_starter = fresh_starter
        self._rank_env = rank_env
        self._events = events
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._rendezvous = Rendezvous(len(self.workers))
        self._running = False  # between a go and the fault or finish that ends it
        self._incident: OpenIncident | None = None
        self._incidents = 0
        self._recovering: OpenIncident | None = None  # all ranks entered again; the lost step is being made
        self._gather_by_s: float | None = None
        self._history = History(settings.max_incidents)
        self._high_water = NO_STEP
        self._inquiry: Inquiry | None = None
        self._next_inquiry_s = 0.0
        self._inquiries = 0
        self._signals = signals
        self._outcome: Outcome | None = None
        self._kill_all_at_s = float("inf")
        if starter.readable is not None:
            self._selector.register(starter.readable, selectors.EVENT_READ, self._hear_starter)

    # ---- the loop

    def run(self) -> Outcome:
        """Serve until every rank's process has ended."""
        try:
            while self._outcome is None or self._alive():
                for key, _ in self._selector.select(TICK_S):
                    key.data()
                self._tick(time.monotonic())
            return self._outcome
        finally:
            self._close()

    def _tick(self, now_s: float) -> None:
        while self._signals:
            self._interrupted(self._signals.pop(0), now_s)
        self._hear_starter()
        for worker in self.workers:
            if worker.kill_at_s is not None and now_s >= worker.kill_at_s:
                self._kill(worker)
        if self._outcome is not None:
            if now_s >= self._kill_all_at_s:
                for worker in self._alive():
                    self._kill(worker)
            return
        self._look_at_boards()
        if self._running:
            self._watch_for_hangs(now_s)
        elif self._gather_by_s is not None and now_s >= self._gather_by_s:
            self._too_late(now_s)
        self._check_progress(now_s)
        self._check_end()

    def _alive(self) -> list[Worker]:
        return [w for w in self.workers if w.state is not WorkerState.GONE]

    def _interrupted(self, number: int, now_s: float) -> None:
        if self._outcome is None:
            self._end(FAILED, f"stopped by {signal_name(number)}")
        elif number == signal.SIGINT:
            self._kill_all_at_s = now_s

    def _end(self, code: int, *last_words: str) -> None:
        """The job is over: ask the ranks that are left to end, and see to it that they do."""
        if self._outcome is not None:
            return
        self._outcome = Outcome(code, tuple(line for line in last_words if line))
        self._kill_all_at_s = time.monotonic() + TERM_GRACE_S
        for worker in self._alive():
            if worker.pid is not None:
                self._starter.signal(worker.pid, signal.SIGTERM)

    def _close(self) -> None:
        self._selector.close()
        self._starter.close()
        for worker in self.workers:
            if worker.connection is not None:
                worker.connection.close()
            worker.board.close()
        self._rendezvous.close()

    # ---- processes

    def _unwatch_starter(self) -> None:
        if self._starter.readable is not None:
            self._selector.unregister(self._starter.readable)

    def _hear_starter(self) -> None:
        if self._starter_lost:
            return
        try:
            news = self._starter.news()
        except StarterLostError as error:
            self._starter_lost = True
            self._unwatch_starter()
            for worker in self.workers:  # they died with it
                self._disconnect(worker)
                worker.state = WorkerState.GONE
            self._end(FAILED, str(error))
            return
        for item in news:
            if isinstance(item, Ready):
                self._on_ready(item)
                continue
            worker = self.workers[item.rank]
            if item.incarnation != worker.incarnation:
                continue
            if isinstance(item, Started):
                worker.pid = item.pid
                if self._outcome is not None:
                    self._kill(worker)
            elif isinstance(item, Exited):
                self._on_exit(worker, item.code)

    def _on_ready(self, ready: Ready) -> None:
        self._events.emit("preload", "point", generation=0, seconds=ready.seconds, failed=ready.failed)
        if self._outcome is not None:
            return
        if not ready.can_fork:
            self._say("a preloaded module has set CUDA up, so ranks are started one by one instead of forked")
            self._unwatch_starter()
            self._starter.close()
            self._starter = self._fresh_starter()
        for worker in self.workers:
            self._spawn(worker)

    def _spawn(self, worker: Worker) -> None:
        coming = self._coming()
        worker.incarnation += 1
        ours, theirs = socket.socketpair()
        log = os.open(worker.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        env = {
            **self._rank_env,
            **self._rendezvous.rank_env(worker.rank, coming),
            "CHECKPOINTLESS_INCARNATION": str(worker.incarnation),
        }
        order = Order(worker.rank, worker.incarnation, env)
        if worker.incarnation > 0:
            self._emit("respawn", "begin", rank=worker.rank, incarnation=worker.incarnation)
        self._starter.start(order, Descriptors(log, theirs.fileno(), worker.board.fd))
        theirs.close()
        os.close(log)
        ours.setblocking(False)
        worker.connection = ours
        worker.lines = LineBuffer()
        worker.state = WorkerState.STARTING
        worker.started_at_s = time.monotonic()
        worker.pid = worker.kill_at_s = None
        worker.said_hello = worker.forgiven = False
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._hear(worker))

    def _kill(self, worker: Worker) -> None:
        worker.kill_at_s = None
        if worker.state is WorkerState.GONE:
            return
        if worker.pid is None:
            worker.kill_at_s = time.monotonic()  # again when its pid is known
        else:
            self._starter.signal(worker.pid, signal.SIGKILL)

    def _on_exit(self, worker: Worker, code: int) -> None:
        self._hear(worker)  # what it said before it ended
        self._disconnect(worker)
        was = worker.state
        worker.state, worker.kill_at_s = WorkerState.GONE, None
        if self._outcome is not None:
            return
        self._look_at_boards()
        entered = was in _COUNTED
        if not entered and (was is WorkerState.FINISHED or worker.incarnation == 0):
            if code != 0:
                cause = exit_cause(worker.rank, code, NO_STEP)
                self._end(FAILED, *worker.last_lines(), f"{cause}; its log: {worker.log_path}")
            return
        cause = exit_cause(worker.rank, code, worker.board.read().making)
        if not entered:
            cause = exit_cause(worker.rank, code, NO_STEP, "before it entered the block")
        if not worker.forgiven:
            self._fault(cause)
        if not entered and self._incident is not None:
            self._incident.stillborn += 1
            if self._incident.stillborn >= STILLBORN_LIMIT:
                many = (
                    f"{self._incident.stillborn} successors ended before they entered the block; the last: {cause}"
                )
                self._end(FAILED, *worker.last_lines(), many)
        if self._outcome is None:
            self._spawn(worker)

    # ---- what ranks say

    def _hear(self, worker: Worker) -> None:
        while worker.connection is not None:
            try:
                data = worker.connection.recv(64 * 1024)
            except BlockingIOError:
                return
            except OSError as error:
                logger.info("rank %d hung up: %s", worker.rank, error)
                data = b""
            if not data:
                self._disconnect(worker)
                if worker.state in _COUNTED:
                    worker.kill_at_s = time.monotonic() + EXIT_GRACE_S
                return
            try:
                messages = [decode(line, Sender.RANK) for line in worker.lines.feed(data)]
            except ProtocolError as error:
                self._say(f"rank {worker.rank} does not keep to the protocol and is replaced: {error}")
                self._disconnect(worker)
                self._kill(worker)
                return
            for message in messages:
                if self._outcome is None:
                    self._on_message(worker, cast(RankMessage, message))

    def _on_message(self, worker: Worker, message: RankMessage) -> None:
        if isinstance(message, Hello):
            self._on_hello(worker)
        elif isinstance(message, Answer):
            if self._inquiry is not None and message.id == self._inquiry.id:
                self._inquiry.in_collective[worker.rank] = message.in_collective
                self._inquiry.stacks[worker.rank] = message.stack
        elif isinstance(message, GiveUp):
            self._end(FAILED, message.reason)
        elif isinstance(message, Replace):
            worker.forgiven = True
            worker.kill_at_s = time.monotonic() + EXIT_GRACE_S
            if self._running:
                step = worker.board.read().making
                what = "asked to be replaced"
                self._fault(Cause(CauseKind.LOSS, worker.rank, "replace", what, step, message.reason))
        elif message.generation != self.generation or worker.state not in (*_IN_BLOCK, WorkerState.LEAVING):
            logger.info("rank %d: %s of generation %d is stale", worker.rank, message.type, message.generation)
        elif isinstance(message, FaultReport):
            self._fault(
                exception_cause(
                    worker.rank,
                    message.error,
                    message.message,
                    message.traceback,
                    message.step,
                    message.victim,
                )
            )
        elif isinstance(message, Barrier):
            if self._running:
                self._fault(Cause(CauseKind.EXCEPTION, worker.rank, "exit", "left the block", NO_STEP))
            self._is_ready(worker)
        elif isinstance(message, Done) and worker.state is WorkerState.RUNNING:
            worker.state = WorkerState.DONE
            if all(w.state is WorkerState.DONE for w in self.workers):
                self._finish()

    def _on_hello(self, worker: Worker) -> None:
        if worker.state not in (WorkerState.STARTING, WorkerState.FINISHED):
            logger.warning("rank %d said hello in the state %s", worker.rank, worker.state.value)
            return
        if worker.incarnation > 0 and not worker.said_hello:
            seconds = time.monotonic() - worker.started_at_s
            self._emit("respawn", "end", rank=worker.rank, seconds=seconds, incarnation=worker.incarnation)
        worker.said_hello = True
        self._is_ready(worker)

    def _disconnect(self, worker: Worker) -> None:
        if worker.connection is not None:
            self._selector.unregister(worker.connection)
            worker.connection.close()
            worker.connection = None

    # ---- incidents

    def _fault(self, cause: Cause) -> None:
        """Open an incident, or add to the one that is open."""
        if self._incident is None:
            self._open_incident(cause)
        else:
            self._incident.causes.append(cause)
        incident = self._incident
        assert incident is not None
        found = attribute(incident.causes)
        if found.kind is not CauseKind.VICTIM and found is not incident.said:
            self._tell(incident, found)
        if cause.kind is CauseKind.LOSS:
            _, verdict = self._history.after(cause, self._high_water)
            if verdict is not None:
                self._end(FAILED, verdict.reason)

    def _open_incident(self, cause: Cause) -> None:
        now_s = time.monotonic()
        self._incidents += 1
        incident = OpenIncident(str(self._incidents), now_s, [cause])
        self._incident, self._recovering, self._inquiry = incident, None, None
        if self._running:
            self._running = False
            notice = FaultNotice(self.generation, incident.id, str(cause), culprit(cause))
            told = [w for w in self.workers if w.state in _IN_BLOCK]
            self._emit("notify", "begin")
            for worker in told:
                worker.state = WorkerState.LEAVING
                if not worker.send(notice):
                    worker.kill_at_s = now_s + EXIT_GRACE_S
            seconds = time.monotonic() - now_s
            self._emit("notify", "end", seconds=seconds, ranks=[worker.rank for worker in told])
        self._gather_by_s = now_s + self.settings.regroup_timeout_s
        self._look_at_boards()
        making = max(worker.board.read().making for worker in self.workers)
        incident.target = max(making, self._high_water + 1) if making != NO_STEP else NO_STEP
        self._rendezvous.open(self._coming())  # and close the old one, which frees who waits in it

    def _tell(self, incident: OpenIncident, cause: Cause) -> None:
        incident.said = cause
        self._emit("detect", "point", cause=str(cause), culprit=culprit(cause), how=cause.how)
        self._say(f"incident {incident.id}: {cause}; recovering")

    def _is_ready(self, worker: Worker) -> None:
        worker.state = WorkerState.READY
        if self._gather_by_s is None:
            self._gather_by_s = time.monotonic() + self.settings.heartbeat_timeout_s
        if all(w.state is WorkerState.READY for w in self.workers):
            self._go()

    def _too_late(self, now_s: float) -> None:
        late = [w for w in self.workers if w.state is not WorkerState.READY]
        names = "rank " + ", ".join(str(w.rank) for w in late)
        if self._incident is None:
            limit_s = self.settings.heartbeat_timeout_s
            self._end(FAILED, f"{names} did not enter the block within {limit_s:g} s after the first rank did")
        elif self._incident.killed_the_late:
            limit_s = self.settings.regroup_timeout_s
            self._end(FAILED, f"{names} did not come back within {limit_s:g} s, also not as a new process")
        else:
            self._incident.killed_the_late = True
            self._gather_by_s = now_s + self.settings.regroup_timeout_s
            self._say(f"incident {self._incident.id}: {names} did not come back in time and is replaced")
            for worker in late:
                worker.forgiven = True
                self._kill(worker)

    def _go(self) -> None:
        """All ranks are at the barrier."""
        incident = self._incident
        if incident is not None:
            found = attribute(incident.causes)
            if found is not incident.said:
                self._tell(incident, found)
            self._history, verdict = self._history.after(found, self._high_water)
            if verdict is not None:
                self._end(FAILED, verdict.reason, verdict.last_words.rstrip())
                return
        self.generation = self._coming()
        self._running = True
        self._gather_by_s = None
        go = Go(
            self.generation,
            incident.id if incident else None,
            self._rendezvous.go_env(self.generation),
            self._high_water,
        )
        now_s = time.monotonic()
        for worker in self.workers:
            worker.state = WorkerState.RUNNING
            worker.beat_at_s = now_s
            if not worker.send(go):
                worker.kill_at_s = now_s + EXIT_GRACE_S
        self._emit("go", "point", high_water=self._high_water)
        self._incident, self._recovering = None, incident

    def _check_progress(self, now_s: float) -> None:
        """Say that an incident is over when every rank has made the step that was in the making."""
        incident = self._recovering
        if incident is None:
            return
        behind = [w for w in self.workers if w.board.read().committed < incident.target]
        if not behind or all(w.state in (WorkerState.DONE, WorkerState.FINISHED) for w in behind):
            self._recovering = None
            self._say(f"incident {incident.id}: recovered in {now_s - incident.opened_at_s:.2f} s")

    def _look_at_boards(self) -> None:
        newest = max(worker.board.read().committed for worker in self.workers)
        if newest < self._high_water:  # every rank is behind what was committed: storage brought that state back
            self._history = self._history.fell_back(self._high_water, newest)
        self._high_water = newest

    def _coming(self) -> int:
        return self.generation + 1

    # ---- hangs

    def _watch_for_hangs(self, now_s: float) -> None:
        readings = {w.rank: w.board.read() for w in self.workers}
        if all(reading.making == NO_STEP for reading in readings.values()):
            return  # nobody shows progress in this job (yet): silence means nothing
        limit_s = self.settings.heartbeat_timeout_s
        ages_s: dict[int, float] = {}
        beats: dict[int, int] = {}
        for worker in self.workers:
            if worker.state is not WorkerState.RUNNING:
                continue
            beat = readings[worker.rank].beat
            if beat != worker.beat:
                worker.beat, worker.beat_at_s = beat, now_s
            beats[worker.rank], ages_s[worker.rank] = beat, now_s - worker.beat_at_s
        if self._inquiry is None:
            suspects = stalled(ages_s, limit_s)
            if suspects and now_s >= self._next_inquiry_s:
                self._inquire({rank: beats[rank] for rank in suspects}, now_s)
        elif self._inquiry.is_over(now_s):
            inquiry, self._inquiry = self._inquiry, None
            verdict = judge(inquiry, beats, ages_s, limit_s)
            self._next_inquiry_s = now_s + max(1.0, limit_s / 10)
            what = f"made no progress for {limit_s:g} s"
            for rank in verdict.culprits:
                worker = self.workers[rank]
                self._emit("stack", "point", rank=rank, stack=inquiry.stacks.get(rank, "no answer"))
                worker.forgiven = True
                self._fault(Cause(CauseKind.LOSS, rank, "hang", what, readings[rank].making))
                self._kill(worker)
            if verdict.everybody_waits:
                step = max(reading.making for reading in readings.values())
                what = f"waited for each other with no progress for {limit_s:g} s"
                self._fault(Cause(CauseKind.LOSS, None, "hang", what, step))

    def _inquire(self, suspects: dict[int, int], now_s: float) -> None:
        self._inquiries += 1
        self._inquiry = Inquiry(self._inquiries, now_s, suspects)
        for rank in suspects:
            self.workers[rank].send(Inquire(self._inquiries))

    # ---- the end

    def _finish(self) -> None:
        self._running = False
        self._check_progress(time.monotonic())
        for worker in self.workers:
            worker.state = WorkerState.FINISHED
            worker.send(Finish())

    def _check_end(self) -> None:
        if self.workers[0].incarnation < 0:
            return  # not started yet
        gone = [w for w in self.workers if w.state is WorkerState.GONE]
        waiting = [w for w in self.workers if w.state is WorkerState.READY]
        if len(gone) == len(self.workers):
            self._end(0)
        elif gone and waiting:
            self._end(
                FAILED,
                f"rank {gone[0].rank} ended without entering the block that rank {waiting[0].rank} waits in",
            )

    def _emit(self, stage: str, edge: Edge, *, rank: int | None = None, **fields: object) -> None:
        incident = self._incident or self._recovering
        self._events.emit(
            stage,
            edge,
            generation=max(self.generation, 0),
            incident=incident.id if incident else None,
            rank=rank,
            **fields,
        )
