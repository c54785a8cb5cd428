"""A node's agent: it starts the ranks, reports what they say and show, and does what the coordinator says."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from checkpointless.launcher.agent.launch_config import SIGTERM_DRAINS, LaunchConfig
from checkpointless.launcher.agent.ranks.process_keeper import EXIT_GRACE_S, LocalRank, NodeJobState, ProcessKeeper
from checkpointless.launcher.coordinator.coordinator import FAILED
from checkpointless.launcher.coordinator.hang_watch import SHARING
from checkpointless.launcher.coordinator.job_config import Heartbeat
from checkpointless.launcher.coordinator.stragglers import TO_SIGMA
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.board import NO_STEP, BoardReading, PaceReading
from checkpointless.launcher.protocol.causes import signal_name
from checkpointless.launcher.protocol.channel import LOOPBACK
from checkpointless.launcher.protocol.messages import IN_BLOCK, Command, NodeMessage, RankState
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.observability.telemetry.wording import numbered
from checkpointless.system.environment import SOURCE_ENV
from checkpointless.system.process_tree import NOT_RUN, Idleness, ProcessLook, begin_by_shell, families, kill_begun
from checkpointless.system.signals import ENDING, STACKS_SIGNAL, is_default

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

_DRAIN_AGAIN_S = 60.0
_NAMED_AFTER_S = 10.0
_ONE_PRESS_S = 1.0  # a terminal sends SIGINT to its whole group, and what runs the agent (timeout) passes it on
_LOOK_EVERY_S = 1.0
_STACKS_S = 1.0  # for a process to write them


class _ExitWatch:
    """Sees to it that a process ends whose script has ended, or whose block has while other ranks' processes have.

    What computes or writes is waited for. A rank that has not said that it has a block may be at work, whatever
    others do: it has the limit of a rank that shows no progress. ``elsewhere`` is the first rank of the whole job
    that has ended well, as the coordinator says (None: none has).
    """

    def __init__(
        self, grace_s: float, silence_s: float, send: Callable[[LocalRank, int], None], say: Callable[[str], None]
    ) -> None:
        self.elsewhere: int | None = None
        self._grace_s = grace_s
        self._silence_s = max(grace_s, silence_s)
        self._send = send
        self._say = say
        self._late: dict[int, tuple[int, Idleness]] = {}  # by rank: its process, and for how long it has been idle
        self._named: set[int] = set()
        self._first_end_s: float | None = None
        self._look_at_s = 0.0
        self._families: dict[int, list[int]] = {}

    def look(self, ranks: Collection[LocalRank], now_s: float) -> None:
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_EVERY_S
        over = [rank.number for rank in ranks if rank.ended is not None and rank.ended.code == 0]
        if not over and self.elsewhere is not None:
            over = [self.elsewhere]
        if not over:
            self._first_end_s = None
        elif self._first_end_s is None:
            self._first_end_s = now_s
        late = [(rank, limit_s) for rank in ranks if (limit_s := self._limit_s(rank, bool(over))) is not None]
        self._late = {rank.number: self._late[rank.number] for rank, _ in late if rank.number in self._late}
        if not late:
            return
        self._name([rank.number for rank, _ in late if _has_only_to_end(rank)], over, now_s)
        self._families = families([rank.pid for rank, _ in late if rank.pid is not None])
        for rank, limit_s in late:
            self._watch(rank, rank.pid or 0, limit_s, now_s)

    def _limit_s(self, rank: LocalRank, others_have_ended: bool) -> float | None:
        if rank.state is RankState.GONE or rank.pid is None or rank.is_cut_off:
            return None
        if rank.board.exit_code() is not None:
            return self._grace_s
        if not others_have_ended or rank.state not in (RankState.FINISHED, RankState.STARTING):
            return None
        return self._grace_s if rank.state is RankState.FINISHED else self._silence_s

    def _name(self, late: list[int], over: list[int], now_s: float) -> None:
        """Say which ranks are waited for, some time after the first has ended."""
        new = set(late) - self._named
        if self._first_end_s is None or now_s < self._first_end_s + _NAMED_AFTER_S or not new:
            return
        self._named |= new
        late_s, after = now_s - self._first_end_s, numbered("rank", over)
        what = (
            f"{numbered('rank', new)} {'has' if len(new) == 1 else 'have'} not ended, {late_s:.0f} s after {after}"
        )
        self._say(f"{what}: waited for as long as it works, and {self._grace_s:g} s if it does not (--exit-grace)")

    def _watch(self, rank: LocalRank, pid: int, limit_s: float, now_s: float) -> None:
        known, idleness = self._late.get(rank.number, (0, None))
        if idleness is None or known != pid:
            idleness = Idleness(now_s, lambda: self._families.get(pid, []))
            self._late[rank.number] = pid, idleness
        idle_s = idleness.seconds(now_s)
        if idle_s < limit_s:
            return
        rank.is_cut_off, rank.kill_at_s = True, now_s + _STACKS_S
        if not is_default(pid, STACKS_SIGNAL):
            self._send(rank, STACKS_SIGNAL)
        what = "has had nothing to do but end" if _has_only_to_end(rank) else "has done nothing while others ended"
        self._say(
            f"rank {rank.number} {what} for {idle_s:.0f} s (--exit-grace) and is killed; its stacks are in "
            f"{rank.log.path}"
        )


def _has_only_to_end(rank: LocalRank) -> bool:
    return rank.state is RankState.FINISHED or rank.board.exit_code() is not None


_PROGRESS_EVERY_S = 0.25
_SILENT_EVERY_S, _SILENT_RARELY_S = 0.2, 5.0  # the longer a silence is, the less its length in seconds means
_SILENT_SHARE = 1 / 100
_PACES_EVERY_S = 0.5
_WARM_UP_STEPS = 2  # the first of a generation compile, connect and allocate


class _BeatWatch:
    """Measures how long ranks show no progress, and reports what the coordinator does not know yet."""

    def __init__(self, heartbeat: Heartbeat, report: Callable[[NodeMessage], None]) -> None:
        self.newest = NO_STEP
        self._heartbeat = heartbeat
        self._report = report
        self._longest_s = 0.0  # longest time between beats within a step of this generation
        self._pause_s = 0.0  # longest time between beats outside of a step, in all generations
        self._shows_progress = False
        self._target = self._began_after = NO_STEP
        self._told_progress: messages.Progress | None = None
        self._tell_progress_at_s = 0.0
        self._told_shards: list[int] = []
        self._told_silent = False
        self._tell_silent_at_s = 0.0

    def begin(self, target: int, began_after: int) -> None:
        """Begin to watch a generation; that the ranks have made step ``target`` is reported at once."""
        self._target, self._began_after = target, began_after
        self._tell_progress_at_s = self._longest_s = 0.0
        self.forget_told()

    def forget_told(self) -> None:
        """Report everything to the coordinator again: it is another one, or the generation is."""
        self._told_progress, self._told_silent, self._told_shards = None, False, []

    def look(self, ranks: Collection[LocalRank], generation: int, now_s: float) -> None:
        readings = {rank.number: rank.board.read() for rank in ranks}
        self.newest = max(self.newest, *(reading.committed for reading in readings.values()))
        self._tell_progress(readings, generation, now_s)
        self._tell_shards(readings)
        self._watch_beats(ranks, readings, now_s)
        self._tell_silent(ranks, readings, now_s)

    def _tell_progress(self, readings: dict[int, BoardReading], generation: int, now_s: float) -> None:
        begun = [reading.began_after for reading in readings.values() if reading.generation == generation]
        progress = messages.Progress(
            min(reading.committed for reading in readings.values()),
            max(reading.committed for reading in readings.values()),
            max(reading.making for reading in readings.values()),
            int(self._longest_s * 1000),
            int(self._pause_s * 1000),
            self._shows_progress,
            max(begun, default=NO_STEP),  # a board may still show the generation before
            generation,
        )
        told = self._told_progress
        if progress == told or generation < 0:
            return
        reached = progress.oldest >= self._target and (told is None or told.oldest < self._target)
        if reached or now_s >= self._tell_progress_at_s:
            self._told_progress, self._tell_progress_at_s = progress, now_s + _PROGRESS_EVERY_S
            self._report(progress)

    def _tell_shards(self, readings: dict[int, BoardReading]) -> None:
        shards = [readings[number].shard for number in sorted(readings)]
        if shards != self._told_shards and min(shards) >= 0:
            self._told_shards = shards
            self._report(messages.Holding(shards))

    def _watch_beats(self, ranks: Collection[LocalRank], readings: dict[int, BoardReading], now_s: float) -> None:
        for rank in ranks:
            if rank.state is not RankState.RUNNING:
                continue
            reading, beats = readings[rank.number], rank.beats
            if reading.beat != beats.last:
                took_s = now_s - beats.at_s
                if beats.in_step:
                    self._longest_s = max(self._longest_s, took_s)
                else:
                    self._pause_s = max(self._pause_s, took_s)
                beats.last, beats.at_s, beats.seen_at_s = reading.beat, now_s, time.monotonic()
                self._shows_progress |= reading.making != NO_STEP or reading.beat > beats.at_begin + 1
            warm = reading.committed > self._began_after + _WARM_UP_STEPS
            beats.in_step = warm and reading.making > reading.committed

    def _tell_silent(self, ranks: Collection[LocalRank], readings: dict[int, BoardReading], now_s: float) -> None:
        within_step_s = self._heartbeat.within_step_s(self._longest_s)
        ceiling_s = self._heartbeat.ceiling_s(self._pause_s)
        silent: list[tuple[LocalRank, float]] = []
        for rank in ranks:
            age_s = now_s - rank.beats.at_s
            limit_s = within_step_s if rank.beats.in_step else ceiling_s
            if rank.state is RankState.RUNNING and age_s >= SHARING * limit_s:
                silent.append((rank, age_s))
        if (silent or self._told_silent) and now_s >= self._tell_silent_at_s:
            youngest_s = min((age_s for _, age_s in silent), default=0.0)
            pause_s = min(_SILENT_RARELY_S, max(_SILENT_EVERY_S, _SILENT_SHARE * youngest_s))
            self._told_silent, self._tell_silent_at_s = bool(silent), now_s + pause_s
            said = [_silence_of(rank, age_s, readings[rank.number]) for rank, age_s in silent]
            self._report(messages.Silent(said))


class _PaceWatch:
    """Reports what the ranks do by themselves in a step, now and then, to whoever compares them."""

    def __init__(self, report: Callable[[NodeMessage], None]) -> None:
        self._report = report
        self._steps = -1
        self._tell_at_s = 0.0

    def look(self, ranks: Collection[LocalRank], generation: int, now_s: float) -> None:
        if now_s < self._tell_at_s or any(rank.state is not RankState.RUNNING for rank in ranks):
            return
        self._tell_at_s = now_s + _PACES_EVERY_S
        read = {rank.number: rank.board.paces() for rank in ranks}
        paces = [_pace_of(number, reading) for number, reading in read.items() if reading.own]
        steps = sum(pace.steps for pace in paces)
        if paces and steps != self._steps:
            self._report(messages.Paces(generation, paces))
        self._steps = steps


def _pace_of(rank: int, reading: PaceReading) -> messages.RankPace:
    """Return the medians of a rank's newest steps, of which there is one at least, and how far steps are away."""
    own_s, data_s = median(reading.own), median(reading.data)
    spread_s = TO_SIGMA * median(abs(each - own_s) for each in reading.own)
    measured = (int(each * 1e6) for each in (own_s, spread_s, data_s))
    return messages.RankPace(rank, reading.role, reading.steps, *measured)


