"""The coordinator's watch over ranks without progress: it asks where they stand and reports what it waits for.

The policy that separates hangs from waits and from shared stalls comes first, as pure functions of plain values.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from checkpointless.launcher.protocol.messages import Answer, SilentRank
from checkpointless.observability.telemetry.wording import numbered
from checkpointless.system.process_tree import ProcessLook, ProcessState, state_of

_NEARLY = 0.9  # ranks that wait for a stalled rank stopped at about the same time
SHARING = 0.5  # the share of its limit after which a rank counts as part of another rank's stall
_DEFAULT_CEILING_S = 600.0
FLOOR_S = 30.0
_LONGEST_TIMES = 10.0
PAUSE_TIMES = 3.0  # a job that has paused for so long by itself may pause again, and longer
BUSY_TIMES = 3.0  # for a rank that cannot answer because it computes
_LEAST_GRACE_S, MOST_GRACE_S = 1.0, 10.0
STEADY_LOOKS = 5  # at ranks that have never shown progress


@dataclass(frozen=True)
class Heartbeat:
    """The limits on how long a rank in its block may show no progress.

    Attributes:
        limit_s: the limit in seconds, wherever the rank is: also between two steps, where checkpoints are written,
            and in the first steps of a generation. If ``adapts`` is set, the limit outside of a step can be longer.
        adapts: whether the limits follow the job. If so, a rank within a step has :data:`_LONGEST_TIMES` times the
            longest time that any rank has needed from one beat to the next so far, but at least :data:`FLOOR_S`. A
            rank outside of a step has :data:`PAUSE_TIMES` times the longest pause so far, but at least ``limit_s``.
    """

    limit_s: float = _DEFAULT_CEILING_S
    adapts: bool = True

    @classmethod
    def of(cls, limit_s: float | None) -> Heartbeat:
        """Return limits that stay at ``limit_s``, or limits that adapt if ``limit_s`` is None."""
        return cls() if limit_s is None else cls(limit_s, adapts=False)

    def within_step_s(self, longest_s: float) -> float:
        """Return the limit for a rank within a step, in seconds."""
        if not self.adapts or longest_s <= 0:
            return self.limit_s
        return min(self.limit_s, max(FLOOR_S, _LONGEST_TIMES * longest_s))

    def ceiling_s(self, pause_s: float) -> float:
        """Return the limit for a rank outside of a step, and for a stall that ranks share, in seconds."""
        return max(self.limit_s, PAUSE_TIMES * pause_s) if self.adapts else self.limit_s


def _grace_s(limit_s: float) -> float:
    """Return how many seconds a rank that was asked has to answer or to leave its block."""
    return min(MOST_GRACE_S, max(_LEAST_GRACE_S, limit_s / 2))


#: States in which a process may be held up by the same thing as the others, and cannot answer.
_EXCUSED = (ProcessState.BUSY, ProcessState.BLOCKED, ProcessState.TRACED)


class _Stance(Enum):
    """A silent rank's answer to the question where its main thread stands."""

    WAITS = "in a collective"
    ELSEWHERE = "outside of a collective"
    UNCLEAR = "perhaps waiting for its device, and so for a collective"
    MUTE = "nothing"


@dataclass(frozen=True)
class _Evidence:
    """What is known about a rank that shows no progress."""

    stance: _Stance
    age_s: float
    limit_s: float
    state: ProcessState = ProcessState.UNKNOWN
    mute_s: float = 0.0


class _Finding(Enum):
    NOTHING = "nothing to do"
    ASK_AGAIN = "who has not answered may still do so"
    WAIT = "a stall that must be waited for"
    CULPRITS = "ranks that hang while the others wait"
    ALL_WAIT = "all wait for each other"
    TOO_LONG = "a stall that has been waited for long enough"


@dataclass(frozen=True)
class _Diagnosis:
    finding: _Finding
    ranks: tuple[int, ...] = ()


def _stalled(ages_s: Mapping[int, float], limits_s: Mapping[int, float]) -> tuple[int, ...]:
    """Return the ranks to ask, which are none while every rank shows progress within its limit."""
    if not any(age_s >= limits_s[rank] for rank, age_s in ages_s.items()):
        return ()
    return tuple(sorted(rank for rank, age_s in ages_s.items() if age_s >= SHARING * limits_s[rank]))


