"""The coordinator's watch over ranks without progress: it asks where they stand and reports what it waits for.

The policy that separates hangs from waits and from shared stalls comes first, as pure functions of plain values.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from checkpointless.launcher.coordinator.job import Job, Node
from checkpointless.launcher.coordinator.job_config import PAUSE_TIMES
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.causes import Cause, CauseKind
from checkpointless.launcher.protocol.messages import Answer, Inquire, Kill, Progress, RankState, Silent, SilentRank
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.wording import numbered
from checkpointless.system.process_tree import ProcessLook, ProcessState

_NEARLY = 0.9  # ranks that wait for a stalled rank stopped at about the same time
SHARING = 0.5  # the share of its limit after which a rank counts as part of another rank's stall
BUSY_TIMES = 3.0  # for a rank that cannot answer because it computes
_LEAST_GRACE_S, MOST_GRACE_S = 1.0, 10.0
STEADY_LOOKS = 5  # at ranks that have never shown progress
_ASK_EVERY_S = 0.8  # so that a rank that hangs and answers is found within the limit and one second
_FRESH_S, _FRESH_SHARE = 2.0, 1 / 40  # how long a report of a silence holds; long silences are reported less often
_PLACES = 4  # that a report names at most


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
class _Silence:
    """What is known of a rank without progress for ``age_s``, as its node reported at ``heard_at_s``."""

    stance: _Stance
    age_s: float
    limit_s: float
    state: ProcessState = ProcessState.UNKNOWN
    mute_s: float = 0.0
    beat: int = -1
    making: int = NO_STEP
    since_s: float = 0.0  # when it made its last progress, on this process's monotonic clock
    heard_at_s: float = 0.0
    first: tuple[ProcessLook, float] = (ProcessLook(), 0.0)  # at this beat: what its process did, and when
    stack: str = ""  # of its main thread, if the rank has sent it

    def is_fresh(self, now_s: float) -> bool:
        """Return whether the node has reported on the rank just now."""
        return now_s - self.heard_at_s <= _FRESH_S + _FRESH_SHARE * self.age_s


class _Finding(Enum):
    NOTHING = "nothing to do"
    ASK_AGAIN = "who has not answered may still do so"
    WAIT = "a stall that must be waited for"
    CULPRITS = "ranks that hang while the others wait"
    ALL_WAIT = "all wait for each other"
    TOO_LONG = "a stall that has been waited for long enough"


class _Diagnosis(NamedTuple):
    finding: _Finding
    ranks: tuple[int, ...] = ()


def _stalled(silent: Mapping[int, _Silence]) -> list[int]:
    """Return the ranks to ask, which are none while every rank shows progress within its limit."""
    if not any(each.age_s >= each.limit_s for each in silent.values()):
        return []
    return sorted(rank for rank, each in silent.items() if each.age_s >= SHARING * each.limit_s)


def _is_shared(standing: Collection[int], world: int, nproc: int) -> bool:
    """Return whether what holds these ranks up is not their fault: it holds up half of the job, or a whole node.

    One rank of several is never enough; otherwise a hang of one rank of two, or of a node's only rank, would never
    be found. ``world`` counts the ranks whose block has returned, too.
    """
    if len(standing) < 2:
        return bool(standing) and world == 1
    here = Counter(rank // nproc for rank in standing)
    return 2 * len(standing) >= world or (nproc > 1 and nproc in here.values())


def _is_given_up(evidence: _Silence, ceiling_s: float) -> bool:
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
    silent: Mapping[int, _Silence],
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
    return _Diagnosis(_Finding.WAIT, tuple(standing)) if mute or unclear else _Diagnosis(_Finding.NOTHING)


def _is_gone(evidence: _Silence, ceiling_s: float) -> bool:
    """Return whether a rank of a shared stall does not answer, and nothing says that it shares the cause."""
    is_excused = evidence.stance is not _Stance.MUTE or evidence.state in _EXCUSED
    return not is_excused and _is_culprit(evidence, ceiling_s)


def _is_culprit(evidence: _Silence, ceiling_s: float) -> bool:
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


@dataclass
class _Inquiry:
    """An inquiry into silent ranks, which are asked until they answer.

    Every answer to question ``first`` or a later one counts. ``beats`` has the beat at which each rank was stuck.
    """

    first: int
    began_at_s: float
    asked_at_s: float
    beats: dict[int, int]
    answers: dict[int, Answer] = field(default_factory=dict)


class _Hang(NamedTuple):
    """A hang, for which ranks have to leave their block; it counts from the last progress.

    If it is that of one rank, that has ``grace_s`` to come to the barrier before it is replaced, unless it beats.
    """

    cause: Cause
    since_s: float
    stack: str = ""
    beat: int = -1
    grace_s: float = 0.0


class HangWatch:
    """Watches the ranks of a running generation through what their nodes report about silent ranks."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._heartbeat = job.config.heartbeat
        self._shows_progress = False  # whether any rank ever has, beyond its entry; if not, silence means nothing
        self._pause_s = 0.0  # the longest pause outside of a step on any node
        self._questions = 0
        self._next_inquiry_s = 0.0
        #: Until when a rank is to leave, with its beat and the generation, by rank.
        self._graces: dict[int, tuple[float, int, int]] = {}
        self.forget()

    def forget(self) -> None:
        """Forget what was observed, because the generation is over or another begins."""
        self._silent: dict[int, dict[int, _Silence]] = {}  # by node
        self._inquiry: _Inquiry | None = None
        self._mute_since_s: dict[int, float] = {}
        self._told: dict[int, int] = {}  # the ranks of the stall that was told, each with its beat
        self._steady = 0
        self._last_seen: object = None

    def note(self, progress: Progress) -> None:
        """Note whether the ranks of a node show progress, and how long they pause outside of steps."""
        self._shows_progress |= progress.shows
        self._pause_s = max(self._pause_s, progress.pause_ms / 1000)

    def hear(self, node: Node, message: Silent | Answer) -> None:
        """Record which ranks of a node are silent, or where a silent rank stands; a late answer counts, too."""
        job = self._job
        if isinstance(message, Answer):
            rank, inquiry = job.rank_of(message.rank, node).number, self._inquiry
            if inquiry is not None and inquiry.first <= message.id <= self._questions and rank in inquiry.beats:
                inquiry.answers[rank] = message
            return
        before = self._silent.get(node.index, {})
        numbers = [job.rank_of(said.number, node).number for said in message.ranks]
        self._silent[node.index] = {
            number: self._silence(said, before.get(number)) for number, said in zip(numbers, message.ranks)
        }

    def _silence(self, said: SilentRank, before: _Silence | None) -> _Silence:
        progress, now_s = self._job.progress, self._job.clock()
        longest_s = progress.longest_s if progress.are_complete else 0.0
        look = ProcessLook(said.letter, said.cpu_ms)
        first = before.first if before is not None and before.beat == said.beat else (look, now_s)
        return _Silence(
            _Stance.MUTE,
            said.age_ms / 1000,
            self._heartbeat.within_step_s(longest_s) if said.in_step else self._ceiling_s,
            look.state_since(first[0], now_s - first[1]),
            beat=said.beat,
            making=said.making,
            since_s=time.monotonic() - said.quiet_ms / 1000,
            heard_at_s=now_s,
            first=first,
        )

    def look(self, now_s: float, fault: Callable[[Cause, float], None]) -> None:
        """Call ``fault`` for each hang that is found now; a rank that answers has time to leave its block."""
        generation = self._job.generation
        for hang in self._find(now_s):
            rank = hang.cause.rank
            if rank is not None:
                self._job.incidents.emit(EventName.STACK, "point", rank=rank, stack=hang.stack)
            fault(hang.cause, hang.since_s)
            if rank is not None:
                self._graces[rank] = now_s + hang.grace_s, hang.beat, generation

    def kill_those_that_stay(self, now_s: float) -> None:
        """Have the ranks killed that hung and have not left their block in time."""
        for number in [number for number, (until_s, *_) in self._graces.items() if now_s >= until_s]:
            (_, beat, generation), rank = self._graces.pop(number), self._job.ranks[number]
            if rank.state is RankState.LEAVING and generation == self._job.generation:
                rank.node.send(Kill(number, rank.incarnation, generation, beat))

    def _find(self, now_s: float) -> list[_Hang]:
        if self._inquiry is None and not any(self._silent.values()):
            return []
        known = {rank: found for node in self._silent.values() for rank, found in node.items()}
        running = [rank.number for rank in self._job.ranks if rank.state is RankState.RUNNING]
        silent = {rank: known[rank] for rank in running if rank in known and known[rank].is_fresh(now_s)}
        if self._inquiry is None:
            self._begin_inquiry(silent, now_s)
            return []
        inquiry = self._inquiry
        asked = self._judged(inquiry, silent, now_s, running)
        mute = [rank for rank, each in asked.items() if each.stance is _Stance.MUTE]
        if mute and now_s - inquiry.began_at_s < _ASK_EVERY_S:
            return []
        steady = None if self._shows_progress else self._steadiness(asked)
        world, nproc = len(self._job.ranks), self._job.config.nproc_per_node
        finding, ranks = _judge(asked, len(running), world, nproc, self._ceiling_s, steady)
        if finding is _Finding.ASK_AGAIN:
            if now_s - inquiry.asked_at_s >= _ASK_EVERY_S:
                inquiry.asked_at_s = now_s
                self._ask(mute)
            return []
        self._inquiry = None
        shortest_s = min((each.limit_s for each in silent.values()), default=self._ceiling_s)
        self._next_inquiry_s = now_s + max(1.0, shortest_s / 10)
        if finding is _Finding.WAIT:
            self._wait({rank: asked[rank] for rank in ranks}, len(running))
        return self._hangs(finding, {rank: asked[rank] for rank in ranks}, silent)

    @property
    def _ceiling_s(self) -> float:
        return self._heartbeat.ceiling_s(self._pause_s)

    def _ask(self, ranks: list[int]) -> None:
        self._questions += 1
        asked: defaultdict[int, list[int]] = defaultdict(list)
        for number in ranks:
            asked[self._job.ranks[number].node.index].append(number)
        for index, numbers in asked.items():
            self._job.nodes[index].send(Inquire(self._questions, numbers))

    def _begin_inquiry(self, silent: Mapping[int, _Silence], now_s: float) -> None:
        suspects = _stalled(silent)
        self._mute_since_s = {rank: at_s for rank, at_s in self._mute_since_s.items() if rank in suspects}
        if suspects and now_s >= self._next_inquiry_s:
            self._ask(suspects)
            self._inquiry = _Inquiry(self._questions, now_s, now_s, {r: silent[r].beat for r in suspects})

    def _judged(
        self, inquiry: _Inquiry, silent: Mapping[int, _Silence], now_s: float, running: Iterable[int]
    ) -> dict[int, _Silence]:
        """Return what is known of the ranks that were asked and are stuck where they were then."""
        found, answers = {}, inquiry.answers
        stances = _stances_of(answers, answers.keys() >= set(running))
        for rank, beat in inquiry.beats.items():
            each = silent.get(rank)
            if each is None or each.beat != beat:
                self._mute_since_s.pop(rank, None)
            elif rank in stances:
                self._mute_since_s.pop(rank, None)
                found[rank] = replace(each, stance=stances[rank], stack=answers[rank].stack)
            else:
                mute_s = now_s - self._mute_since_s.setdefault(rank, inquiry.began_at_s)
                found[rank] = replace(each, mute_s=mute_s)
        return found

    def _steadiness(self, asked: Mapping[int, _Silence]) -> int:
        """Return how many times in a row all ranks were found where they are now."""
        seen = {rank: each.stance for rank, each in asked.items()}
        busy = any(e.state is ProcessState.BUSY for e in asked.values() if e.stance is not _Stance.WAITS)
        self._steady = self._steady + 1 if seen == self._last_seen and not busy else 0
        self._last_seen = seen
        return self._steady

    def _hangs(
        self, finding: _Finding, found: Mapping[int, _Silence], silent: Mapping[int, _Silence]
    ) -> list[_Hang]:
        step, no_progress = max((each.making for each in silent.values()), default=NO_STEP), "made no progress for"
        if finding is _Finding.ALL_WAIT:
            what = f"waited for each other with no progress for {min(e.limit_s for e in silent.values()):g} s"
            cause = Cause(CauseKind.LOSS, None, "hang", what, step)
            return [_Hang(cause, min(each.since_s for each in silent.values()))]
        if finding is _Finding.TOO_LONG:
            what = f"{no_progress} {self._ceiling_s:g} s"
            self._pause_s = max(self._pause_s, 2 * self._ceiling_s / PAUSE_TIMES)  # if no hang, it will come again
            cause = Cause(CauseKind.LOSS, None, "hang", what, step, who=numbered("rank", found))
            return [_Hang(cause, min(each.since_s for each in found.values()))]
        if finding is not _Finding.CULPRITS:
            return []
        hangs = []
        for rank, each in found.items():
            cause = Cause(CauseKind.LOSS, rank, "hang", f"{no_progress} {each.limit_s:g} s", each.making)
            is_mute = each.stance is _Stance.MUTE
            stack = f"no answer; {each.state.value}" if is_mute else each.stack
            hangs.append(_Hang(cause, each.since_s, stack, each.beat, 0.0 if is_mute else _grace_s(each.limit_s)))
        return hangs

    def _wait(self, stalled: Mapping[int, _Silence], running: int) -> None:
        """Report a stall that is waited for, once."""
        beats = {rank: each.beat for rank, each in stalled.items()}
        if beats.items() & self._told.items():
            return
        self._told = beats
        at: defaultdict[str, list[int]] = defaultdict(list)
        for rank, each in stalled.items():
            is_mute = each.stance is _Stance.MUTE
            at[f"no answer, {each.state.value}" if is_mute else _place(each.stack)].append(rank)
        named = [f"{numbered('rank', ranks)}: {place}" for place, ranks in list(at.items())[:_PLACES]]
        if len(at) > _PLACES:
            named.append(f"{len(at) - _PLACES} more places")
        places, up_to_s = "; ".join(named), self._ceiling_s
        seconds = max(each.age_s for each in stalled.values())
        step = max(each.making for each in stalled.values())
        about: dict[str, Any] = {"seconds": seconds, "up_to_s": up_to_s, "step": step, "places": places}
        self._job.incidents.emit(EventName.STALL, "point", ranks=list(stalled), **about)
        at_step = f" at step {step}" if step >= 0 else ""
        verb = "has" if len(stalled) == 1 else "have"
        self._job.say(
            f"{numbered('rank', stalled)} of {running} {verb} made no progress for {seconds:.0f} s{at_step} "
            f"({places}): waiting up to {up_to_s:.0f} s, and nobody is replaced for it"
        )


def _place(stack: str) -> str:
    """Return the innermost call of a stack, for example ``read in loader.py:31``."""
    for line in reversed(stack.splitlines()):
        parts = line.strip().split(", ")
        if len(parts) >= 3 and parts[0].startswith('File "') and parts[1].startswith("line "):
            file = parts[0][6:-1].rpartition("/")[2]
            return f"{parts[2].removeprefix('in ')} in {file}:{parts[1][5:]}"
    return "outside of a collective"
