"""Finding ranks that make no progress, and telling who hangs from who merely waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

ANSWER_TIMEOUT_S = 0.8  # so that a hang is found within the limit and one second
NEARLY = 0.9  # ranks that wait for a stalled one stopped about when it did
DEFAULT_CEILING_S = 600.0
FLOOR_S = 30.0
LONGEST_TIMES = 10.0
_MOVED_ON = -1  # the beat of a rank that its node does not call silent


@dataclass(frozen=True)
class Heartbeat:
    """How long a rank in its block may show no progress.

    Attributes:
        ceiling_s: at most, wherever it is: also between two steps, where checkpoints are written, and in the first
            steps of a generation.
        adapts: whether a rank within a step has :data:`LONGEST_TIMES` times as long as any rank needed from one
            beat to the next so far, but at least :data:`FLOOR_S`.
    """

    ceiling_s: float = DEFAULT_CEILING_S
    adapts: bool = True

    @classmethod
    def of(cls, limit_s: float | None) -> Heartbeat:
        """One that keeps to ``limit_s``, or adapts if that is None."""
        return cls() if limit_s is None else cls(limit_s, adapts=False)

    def within_step_s(self, longest_s: float) -> float:
        """The limit of a rank in a step.

        Args:
            longest_s: the longest that any rank took from one beat to the next within a step (0: not known yet).
        """
        if not self.adapts or longest_s <= 0:
            return self.ceiling_s
        return min(self.ceiling_s, max(FLOOR_S, LONGEST_TIMES * longest_s))


@dataclass(frozen=True)
class Silence:
    """A rank that has shown no progress for a while.

    Attributes:
        beat: that it is stuck at.
        since_s: when that began, by this process's clock.
        making: the step in the making.
        limit_s: how long it may.
    """

    beat: int
    since_s: float
    making: int
    limit_s: float


@dataclass
class Inquiry:
    """A question that is out.

    Attributes:
        stalled: the ranks that were asked, with the beat that they were stuck at.
        in_collective: what they answered so far.
    """

    id: int
    asked_at_s: float
    stalled: dict[int, int]
    in_collective: dict[int, bool] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)

    def is_over(self, now_s: float) -> bool:
        """Whether all have answered, or had the time to."""
        return len(self.in_collective) == len(self.stalled) or now_s - self.asked_at_s >= ANSWER_TIMEOUT_S


@dataclass(frozen=True)
class Verdict:
    """What an inquiry came to.

    Attributes:
        culprits: ranks that hang, and must be replaced.
        everybody_waits: no rank hangs by itself, but all wait for each other.
    """

    culprits: tuple[int, ...]
    everybody_waits: bool


@dataclass(frozen=True)
class Hang:
    """A rank that hangs, or all of them.

    Attributes:
        rank: None if all wait for each other.
        limit_s: for how long there was no progress.
        step: in the making.
        stack: of its main thread, if it told.
    """

    rank: int | None
    limit_s: float
    step: int
    stack: str = ""


def stalled(ages_s: Mapping[int, float], limits_s: Mapping[int, float]) -> tuple[int, ...]:
    """The ranks to be asked: nobody while every rank shows progress within its limit.

    Args:
        ages_s: seconds since each running rank showed progress last.
        limits_s: how long each of them may show none.
    """
    if not any(age_s >= limits_s[rank] for rank, age_s in ages_s.items()):
        return ()
    return tuple(sorted(rank for rank, age_s in ages_s.items() if age_s >= NEARLY * limits_s[rank]))


def judge(inquiry: Inquiry, beats: Mapping[int, int], ages_s: Mapping[int, float], ceiling_s: float) -> Verdict:
    """Who hangs: who does not answer, or answers from outside a collective. The others are victims.

    Victims alone are no reason to act while a rank that they may be waiting for still shows progress, unless
    that goes on for twice the limit.

    Args:
        beats: the beat of each running rank now; one that moved on since it was asked is left alone.
        ages_s: as for :func:`stalled`.
        ceiling_s: how long any rank may show no progress, wherever it is.
    """
    still = [rank for rank, beat in inquiry.stalled.items() if beats.get(rank) == beat]
    culprits = tuple(rank for rank in still if not inquiry.in_collective.get(rank, False))
    everybody = len(still) == len(ages_s) or any(ages_s[rank] >= 2 * ceiling_s for rank in still)
    return Verdict(culprits, bool(still) and not culprits and everybody)


class HangWatch:
    """Watches the ranks of a running generation by what their nodes say of silent ones.

    Args:
        heartbeat: what ranks are held to.
        ask: asks ranks where their main threads stand; takes the number of the inquiry and theirs.
    """

    def __init__(self, heartbeat: Heartbeat, ask: Callable[[int, list[int]], None]) -> None:
        self._heartbeat = heartbeat
        self._ask = ask
        self._silent: dict[int, dict[int, Silence]] = {}  # by node
        self._inquiry: Inquiry | None = None
        self._inquiries = 0
        self._next_inquiry_s = 0.0

    def forget(self) -> None:
        """The generation is over, or another begins."""
        self._silent, self._inquiry = {}, None

    def hear(self, node: int, ranks: Iterable[list[int]], longest_s: float, now_s: float) -> None:
        """A node says which of its ranks are silent now.

        Args:
            ranks: as in :class:`~checkpointless.agent.node_protocol.Silent`.
            longest_s: the longest between two beats on any node.
            now_s: on the monotonic clock.
        """
        self._silent[node] = {
            rank: Silence(
                beat,
                now_s - age_ms / 1000,
                making,
                self._heartbeat.within_step_s(longest_s) if in_step else self._heartbeat.ceiling_s,
            )
            for rank, beat, age_ms, making, in_step in ranks
        }

    def answered(self, inquiry: int, rank: int, in_collective: bool, stack: str) -> None:
        """A rank says where its main thread stands."""
        if self._inquiry is not None and inquiry == self._inquiry.id:
            self._inquiry.in_collective[rank] = in_collective
            self._inquiry.stacks[rank] = stack

    def look(self, running: Iterable[int], now_s: float) -> list[Hang]:
        """The hangs that are found now.

        Args:
            running: the numbers of the ranks in their block.
            now_s: on the monotonic clock.
        """
        silent = {rank: found for node in self._silent.values() for rank, found in node.items()}
        if not silent and self._inquiry is None:
            return []
        ages_s = {rank: now_s - silent[rank].since_s if rank in silent else 0.0 for rank in running}
        beats = {rank: silent[rank].beat if rank in silent else _MOVED_ON for rank in ages_s}
        if self._inquiry is None:
            limits_s = {rank: silent[rank].limit_s if rank in silent else float("inf") for rank in ages_s}
            suspects = stalled(ages_s, limits_s)
            if suspects and now_s >= self._next_inquiry_s:
                self._inquiries += 1
                self._inquiry = Inquiry(self._inquiries, now_s, {rank: beats[rank] for rank in suspects})
                self._ask(self._inquiries, list(suspects))
            return []
        if not self._inquiry.is_over(now_s):
            return []
        inquiry, self._inquiry = self._inquiry, None
        shortest_s = min((each.limit_s for each in silent.values()), default=self._heartbeat.ceiling_s)
        self._next_inquiry_s = now_s + max(1.0, shortest_s / 10)
        verdict = judge(inquiry, beats, ages_s, self._heartbeat.ceiling_s)
        hangs = [
            Hang(rank, silent[rank].limit_s, silent[rank].making, inquiry.stacks.get(rank, "no answer"))
            for rank in verdict.culprits
        ]
        if verdict.everybody_waits:
            step = max(each.making for each in silent.values())
            hangs.append(Hang(None, shortest_s, step))
        return hangs
