"""A node's agent: it starts the ranks of the node, listens to them and does what the coordinator says."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import cast

from checkpointless.agent.generation_store import GenerationStore
from checkpointless.agent.workers import (
    Descriptors,
    Exited,
    Order,
    Ready,
    Started,
    Starter,
    StarterLostError,
    Worker,
)
from checkpointless.coordinator.hangs.policy import SHARING, Heartbeat
from checkpointless.posix.process_state import ProcessLook
from checkpointless.telemetry.events import Edge, EventLog
from checkpointless.wire.board import NO_STEP, BoardReading
from checkpointless.wire.causes import Cause, CauseKind, exception_cause, signal_name
from checkpointless.wire.messages import (
    FAULT_AT_ENV,
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
from checkpointless.wire.node_messages import (
    STATES,
    AllDone,
    Answered,
    Ask,
    Begin,
    Command,
    Discard,
    End,
    Interrupt,
    JobOver,
    Joined,
    Kill,
    Leaving,
    NodeMessage,
    OpenStore,
    Progress,
    RankDone,
    RankEnded,
    RankReady,
    Silent,
    Spawn,
    Standing,
    StoreOpened,
    Trouble,
)
from checkpointless.wire.rank_state import COUNTED, IN_BLOCK, WorkerState

logger = logging.getLogger(__name__)

TERM_GRACE_S = 5.0
EXIT_GRACE_S = 1.0  # for a process to end after it hung up or said that it would exit
_PROGRESS_EVERY_S = 0.25
_SILENT_EVERY_S, _SILENT_RARELY_S = 0.2, 5.0  # the longer a silence is, the less its length in seconds means
_SILENT_SHARE = 1 / 100
_WARM_UP_STEPS = 2  # the first of a generation compile, connect and allocate
_FAILED = 1


class NodeAgent:
    """Runs the ranks of one node until the job is over.

    Args:
        index: the node's number.
        heartbeat: how long a rank in its block may show no progress.
        address: returns the numeric address at which the other nodes reach this one.
        report: sends a message to the coordinator. The answer comes to :meth:`obey`, and not before ``report`` has
            returned.
        selector: selector of the loop that this agent runs in.
        starter: starts the ranks' processes.
        fresh_starter: makes the starter to use if the zygote must not be forked.
        make_worker: makes the worker of a rank, given the rank's number, before its first process is started.
        rank_env: environment variables of every rank, besides those that the coordinator sends.
        events: the job's event log.
        say: called with each line for the terminal.
        clock: clock of the times given to :meth:`tick`; it should stand still while this process does not run, so
            that ranks are not blamed for what the agent did not see.

    Attributes:
        index: the node's number.
        clock: clock of the times given to :meth:`tick`.
        generation: the generation that began last (-1: none).
        joined: whether this node can start processes.
        finished: whether every rank's block has returned, on this node and all others.
        outcome: how the job ended; None until it has.
        began_after: the highest step that was known to be committed when the generation began.
    """

    def __init__(
        self,
        *,
        index: int,
        heartbeat: Heartbeat,
        address: Callable[[], str],
        report: Callable[[NodeMessage], None],
        selector: selectors.BaseSelector,
        starter: Starter,
        fresh_starter: Callable[[], Starter],
        make_worker: Callable[[int], Worker],
        rank_env: dict[str, str],
        events: EventLog,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workers: dict[int, Worker] = {}
        self.clock = clock
        self.generation = -1
        self.outcome: End | None = None
        self.index = index
        self.began_after = NO_STEP
        self.joined = self.finished = False
        self._heartbeat = heartbeat
        self._address = address
        self._report = report
        self._make_worker = make_worker
        self._selector = selector
        self._starter = starter
        self._starter_lost = False
        self._fresh_starter = fresh_starter
        self._rank_env = rank_env
        self._events = events
        self._say = say
        self._incident: str | None = None
        self._fault_at: tuple[str, float] = ("", 0.0)  # the incident, and when this node was told of it
        self._run_id = ""
        self._store: GenerationStore | None = None
        self._discarding = False
        self._failures = 0  # processes that exited with a nonzero code since the generation began
        self._longest_s = 0.0  # longest time between beats within a step of this generation
        self._pause_s = 0.0  # longest time between beats outside of a step, in all generations
        self._shows_progress = False
        self._target = NO_STEP
        self._told_progress: Progress | None = None
        self._tell_progress_at_s = 0.0
        self._told_silent = False
        self._tell_silent_at_s = 0.0
        self._kill_all_at_s = float("inf")
        if starter.readable is not None:
            self._selector.register(starter.readable, selectors.EVENT_READ, self._hear_starter)

    # ---- the loop

    def tick(self, now_s: float) -> None:
        """Act on the time that has passed.

        Args:
            now_s: the current time on the monotonic clock.
        """
        self._hear_starter()
        for worker in self.workers.values():
            if worker.kill_at_s is not None and now_s >= worker.kill_at_s:
                self._kill(worker)
        if self.outcome is not None:
            if now_s >= self._kill_all_at_s:
                for worker in self.alive():
                    self._kill(worker)
            return
        if not self.workers:
            return
        readings = {worker.rank: worker.board.read() for worker in self.workers.values()}
        self._tell_progress(readings, now_s)
        self._watch_beats(readings, now_s)
        self._tell_silent(readings, now_s)

    @property
    def has_ended_well(self) -> bool:
        """Whether every rank's block has returned and every process of this node exited with code 0."""
        return self.finished and self._failures == 0 and not self.alive()

    def alive(self) -> list[Worker]:
        """Return the ranks whose processes have not ended."""
        return [worker for worker in self.workers.values() if worker.state is not WorkerState.GONE]

    @property
    def incident(self) -> str | None:
        """The incident that the ranks are being brought together for; None while they train."""
        together = any(worker.state in (*IN_BLOCK, WorkerState.FINISHED) for worker in self.workers.values())
        return None if together or self.outcome is not None else self._incident

    def interrupted(self, number: int) -> None:
        """End the job because this process got a signal; kill the ranks at once at a SIGINT while the job ends."""
        if self.outcome is None:
            self._leave(f"stopped by {signal_name(number)}")
        elif number == signal.SIGINT:
            self._kill_all_at_s = self.clock()

    def end(self, outcome: End, grace_s: float = TERM_GRACE_S) -> None:
        """Ask the remaining ranks to end because the job is over, and kill those that do not end in time.

        Args:
            outcome: how the job ended.
            grace_s: how many seconds the ranks may take to end.
        """
        if self.outcome is not None:
            return
        self.outcome = outcome
        self._kill_all_at_s = self.clock() + grace_s
        for worker in self.alive():
            if worker.pid is not None:
                self._starter.signal(worker.pid, signal.SIGTERM)

    def close(self) -> None:
        """Kill and reap the remaining processes, and release all resources."""
        self._starter.close()
        self._close_store()
        for worker in self.workers.values():
            if worker.connection is not None:
                worker.connection.close()
            worker.board.close()
            worker.log.close()

    def _leave(self, reason: str) -> None:
        """End the job on this node, and tell the coordinator that the node no longer takes part."""
        self._report(Leaving(reason))
        self.end(End(_FAILED, [reason]))

    # ---- what the coordinator says

    def obey(self, command: Command) -> None:
        """Do what the coordinator says.

        Raises:
            ValueError: the command is for a rank that this node does not run.
        """
        if self.outcome is not None:
            return
        if isinstance(command, OpenStore):
            self._open_store(command.generation)
        elif isinstance(command, Discard):
            self._discard()
        elif isinstance(command, Spawn):
            if command.rank not in self.workers:
                self.workers[command.rank] = self._make_worker(command.rank)
            self._spawn(self.workers[command.rank], command)
        elif isinstance(command, Begin):
            self._begin(command)
        elif isinstance(command, Interrupt):
            self._interrupt(command)
        elif isinstance(command, Ask):
            for (rank,) in command.ranks:
                self._worker(rank).send(Inquire(command.id))
        elif isinstance(command, Kill):
            worker = self._worker(command.rank)
            is_meant = (worker.incarnation, self.generation) == (command.incarnation, command.generation)
            if is_meant and command.beat in (-1, worker.board.read().beat):
                worker.forgiven = True
                self._kill(worker)
        elif isinstance(command, AllDone):
            self.finished = True
            for worker in self.alive():
                worker.state = WorkerState.FINISHED
                worker.send(Finish())
        elif isinstance(command, End):
            self.end(command)

    def _worker(self, rank: int) -> Worker:
        if rank not in self.workers:
            raise ValueError(f"the coordinator speaks of rank {rank}, which this node does not run")
        return self.workers[rank]

    def standing(self) -> Standing:
        """Return what a coordinator that has just begun needs to know of the ranks that run here."""
        self._told_progress, self._told_silent = None, False  # the coordinator has been told neither
        ranks = []
        for worker in self.workers.values():
            reading = worker.board.read()
            state = STATES.index(worker.state)
            ranks.append([worker.rank, worker.incarnation, state, reading.committed, reading.making])
        incident = int(self._incident or 0)
        return Standing(self.generation, incident, self.began_after, self._run_id, self.finished, ranks)

    def _discard(self) -> None:
        """End the ranks, which a coordinator has taken for dead, and join again without them."""
        self._say("this node was taken for lost: its ranks are ended, and it joins the job anew")
        self._discarding = True
        self._close_store()
        for worker in self.alive():
            self._disconnect(worker)
            self._kill(worker)
        self._join_when_empty()

    def _join_when_empty(self) -> None:
        if self._discarding and not self.alive():
            self._discarding = False
            self._report(Joined())

    def _open_store(self, generation: int) -> None:
        self._close_store()
        try:
            self._store = GenerationStore(generation, self._address())
        except (OSError, RuntimeError) as error:
            self._report(JobOver(f"node {self.index}: no store can be opened for generation {generation}: {error}"))
            return
        self._report(StoreOpened(generation, self._store.address, self._store.port))

    def _close_store(self) -> None:
        """Close the store, which frees the ranks that wait in it."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _begin(self, begin: Begin) -> None:
        self.generation, self._target, self.began_after = begin.generation, begin.target, begin.high_water
        self._incident = begin.incident or None
        self._told_progress, self._tell_progress_at_s, self._told_silent = None, 0.0, False
        self._longest_s, self.finished, self._failures = 0.0, False, 0
        go = Go(begin.generation, self._incident, begin.env, begin.high_water)
        now_s = self.clock()
        for worker in self.workers.values():
            if worker.state is not WorkerState.READY:
                continue  # its process has ended since; the coordinator hears of that
            worker.state = WorkerState.RUNNING
            worker.beat = worker.beat_at_begin = worker.board.read().beat
            worker.beat_at_s, worker.in_step = now_s, False
            if not worker.send(go):
                worker.kill_at_s = now_s + EXIT_GRACE_S

    def _interrupt(self, interrupt: Interrupt) -> None:
        began_s, now_s = time.monotonic(), self.clock()
        self._incident = interrupt.incident
        self._fault_at = (interrupt.incident, began_s)
        if self._store is not None and self._store.generation <= interrupt.generation:
            self._close_store()
        culprit = interrupt.culprit if interrupt.culprit >= 0 else None
        notice = FaultNotice(interrupt.generation, interrupt.incident, interrupt.cause, culprit)
        # A rank that failed by itself may reach the barrier before this notice; its successor ignores a notice of a
        # generation that is over.
        told = [worker for worker in self.workers.values() if worker.state in (*IN_BLOCK, WorkerState.READY)]
        self._emit("notify", "begin")
        for worker in told:
            if worker.state in IN_BLOCK:
                worker.state = WorkerState.LEAVING
            if not worker.send(notice):
                worker.kill_at_s = now_s + EXIT_GRACE_S
        seconds = time.monotonic() - began_s
        self._emit("notify", "end", seconds=seconds, ranks=[worker.rank for worker in told])

    # ---- what the coordinator is told of the boards

    def _tell_progress(self, readings: dict[int, BoardReading], now_s: float) -> None:
        progress = Progress(
            min(reading.committed for reading in readings.values()),
            max(reading.committed for reading in readings.values()),
            max(reading.making for reading in readings.values()),
            int(self._longest_s * 1000),
            int(self._pause_s * 1000),
            self._shows_progress,
        )
        told = self._told_progress
        if progress == told or self.generation < 0:
            return
        reached = progress.oldest >= self._target and (told is None or told.oldest < self._target)
        if reached or now_s >= self._tell_progress_at_s:
            self._told_progress, self._tell_progress_at_s = progress, now_s + _PROGRESS_EVERY_S
            self._report(progress)

    def _watch_beats(self, readings: dict[int, BoardReading], now_s: float) -> None:
        for worker in self.workers.values():
            if worker.state is not WorkerState.RUNNING:
                continue
            reading = readings[worker.rank]
            if reading.beat != worker.beat:
                took_s = now_s - worker.beat_at_s
                if worker.in_step:
                    self._longest_s = max(self._longest_s, took_s)
                else:
                    self._pause_s = max(self._pause_s, took_s)
                worker.beat, worker.beat_at_s = reading.beat, now_s
                self._shows_progress |= reading.making != NO_STEP or reading.beat > worker.beat_at_begin + 1
            warm = reading.committed > self.began_after + _WARM_UP_STEPS
            worker.in_step = warm and reading.making > reading.committed

    def _tell_silent(self, readings: dict[int, BoardReading], now_s: float) -> None:
        within_step_s = self._heartbeat.within_step_s(self._longest_s)
        ceiling_s = self._heartbeat.ceiling_s(self._pause_s)
        silent: list[tuple[Worker, float]] = []
        for worker in self.workers.values():
            age_s = now_s - worker.beat_at_s
            limit_s = within_step_s if worker.in_step else ceiling_s
            if worker.state is WorkerState.RUNNING and age_s >= SHARING * limit_s:
                silent.append((worker, age_s))
        if (silent or self._told_silent) and now_s >= self._tell_silent_at_s:
            youngest_s = min((age_s for _, age_s in silent), default=0.0)
            pause_s = min(_SILENT_RARELY_S, max(_SILENT_EVERY_S, _SILENT_SHARE * youngest_s))
            self._told_silent, self._tell_silent_at_s = bool(silent), now_s + pause_s
            self._report(Silent([self._row_of(worker, age_s, readings[worker.rank]) for worker, age_s in silent]))

    def _row_of(self, worker: Worker, age_s: float, reading: BoardReading) -> list[int]:
        look = ProcessLook.at(worker.pid)
        known = [worker.rank, worker.beat, int(age_s * 1000), reading.making, int(worker.in_step)]
        return [*known, look.letter, look.cpu_ms]

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
            for worker in self.workers.values():  # they died with the starter
                self._disconnect(worker)
                worker.state = WorkerState.GONE
            self._leave(str(error))
            return
        for item in news:
            if isinstance(item, Ready):
                self._on_starter_ready(item)
                continue
            worker = self.workers[item.rank]
            if item.incarnation != worker.incarnation:
                continue
            if isinstance(item, Started):
                worker.pid = item.pid
                if self.outcome is not None:
                    self._kill(worker)
            elif isinstance(item, Exited):
                self._on_exit(worker, item.code)

    def _on_starter_ready(self, ready: Ready) -> None:
        self._events.emit("preload", "point", generation=0, seconds=ready.seconds, failed=ready.failed)
        if self.outcome is not None:
            return
        if not ready.can_fork:
            self._say("a preloaded module has set CUDA up, so ranks are started one by one instead of forked")
            self._unwatch_starter()
            self._starter.close()
            self._starter = self._fresh_starter()
        self.joined = True
        self._report(Joined())

    def _spawn(self, worker: Worker, spawn: Spawn) -> None:
        if worker.state is not WorkerState.GONE:
            raise ValueError(f"rank {worker.rank} is to be started, but its process has not ended")
        worker.incarnation = spawn.incarnation
        self.generation = max(self.generation, spawn.generation - 1)  # a spare's agent has seen no generation yet
        self._incident = spawn.incident or None
        self._run_id = spawn.env.get("TORCHELASTIC_RUN_ID", "")
        ours, theirs = socket.socketpair()
        log = worker.log.open()
        env = {**self._rank_env, **spawn.env, "CHECKPOINTLESS_INCARNATION": str(worker.incarnation)}
        if spawn.incident:
            told_of, at_s = self._fault_at
            env[FAULT_AT_ENV] = str(at_s if told_of == spawn.incident else time.monotonic())
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
            worker.kill_at_s = self.clock()  # try again when its pid is known
        else:
            self._starter.signal(worker.pid, signal.SIGKILL)

    def _on_exit(self, worker: Worker, code: int) -> None:
        self._hear(worker)  # take what it said before it ended
        self._disconnect(worker)
        worker.state, worker.kill_at_s = WorkerState.GONE, None
        self._failures += code != 0
        if self._discarding:
            self._join_when_empty()
            return
        reading = worker.board.read()
        self._report(
            RankEnded(
                worker.rank,
                worker.incarnation,
                code,
                worker.forgiven,
                reading.committed,
                reading.making,
                str(worker.log.path),
                worker.log.last_lines() if code != 0 else [],
            )
        )

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
                if worker.state in COUNTED:
                    worker.kill_at_s = self.clock() + EXIT_GRACE_S
                return
            try:
                messages = [decode(line, Sender.RANK) for line in worker.lines.feed(data)]
            except ProtocolError as error:
                self._say(f"rank {worker.rank} does not keep to the protocol and is replaced: {error}")
                self._disconnect(worker)
                self._kill(worker)
                return
            for message in messages:
                if self.outcome is None:
                    self._on_message(worker, cast(RankMessage, message))

    def _on_message(self, worker: Worker, message: RankMessage) -> None:
        if isinstance(message, Hello):
            self._on_hello(worker)
        elif isinstance(message, Answer):
            self._report(Answered(message.id, worker.rank, message.in_collective, message.stack))
        elif isinstance(message, GiveUp):
            self._report(JobOver(message.reason, message.code))
        elif isinstance(message, Replace):
            worker.forgiven = True
            worker.kill_at_s = self.clock() + EXIT_GRACE_S
            if worker.state in IN_BLOCK:
                step = worker.board.read().making
                what = "asked to be replaced"
                self._trouble(worker, Cause(CauseKind.LOSS, worker.rank, "replace", what, step, message.reason))
        elif message.generation != self.generation or worker.state not in (*IN_BLOCK, WorkerState.LEAVING):
            logger.info("rank %d: %s of generation %d is stale", worker.rank, message.type, message.generation)
        elif isinstance(message, FaultReport):
            self._trouble(
                worker,
                exception_cause(
                    worker.rank,
                    message.error,
                    message.message,
                    message.traceback,
                    message.step,
                    message.victim,
                ),
            )
        elif isinstance(message, Barrier):
            self._is_ready(worker)
        elif isinstance(message, Done) and worker.state is WorkerState.RUNNING:
            worker.state = WorkerState.DONE
            self._report(RankDone(worker.rank, message.generation))

    def _on_hello(self, worker: Worker) -> None:
        if worker.state not in (WorkerState.STARTING, WorkerState.FINISHED):
            logger.warning("rank %d said hello in the state %s", worker.rank, worker.state.value)
            return
        if worker.incarnation > 0 and not worker.said_hello:
            seconds = time.monotonic() - worker.started_at_s
            self._emit("respawn", "end", rank=worker.rank, seconds=seconds, incarnation=worker.incarnation)
        worker.said_hello = True
        self._is_ready(worker)

    def _is_ready(self, worker: Worker) -> None:
        worker.state = WorkerState.READY
        reading = worker.board.read()
        self._report(
            RankReady(worker.rank, worker.incarnation, worker.pid or -1, reading.committed, reading.making)
        )

    def _trouble(self, worker: Worker, cause: Cause) -> None:
        reading = worker.board.read()
        self._report(Trouble.of(self.generation, worker.rank, cause, reading.committed, reading.making))

    def _disconnect(self, worker: Worker) -> None:
        if worker.connection is not None:
            self._selector.unregister(worker.connection)
            worker.connection.close()
            worker.connection = None

    def _emit(self, stage: str, edge: Edge, *, rank: int | None = None, **fields: object) -> None:
        self._events.emit(
            stage, edge, generation=max(self.generation, 0), incident=self._incident, rank=rank, **fields
        )
