"""The coordinator's watch over ranks without progress: it asks where they stand and reports what it waits for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from checkpointless.launcher.coordinator.hang_policy import (
    PAUSE_TIMES,
    Diagnosis,
    Evidence,
    Finding,
    Heartbeat,
    Stance,
    Whereabouts,
    grace_s,
    judge,
    numbers,
    stalled,
    stances_of,
)
from checkpointless.launcher.protocol.node_messages import SilentRank
from checkpointless.system.process_tree import ProcessLook, ProcessState, state_of

_ASK_EVERY_S = 0.8  # so that a rank that hangs and answers is found within the limit and one second
_FRESH_S, _FRESH_SHARE = 2.0, 1 / 40  # how long a report of a silence holds; long silences are reported less often
_PLACES = 4  # that a report names at most
_MOVED_ON = -1  # the beat of a rank that its node does not report as silent


@dataclass(frozen=True)
class Silence:
    """A rank that has shown no progress for a while.

    Attributes:
        age_s: for how many seconds it has shown no progress, by its node's clock.
        heard_at_s: when its node reported that, by this process's clock.
        since_s: when it made its last progress, on this process's monotonic clock.
        first_at_s: when the first look came, by this process's clock.
    """

    beat: int
    age_s: float
    heard_at_s: float
    since_s: float
    making: int
    limit_s: float
    look: ProcessLook
    first: ProcessLook
    first_at_s: float

    @property
    def state(self) -> ProcessState:
        """The state of the rank's process."""
        return state_of(self.first, self.look, self.heard_at_s - self.first_at_s)

    def is_fresh(self, now_s: float) -> bool:
        """Return whether the node has reported on the rank just now."""
        return now_s - self.heard_at_s <= _FRESH_S + _FRESH_SHARE * self.age_s


@dataclass
class _Inquiry:
    """An inquiry into silent ranks, which are asked until they answer.

    Attributes:
        first: the number of the first question; every answer to it or to a later question counts.
        beats: for each rank that was asked, the beat at which it was stuck.
    """

    first: int
    last: int
    began_at_s: float
    asked_at_s: float
    beats: dict[int, int]
    answers: dict[int, Whereabouts] = field(default_factory=dict)

    def stack(self, rank: int, default: str = "") -> str:
        """Return the stack that a rank has sent, or ``default`` if it has not answered."""
        answer = self.answers.get(rank)
        return default if answer is None else answer.stack


@dataclass(frozen=True)
class _Hang:
    """A hang, for which ranks have to leave their block.

    Attributes:
        rank: the rank that hangs; None if all ranks wait for each other, or if a stall of many ranks has been
            waited for long enough.
        who: the names of the ranks, for people, where the hang is not of one rank.
        since_s: when the last progress was made, on this process's monotonic clock: the hang counts from there.
        stack: the stack of the rank's main thread, if the rank sent it; else that it did not answer.
        grace_s: how many seconds the rank has to come to the barrier before it is replaced; 0 if it does not even
            answer.
    """

    rank: int | None
    limit_s: float
    since_s: float
    step: int
    stack: str = ""
    beat: int = _MOVED_ON
    grace_s: float = 0.0
    who: str = ""

    @property
    def what(self) -> str:
        """The description of the hang, to be put after the name of the rank or ranks."""
        if self.rank is None and not self.who:
            return f"waited for each other with no progress for {self.limit_s:g} s"
        return f"made no progress for {self.limit_s:g} s"


@dataclass(frozen=True)
class Stall:
    """A report on a stall that is waited for.

    Attributes:
        up_to_s: for how many seconds the stall is waited for at most; 0 if it is over.
    """

    ranks: tuple[int, ...]
    running: int
    seconds: float
    up_to_s: float
    step: int
    places: str = ""

    def __str__(self) -> str:
        who = numbers(self.ranks)
        if not self.up_to_s:
            return f"the stall of {who} is over after {self.seconds:.0f} s"
        at = f" at step {self.step}" if self.step >= 0 else ""
        verb = "has" if len(self.ranks) == 1 else "have"
        return (
            f"{who} of {self.running} {verb} made no progress for {self.seconds:.0f} s{at} ({self.places}): "
            f"waiting up to {self.up_to_s:.0f} s, and nobody is replaced for it"
        )