def _silence_of(rank: LocalRank, age_s: float, reading: BoardReading) -> messages.SilentRank:
    look, beats = ProcessLook.at(rank.pid), rank.beats
    age_ms, quiet_ms = int(age_s * 1000), int((time.monotonic() - beats.seen_at_s) * 1000)
    return messages.SilentRank(
        rank.number, beats.last, age_ms, quiet_ms, reading.making, beats.in_step, look.letter, look.cpu_ms
    )


_NOTICE_EVERY_S = 5.0
_NOTICE_AGAIN_S = 60.0  # after a notice: there may be a spare by then
_NOTICE_LIMIT_S = 30.0  # of one run of the command


class _Notice:
    """Runs a command again and again, and never waits for it; exit code 0 means that the node is to be left."""

    def __init__(self, command: Sequence[str], say: Callable[[str], None]) -> None:
        self._command, self._say = command, say
        self._process: subprocess.Popen[bytes] | None = None
        self._begin_at_s = self._by_s = 0.0
        self._said: set[str] = set()

    def has_come(self, now_s: float) -> bool:
        """Return whether a run has just ended with exit code 0; begin the next run when it is due."""
        if self._process is None:
            if self._command and now_s >= self._begin_at_s:
                self._begin(now_s)
            return False
        code = self._process.poll()
        if code is None and now_s >= self._by_s:
            self._warn(f"the notice command is killed, since it was not over within {_NOTICE_LIMIT_S:g} s")
            kill_begun(self._process)
            self._by_s = float("inf")  # until the kernel lets go of it
        if code is None:
            return False
        if code in NOT_RUN:
            self._warn(f"the notice command cannot be run: {self._command[0]}")
        self._process, self._begin_at_s = None, now_s + (_NOTICE_EVERY_S if code else _NOTICE_AGAIN_S)
        return code == 0

    def close(self) -> None:
        """End what runs."""
        self._command = ()
        if self._process is not None and self._process.poll() is None:
            kill_begun(self._process)

    def _begin(self, now_s: float) -> None:
        self._begin_at_s, self._by_s = now_s + _NOTICE_EVERY_S, now_s + _NOTICE_LIMIT_S
        try:
            self._process = begin_by_shell(self._command)
        except OSError as error:
            self._warn(f"the notice command cannot be run: {error}")

    def _warn(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)


