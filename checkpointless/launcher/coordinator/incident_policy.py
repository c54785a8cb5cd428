"""The policy on incidents, as pure functions of plain values: which rank is the culprit, and when to give up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.causes import Cause, CauseKind

SAME_FAILURE_LIMIT = 3
NO_PROGRESS_LIMIT = 5
SAME_FAILURE_S = 2.0  # for all ranks to raise what the first one raised before the first step
STILLBORN_LIMIT = 5  # successors in one incident that end before they enter the block


@dataclass(frozen=True)
class GiveUpDecision:
    """The decision that the job cannot go on; ``last_words`` are the user's traceback ("" without one).

    It ``is_final`` if a restart of the whole job would be of no use, or would go over a limit.
    """

    reason: str
    last_words: str = ""
    is_final: bool = False


def may_be_certain(causes: Collection[Cause]) -> bool:
    """Return whether all of these causes are one exception before the first step, which all ranks may raise."""
    kinds = {(cause.kind, cause.how, cause.error, cause.message, cause.step) for cause in causes}
    return (
        len(kinds) == 1
        and next(iter(kinds))[:2] == (CauseKind.EXCEPTION, "exception")
        and all(cause.step == NO_STEP for cause in causes)
    )


def certain_failure(causes: Mapping[int, Cause], world_size: int) -> GiveUpDecision | None:
    """Return the decision to end a job of which every rank raises the same before the first step."""
    if len(causes) < world_size or not may_be_certain(causes.values()):
        return None
    first = min(causes.items())[1]
    who = "the only rank" if world_size == 1 else f"all {world_size} ranks"
    reason = f"{who} {first.what} before the first step: {first.detail}".removesuffix(": ")
    return GiveUpDecision(reason, first.traceback, is_final=True)


@dataclass(frozen=True)
class History:
    """What the limits need to know about the incidents so far.

    Attributes:
        max_incidents: how many incidents may be recovered from (None: any number).
        high_water: the newest committed step at the last incident, or the step that storage brought back after it.
        without_progress: how many incidents came in a row with no newly committed step before them.
        best: the highest step that was ever committed before a fallback to storage.
        fallbacks: how often in a row the job fell back to storage with no step beyond ``best`` in between.
        same_failure: how often in a row the exception ``failure`` came with no newly committed step in between.
        failure: the type, the message and the step of the last exception.
    """

    max_incidents: int | None = None
    incidents: int = 0
    high_water: int | None = None
    without_progress: int = 0
    best: int | None = None
    fallbacks: int = 0
    same_failure: int = 0
    failure: tuple[str, str, int] | None = None

    def after(self, cause: Cause, high_water: int) -> tuple[History, GiveUpDecision | None]:
        """Return the history with one more incident, and the decision to give up if that is one too many.

        What was planned is none.
        """
        if cause.kind is CauseKind.PLANNED:
            return self, None
        progress = self.high_water is None or high_water > self.high_water
        failure = (cause.error, cause.message, cause.step) if cause.kind is CauseKind.EXCEPTION else None
        if failure is None:
            same = 0 if progress else self.same_failure
            kept = None if progress else self.failure
        else:
            same = self.same_failure + 1 if failure == self.failure and not progress else 1
            kept = failure
        history = replace(
            self,
            incidents=self.incidents + 1,
            high_water=high_water,
            without_progress=1 if progress else self.without_progress + 1,
            same_failure=same,
            failure=kept,
        )
        return history, history._limit_reached(cause)

    def fell_back(self, lost: int, resumed: int) -> History:
        """Return the history after a fallback to storage, which counts, too; progress counts from there."""
        further = self.best is None or lost > self.best
        return replace(
            self,
            high_water=resumed,
            best=lost if further else self.best,
            fallbacks=1 if further else self.fallbacks + 1,
        )

    def _limit_reached(self, cause: Cause) -> GiveUpDecision | None:
        if self.same_failure >= SAME_FAILURE_LIMIT and cause.kind is CauseKind.EXCEPTION:
            reason = f"{cause}, {self.same_failure} times in a row with no step committed in between"
            return GiveUpDecision(reason, cause.traceback)
        if self.without_progress >= NO_PROGRESS_LIMIT:
            reason = (
                f"{self.without_progress} incidents in a row with no step committed in between; the last: {cause}"
            )
            return GiveUpDecision(reason, cause.traceback)
        if self.fallbacks >= NO_PROGRESS_LIMIT:
            reason = (
                f"the job fell back to storage {self.fallbacks} times and never came further than step "
                f"{self.best}; the last incident: {cause}"
            )
            return GiveUpDecision(reason, cause.traceback, is_final=True)
        if self.max_incidents is not None and self.incidents > self.max_incidents:
            reason = f"incident {self.incidents} is over the limit of {self.max_incidents}: {cause}"
            return GiveUpDecision(reason, cause.traceback, is_final=True)
        return None
