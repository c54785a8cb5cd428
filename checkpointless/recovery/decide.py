"""Decide which step to resume at, who must be filled and from whom: a pure function of what the ranks report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from checkpointless.state.port import SnapshotPoint
from checkpointless.transfer.rank_groups import Group, all_groups, compact, expanded, names

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.causes import Json


#: The parts of a rank to fill: the replica group of each, and the ranks that hold it.
Parts = tuple[tuple[Group, tuple[int, ...]], ...]


class Verdict(Enum):
    """The outcome of a decision."""

    RESUME = "resume"  # resume from memory, at the target step
    START = "start"  # no step of this fit was ever committed: begin as a new job does
    SKIP = "skip"  # this fit was over before the fault: a later fit of the same block is to be resumed
    REFUSE = "refuse"  # memory does not suffice; the reason says why


@dataclass(frozen=True)
class RankReport:
    """What one rank knows about itself.

    Attributes:
        committed: the optimizer step of the whole state that the rank holds, or None if it holds none.
        ready: whether the rank also holds the final gradients of step ``committed + 1`` and can apply them alone.
        torn: whether an update failed half-way; the rank's state then belongs to no step.
        parts: the rank's parts of the state, each by its replica group: the ranks that hold the same, this one
            included.
        digests: the digest of each part's shard at ``committed``, in the order of ``parts``, if checksums are on.
        stages: the points (``SnapshotPoint``) after step ``committed`` at which the rank has its state.
        streams: the steps and points for which the rank's random streams are known.
        saves: the background saves whose end the rank has not gone through: for each its number, the step and the
            stage after which it began, and whether its writer still works on it.
        examples: the name of a tensor of each part, in the order of ``parts``, if there are several.
        reduced: whether each part is the same on all its holders for sure, because it is reduced over them. If not,
            the rank is filled by ranks that hold all its parts as long as one of them lives, and its digests are
            compared with theirs.
        given_up: why the rank gave up its state, for people ("": it did not).
    """

    rank: int
    committed: int | None
    ready: bool
    torn: bool
    parts: tuple[Group, ...]
    digests: tuple[str, ...] = ()
    stages: tuple[int, ...] = (0,)
    streams: tuple[tuple[int, int], ...] = ()
    fit: int = 1
    offset: int = 0
    begun: int = 0
    saves: tuple[tuple[int, int, int, bool], ...] = ()
    examples: tuple[str, ...] = ()
    reduced: bool = True
    given_up: str = ""

    @classmethod
    def gathered(cls, answers: Sequence[Mapping[str, Any]], jump: int) -> list[RankReport]:
        """Return the ranks' reports; lost streams count as kept by the rank ``jump`` places further on."""
        reports = []
        parts = expanded([answer["report"]["parts"] for answer in answers])
        for rank, answer in enumerate(answers):
            each = answer["report"]
            streams = each["streams"] or (answers[(rank + jump) % len(answers)]["keeps"] if jump else [])
            report = msgspec.convert({**each, "streams": streams, "parts": ()}, cls)
            reports.append(replace(report, parts=parts[rank]))
        return reports

    def to_json(self) -> dict[str, Json]:
        """Return the report as plain data, with the groups in few bytes."""
        return {**asdict(replace(self, parts=())), "parts": [compact(group) for group in self.parts]}

    def example(self, group: Group) -> str:
        """Return the name of a tensor of a part in brackets; "" if the rank has only one part."""
        return f" ({self.examples[self.parts.index(group)]})" if group in self.parts[: len(self.examples)] else ""


@dataclass(frozen=True)
class Decision:
    """How the job resumes.

    Attributes:
        target: the step after which training resumes (None unless resuming).
        stage: how much of what follows that step is not done again: as much as every rank that keeps its state has
            behind it, and for which every other rank has its random streams. A background save of which a rank has
            lost its part is done again where possible, since the state that was saved is still at hand.
        redo: the ranks that apply the gradients of ``target``, which they still hold.
        refills: maps each rank to fill to the ranks that fill it.
        parts: maps each rank to fill to its parts, each with the ranks that hold it at ``target`` (after their
            redo).
        offset: how many steps of the job precede the fit that is resumed, now or after fits that are skipped.
        reason: why recovery is refused, in one line ("" otherwise).
    """

    verdict: Verdict
    target: int | None = None
    stage: int = 0
    redo: tuple[int, ...] = ()
    refills: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    offset: int = 0
    reason: str = ""
    parts: Mapping[int, Parts] = field(default_factory=dict)

    @property
    def moment(self) -> tuple[int, SnapshotPoint]:
        """The step and the point to resume at."""
        assert self.target is not None
        return self.target, SnapshotPoint(self.stage)

    def peers(self) -> dict[int, tuple[int, ...]]:
        """Return, for each rank to fill, the ranks that hold all its parts; if there are none, its widest part."""
        return {
            rank: peers_of(parts) or max((sources for _, sources in parts), key=len)
            for rank, parts in self.parts.items()
        }


