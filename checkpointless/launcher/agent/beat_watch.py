"""Watches the boards of a node's ranks, and tells the coordinator how far they have come and which are silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from checkpointless.launcher.agent.ranks.local_rank import LocalRank
from checkpointless.launcher.coordinator.hangs.policy import SHARING, Heartbeat
from checkpointless.launcher.protocol.board import NO_STEP, BoardReading
from checkpointless.launcher.protocol.node_messages import (
    Holding,
    NodeMessage,
    Progress,
    RankState,
    Silent,
    SilentRank,
)
from checkpointless.system.process_state import ProcessLook

_PROGRESS_EVERY_S = 0.25
_SILENT_EVERY_S, _SILENT_RARELY_S = 0.2, 5.0  # the longer a silence is, the less its length in seconds means
_SILENT_SHARE = 1 / 100
_WARM_UP_STEPS = 2  # the first of a generation compile, connect and allocate


class BeatWatch:
    """Measures how long the ranks of a node show no progress, and reports what the coordinator does not know yet.

    Args:
        heartbeat: how long a rank in its block may show no progress.
        report: sends a message to the coordinator.

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
            ranks: all ranks of the node, at least one.
            generation: the generation that began last (-1: none).
            now_s: the current time on the agent's clock.
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
