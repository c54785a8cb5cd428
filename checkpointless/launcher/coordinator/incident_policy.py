"""The policy on incidents: when to give up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from checkpointless.launcher.protocol.causes import Cause, CauseKind

SAME_FAILURE_LIMIT = 3
NO_PROGRESS_LIMIT = 5


class GiveUpDecision(NamedTuple):
    """The decision that the job cannot go on; ``last_words`` are the user's traceback ("" without one).

    It ``is_final`` if a restart of the whole job would be of no use, or would go over a limit.
    """

    reason: str
    last_words: str = ""
    is_final: bool = False


@dataclass(frozen=True)
class History:
    """What the limits need to know about the incidents so far."""

    max_incidents: int | None = None  # how many incidents may be recovered from (None: any number)
    incidents: int = 0
    high_water: int | None = None  # at the last incident, or after what storage brought back
    without_progress: int = 0  # how many incidents came in a row with no newly committed step before them
    best: int | None = None  # the highest step that was ever committed before a fallback to storage
    fallbacks: int = 0  # how often in a row the job fell back to storage with no step beyond ``best`` in between
    same_failure: int = 0  # how often in a row ``failure`` came with no new step in between
    failure: tuple[str, str, int] | None = None  # the type, the message and the step of the last exception

    def after(self, cause: Cause, high_water: int) -> tuple[History, GiveUpDecision | None]:
        """Return the history with one more incident, unless it was planned, and the decision to give up, if any."""
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
