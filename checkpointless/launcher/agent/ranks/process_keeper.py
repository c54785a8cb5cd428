"""Starts and ends the processes of a node's ranks, each after any ``--device-check``, and listens to them."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.agent.ranks.output import Printed
from checkpointless.launcher.agent.ranks.zygote import ForkServer, ForkServerLostError, Ready, Start, Started
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.board import NO_STEP, Board
from checkpointless.launcher.protocol.causes import Cause, CauseKind, signal_name
from checkpointless.launcher.protocol.messages import COUNTED, IN_BLOCK, NodeMessage, RankState
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Edge, EventLog
from checkpointless.observability.telemetry.wording import numbered, printable
from checkpointless.system.environment import INCARNATION_ENV, TORCHELASTIC_RUN_ID_ENV
from checkpointless.system.process_tree import NOT_RUN, begin_by_shell, kill_begun, wait_for_killed
from checkpointless.system.signals import ENDING, is_default

logger = logging.getLogger(__name__)
_About = TypeVar("_About", bound=messages.PassedOn | messages.RankEnded)


class NodeJobState:
    """The job as the coordinator has described it to this node.

    ``began_after`` is the highest step that was known to be committed when the generation began.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.generation = -1
        self.began_after = NO_STEP
        self.incident: str | None = None
        self.run_id = ""
        self.finished = False
        self.outcome: messages.End | None = None

    def emit(self, stage: EventName, edge: Edge, *, rank: int | None = None, **fields: object) -> None:
        """Write an event of the generation and incident that this node knows of."""
        generation = max(self.generation, 0)
        self._events.emit(stage, edge, generation=generation, incident=self.incident, rank=rank, **fields)


EXIT_GRACE_S = 1.0  # for a process to end after it hung up or said that it would exit


@dataclass
class _Beats:
    """The beats of a rank's main thread, as they were seen on its board.

    ``at_s`` is on the agent's clock, ``seen_at_s`` on the monotonic clock, which does not stand still with the
    agent. The first steps of a generation are not ``in_step``.
    """

    last: int = 0
    at_begin: int = 0
    at_s: float = 0.0
    seen_at_s: float = field(default_factory=time.monotonic)
    in_step: bool = False


@dataclass
class LocalRank:
    """One rank, over all its processes.

    Attributes:
        forgiven: whether the end of the process is a consequence of what is known already, and no fault by itself.
        started_at_s: when the living process was started, on the monotonic clock.
        is_shown: whether all that it prints is on the terminal of the job, which has no other node.
        kill_at_s: when the agent kills the process if it still runs, on the agent's clock (None: never).
    """

    number: int
    board: Board
    log: Printed
    incarnation: int = -1
    state: RankState = RankState.GONE
    pid: int | None = None
    connection: socket.socket | None = None
    said_hello: bool = False
    forgiven: bool = False
    handed_over: bool = False
    beats: _Beats = field(default_factory=_Beats)
    started_at_s: float = 0.0
    ended: messages.RankEnded | None = None
    is_cut_off: bool = False
    is_shown: bool = False
    kill_at_s: float | None = None
    _selector: selectors.BaseSelector | None = None
    _lines: messages.LineBuffer = field(default_factory=messages.LineBuffer)

    def connect(
        self, connection: socket.socket, selector: selectors.BaseSelector, on_readable: Callable[[], None]
    ) -> None:
        """Take the agent's end of the socket pair of a process."""
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, on_readable)
        self.connection, self._selector, self._lines = connection, selector, messages.LineBuffer()

    def send(self, message: messages.AgentMessage) -> bool:
        """Send ``message``; return False if the rank has ended, or has read nothing for a long time."""
        if self.connection is None:
            return False
        try:
            data = messages.encode(message)
            return self.connection.send(data) == len(data)
        except OSError as error:
            logger.info("rank %d cannot be told %r: %s", self.number, message.type, error)
            return False

    def receive(self) -> list[messages.RankMessage] | None:
        """Return what is complete after one read (None: there was nothing to read); ``EOFError`` at a hang-up."""
        try:
            data = b"" if self.connection is None else self.connection.recv(64 * 1024)
        except BlockingIOError:
            return None
        except OSError as error:
            logger.info("rank %d hung up: %s", self.number, error)
            data = b""
        if not data:
            raise EOFError
        return [messages.FROM_RANK.decode(line) for line in self._lines.feed(data)]

    def signed(self, message: _About) -> _About:
        """Return a message about this rank with which process it is and what its board shows."""
        reading = self.board.read()
        seen = {"committed": reading.committed, "making": reading.making}
        return msgspec.structs.replace(message, rank=self.number, incarnation=self.incarnation, **seen)

    def begin(self, now_s: float) -> None:
        self.state = RankState.RUNNING
        beat = self.board.read().beat
        self.beats = _Beats(beat, beat, now_s)

    def disconnect(self) -> None:
        if self.connection is not None and self._selector is not None:
            self._selector.unregister(self.connection)
            self.connection.close()
            self.connection = None

    def close(self) -> None:
        self.disconnect()
        self.board.close()