class HangWatch:
    """Watches the ranks of a running generation through what their nodes report about silent ranks.

    Args:
        heartbeat: how long a rank may show no progress.
        ask: asks ranks where their main threads stand; called with the number of the question and the ranks.
        tell: called with a stall that is waited for: when it is noticed, then at growing intervals, and when it is
            over.

    Attributes:
        shows_progress: whether any rank of this job has ever shown progress beyond the entry of its block. As long
            as none has, silence means nothing.
        pause_s: the longest pause outside of a step on any node, in seconds.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        world: int,
        nproc: int,
        ask: Callable[[int, list[int]], None],
        tell: Callable[[Stall], None],
    ) -> None:
        self.shows_progress = False
        self.pause_s = 0.0
        self._heartbeat = heartbeat
        self._world = world
        self._nproc = nproc
        self._ask = ask
        self._tell = tell
        self._silent: dict[int, dict[int, Silence]] = {}  # by node
        self._inquiry: _Inquiry | None = None
        self._questions = 0
        self._next_inquiry_s = 0.0
        self._mute_since_s: dict[int, float] = {}
        self._told: Stall | None = None
        self._told_beats: dict[int, int] = {}
        self._told_age_s = 0.0
        self._steady = 0
        self._last_seen: object = None

    def forget(self) -> None:
        """Forget what was observed, because the generation is over or another begins."""
        self._silent, self._inquiry, self._mute_since_s = {}, None, {}
        self._told, self._told_beats = None, {}
        self._steady, self._last_seen = 0, None

    def hear(self, node: int, ranks: Iterable[SilentRank], longest_s: float, now_s: float) -> None:
        """Record which ranks of a node are silent now.

        Args:
            longest_s: the longest time between two beats in a step on any node, in seconds.
        """
        before = self._silent.get(node, {})
        self._silent[node] = {}
        for rank in ranks:
            look, since_s = ProcessLook(rank.letter, rank.cpu_ms), time.monotonic() - rank.quiet_ms / 1000
            known = before.get(rank.number)
            first, first_at_s = look, now_s
            if known is not None and known.beat == rank.beat:
                first, first_at_s = known.first, known.first_at_s
            limit_s = self._heartbeat.within_step_s(longest_s) if rank.in_step else self._ceiling_s
            self._silent[node][rank.number] = Silence(
                rank.beat, rank.age_ms / 1000, now_s, since_s, rank.making, limit_s, look, first, first_at_s
            )

    def answered(self, question: int, rank: int, where: Whereabouts) -> None:
        """Record where a rank stands, as it answered; a late answer counts, too."""
        inquiry = self._inquiry
        if inquiry is not None and inquiry.first <= question <= inquiry.last and rank in inquiry.beats:
            inquiry.answers[rank] = where

    def look(self, running: Iterable[int], now_s: float) -> list[_Hang]:
        """Return the hangs that are found now."""
        if self._inquiry is None and self._told is None and not any(self._silent.values()):
            return []
        known = {rank: found for node in self._silent.values() for rank, found in node.items()}
        everybody = tuple(running)
        silent = {rank: known[rank] for rank in everybody if rank in known and known[rank].is_fresh(now_s)}
        self._see_whether_it_is_over(known)
        if self._inquiry is None:
            self._begin_inquiry(silent, everybody, now_s)
            return []
        inquiry = self._inquiry
        evidence = self._evidence(inquiry, silent, now_s, everybody)
        mute = [rank for rank, each in evidence.items() if each.stance is Stance.MUTE]
        if mute and now_s - inquiry.began_at_s < _ASK_EVERY_S:
            return []
        steady = None if self.shows_progress else self._steadiness(evidence)
        diagnosis = judge(evidence, len(everybody), self._world, self._nproc, self._ceiling_s, steady)
        if diagnosis.finding is Finding.ASK_AGAIN:
            if now_s - inquiry.asked_at_s >= _ASK_EVERY_S:
                self._questions += 1
                inquiry.last, inquiry.asked_at_s = self._questions, now_s
                self._ask(self._questions, mute)
            return []
        self._inquiry = None
        shortest_s = min((each.limit_s for each in silent.values()), default=self._ceiling_s)
        self._next_inquiry_s = now_s + max(1.0, shortest_s / 10)
        if diagnosis.finding is Finding.WAIT:
            self._wait(diagnosis, evidence, silent, inquiry, len(everybody))
        return self._hangs(diagnosis, evidence, silent, inquiry)

    @property
    def _ceiling_s(self) -> float:
        return self._heartbeat.ceiling_s(self.pause_s)

    def _begin_inquiry(self, silent: Mapping[int, Silence], running: Iterable[int], now_s: float) -> None:
        ages_s = {rank: each.age_s for rank, each in silent.items()}
        suspects = stalled(ages_s, {rank: each.limit_s for rank, each in silent.items()})
        self._mute_since_s = {rank: at_s for rank, at_s in self._mute_since_s.items() if rank in suspects}
        if suspects and now_s >= self._next_inquiry_s:
            self._questions += 1
            beats = {rank: silent[rank].beat for rank in suspects}
            self._inquiry = _Inquiry(self._questions, self._questions, now_s, now_s, beats)
            self._ask(self._questions, list(suspects))

    def _evidence(
        self, inquiry: _Inquiry, silent: Mapping[int, Silence], now_s: float, running: Iterable[int]
    ) -> dict[int, Evidence]:
        """Return the evidence about the ranks that were asked and have not moved since."""
        found = {}
        stances = stances_of(inquiry.answers, inquiry.answers.keys() >= set(running))
        for rank, beat in inquiry.beats.items():
            each = silent.get(rank)
            if each is None or each.beat != beat:
                self._mute_since_s.pop(rank, None)
                continue
            mute_s = 0.0
            stance = stances.get(rank, Stance.MUTE)
            if stance is not Stance.MUTE:
                self._mute_since_s.pop(rank, None)
            else:
                mute_s = now_s - self._mute_since_s.setdefault(rank, inquiry.began_at_s)
            found[rank] = Evidence(stance, each.age_s, each.limit_s, each.state, mute_s)
        return found

    def _steadiness(self, evidence: Mapping[int, Evidence]) -> int:
        """Return how many times in a row all ranks were found where they are now."""
        seen = {rank: each.stance for rank, each in evidence.items()}
        busy = any(e.state is ProcessState.BUSY for e in evidence.values() if e.stance is not Stance.WAITS)
        self._steady = self._steady + 1 if seen == self._last_seen and not busy else 0
        self._last_seen = seen
        return self._steady

    def _hangs(
        self,
        diagnosis: Diagnosis,
        evidence: Mapping[int, Evidence],
        silent: Mapping[int, Silence],
        inquiry: _Inquiry,
    ) -> list[_Hang]:
        step = max((each.making for each in silent.values()), default=-1)
        if diagnosis.finding is Finding.ALL_WAIT:
            since_s = min(each.since_s for each in silent.values())
            return [_Hang(None, min(each.limit_s for each in silent.values()), since_s, step)]
        if diagnosis.finding is Finding.TOO_LONG:
            ceiling_s = self._ceiling_s
            self.pause_s = max(self.pause_s, 2 * ceiling_s / PAUSE_TIMES)  # if it was no hang, it will come again
            since_s = min(silent[rank].since_s for rank in diagnosis.ranks)
            return [_Hang(None, ceiling_s, since_s, step, who=numbers(diagnosis.ranks))]
        if diagnosis.finding is not Finding.CULPRITS:
            return []
        return [
            _Hang(
                rank,
                silent[rank].limit_s,
                silent[rank].since_s,
                silent[rank].making,
                inquiry.stack(rank, f"no answer; {silent[rank].state.value}"),
                silent[rank].beat,
                0.0 if evidence[rank].stance is Stance.MUTE else grace_s(silent[rank].limit_s),
            )
            for rank in diagnosis.ranks
        ]

    # ---- stalls that are waited for

    def _wait(
        self,
        diagnosis: Diagnosis,
        evidence: Mapping[int, Evidence],
        silent: Mapping[int, Silence],
        inquiry: _Inquiry,
        running: int,
    ) -> None:
        """Report a stall when it is new, and again when it has lasted twice as long as at the last report."""
        seconds = max(silent[rank].age_s for rank in diagnosis.ranks)
        if self._told is not None and seconds < 2 * self._told.seconds:
            return
        places: defaultdict[str, list[int]] = defaultdict(list)
        for rank in diagnosis.ranks:
            if evidence[rank].stance is Stance.MUTE:
                places[f"no answer, {evidence[rank].state.value}"].append(rank)
            else:
                places[_place(inquiry.stack(rank))].append(rank)
        named = [f"{numbers(ranks)}: {place}" for place, ranks in list(places.items())[:_PLACES]]
        if len(places) > _PLACES:
            named.append(f"{len(places) - _PLACES} more places")
        step = max(silent[rank].making for rank in diagnosis.ranks)
        self._told = Stall(diagnosis.ranks, running, seconds, self._ceiling_s, step, "; ".join(named))
        self._told_beats = {rank: silent[rank].beat for rank in diagnosis.ranks}
        self._tell(self._told)

    def _see_whether_it_is_over(self, known: Mapping[int, Silence]) -> None:
        told = self._told
        if told is None:
            return
        still = [
            known[rank] for rank, beat in self._told_beats.items() if rank in known and known[rank].beat == beat
        ]
        if still:
            self._told_age_s = max(each.age_s for each in still)
            return
        self._told, self._told_beats = None, {}
        self._tell(Stall(told.ranks, told.running, max(told.seconds, self._told_age_s), 0.0, told.step))


def _place(stack: str) -> str:
    """Return the innermost call of a stack, for example ``read in loader.py:31``."""
    for line in reversed(stack.splitlines()):
        parts = line.strip().split(", ")
        if len(parts) >= 3 and parts[0].startswith('File "') and parts[1].startswith("line "):
            file = parts[0][6:-1].rpartition("/")[2]
            return f"{parts[2].removeprefix('in ')} in {file}:{parts[1][5:]}"
    return "outside of a collective"
