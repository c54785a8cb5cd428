"""The policy that tells hangs from waits and from shared stalls, as pure functions of plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from checkpointless.system.process_tree import ProcessState

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
        """Return the limit for a rank within a step, in seconds.

        Args:
            longest_s: the longest time that any rank took from one beat to the next within a step (0: not known
                yet).
        """
        if not self.adapts or longest_s <= 0:
            return self.limit_s
        return min(self.limit_s, max(FLOOR_S, _LONGEST_TIMES * longest_s))

    def ceiling_s(self, pause_s: float) -> float:
        """Return the limit for a rank outside of a step, and for a stall that ranks share, in seconds.

        Args:
            pause_s: the longest time that any rank took from one beat to the next outside of a step so far.
        """
        return max(self.limit_s, PAUSE_TIMES * pause_s) if self.adapts else self.limit_s


def grace_s(limit_s: float) -> float:
    """Return how many seconds a rank that was asked has to answer or to leave its block."""
    return min(MOST_GRACE_S, max(_LEAST_GRACE_S, limit_s / 2))


#: States in which a process may be held up by the same thing as the others, and cannot answer.
_EXCUSED = (ProcessState.BUSY, ProcessState.BLOCKED, ProcessState.TRACED)


class Stance(Enum):
    """A silent rank's answer to the question where its main thread stands."""

    WAITS = "in a collective"
    ELSEWHERE = "outside of a collective"
    UNCLEAR = "perhaps waiting for its device, and so for a collective"
    MUTE = "nothing"


@dataclass(frozen=True)
class Evidence:
    """What is known about a rank that shows no progress.

    Attributes:
        age_s: for how many seconds the rank has shown no progress.
        mute_s: for how many seconds it has been asked without an answer.
    """

    stance: Stance
    age_s: float
    limit_s: float
    state: ProcessState = ProcessState.UNKNOWN
    mute_s: float = 0.0


class Finding(Enum):
    """The outcome of an inquiry."""

    NOTHING = "nothing to do"
    ASK_AGAIN = "who has not answered may still do so"
    WAIT = "a stall that must be waited for"
    CULPRITS = "ranks that hang while the others wait"
    ALL_WAIT = "all wait for each other"
    TOO_LONG = "a stall that has been waited for long enough"


@dataclass(frozen=True)
class Diagnosis:
    """A finding and the ranks that it concerns."""

    finding: Finding
    ranks: tuple[int, ...] = ()


def stalled(ages_s: Mapping[int, float], limits_s: Mapping[int, float]) -> tuple[int, ...]:
    """Return the ranks to ask, which are none while every rank shows progress within its limit.

    Args:
        ages_s: for each running rank, the seconds since it last showed progress.
        limits_s: for each running rank, how many seconds it may show no progress.
    """
    if not any(age_s >= limits_s[rank] for rank, age_s in ages_s.items()):
        return ()
    return tuple(sorted(rank for rank, age_s in ages_s.items() if age_s >= SHARING * limits_s[rank]))