REPORT_AGAIN_S = 10.0  # a report may be lost with the connection
_KEPT_BYTES = 4096  # of what a check prints
_PIPE_BYTES = 64 * 1024
_LONGEST_LINE = 200
_NO_CHECK = "rank {} is started without a device check, which cannot be run: {}"  # it says nothing of the device
_END_S = 0.5  # for a killed check to end; one that the kernel holds does not


class _Run:
    """A run of the check, in a process group of its own; ``why`` it failed is to be reported at ``report_at_s``."""

    def __init__(self, config: LaunchConfig, spawn: messages.Spawn, env: Mapping[str, str], now_s: float) -> None:
        self.spawn, self.why, self.report_at_s, self.not_run = spawn, "", 0.0, ""
        self.process = begin_by_shell(config.check_command, env={**os.environ, **env}, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self._output = self.process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._said, self._limit_s, self.began_s = b"", config.device_check_timeout_s, now_s

    def result(self, now_s: float) -> str | None:
        """Return why the device must not be used ("": it may be); None as long as that is not known."""
        is_over = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        with contextlib.suppress(BlockingIOError):
            self._said = (self._said + os.read(self._output.fileno(), _PIPE_BYTES))[-_KEPT_BYTES:]
        if not is_over and now_s < self.began_s + self._limit_s:
            return None
        self.kill()
        how = f"was not over within {self._limit_s:g} s"
        lines = [printable(line, _LONGEST_LINE) for line in self._said.decode(errors="replace").split("\n")]
        last = [line for line in lines if line][-1:]
        if is_over:
            code = self.process.wait()
            if code in NOT_RUN:
                self.not_run = "".join(last)
            if code in (0, *NOT_RUN):
                return ""
            how = f"exited with {code}" if code > 0 else f"was killed by {signal_name(-code)}"
        return ": ".join([f"the device check {how}", *last])

    def kill(self) -> None:
        """Kill what is left of it; its first process must not have been waited for."""
        kill_begun(self.process)
        self._output.close()


class _DeviceChecks:
    """Holds all but the first start of a rank's process while a check runs, and reports devices that failed."""

    def __init__(
        self,
        job: NodeJobState,
        config: LaunchConfig,
        report: Callable[[NodeMessage], None],
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._job, self._config, self._clock = job, config, clock
        self._report, self._say = report, say
        self._held: dict[int, _Run] = {}
        self._ending: list[subprocess.Popen[bytes]] = []  # killed, and not reaped yet

    def held(self, rank: int) -> int | None:
        """Return the incarnation of the rank's process that is held; None: none is."""
        return self._held[rank].spawn.incarnation if rank in self._held else None

    def hold(self, spawn: messages.Spawn, env: Mapping[str, str]) -> bool:
        """Begin to check the device of a rank; return whether its process is held until that is over."""
        self.drop(spawn.rank)
        if not self._config.check_command or spawn.incarnation == 0 or spawn.anyway:
            return False
        try:
            self._held[spawn.rank] = _Run(self._config, spawn, env, self._clock())
        except OSError as error:
            self._say(_NO_CHECK.format(spawn.rank, error))
        return spawn.rank in self._held

    def passed(self) -> list[messages.Spawn]:
        """Return the processes that may be started by now, and report those that must not be."""
        self._ending = [process for process in self._ending if process.poll() is None]
        return [held.spawn for held in list(self._held.values()) if self._has_passed(held, self._clock())]

    def drop(self, rank: int) -> bool:
        held = self._held.pop(rank, None)
        if held is not None and not held.why:
            held.kill()
            self._ending.append(held.process)
        return held is not None

    def report_again(self) -> None:
        """Report devices that must not be used again: the coordinator does not know them."""
        for held in self._held.values():
            held.report_at_s = 0.0

    def close(self) -> None:
        for rank in list(self._held):
            self.drop(rank)
        for process in self._ending:
            wait_for_killed(process, _END_S)

    def _has_passed(self, held: _Run, now_s: float) -> bool:
        spawn = held.spawn
        why = held.why or held.result(now_s)
        if why is not None and not held.why:
            self._ending.append(held.process)
            seconds, told = now_s - held.began_s, {"incarnation": spawn.incarnation, "why": why}
            self._job.emit(EventName.DEVICE_CHECK, "point", rank=spawn.rank, seconds=seconds, **told)
            if held.not_run:
                self._say(_NO_CHECK.format(spawn.rank, held.not_run))
            if why:
                held.why = why
                self._say(f"rank {spawn.rank}: {why}")
            else:
                del self._held[spawn.rank]
        if why and now_s >= held.report_at_s:
            held.report_at_s = now_s + REPORT_AGAIN_S
            self._report(messages.DeviceBad(spawn.rank, spawn.incarnation, why))
        return why == ""


LEAVE_S = 5.0  # a process that was killed ends in a moment, or gives much memory back, or is held by the kernel


class ProcessKeeper:
    """Keeps the processes of a node's ranks.

    ``fork_servers`` gives the fork server, and then the one to use if what that has imported must not be forked;
    ``failures`` counts the processes that exited with a nonzero code since the generation began.
    """

    def __init__(
        self,
        config: LaunchConfig,
        fork_servers: Iterator[ForkServer],
        make_rank: Callable[[int], LocalRank],
        rank_env: dict[str, str],
        selector: selectors.BaseSelector,
        say: Callable[[str], None],
        clock: Callable[[], float],
        job: NodeJobState,
        report: Callable[[NodeMessage], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.ranks: dict[int, LocalRank] = {}
        self.can_start = self.is_discarding = False
        self.failures = 0
        self._job, self._report, self._say, self._clock, self._on_lost = job, report, say, clock, on_lost
        self._reports = _RankReports(job, report, clock)
        self._servers = fork_servers
        self._server = next(fork_servers)
        self._server_lost = False
        self._make_rank, self._rank_env, self._selector = make_rank, rank_env, selector
        self._checks = _DeviceChecks(job, config, report, say, clock)
        self._next: dict[int, messages.Spawn] = {}  # to be started when the living process of the rank has ended
        self._killed_at_s: dict[int, float] = {}  # by rank, while its process has not ended
        self._told_of: set[int] = set()  # signals that ranks have no handlers for
        selector.register(self._server.readable, selectors.EVENT_READ, self.hear)

    def alive(self) -> list[LocalRank]:
        """Return the ranks whose processes have not ended."""
        return [rank for rank in self.ranks.values() if rank.state is not RankState.GONE]

    def hear(self) -> None:
        """Take what has happened to processes and device checks since the last call."""
        if self._server_lost:
            return
        for spawn in self._checks.passed():
            self._start(self.ranks[spawn.rank], spawn)
        if any(rank.connection is None for rank in self.alive()):  # nobody else would say that it has ended
            self._server.ask()
        self._hear_server()

    def hear_ranks(self) -> None:
        """Take what the ranks have said until now."""
        for rank in self.ranks.values():
            self._hear_rank(rank)

    def _hear_server(self) -> None:
        if self._server_lost:
            return
        try:
            news = self._server.news()
        except ForkServerLostError as error:
            self._server_lost = True
            self._selector.unregister(self._server.readable)
            for rank in self.ranks.values():  # they died with the fork server
                rank.disconnect()
                rank.state = RankState.GONE
            self._on_lost(str(error))
            return
        for item in news:
            if isinstance(item, Ready):
                self._on_server_ready(item)
                continue
            rank = self.ranks[item.rank]
            if item.incarnation != rank.incarnation:
                continue
            if isinstance(item, Started):
                rank.pid = item.pid
                if self._job.outcome is not None or rank.number in self._killed_at_s:
                    self._server.signal(item.pid, signal.SIGKILL)
            else:
                self._on_exit(rank, item.code)

    def spawn(self, spawn: messages.Spawn) -> None:
        """Start a process of a rank, once its device has passed the check if it had a process before.

        If the rank's last process lives, it is killed first: the coordinator counts on the new one only.
        """
        held = self._checks.held(spawn.rank)
        if spawn.anyway and held != spawn.incarnation:
            logger.info("rank %d: nothing holds its process %d any more", spawn.rank, spawn.incarnation)
            return
        if spawn.rank not in self.ranks:
            self.ranks[spawn.rank] = self._make_rank(spawn.rank)
        rank, job = self.ranks[spawn.rank], self._job
        if rank.state is not RankState.GONE and held is None:
            logger.info("rank %d: %d is to be started while another lives", rank.number, spawn.incarnation)
            if spawn.incarnation > rank.incarnation:
                self._next[rank.number] = spawn
                self.kill(rank)
            return
        rank.incarnation = spawn.incarnation
        job.generation = max(job.generation, spawn.generation - 1)  # a spare's agent has seen no generation yet
        job.incident = spawn.incident or None
        job.run_id = spawn.env.get(TORCHELASTIC_RUN_ID_ENV, "")
        rank.state, rank.pid, rank.kill_at_s = RankState.STARTING, None, None
        rank.said_hello, rank.forgiven, rank.ended = False, False, None
        rank.is_cut_off = rank.handed_over = False
        rank.board.set_exit_code(None)
        if not self._checks.hold(spawn, {**self._rank_env, **spawn.env}):
            self._start(rank, spawn)

    def _start(self, rank: LocalRank, spawn: messages.Spawn) -> None:
        job = self._job
        if spawn.afresh:
            rank.board.clear_snapshots()
        ours, theirs = socket.socketpair()
        env = {**self._rank_env, **spawn.env, INCARNATION_ENV: str(rank.incarnation)}
        if rank.incarnation > 0:
            job.emit(EventName.RESPAWN, "begin", rank=rank.number, incarnation=rank.incarnation)
        order = Start(rank.number, rank.incarnation, env)
        self._server.start(order, rank.log.begin(), theirs.fileno(), rank.board.fd)
        theirs.close()
        rank.connect(ours, self._selector, lambda: self._hear_rank(rank))
        rank.started_at_s = time.monotonic()

    def report_again(self) -> None:
        """Report again what a coordinator may not have heard of: bad devices, and how processes ended."""
        self._checks.report_again()
        for rank in self.ranks.values():
            if rank.ended is not None:
                self._report(rank.ended)

    def terminate(self, number: int) -> None:
        """Let go of the blocks that return, and ask every process to end with the signal ``number``."""
        for rank in self.alive():
            rank.send(messages.Ending())
        for rank in self.alive():
            if self._checks.drop(rank.number):
                rank.state = RankState.GONE
            elif rank.pid is not None:
                self._server.signal(rank.pid, number)

    def pass_on(self, number: int) -> None:
        """Send a signal to every process, but to one that would die of it only if it ends jobs."""
        would_die = []
        for rank in self.alive():
            if rank.pid is None:
                continue
            if number not in ENDING and is_default(rank.pid, number):
                would_die.append(rank.number)
            else:
                self._server.signal(rank.pid, number)
        if would_die and number not in self._told_of:
            self._told_of.add(number)
            name, ranks = signal_name(number), numbered("rank", would_die)
            self._say(f"{name} is not passed on to {ranks}: without a handler a process would die of it")

    def tell_waiting(self, command: messages.HandOver | messages.Offer) -> None:
        """Have processes that wait at the barrier hand or offer their state to successors."""
        for number in command.ranks:
            rank = self.ranks.get(number)
            if rank is not None and rank.state is RankState.READY:
                if isinstance(command, messages.HandOver):
                    rank.state = RankState.LEAVING
                if not rank.send(command):
                    self.kill(rank)

    def signal(self, rank: LocalRank, number: int) -> None:
        """Send a signal to a rank's process, if it has one."""
        if rank.pid is not None:
            self._server.signal(rank.pid, number)

    def kill(self, rank: LocalRank) -> None:
        """Kill the rank's process, as soon as its process ID is known."""
        rank.kill_at_s = None
        if rank.state is RankState.GONE or rank.number in self._killed_at_s:
            return
        if self._checks.drop(rank.number):  # there is no process, and it does not come
            self._ended(rank, -signal.SIGKILL, was_started=False)
        else:
            self._killed_at_s[rank.number] = self._clock()
            self.signal(rank, signal.SIGKILL)

    def kill_overdue(self, now_s: float) -> None:
        """Kill the processes that should have ended by now; once the job is over, do not wait for them any more."""
        for rank in self.ranks.values():
            if rank.kill_at_s is not None and now_s >= rank.kill_at_s:
                self.kill(rank)
        if self._job.outcome is None:
            return
        for rank in self.alive():
            if now_s > self._killed_at_s.get(rank.number, now_s) + LEAVE_S:
                self._say(f"rank {rank.number} did not exit within {LEAVE_S:g} s after SIGKILL, and is left")
                rank.disconnect()
                rank.state = RankState.GONE

    def discard(self, grace_s: float = 0.0) -> None:
        """End all processes, those at the barrier after ``grace_s`` seconds, without a report, and join again."""
        self.is_discarding = True
        self._next.clear()
        for rank in self.alive():
            if grace_s and rank.state is RankState.READY and rank.send(messages.Finish()):
                rank.kill_at_s = self._clock() + grace_s
                continue
            rank.disconnect()
            self.kill(rank)
        self._join_when_empty()

    def close(self) -> None:
        """Kill and reap the remaining processes, and release all resources."""
        self._checks.close()
        self._server.close()
        for rank in self.ranks.values():
            rank.close()

    def _on_server_ready(self, ready: Ready) -> None:
        self._job.emit(EventName.PRELOAD, "point", seconds=ready.seconds, failed=ready.failed)
        if self._job.outcome is not None:
            return
        if not ready.can_fork:
            self._selector.unregister(self._server.readable)
            self._server.close()
            following = next(self._servers, None)
            if following is None:
                self._on_lost("CUDA is initialized in a process that has imported nothing for the job")
                return
            self._say(
                "a preloaded module has initialized CUDA: nothing is preloaded, and each rank imports by itself"
            )
            self._server = following
            self._selector.register(self._server.readable, selectors.EVENT_READ, self.hear)
            return
        self.can_start = True
        self._report(messages.Joined())

    def _on_exit(self, rank: LocalRank, code: int) -> None:
        if rank.pid is not None:  # else the kernel has given it no process
            self._hear_rank(rank)  # take what it said before it ended
        rank.disconnect()
        rank.state, rank.kill_at_s = RankState.GONE, None
        if rank.is_cut_off and (scripts := rank.board.exit_code()) is not None:
            code = scripts  # nothing of the script was cut off
        self.failures += code != 0
        lines = rank.log.last_lines() if code != 0 else []
        self._ended(rank, code, lines)
        following = self._next.pop(rank.number, None)
        if following is not None and self._job.outcome is None:
            self.spawn(following)

    def _ended(
        self, rank: LocalRank, code: int, lines: list[str] | None = None, *, was_started: bool = True
    ) -> None:
        rank.state = RankState.GONE
        self._killed_at_s.pop(rank.number, None)
        if self.is_discarding:
            self._join_when_empty()
            return
        last = [] if rank.is_shown else lines or []
        log = str(rank.log.path)
        ended = messages.RankEnded(code, rank.forgiven, log, last, was_started, rank.handed_over)
        rank.ended = rank.signed(ended)
        self._report(rank.ended)

    def _join_when_empty(self) -> None:
        if self.is_discarding and not self.alive():
            self.is_discarding = False
            self._report(messages.Joined())

    def _hear_rank(self, rank: LocalRank) -> None:
        if rank.pid is None:
            self._hear_server()  # which process this is, if both have spoken since the last look
        try:
            self._reports.hear(rank)
        except messages.ProtocolError as error:
            self._say(f"rank {rank.number} broke the protocol and is replaced: {error}")
            rank.disconnect()
            self.kill(rank)


class _RankReports:
    """Reports what ranks say, as far as it is about the generation that this node knows of."""

    def __init__(
        self, job: NodeJobState, report: Callable[[NodeMessage], None], clock: Callable[[], float]
    ) -> None:
        self._job, self._report, self._clock = job, report, clock

    def hear(self, rank: LocalRank) -> None:
        while rank.connection is not None:
            try:
                heard = rank.receive()
            except EOFError:
                rank.disconnect()
                if rank.state in COUNTED and self._job.outcome is None:
                    rank.kill_at_s = self._clock() + EXIT_GRACE_S
                return
            if heard is None:
                return
            for message in heard:
                if self._job.outcome is None:
                    self._on_message(rank, message)

    def _on_message(self, rank: LocalRank, message: messages.RankMessage) -> None:
        if isinstance(message, messages.Hello):
            self._on_hello(rank, message)
        elif isinstance(message, messages.GiveUp):
            self._report(message)
        elif isinstance(message, messages.Replace):
            self._on_replace(rank, message)
        elif isinstance(message, messages.Offered | messages.Answer):
            self._report(rank.signed(message))
        elif message.generation != self._job.generation or rank.state not in (*IN_BLOCK, RankState.LEAVING):
            logger.info("rank %d: %s of generation %d is stale", rank.number, message.type, message.generation)
        elif isinstance(message, messages.FaultReport):
            self._trouble(rank, message.cause)
        elif isinstance(message, messages.Inexact | messages.Paused):
            self._report(rank.signed(message))
        elif isinstance(message, messages.Barrier):
            rank.state = RankState.READY
            self._report(rank.signed(message))
        elif isinstance(message, messages.Done) and rank.state is RankState.RUNNING:
            rank.state = RankState.DONE
            self._report(rank.signed(message))

    def _on_hello(self, rank: LocalRank, message: messages.Hello) -> None:
        if rank.state not in (RankState.STARTING, RankState.FINISHED):
            logger.warning("rank %d said hello in the state %s", rank.number, rank.state.value)
            return
        if rank.incarnation > 0 and not rank.said_hello:
            seconds = time.monotonic() - rank.started_at_s
            incarnation = rank.incarnation
            self._job.emit(EventName.RESPAWN, "end", rank=rank.number, seconds=seconds, incarnation=incarnation)
        rank.said_hello = True
        rank.state = RankState.READY
        self._report(rank.signed(message))

    def _on_replace(self, rank: LocalRank, message: messages.Replace) -> None:
        rank.forgiven, rank.handed_over = True, message.handed_over
        rank.kill_at_s = self._clock() + EXIT_GRACE_S
        if rank.state in IN_BLOCK:
            step = rank.board.read().making
            what = "asked to be replaced"
            self._trouble(rank, Cause(CauseKind.LOSS, rank.number, "replace", what, step, message.reason))

    def _trouble(self, rank: LocalRank, cause: Cause) -> None:
        report = messages.FaultReport(self._job.generation, msgspec.structs.replace(cause, rank=rank.number))
        self._report(rank.signed(report))