def _is_shared(standing: Collection[int], world: int, nproc: int) -> bool:
    """Return whether what holds these ranks up is not their fault: it holds up half of the job, or a whole node.

    One rank of several is never enough; otherwise a hang of one rank of two, or of a node's only rank, would never
    be found. ``world`` counts the ranks whose block has returned, too.
    """
    if len(standing) < 2:
        return bool(standing) and world == 1
    here = Counter(rank // nproc for rank in standing)
    return 2 * len(standing) >= world or (nproc > 1 and nproc in here.values())


def _is_given_up(evidence: _Evidence, ceiling_s: float) -> bool:
    """Return whether a rank that does not answer must be replaced; what the kernel says outweighs its silence.

    A process that computes holds the interpreter, as a long call into a C library does. One that is blocked in the
    kernel could neither answer nor be killed. One that a debugger holds is being looked at.
    """
    if evidence.mute_s < _grace_s(evidence.limit_s):
        return False
    if evidence.state is ProcessState.BUSY:
        return evidence.age_s >= BUSY_TIMES * evidence.limit_s
    if evidence.state in (ProcessState.BLOCKED, ProcessState.TRACED):
        return evidence.age_s >= max(ceiling_s, BUSY_TIMES * evidence.limit_s)
    return True


def _judge(
    silent: Mapping[int, _Evidence],
    running: int,
    world: int,
    nproc: int,
    ceiling_s: float,
    steady: int | None = None,
) -> _Diagnosis:
    """Find the ranks that hang: those outside of a collective, or mute, whose stall is not shared by many.

    A stall that ranks share is waited for up to the ceiling. Beyond it those that answer can leave their blocks;
    the few that do not even answer are given up. Victims alone are no reason to act while a rank that they may be
    waiting for still shows progress, unless that goes on for twice the ceiling.

    In a job that shows no progress silence means nothing, and only a rank that stands idle while others wait in a
    collective hangs; ``steady`` is then how many times in a row all ranks were found where they are, else None.
    """
    standing = sorted(rank for rank, each in silent.items() if each.stance is not _Stance.WAITS)
    if not standing:
        everybody = len(silent) == running and all(e.age_s >= _NEARLY * e.limit_s for e in silent.values())
        too_long = any(each.age_s >= 2 * ceiling_s for each in silent.values())
        if silent and steady is None and (everybody or too_long):
            return _Diagnosis(_Finding.ALL_WAIT)
        return _Diagnosis(_Finding.NOTHING)
    mute = [silent[rank] for rank in standing if silent[rank].stance is _Stance.MUTE]
    if any(each.mute_s < _grace_s(each.limit_s) for each in mute):
        return _Diagnosis(_Finding.ASK_AGAIN)
    if _is_shared(standing, world, nproc):
        if steady is not None:
            return _Diagnosis(_Finding.NOTHING)
        if all(silent[rank].age_s < ceiling_s for rank in standing):
            return _Diagnosis(_Finding.WAIT, tuple(standing))
        gone = [rank for rank in standing if _is_gone(silent[rank], ceiling_s)]
        if gone and not _is_shared(gone, world, nproc):
            return _Diagnosis(_Finding.CULPRITS, tuple(gone))
        return _Diagnosis(_Finding.TOO_LONG, tuple(standing))
    if steady is not None:
        idle = all(silent[rank].state is not ProcessState.BUSY for rank in standing)
        if not idle or len(standing) == len(silent) or steady < STEADY_LOOKS:
            return _Diagnosis(_Finding.NOTHING)
    culprits = tuple(rank for rank in standing if _is_culprit(silent[rank], ceiling_s))
    if culprits:
        return _Diagnosis(_Finding.CULPRITS, culprits)
    unclear = [rank for rank in standing if silent[rank].stance is _Stance.UNCLEAR]
    if steady is None and any(silent[rank].age_s >= ceiling_s for rank in unclear):
        return _Diagnosis(_Finding.TOO_LONG, tuple(standing))
    return _Diagnosis(
        _Finding.WAIT if mute or unclear else _Finding.NOTHING, tuple(standing) if mute or unclear else ()
    )


def _is_gone(evidence: _Evidence, ceiling_s: float) -> bool:
    """Return whether a rank of a shared stall does not answer, and nothing says that it shares the cause."""
    is_excused = evidence.stance is not _Stance.MUTE or evidence.state in _EXCUSED
    return not is_excused and _is_culprit(evidence, ceiling_s)


def _is_culprit(evidence: _Evidence, ceiling_s: float) -> bool:
    if evidence.age_s < evidence.limit_s:
        return False
    return evidence.stance is _Stance.ELSEWHERE or _is_given_up(evidence, ceiling_s)


_Launched = Mapping[int, Mapping[str, int]]  # for each rank, the number of collectives in each of its groups


def _ahead_and_behind(launched: _Launched) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ranks that wait for a peer in a collective, and those that are waited for and wait for nobody."""
    counts: defaultdict[str, list[int]] = defaultdict(list)
    for groups in launched.values():
        for group, count in groups.items():
            counts[group].append(count)
    least, most = ({group: pick(each) for group, each in counts.items()} for pick in (min, max))
    ahead = {rank for rank, groups in launched.items() if any(n > least[group] for group, n in groups.items())}
    late = {rank for rank, groups in launched.items() if any(n < most[group] for group, n in groups.items())}
    return frozenset(ahead), frozenset(late - ahead)


def _stances_of(answers: Mapping[int, Answer], is_complete: bool) -> dict[int, _Stance]:
    """Return where each rank stands that has answered.

    The stack of a rank whose launches return at once shows nothing. It waits if it is ahead of a peer; it holds the
    others up if it alone is late. If several are, they may wait for each other in a way that nobody counts. If not
    all have answered, whoever is late may be ahead of one that has not.
    """
    launched = {rank: answer.launched for rank, answer in answers.items()}
    waiting, late = _ahead_and_behind(launched)
    found = {}
    for rank, answer in answers.items():
        if answer.in_collective or (answer.is_async and rank in waiting):
            found[rank] = _Stance.WAITS
        elif answer.is_async and not (is_complete and late == {rank}):
            found[rank] = _Stance.UNCLEAR
        else:
            found[rank] = _Stance.ELSEWHERE
    return found


_ASK_EVERY_S = 0.8  # so that a rank that hangs and answers is found within the limit and one second
_FRESH_S, _FRESH_SHARE = 2.0, 1 / 40  # how long a report of a silence holds; long silences are reported less often
_PLACES = 4  # that a report names at most
_MOVED_ON = -1  # the beat of a rank that its node does not report as silent


@dataclass(frozen=True)
class _Silence:
    """A rank that has shown no progress for ``age_s``, as its node reported at ``heard_at_s``.

    Attributes:
        since_s: when it made its last progress, on this process's monotonic clock.
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
        return state_of(self.first, self.look, self.heard_at_s - self.first_at_s)

    def is_fresh(self, now_s: float) -> bool:
        """Return whether the node has reported on the rank just now."""
        return now_s - self.heard_at_s <= _FRESH_S + _FRESH_SHARE * self.age_s


@dataclass
class _Inquiry:
    """An inquiry into silent ranks, which are asked until they answer.

    Every answer to question ``first`` or a later one counts. ``beats`` has the beat at which each rank was stuck.
    """

    first: int
    last: int
    began_at_s: float
    asked_at_s: float
    beats: dict[int, int]
    answers: dict[int, Answer] = field(default_factory=dict)

    def stack(self, rank: int, default: str = "") -> str:
        """Return the stack that a rank has sent, or ``default`` if it has not answered."""
        answer = self.answers.get(rank)
        return default if answer is None else answer.stack


@dataclass(frozen=True)
class _Hang:
    """A hang, for which ranks have to leave their block.

    Attributes:
        rank: None if all ranks wait for each other, or if a stall of many has been waited for long enough.
        since_s: when the last progress was made, on this process's monotonic clock: the hang counts from there.
        stack: of the rank's main thread, if the rank sent it; else that it did not answer.
        grace_s: how long the rank has to come to the barrier before it is replaced; 0 if it does not even answer.
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
    """A report on a stall that is waited for, for ``up_to_s`` seconds at most."""

    ranks: tuple[int, ...]
    running: int
    seconds: float
    up_to_s: float
    step: int
    places: str

    def __str__(self) -> str:
        who = numbered("rank", self.ranks)
        at = f" at step {self.step}" if self.step >= 0 else ""
        verb = "has" if len(self.ranks) == 1 else "have"
        return (
            f"{who} of {self.running} {verb} made no progress for {self.seconds:.0f} s{at} ({self.places}): "
            f"waiting up to {self.up_to_s:.0f} s, and nobody is replaced for it"
        )


class HangWatch:
    """Watches the ranks of a running generation through what their nodes report about silent ranks.

    Args:
        ask: asks ranks where their main threads stand; called with the number of the question and the ranks.
        tell: called with a stall that is waited for, when it is noticed.

    Attributes:
        shows_progress: whether any rank has ever shown progress beyond the entry of its block; if not, silence
            means nothing.
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
        self._silent: dict[int, dict[int, _Silence]] = {}  # by node
        self._inquiry: _Inquiry | None = None
        self._questions = 0
        self._next_inquiry_s = 0.0
        self._mute_since_s: dict[int, float] = {}
        self._told: dict[int, int] = {}  # the ranks of the stall that was told, each with its beat
        self._steady = 0
        self._last_seen: object = None

    def forget(self) -> None:
        """Forget what was observed, because the generation is over or another begins."""
        self._silent, self._inquiry, self._mute_since_s, self._told = {}, None, {}, {}
        self._steady, self._last_seen = 0, None

    def hear(self, node: int, ranks: Iterable[SilentRank], longest_s: float, now_s: float) -> None:
        """Record which ranks of a node are silent; ``longest_s`` is the longest time between beats in a step."""
        before = self._silent.get(node, {})
        self._silent[node] = {}
        for rank in ranks:
            look, since_s = ProcessLook(rank.letter, rank.cpu_ms), time.monotonic() - rank.quiet_ms / 1000
            known = before.get(rank.number)
            first, first_at_s = look, now_s
            if known is not None and known.beat == rank.beat:
                first, first_at_s = known.first, known.first_at_s
            limit_s = self._heartbeat.within_step_s(longest_s) if rank.in_step else self._ceiling_s
            self._silent[node][rank.number] = _Silence(
                rank.beat, rank.age_ms / 1000, now_s, since_s, rank.making, limit_s, look, first, first_at_s
            )

    def answered(self, rank: int, answer: Answer) -> None:
        """Record where a rank stands, as it answered; a late answer counts, too."""
        inquiry = self._inquiry
        if inquiry is not None and inquiry.first <= answer.id <= inquiry.last and rank in inquiry.beats:
            inquiry.answers[rank] = answer

    def look(self, running: Iterable[int], now_s: float) -> list[_Hang]:
        """Return the hangs that are found now."""
        if self._inquiry is None and not any(self._silent.values()):
            return []
        known = {rank: found for node in self._silent.values() for rank, found in node.items()}
        everybody = tuple(running)
        silent = {rank: known[rank] for rank in everybody if rank in known and known[rank].is_fresh(now_s)}
        if self._inquiry is None:
            self._begin_inquiry(silent, everybody, now_s)
            return []
        inquiry = self._inquiry
        evidence = self._evidence(inquiry, silent, now_s, everybody)
        mute = [rank for rank, each in evidence.items() if each.stance is _Stance.MUTE]
        if mute and now_s - inquiry.began_at_s < _ASK_EVERY_S:
            return []
        steady = None if self.shows_progress else self._steadiness(evidence)
        diagnosis = _judge(evidence, len(everybody), self._world, self._nproc, self._ceiling_s, steady)
        if diagnosis.finding is _Finding.ASK_AGAIN:
            if now_s - inquiry.asked_at_s >= _ASK_EVERY_S:
                self._questions += 1
                inquiry.last, inquiry.asked_at_s = self._questions, now_s
                self._ask(self._questions, mute)
            return []
        self._inquiry = None
        shortest_s = min((each.limit_s for each in silent.values()), default=self._ceiling_s)
        self._next_inquiry_s = now_s + max(1.0, shortest_s / 10)
        if diagnosis.finding is _Finding.WAIT:
            self._wait(diagnosis, evidence, silent, inquiry, len(everybody))
        return self._hangs(diagnosis, evidence, silent, inquiry)

    @property
    def _ceiling_s(self) -> float:
        return self._heartbeat.ceiling_s(self.pause_s)

    def _begin_inquiry(self, silent: Mapping[int, _Silence], running: Iterable[int], now_s: float) -> None:
        ages_s = {rank: each.age_s for rank, each in silent.items()}
        suspects = _stalled(ages_s, {rank: each.limit_s for rank, each in silent.items()})
        self._mute_since_s = {rank: at_s for rank, at_s in self._mute_since_s.items() if rank in suspects}
        if suspects and now_s >= self._next_inquiry_s:
            self._questions += 1
            beats = {rank: silent[rank].beat for rank in suspects}
            self._inquiry = _Inquiry(self._questions, self._questions, now_s, now_s, beats)
            self._ask(self._questions, list(suspects))

    def _evidence(
        self, inquiry: _Inquiry, silent: Mapping[int, _Silence], now_s: float, running: Iterable[int]
    ) -> dict[int, _Evidence]:
        found = {}
        stances = _stances_of(inquiry.answers, inquiry.answers.keys() >= set(running))
        for rank, beat in inquiry.beats.items():
            each = silent.get(rank)
            if each is None or each.beat != beat:
                self._mute_since_s.pop(rank, None)
                continue
            mute_s = 0.0
            stance = stances.get(rank, _Stance.MUTE)
            if stance is not _Stance.MUTE:
                self._mute_since_s.pop(rank, None)
            else:
                mute_s = now_s - self._mute_since_s.setdefault(rank, inquiry.began_at_s)
            found[rank] = _Evidence(stance, each.age_s, each.limit_s, each.state, mute_s)
        return found

    def _steadiness(self, evidence: Mapping[int, _Evidence]) -> int:
        """Return how many times in a row all ranks were found where they are now."""
        seen = {rank: each.stance for rank, each in evidence.items()}
        busy = any(e.state is ProcessState.BUSY for e in evidence.values() if e.stance is not _Stance.WAITS)
        self._steady = self._steady + 1 if seen == self._last_seen and not busy else 0
        self._last_seen = seen
        return self._steady

    def _hangs(
        self,
        diagnosis: _Diagnosis,
        evidence: Mapping[int, _Evidence],
        silent: Mapping[int, _Silence],
        inquiry: _Inquiry,
    ) -> list[_Hang]:
        step = max((each.making for each in silent.values()), default=-1)
        if diagnosis.finding is _Finding.ALL_WAIT:
            since_s = min(each.since_s for each in silent.values())
            return [_Hang(None, min(each.limit_s for each in silent.values()), since_s, step)]
        if diagnosis.finding is _Finding.TOO_LONG:
            ceiling_s = self._ceiling_s
            self.pause_s = max(self.pause_s, 2 * ceiling_s / PAUSE_TIMES)  # if it was no hang, it will come again
            since_s = min(silent[rank].since_s for rank in diagnosis.ranks)
            return [_Hang(None, ceiling_s, since_s, step, who=numbered("rank", diagnosis.ranks))]
        if diagnosis.finding is not _Finding.CULPRITS:
            return []
        return [
            _Hang(
                rank,
                silent[rank].limit_s,
                silent[rank].since_s,
                silent[rank].making,
                inquiry.stack(rank, f"no answer; {silent[rank].state.value}"),
                silent[rank].beat,
                0.0 if evidence[rank].stance is _Stance.MUTE else _grace_s(silent[rank].limit_s),
            )
            for rank in diagnosis.ranks
        ]

    def _wait(
        self,
        diagnosis: _Diagnosis,
        evidence: Mapping[int, _Evidence],
        silent: Mapping[int, _Silence],
        inquiry: _Inquiry,
        running: int,
    ) -> None:
        """Report a stall, once."""
        beats = {rank: silent[rank].beat for rank in diagnosis.ranks}
        if beats.items() & self._told.items():
            return
        self._told = beats
        places: defaultdict[str, list[int]] = defaultdict(list)
        for rank in diagnosis.ranks:
            if evidence[rank].stance is _Stance.MUTE:
                places[f"no answer, {evidence[rank].state.value}"].append(rank)
            else:
                places[_place(inquiry.stack(rank))].append(rank)
        named = [f"{numbered('rank', ranks)}: {place}" for place, ranks in list(places.items())[:_PLACES]]
        if len(places) > _PLACES:
            named.append(f"{len(places) - _PLACES} more places")
        seconds = max(silent[rank].age_s for rank in diagnosis.ranks)
        step = max(silent[rank].making for rank in diagnosis.ranks)
        self._tell(Stall(diagnosis.ranks, running, seconds, self._ceiling_s, step, "; ".join(named)))


def _place(stack: str) -> str:
    """Return the innermost call of a stack, for example ``read in loader.py:31``."""
    for line in reversed(stack.splitlines()):
        parts = line.strip().split(", ")
        if len(parts) >= 3 and parts[0].startswith('File "') and parts[1].startswith("line "):
            file = parts[0][6:-1].rpartition("/")[2]
            return f"{parts[2].removeprefix('in ')} in {file}:{parts[1][5:]}"
    return "outside of a collective"