def peers_of(parts: Parts) -> tuple[int, ...]:
    """Return the ranks that hold all parts of a rank to fill, in ascending order."""
    (_, first), *others = parts
    return tuple(sorted(set(first).intersection(*(sources for _, sources in others)))) if others else first


def decide(reports: Sequence[RankReport], high_water: int, fit: int = 1) -> Decision:
    """Decide how the job resumes, in time linear in the number of ranks.

    The target is the newest committed step that every part of the state can reach, that is, every replica group. A
    group reaches a step if one of its ranks holds it, or holds the step before and the final gradients. Every rank
    then is at the target, redoes its update or is refilled, each of its parts from that part's holders; two steps
    are never mixed. A step that no rank committed is not completed from gradients, although it could be: a rank
    that did not come as far has neither the random streams nor the loss of that step. ``high_water`` is the highest
    step that any rank was ever seen to commit (-1: none).

    Raises:
        ValueError: the reports are not one per rank, or contradict each other about the replica groups.
    """
    parts = {report.rank: report.parts for report in reports}
    if len(parts) != len(reports):
        raise ValueError("two reports come from one rank")
    groups = all_groups(parts)
    holders = {report.rank: report for report in reports if report.committed is not None and not report.torn}
    if not holders and high_water <= 0:
        return Decision(Verdict.START)
    if fit > max(report.begun for report in reports) > 0:  # and all fits before it are over
        return Decision(Verdict.START)
    held, offset = _fit_that_is_held(groups, holders)
    if held > fit:
        return Decision(Verdict.SKIP, offset=offset)
    holders = {rank: report for rank, report in holders.items() if report.fit == fit}

    suspects, corrupt = _corrupt(groups, holders, reports)
    if corrupt:
        return Decision(Verdict.REFUSE, reason=corrupt)
    for rank in suspects:
        holders.pop(rank, None)

    candidates = {report.committed for report in holders.values()} | {high_water}
    reachable: set[int] | None = None
    for members in groups:
        steps = set()
        for rank in members:
            report = holders.get(rank)
            if report is not None and report.committed is not None:
                steps.add(report.committed)
                if report.ready:
                    steps.add(report.committed + 1)
        if not steps:
            return Decision(Verdict.REFUSE, reason=_nobody_left(members, reports, high_water))
        reachable = steps if reachable is None else reachable & steps
    reachable = (reachable or set()) & candidates
    if not reachable:
        return Decision(Verdict.REFUSE, reason=_no_common_step(groups, holders))
    found = _assign(groups, holders, max(reachable), {report.rank: report for report in reports})
    return found if found.verdict is Verdict.REFUSE else replace(found, offset=offset)


def _assign(
    groups: list[Group], holders: Mapping[int, RankReport], target: int, reports: Mapping[int, RankReport]
) -> Decision:
    redo: list[int] = []
    behind: list[int] = []
    stages: list[set[int]] = []  # one set per rank
    for rank in sorted(reports):
        report = holders.get(rank)
        if report is not None and report.committed == target:
            stages.append(set(report.stages))
        elif report is not None and report.ready and report.committed == target - 1:
            redo.append(rank)
            stages.append({0})
        else:
            behind.append(rank)
    parts = _sources(groups, behind)
    _prefer_peers(parts, reports)
    refills = _of_parts(parts, _united)
    # If a rank's streams are unknown, another node has those right after the step, or no node has any.
    for rank in refills:
        stages.append({stage for step, stage in reports[rank].streams if step == target} or {0})
    common = set.intersection(*stages) if target > 0 else set.intersection(*stages[: len(reports) - len(refills)])
    if not common:
        return Decision(
            Verdict.REFUSE,
            reason=f"there is no moment after step {target} of which every rank has its state or streams",
        )
    stage = max(common)
    if all(any(step == target - 1 for step, _ in report.streams) for report in reports.values()):
        # Going back repeats what leads to the step, with the random streams from before the step.
        first_lost = min((at for step, at in _lost_saves(reports.values()) if step == target), default=stage)
        stage = max((each for each in common if each <= first_lost), default=stage)
    return Decision(Verdict.RESUME, target, stage, tuple(redo), refills, parts=parts)


