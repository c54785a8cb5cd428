"""Watches the boards of a node's ranks, and tells the coordinator how far they have come and which are silent.

Watches the processes of ranks that have only to end: names those that others wait for, ends those that idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from checkpointless.launcher.agent.ranks.local_rank import LocalRank
from checkpointless.launcher.coordinator.hang_policy import SHARING, Heartbeat
from checkpointless.launcher.protocol.board import NO_STEP, BoardReading
from checkpointless.launcher.protocol.node_messages import (
    Holding,
    NodeMessage,
    Progress,
    RankState,
    Silent,
    SilentRank,
)
from checkpointless.observability.telemetry.wording import numbered
from checkpointless.system.idleness import Idleness, families
from checkpointless.system.process_tree import ProcessLook
from checkpointless.system.signals import STACKS_SIGNAL, is_default

_NAMED_AFTER_S = 10.0
_OWN_LIMIT_S = 5.0  # for a process to find out by itself, and to name its threads, before the agent ends it
_LOOK_EVERY_S = 1.0
_STACKS_S = 1.0  # for a process to write them


@dataclass
class _Late:
    """A process that has only to end.

    Attributes:
        is_told: whether it was said that it idles.
    """

    pid: int
    idleness: Idleness
    is_told: bool = False


class ExitWatch:
    """Sees to it that a process ends whose script has ended, or whose block has while other ranks' processes have.

    What computes or writes is waited for. A rank that has not said that it has a block may be at work, whatever
    others do: it has the limit of a rank that shows no progress.

    Args:
        grace_s: how many seconds a process that has only to end may idle.
        silence_s: how many seconds a rank without a block may idle once another one has ended well.

    Attributes:
        elsewhere: the first rank of the whole job that has ended well, as the coordinator says (None: none has).
    """

    def __init__(
        self,
        grace_s: float,
        silence_s: float,
        send: Callable[[LocalRank, int], None],
        say: Callable[[str], None],
    ) -> None:
        self.elsewhere: int | None = None
        self._grace_s = grace_s
        self._silence_s = max(grace_s, silence_s)
        self._send = send
        self._say = say
        self._late: dict[int, _Late] = {}
        self._named: set[int] = set()
        self._first_end_s: float | None = None
        self._look_at_s = 0.0
        self._families: dict[int, list[int]] = {}

    def look(self, ranks: Collection[LocalRank], now_s: float) -> None:
        """Act on what the processes have done since the last look."""
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
        """Return how many seconds a rank's process may idle; None: as long as it likes."""
        if rank.state is RankState.GONE or rank.pid is None or rank.is_cut_off:
            return None
        if rank.board.exit_code() is not None:
            return self._grace_s + _OWN_LIMIT_S
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
        """Say that a process idles, with its stacks, and end it once it has for too long."""
        late = self._late.get(rank.number)
        if late is None or late.pid != pid:
            late = self._late[rank.number] = _Late(pid, Idleness(now_s, lambda: self._families.get(pid, [])))
        idle_s = late.idleness.seconds(now_s)
        is_over = _has_only_to_end(rank)
        if idle_s < (limit_s if is_over or late.is_told else self._grace_s):
            return
        if idle_s >= limit_s:
            rank.is_cut_off, rank.kill_at_s = True, now_s + _STACKS_S
        if not late.is_told and not is_default(pid, STACKS_SIGNAL):
            self._send(rank, STACKS_SIGNAL)
        late.is_told = True
        what = "has had nothing to do but end" if is_over else "has done nothing while others ended"
        then = " and is killed" if rank.is_cut_off else ""
        self._say(f"rank {rank.number} {what} for {idle_s:.0f} s{then}; its stacks are in {rank.log.path}")


def _has_only_to_end(rank: LocalRank) -> bool:
    """Return whether a rank's last block or its script is over."""
    return rank.state is RankState.FINISHED or rank.board.exit_code() is not None


_PROGRESS_EVERY_S = 0.25
_SILENT_EVERY_S, _SILENT_RARELY_S = 0.2, 5.0  # the longer a silence is, the less its length in seconds means
_SILENT_SHARE = 1 / 100
_WARM_UP_STEPS = 2  # the first of a generation compile, connect and allocate


class BeatWatch:
    """Measures how long the ranks of a node show no progress, and reports what the coordinator does not know yet.

    Args:
        heartbeat: how long a rank in its block may show no progress.

    Attributes:
        newest: the highest optimizer step that any rank of the node was seen to commit (-1: none).
    """

    def __init__(self, heartbeat: Heartbeat, report: Callable[[NodeMessage], None]) -> None:
        self.newest = NO_STEP
        self._heartbeat = heartbeat
        self._report = report
        self._longest_s = 0.0  # longest time between beats within a step of this generation
        self._pause_s = 0.0  # longest time between beats outside of a step, in all generations
        self._shows_progress = False
        self._target = self._began_after = NO_STEP
        self._told_progress: Progress | None = None
        self._tell_progress_at_s = 0.0
        self._told_shards: list[int] = []
        self._told_silent = False
        self._tell_silent_at_s = 0.0

    def begin(self, target: int, began_after: int) -> None:
        """Begin to watch a generation.

        Args:
            target: the step from which the coordinator counts the ranks as recovered; it is told of that at once.
            began_after: the highest step that was known to be committed when the generation began.
        """
        self._target, self._began_after = target, began_after
        self._tell_progress_at_s = self._longest_s = 0.0
        self.forget_told()

    def forget_told(self) -> None:
        """Tell the coordinator everything again: it is another one, or the generation is."""
        self._told_progress, self._told_silent, self._told_shards = None, False, []

    def look(self, ranks: Collection[LocalRank], generation: int, now_s: float) -> None:
        """Read the boards, and report what is due.

        Args:
            generation: the generation that began last (-1: none).
        """
        readings = {rank.number: rank.board.read() for rank in ranks}
        self.newest = max(self.newest, *(reading.committed for reading in readings.values()))
        self._tell_progress(readings, generation, now_s)
        self._tell_shards(readings)
        self._watch_beats(ranks, readings, now_s)
        self._tell_silent(ranks, readings, now_s)

    def _tell_progress(self, readings: dict[int, BoardReading], generation: int, now_s: float) -> None:
        begun = [reading.began_after for reading in readings.values() if reading.generation == generation]
        progress = Progress(
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
            self._report(Holding(shards))

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
            self._report(Silent([_silence_of(rank, age_s, readings[rank.number]) for rank, age_s in silent]))


def _silence_of(rank: LocalRank, age_s: float, reading: BoardReading) -> SilentRank:
    look, beats = ProcessLook.at(rank.pid), rank.beats
    age_ms, quiet_ms = int(age_s * 1000), int((time.monotonic() - beats.seen_at_s) * 1000)
    return SilentRank(
        rank.number, beats.last, age_ms, quiet_ms, reading.making, beats.in_step, look.letter, look.cpu_ms
    )