class NodeAgent:
    """Runs the ranks of one node until the job is over.

    Args:
        report: sends a message to the coordinator. The answer comes to :meth:`obey`, after ``report`` has returned.
        clock: should stand still while this process does not run, so that ranks are not blamed for what the agent
            did not see.
        hosts: whether the coordinator ends with this agent.
    """

    def __init__(
        self,
        config: LaunchConfig,
        *,
        address: Callable[[], str],
        report: Callable[[NodeMessage], None],
        keep_processes: Callable[..., ProcessKeeper],
        events: EventLog,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        hosts: bool = True,
    ) -> None:
        self.clock = clock
        self.index = config.node_rank
        self._address = address
        self._report = report
        self._say = say
        self.job = NodeJobState(events)
        self._beats = _BeatWatch(config.heartbeat, self._report_boards)
        self._paces = _PaceWatch(report)
        self._store: _GenerationStore | None = None
        self._term_grace_s = config.term_grace_s
        self._hosts = hosts
        self._drains_at_sigterm = config.on_sigterm == SIGTERM_DRAINS
        self._notice = _Notice(config.notice_command, say)
        self._is_draining = False  # a spare is to take the ranks over, and the agent ends once it has
        self._was_terminated, self._drain_at_s = False, 0.0  # when a drain for SIGTERM is asked for again
        self.takes_part = self.has_moved = False
        self._farewell: messages.Leaving | None = None  # what the coordinator is told when the first rank has ended
        self._ends_since_s = self._kill_all_at_s = float("inf")
        self._too_late = ""  # for what the ranks that are killed then were too late
        self.processes = keep_processes(clock=clock, job=self.job, report=self._pass, on_lost=self._leave)
        self._exits = _ExitWatch(config.exit_grace_s, config.heartbeat.ceiling_s(0.0), self.processes.signal, say)

    # ---- what others may know

    @property
    def ranks(self) -> dict[int, LocalRank]:
        """Every rank that this node has started a process of, by number."""
        return self.processes.ranks

    @property
    def newest(self) -> int:
        """The highest optimizer step that a rank of this node was seen to commit (-1: none)."""
        return self._beats.newest

    @property
    def incident(self) -> str | None:
        """The incident that the ranks are being brought together for; None while they train."""
        together = any(rank.state in (*IN_BLOCK, RankState.FINISHED) for rank in self.ranks.values())
        return None if together or self.job.outcome is not None else self.job.incident

    @property
    def has_ended_well(self) -> bool:
        """Whether every rank's block has returned and every process of this node exited with code 0."""
        return self.job.finished and self.processes.failures == 0 and not self.alive()

    def alive(self) -> list[LocalRank]:
        """Return the ranks whose processes have not ended."""
        return self.processes.alive()

    # ---- the loop

    def tick(self, now_s: float) -> None:
        """Act on the time that has passed."""
        self.processes.hear()
        self.processes.kill_overdue(now_s)
        if self.job.outcome is not None:
            if now_s >= self._kill_all_at_s:
                self._kill_all()
            return
        if self.has_moved and self._is_draining and not self.alive():
            self.end(messages.End(0, [f"node {self.index} is drained: another node has taken its ranks over"]))
            return
        if self._notice.has_come(now_s):
            self._drain("its notice command has exited with 0")
        if self._was_terminated and now_s >= self._drain_at_s:
            self._drain("its agent got SIGTERM")
        if self.ranks:
            self._beats.look(self.ranks.values(), self.job.generation, now_s)
            self._paces.look(self.ranks.values(), self.job.generation, now_s)
            self._exits.look(self.ranks.values(), now_s)

    def interrupted(self, number: int) -> None:
        """Pass a signal on to the ranks; a later SIGINT, while a job ends, has them killed at once."""
        drains = number == signal.SIGTERM and self._drains_at_sigterm and self.takes_part and not self._hosts
        if self.job.outcome is None and drains:
            self._drains_at_sigterm, self._was_terminated = False, True  # the next one ends the job
            self._drain("its agent got SIGTERM")
        elif self.job.outcome is None and number in ENDING:
            self._leave(f"stopped by {signal_name(number)}", number)
        elif number == signal.SIGINT:
            if self.clock() - self._ends_since_s > _ONE_PRESS_S:
                self._kill_all_at_s, self._too_late = self.clock(), "before a second SIGINT came"
        else:
            self.processes.pass_on(number)

    def end(self, outcome: messages.End, grace_s: float | None = None, number: int = signal.SIGTERM) -> None:
        """End the ranks because the job is over, and kill those that take longer than ``grace_s``."""
        if self.job.outcome is not None:
            return
        self.job.outcome = outcome
        grace_s = self._term_grace_s if grace_s is None else grace_s
        self._ends_since_s = self.clock()
        self._kill_all_at_s = self._ends_since_s + grace_s
        self._too_late = f"within {grace_s:g} s of {signal_name(number)}" if grace_s else ""
        self.processes.terminate(number)

    def close(self) -> None:
        """Kill and reap the remaining processes, and release all resources."""
        self._notice.close()
        self.processes.close()
        self._close_store()

    def _drain(self, reason: str) -> None:
        if self.takes_part and not self._is_draining:
            self._is_draining = True
            self._report(messages.MoveWanted(reason))

    def _leave(self, reason: str, number: int = signal.SIGTERM) -> None:
        """End the job on this node, and report to the coordinator that the node no longer takes part.

        It hears when the first rank has ended: the other nodes may be about to get the same signal, and what their
        ranks do then must not be interrupted because this node is lost.
        """
        self._farewell = messages.Leaving(reason)
        self.end(messages.End(FAILED, [reason]), number=number)
        if self._hosts or not self.alive():
            self._say_farewell()

    def _say_farewell(self) -> None:
        if self._farewell is not None:
            self._report(self._farewell)
            self._farewell = None

    def _pass(self, message: NodeMessage) -> None:
        if isinstance(message, messages.RankEnded):
            self._say_farewell()
        self._report(message)

    def _report_boards(self, message: NodeMessage) -> None:
        """Report what boards show, after what the ranks said before they showed it."""
        if isinstance(message, messages.Progress):
            self.processes.hear_ranks()
        self._report(message)

    def _kill_all(self) -> None:
        """Kill the processes that have not ended in time, and say which."""
        self._say_farewell()
        late = self.alive()
        if late and self._too_late:
            were = "was" if len(late) == 1 else "were"
            ranks = numbered("rank", [rank.number for rank in late])
            self._say(f"{ranks} did not end {self._too_late} and {were} killed")
            self._too_late = ""
        for rank in late:
            self.processes.kill(rank)

    # ---- what the coordinator says

    def obey(self, command: Command) -> None:
        """Do what the coordinator says; ``ValueError`` if that is about a rank that this node does not run."""
        if self.job.outcome is not None:
            return
        if isinstance(command, messages.OpenStore):
            self._open_store(command.generation)
        elif isinstance(command, messages.Discard):
            self._discard(command.moved)
        elif isinstance(command, messages.Displaced):
            self.takes_part, self.has_moved = False, True
        elif isinstance(command, messages.Spawn):
            if command.afresh:
                self._exits.elsewhere = None
            self.processes.spawn(command)
        elif isinstance(command, messages.Go):
            self._begin(command)
        elif isinstance(command, messages.FaultNotice):
            self._interrupt(command)
        elif isinstance(command, messages.HandOver):
            self.processes.tell_waiting(command)
        elif isinstance(command, messages.Pause):
            for rank in self.ranks.values():
                if rank.state in IN_BLOCK:
                    rank.send(command)
        elif isinstance(command, messages.MoveNews):
            if command.is_over and not command.is_moved:
                self._is_draining, self._drain_at_s = False, self.clock() + _DRAIN_AGAIN_S
                if not self._hosts:  # else it has said so as the coordinator
                    self._say(command.line)
        elif isinstance(command, messages.Offer):
            self.processes.tell_waiting(msgspec.structs.replace(command, address=self._address()))
        elif isinstance(command, messages.Inquire):
            for number in command.ranks:
                self._rank(number).send(command)
        elif isinstance(command, messages.Kill):
            self._kill(command)
        elif isinstance(command, messages.Finish):
            self.job.finished = True
            for rank in self.ranks.values():
                if rank.state in IN_BLOCK:  # others have gone on to the next block
                    rank.state = RankState.FINISHED
                    rank.send(command)
        elif isinstance(command, messages.OneEnded):
            self._exits.elsewhere = command.rank
        elif isinstance(command, messages.End):
            self.end(command)

    def standing(self) -> messages.Standing:
        """Return what a coordinator that has just begun needs to know of the ranks that run here."""
        self._beats.forget_told()
        self._is_draining, self._drain_at_s = False, self.clock() + _DRAIN_AGAIN_S  # the former one was asked
        self.processes.report_again()
        job, rows = self.job, []
        for rank in self.ranks.values():
            reading = rank.board.read()
            shown = reading.committed, reading.making
            rows.append(messages.RankStanding(rank.number, rank.incarnation, rank.state, *shown))
        incident = int(job.incident or 0)
        return messages.Standing(job.generation, incident, job.began_after, job.run_id, job.finished, rows)

    def _rank(self, number: int) -> LocalRank:
        if number not in self.ranks:
            raise ValueError(f"the coordinator named rank {number}, which this node does not run")
        return self.ranks[number]

    def _kill(self, command: messages.Kill) -> None:
        rank = self.ranks.get(command.rank)
        if rank is None:
            logger.info("rank %d is to be killed, and was never started here", command.rank)
            return
        is_meant = (rank.incarnation, self.job.generation) == (command.incarnation, command.generation)
        if is_meant and command.beat in (-1, rank.board.read().beat):
            rank.forgiven = True
            self.processes.kill(rank)

    def _discard(self, moved: bool) -> None:
        """End the ranks, which have moved or were declared dead, and join again without them."""
        if not moved:
            self._say("this node was declared lost: its ranks are killed, and it joins the job again")
        self.takes_part, self.has_moved = False, moved
        self._close_store()
        self.processes.discard(self._term_grace_s if moved else 0.0)

    def _open_store(self, generation: int) -> None:
        self._close_store()
        try:
            self._store = _GenerationStore(generation, self._address())
        except (OSError, RuntimeError) as error:
            reason = f"node {self.index}: no store can be opened for generation {generation}: {error}"
            self._report(messages.GiveUp(-1, reason))
            return
        self._report(messages.StoreOpened(generation, self._store.address, self._store.port))

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _begin(self, go: messages.Go) -> None:
        job = self.job
        self.takes_part, self.has_moved = True, False
        job.generation, job.began_after = go.generation, go.high_water
        job.incident, job.finished = go.incident, False
        self._beats.begin(go.target, go.high_water)
        self.processes.failures = 0
        known = NO_STEP if go.generation == go.origin else go.high_water  # nothing comes before an origin
        now_s = self.clock()
        for rank in self.ranks.values():
            if rank.state is not RankState.READY:
                continue  # its process has ended since; the coordinator hears of that
            rank.begin(now_s)
            env = {**go.env, SOURCE_ENV: go.sources.get(str(rank.number), "")}
            if not rank.send(msgspec.structs.replace(go, env=env, high_water=known, sources={})):
                rank.kill_at_s = now_s + EXIT_GRACE_S

    def _interrupt(self, notice: messages.FaultNotice) -> None:
        began_s, now_s = time.monotonic(), self.clock()
        self.job.incident = notice.incident
        if self._store is not None and self._store.generation <= notice.generation:
            self._close_store()
        # A rank that failed by itself may reach the barrier before this notice; its successor ignores a notice of a
        # generation that is over.
        told = [rank for rank in self.ranks.values() if rank.state in (*IN_BLOCK, RankState.READY)]
        self.job.emit(EventName.NOTIFY, "begin")
        for rank in told:
            if rank.state in IN_BLOCK:
                rank.state = RankState.LEAVING
            if not rank.send(notice):
                rank.kill_at_s = now_s + EXIT_GRACE_S
        seconds = time.monotonic() - began_s
        self.job.emit(EventName.NOTIFY, "end", seconds=seconds, ranks=[rank.number for rank in told])


class _GenerationStore:
    """A c10d store for one generation, which outlives the coordinator; closing it frees every rank that waits."""

    def __init__(self, generation: int, address: str = LOOPBACK) -> None:
        self.generation = generation
        self.address = address
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.bind((address, 0))
        listener.listen(1024)
        self.port: int = listener.getsockname()[1]
        from torch.distributed import TCPStore

        self._store: TCPStore | None = TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store owns it from here on
            use_libuv=True,
        )

    def close(self) -> None:
        self._store = None