def _sources(groups: Sequence[Group], behind: Sequence[int]) -> dict[int, Parts]:
    lacking = set(behind)
    parts: dict[int, Parts] = dict.fromkeys(behind, ())
    for members in groups:
        filled = [rank for rank in members if rank in lacking]
        if filled:
            sources = tuple(rank for rank in members if rank not in lacking)
            for rank in filled:
                parts[rank] += ((members, sources),)
    return parts


def _prefer_peers(parts: dict[int, Parts], reports: Mapping[int, RankReport]) -> None:
    """Where parts are only said to be the same, leave as sources those that hold all parts, if there are any."""
    apart = {rank: mine for rank, mine in parts.items() if not reports[rank].reduced and len(mine) > 1}
    for rank, peers in _of_parts(apart, peers_of).items():
        if peers:
            parts[rank] = tuple((group, peers) for group, _ in parts[rank])


def _of_parts(parts: Mapping[int, Parts], make: Callable[[Parts], tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Return what ``make`` gives for the parts of each rank; ranks with the same parts share the work."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    made = {}
    for rank, mine in parts.items():
        name = tuple(id(sources) for _, sources in mine)
        if name not in known:
            known[name] = make(mine)
        made[rank] = known[name]
    return made


def _united(parts: Parts) -> tuple[int, ...]:
    return tuple(sorted({source for _, sources in parts for source in sources}))


def _lost_saves(reports: Collection[RankReport]) -> set[tuple[int, int]]:
    """Return the (step, stage) after which each unfinished save began that not every rank continues."""
    begun = {save[:3] for report in reports for save in report.saves}
    going_on = Counter(save[:3] for report in reports for save in report.saves if save[3])
    return {(step, stage) for number, step, stage in begun if going_on[number, step, stage] < len(reports)}


def _fit_that_is_held(groups: list[Group], holders: Mapping[int, RankReport]) -> tuple[int, int]:
    """Return the newest fit of which every group has a holder, and how many steps precede it; (0, 0) if none."""
    common: set[tuple[int, int]] | None = None
    for members in groups:
        fits = {(holders[rank].fit, holders[rank].offset) for rank in members if rank in holders}
        common = fits if common is None else common & fits
    return max(common or {(0, 0)})


def _corrupt(
    groups: list[Group], holders: Mapping[int, RankReport], reports: Sequence[RankReport]
) -> tuple[list[int], str]:
    """Return ranks of which the majority of a group contradicts a digest, or a reason if there is no majority."""
    suspects: list[int] = []
    is_asked = any(report.digests for report in reports)
    alike = Counter(each.parts for each in reports if is_asked and not each.reduced and len(each.parts) > 1)
    for members in groups:
        by_step: dict[tuple[int, tuple[Group, ...]], dict[int, str]] = defaultdict(dict)
        for rank in members:
            report = holders.get(rank)
            if report is not None and report.committed is not None and report.digests:
                among = report.parts if alike[report.parts] > 1 else ()
                by_step[report.committed, among][rank] = report.digests[report.parts.index(members)]
        for (step, _), digests in by_step.items():
            if len(set(digests.values())) == 1:
                continue
            counts = Counter(digests.values()).most_common()
            if counts[0][1] == counts[1][1]:
                of = f"the shard of {_ranks(members)}{holders[min(digests)].example(members)}"
                return [], f"the replicas of {of} differ at step {step} and no majority says which is right"
            suspects += [rank for rank, digest in digests.items() if digest != counts[0][0]]
    return suspects, ""


def _nobody_left(members: Group, reports: Sequence[RankReport], high_water: int) -> str:
    mine = [report for report in reports if report.rank in members]
    torn = [report.rank for report in mine if report.torn]
    because = f" (an update failed half-way, or the state was given up, on {names(torn)})" if torn else ""
    why = next((f"; {report.given_up}" for report in mine if report.given_up), "")
    return (
        f"no living rank holds the shard of {_ranks(members)}{mine[0].example(members)}{because}; "
        f"the last committed step was {high_water}{why}"
    )


def _ranks(members: Group) -> str:
    return f"{'rank' if len(members) == 1 else 'ranks'} {names(members)}"


def _no_common_step(groups: list[Group], holders: Mapping[int, RankReport]) -> str:
    newest = {
        members: max((holders[rank].committed or 0 for rank in members if rank in holders), default=-1)
        for members in groups
    }
    ahead = max(newest, key=lambda members: newest[members])
    behind = min(newest, key=lambda members: newest[members])
    return (
        f"ranks {names(ahead)} are at step {newest[ahead]} and ranks {names(behind)} at step {newest[behind]}, "
        "and neither group can reach the other's step"
    )