def is_shared(standing: Collection[int], world: int, nproc: int) -> bool:
    """Return whether what holds these ranks up is not their fault: it holds up half of the job, or a whole node.

    One rank of several is never enough; otherwise a hang of one rank of two, or of a node's only rank, would never
    be found.

    Args:
        standing: the ranks that stand still outside of a collective, or do not answer.
        world: how many ranks the job has, including those whose block has returned.
    """
    if len(standing) < 2:
        return bool(standing) and world == 1
    here = Counter(rank // nproc for rank in standing)
    return 2 * len(standing) >= world or (nproc > 1 and nproc in here.values())


def _is_given_up(evidence: Evidence, ceiling_s: float) -> bool:
    """Return whether a rank that does not answer must be replaced; what the kernel says outweighs its silence.

    A process that computes holds the interpreter, as a long call into a C library does. One that is blocked in the
    kernel could neither answer nor be killed. One that a debugger holds is being looked at.

    Args:
        ceiling_s: how many seconds a stall that is no rank's fault may take.
    """
    if evidence.mute_s < grace_s(evidence.limit_s):
        return False
    if evidence.state is ProcessState.BUSY:
        return evidence.age_s >= BUSY_TIMES * evidence.limit_s
    if evidence.state in (ProcessState.BLOCKED, ProcessState.TRACED):
        return evidence.age_s >= max(ceiling_s, BUSY_TIMES * evidence.limit_s)
    return True


def judge(
    silent: Mapping[int, Evidence],
    running: int,
    world: int,
    nproc: int,
    ceiling_s: float,
    steady: int | None = None,
) -> Diagnosis:
    """Find the ranks that hang: those outside of a collective, or mute, whose stall is not shared by many.

    A stall that ranks share is waited for up to the ceiling. Beyond it those that answer can leave their blocks;
    the few that do not even answer are given up.

    Victims alone are no reason to act while a rank that they may be waiting for still shows progress, unless
    that goes on for twice the ceiling.

    Args:
        silent: the evidence about each rank that was asked and has not moved since.
        ceiling_s: how many seconds a stall that ranks share is waited for.
        steady: None in a job that shows progress. In any other job silence means nothing, and only a rank that
            stands idle while others wait in a collective hangs; ``steady`` is then how many times in a row all
            ranks were found where they are.
    """
    standing = sorted(rank for rank, each in silent.items() if each.stance is not Stance.WAITS)
    if not standing:
        everybody = len(silent) == running and all(e.age_s >= _NEARLY * e.limit_s for e in silent.values())
        too_long = any(each.age_s >= 2 * ceiling_s for each in silent.values())
        if silent and steady is None and (everybody or too_long):
            return Diagnosis(Finding.ALL_WAIT)
        return Diagnosis(Finding.NOTHING)
    mute = [silent[rank] for rank in standing if silent[rank].stance is Stance.MUTE]
    if any(each.mute_s < grace_s(each.limit_s) for each in mute):
        return Diagnosis(Finding.ASK_AGAIN)
    if is_shared(standing, world, nproc):
        if steady is not None:
            return Diagnosis(Finding.NOTHING)
        if all(silent[rank].age_s < ceiling_s for rank in standing):
            return Diagnosis(Finding.WAIT, tuple(standing))
        gone = [rank for rank in standing if _is_gone(silent[rank], ceiling_s)]
        if gone and not is_shared(gone, world, nproc):
            return Diagnosis(Finding.CULPRITS, tuple(gone))
        return Diagnosis(Finding.TOO_LONG, tuple(standing))
    if steady is not None:
        idle = all(silent[rank].state is not ProcessState.BUSY for rank in standing)
        if not idle or len(standing) == len(silent) or steady < STEADY_LOOKS:
            return Diagnosis(Finding.NOTHING)
    culprits = tuple(rank for rank in standing if _is_culprit(silent[rank], ceiling_s))
    if culprits:
        return Diagnosis(Finding.CULPRITS, culprits)
    unclear = [rank for rank in standing if silent[rank].stance is Stance.UNCLEAR]
    if steady is None and any(silent[rank].age_s >= ceiling_s for rank in unclear):
        return Diagnosis(Finding.TOO_LONG, tuple(standing))
    return Diagnosis(
        Finding.WAIT if mute or unclear else Finding.NOTHING, tuple(standing) if mute or unclear else ()
    )


def _is_gone(evidence: Evidence, ceiling_s: float) -> bool:
    """Return whether a rank of a shared stall does not answer, and nothing says that it shares the cause."""
    is_excused = evidence.stance is not Stance.MUTE or evidence.state in _EXCUSED
    return not is_excused and _is_culprit(evidence, ceiling_s)


def _is_culprit(evidence: Evidence, ceiling_s: float) -> bool:
    if evidence.age_s < evidence.limit_s:
        return False
    return evidence.stance is Stance.ELSEWHERE or _is_given_up(evidence, ceiling_s)


def numbers(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 1, 2``, with the numbers of at most eight ranks."""
    listed = sorted(ranks)
    shown = ", ".join(str(rank) for rank in listed[:8])
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return ("rank " if len(listed) == 1 else "ranks ") + shown + more


_Launched = Mapping[int, Mapping[str, int]]  # for each rank, the number of collectives in each of its groups


@dataclass(frozen=True)
class Whereabouts:
    """A rank's answer to an inquiry.

    Attributes:
        in_collective: whether its main thread waits in a collective.
        is_async: whether collectives return when they have been launched, before the peers have come.
        launched: how many collectives it has launched in each of its process groups.
    """

    in_collective: bool
    stack: str
    is_async: bool = False
    launched: Mapping[str, int] = field(default_factory=dict)


def ahead(launched: _Launched) -> frozenset[int]:
    """Return the ranks that have launched a collective to which another rank of its group has not come."""
    least: dict[str, int] = {}
    for groups in launched.values():
        for group, count in groups.items():
            least[group] = min(count, least.get(group, count))
    return frozenset(
        rank for rank, groups in launched.items() if any(count > least[group] for group, count in groups.items())
    )


def behind(launched: _Launched) -> frozenset[int]:
    """Return the ranks that others wait for and that wait for nobody."""
    most: dict[str, int] = {}
    for groups in launched.values():
        for group, count in groups.items():
            most[group] = max(count, most.get(group, count))
    late = {
        rank for rank, groups in launched.items() if any(count < most[group] for group, count in groups.items())
    }
    return frozenset(late - ahead(launched))


def stances_of(answers: Mapping[int, Whereabouts], is_complete: bool) -> dict[int, Stance]:
    """Return where each rank stands that has answered.

    The stack of a rank whose launches return at once tells nothing. It waits if it is ahead of a peer; it holds the
    others up if it alone is behind. If several are, they may wait for each other in a way that nobody counts. If
    not all have answered, whoever is behind may be ahead of one that has not.

    Args:
        is_complete: whether every rank that is in its block has answered.
    """
    launched = {rank: answer.launched for rank, answer in answers.items()}
    waiting, late = ahead(launched), behind(launched)
    found = {}
    for rank, answer in answers.items():
        if answer.in_collective or (answer.is_async and rank in waiting):
            found[rank] = Stance.WAITS
        elif answer.is_async and not (is_complete and late == {rank}):
            found[rank] = Stance.UNCLEAR
        else:
            found[rank] = Stance.ELSEWHERE
    return found
