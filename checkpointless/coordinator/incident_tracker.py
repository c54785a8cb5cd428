"""What a job is recovering from: the incident that is open, how far up its recovery goes, and what it cost.

An incident is open from its first cause until all ranks are together again. It is then recovering until the ranks
have made the step that it interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from checkpointless.coordinator.incident_policy import GiveUpDecision, History
from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import Edge, EventLog
from checkpointless.telemetry.narration import detected_line, recovered_line
from checkpointless.telemetry.rungs import Rung
from checkpointless.wire.board import NO_STEP
from checkpointless.wire.causes import Cause, CauseKind, attribute, culprit


@dataclass
class Incident:
    """An incident that is not over.

    Attributes:
        opened_at_s: when the incident was opened, on the monotonic clock.
        cause: the cause that explains all causes that are known so far.
        said: the cause that the terminal was told.
        killed_the_late: whether the ranks that did not come in time have been replaced.
        stillborn: how many successors ended before they entered the block.
        rung: how far up its recovery goes.
        steps_lost: how many committed steps storage did not bring back.
    """

    id: str
    opened_at_s: float
    cause: Cause
    said: Cause | None = None
    killed_the_late: bool = False
    stillborn: int = 0
    rung: Rung = Rung.IN_PROCESS
    steps_lost: int = 0


class IncidentTracker:
    """Follows the incidents of a job and reports them to the event log and the terminal.

    Args:
        max_incidents: how many incidents the job may recover from (None: any number).
        events: the job's event log.
        say: called with lines for the terminal.

    Attributes:
        generation: the generation that began last (-1: none).
        open: the incident whose ranks are not together again.
        recovering: the incident whose ranks are together again and make the lost step.
    """

    def __init__(self, max_incidents: int | None, events: EventLog, say: Callable[[str], None]) -> None:
        self.generation = -1
        self.open: Incident | None = None
        self.recovering: Incident | None = None
        self._count = 0
        self._history = History(max_incidents)
        self._events = events
        self._say = say

    def adopt(self, generation: int, incidents: int) -> None:
        """Take over a job that is in ``generation`` and has been through ``incidents`` incidents."""
        self.generation, self._count = generation, incidents
        self._history = replace(self._history, incidents=incidents)

    def begin(self, cause: Cause) -> Incident:
        """Open an incident; if the last one's step has not been made yet, its recovery is no longer reported."""
        self._count += 1
        self.open, self.recovering = Incident(str(self._count), time.monotonic(), cause), None
        return self.open

    def add_cause(self, cause: Cause) -> None:
        """Add a cause to the open incident, and report the cause if it explains the others."""
        assert self.open is not None
        self.open.cause = attribute([self.open.cause, cause])
        if self.open.cause.kind is not CauseKind.VICTIM:
            self._tell(self.open)

    def one_too_many(self, cause: Cause, high_water: int) -> GiveUpDecision | None:
        """Return why the job must end if one more incident with this cause would be one too many, else None."""
        return self._history.after(cause, high_water)[1]

    def gathered(self, high_water: int) -> GiveUpDecision | None:
        """Count the open incident, if there is one, now that all ranks are at the barrier.

        Returns:
            Why the job must end, if the incident is one too many.
        """
        if self.open is None:
            return None
        self._tell(self.open)
        self._history, give_up = self._history.after(self.open.cause, high_water)
        return give_up

    def regrouped(self, generation: int) -> None:
        """Record that ``generation`` begins."""
        self.generation = generation
        self.open, self.recovering = None, self.open

    def step_up(self, rung: Rung, why: str) -> None:
        """Raise the incident that is not over to ``rung``, if its recovery has not gone that far up yet."""
        incident = self.open or self.recovering
        if incident is not None and rung > incident.rung:
            incident.rung = rung
            self.emit(EventName.RUNG, "point", rung=rung.label, why=why)

    def fell_back(self, high_water: int, newest: int) -> None:
        """Record that the state after step ``newest`` was brought back; ``high_water`` had been committed."""
        self._history = self._history.fell_back(high_water, newest)
        if self.recovering is not None:
            self.recovering.steps_lost += high_water - newest
            back = "nothing" if newest == NO_STEP else f"step {newest}"
            why = f"storage or copies brought {back} back; step {high_water} had been committed"
            self.step_up(Rung.JOB, why)
            self._say(f"incident {self.recovering.id}: {why}")

    def recovered(self, step: int, high_water: int) -> None:
        """Record that step ``step``, which was lost (-1: none was), has been made again."""
        incident = self.recovering
        if incident is None:
            return
        seconds = time.monotonic() - incident.opened_at_s
        rung, lost = incident.rung.label, None if high_water == NO_STEP else incident.steps_lost
        made = None if step == NO_STEP else step
        self.emit(EventName.RECOVERED, "point", seconds=seconds, rung=rung, steps_lost=lost, step=made)
        self.recovering = None
        self._say(recovered_line(incident.id, seconds, rung, lost))

    def emit(self, stage: EventName, edge: Edge, *, rank: int | None = None, **fields: object) -> None:
        """Write an event of the incident that is not over, if there is one, or of no incident."""
        incident = self.open or self.recovering
        self._events.emit(
            stage,
            edge,
            generation=max(self.generation, 0),
            incident=incident.id if incident else None,
            rank=rank,
            **fields,
        )

    def _tell(self, incident: Incident) -> None:
        cause = incident.cause
        if cause is incident.said:
            return
        incident.said = cause
        self.emit(EventName.DETECT, "point", cause=str(cause), culprit=culprit(cause), how=cause.how)
        self._say(detected_line(incident.id, str(cause)))
