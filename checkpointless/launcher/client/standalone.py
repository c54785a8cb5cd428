"""The client of a rank that is alone in its job and was not started by an agent of this package."""

from __future__ import annotations

from checkpointless.launcher.client.agent_client import RankClient
from checkpointless.launcher.coordinator.incident_policy import History
from checkpointless.launcher.protocol.causes import Cause, culprit
from checkpointless.launcher.protocol.messages import (
    Barrier,
    Done,
    FaultNotice,
    FaultReport,
    Finish,
    Go,
    Hello,
    RankMessage,
)
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import event_log
from checkpointless.system.environment import JOB_RESTART_COUNT_ENV, TORCHELASTIC_RESTART_COUNT_ENV


class FaultLimits:
    """The agent's limits on incidents, applied by the ranks themselves to what they report.

    Attributes:
        high_water: the highest optimizer step that must have been committed, as far as reports tell (-1: none).
    """

    def __init__(self) -> None:
        self.high_water = -1
        self._history = History()

    def after(self, cause: Cause) -> str | None:
        """Count one more incident.

        Returns:
            The reason why the job must end (None: it need not).
        """
        if cause.step > 0:
            self.high_water = max(self.high_water, cause.step - 1)
        self._history, give_up = self._history.after(cause, self.high_water)
        return None if give_up is None else f"{give_up.reason}\n{give_up.last_words}".rstrip()


def tell(generation: int, incident: str, cause: Cause) -> None:
    """Log the cause of an incident where no agent does; the rank that reported the incident calls this."""
    event_log().emit(
        EventName.DETECT,
        "point",
        generation=generation,
        incident=incident,
        cause=str(cause),
        culprit=culprit(cause),
        how=cause.how,
    )


class StandaloneClient(RankClient):
    """Regroups the only rank of a job that consists of this process.

    Args:
        has_launcher: whether a launcher started this process.
    """

    def __init__(self, has_launcher: bool = True) -> None:
        super().__init__(rank=0)
        self.has_launcher = has_launcher
        self._incidents = 0
        self._limits = FaultLimits()

    def close(self) -> None:
        """Close the client, which holds no resources."""
        self._lose("closed")

    def _send(self, message: RankMessage) -> None:
        if isinstance(message, Hello):
            self._hear(Go(message.generation, None, {}, -1))
        elif isinstance(message, FaultReport):
            self._incidents += 1
            cause, reason = message.cause, self._limits.after(message.cause)
            tell(message.generation, str(self._incidents), cause)
            self._hear(FaultNotice(message.generation, str(self._incidents), str(cause), self.rank))
            if reason is not None:
                self._lose(reason)
        elif isinstance(message, Barrier) and self._lost is None:
            coming = message.generation + 1
            env = {JOB_RESTART_COUNT_ENV: str(coming), TORCHELASTIC_RESTART_COUNT_ENV: str(coming)}
            self._hear(Go(coming, str(self._incidents), env, self._limits.high_water))
        elif isinstance(message, Done):
            self._hear(Finish())
