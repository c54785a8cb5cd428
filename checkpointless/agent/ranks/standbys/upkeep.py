"""When a node's standbys are made: while its ranks train, so that neither a start nor a recovery waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from checkpointless.agent.ranks.known_job import KnownJob
from checkpointless.agent.ranks.local_rank import LocalRank
from checkpointless.agent.ranks.standbys.pool import Fate, StandbyNews
from checkpointless.telemetry.event_names import EventName
from checkpointless.wire.rank_state import RankState

SETTLE_S = 30.0  # after that, ranks in their block count as training, though no step of theirs is known
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 3600.0  # after a standby was lost; twice as long each time


class StandbyUpkeep:
    """Has a node's standbys made, and tells what becomes of them.

    Args:
        job: what this node knows of the job.
        count: how many standbys to keep.
        say: called with each line for the terminal.
        clock: clock of the pauses.
    """

    def __init__(self, job: KnownJob, count: int, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._job = job
        self._count = count
        self._say = say
        self._clock = clock
        self._generation = -1  # the one that was seen last, and since when
        self._since_s = 0.0
        self._is_missing = False  # whether fewer may wait than are to
        self._not_before_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._left_out: set[str] = set()  # imports that standbys do without

    def wanted(self, ranks: Iterable[LocalRank]) -> int:
        """Return how many standbys are to be there now; 0 if nothing is to be done about them now.

        They are made once every rank of the node has committed a step of the generation.
        """
        if not self._count or self._job.outcome is not None or self._job.finished:
            return 0
        now_s = self._clock()
        if self._job.generation != self._generation:
            self._generation, self._since_s, self._is_missing = self._job.generation, now_s, True
        if not self._is_missing or now_s < self._not_before_s or not self._are_training(ranks, now_s):
            return 0
        self._is_missing = False
        return self._count

    def note(self, news: StandbyNews) -> None:
        """Take and tell what has become of a standby."""
        if self._job.outcome is not None:
            return
        self._job.emit(
            EventName.STANDBY,
            "point",
            process=news.pid,
            fate=news.fate.value,
            why=news.why,
            seconds=news.seconds,
            private_bytes=news.private_bytes,
        )
        if news.fate is Fate.READY:
            return
        self._is_missing = True
        if news.fate is Fate.SPOILED:
            if news.why not in self._left_out:  # several may have begun together
                self._left_out.add(news.why)
                self._say(f"standbys do without {news.why}, which sets up CUDA when it is imported")
            return
        self._not_before_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._say(f"a standby is lost: {news.why}; until there is another, ranks are started without")

    def note_used(self) -> None:
        """Note that a standby has taken the place of a rank: standbys are worth making."""
        self._pause_s = FIRST_PAUSE_S

    def _are_training(self, ranks: Iterable[LocalRank], now_s: float) -> bool:
        mine = list(ranks)
        if not mine or any(rank.state is not RankState.RUNNING for rank in mine):
            return False
        if now_s - self._since_s >= SETTLE_S:
            return True
        return all(rank.board.read().committed > self._job.began_after for rank in mine)
