"""What the agent's loop tells other threads: an immutable snapshot that it replaces a few times per second.

Only the loop calls :class:`Watch`; other threads only read its ``snapshot``, so no thread ever waits for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OUTSIDE = -1  # in place of a node's number: a coordinator in a separate process is no node
STALE_S = 5.0  # a loop that has not turned for this long counts as stuck
_Durations = Mapping[str, float]  # how many there were, and their sum: ``count`` and ``seconds``


@dataclass(frozen=True)
class JobNames:
    """What a job is called, for the labels of its metrics.

    Attributes:
        job: name of the script or recipe ("": not known).
        run_dir: the run directory ("": there is none).
        script: path of the script, or name of the module ("": not known).
    """

    job: str = ""
    run_dir: str = ""
    script: str = ""

    @property
    def run(self) -> str:
        """Name of the run."""
        return Path(self.run_dir).name


@dataclass(frozen=True)
class RankStatus:
    """A rank of this node.

    Attributes:
        committed: the last optimizer step that the rank's board shows (None: none yet).
        making: the step in the making that the rank's board shows (None: none yet).
        beat_age_s: seconds since the rank last showed progress; None while it is not in its block.
    """

    rank: int
    state: str
    pid: int | None
    incarnation: int
    committed: int | None
    making: int | None
    beat_age_s: float | None


@dataclass(frozen=True)
class JobNode:
    """A node, as the coordinator knows it.

    Attributes:
        state: ``joined``, ``loading`` (its agent is connected but cannot start ranks yet) or ``absent``.
    """

    node: int
    state: str
    why: str


@dataclass(frozen=True)
class JobRank:
    """A rank of any node, as the coordinator knows it."""

    rank: int
    node: int
    state: str
    incarnation: int


@dataclass(frozen=True)
class JobStatus:
    """The whole job, which only the coordinator knows.

    Attributes:
        cause: how the cause of the incident in progress came about: ``exception``, ``hang``, ``SIGKILL``...
        causes: how many incidents the ranks have met again after, by how the incident's cause came about.
        recoveries: time from the fault until the lost step was made, of the incidents after which it was made.
        rungs: the times in ``recoveries``, by how far up the recovery went (the labels of
            :class:`~checkpointless.observability.report.incidents.Rung`).
        inexact: after how many incidents the job resumed, and was another one.
    """

    nodes: tuple[JobNode, ...]
    ranks: tuple[JobRank, ...]
    spares: int
    incidents: int
    cause: str | None
    causes: Mapping[str, int]
    recoveries: _Durations
    rungs: Mapping[str, _Durations]
    steps_lost: int = 0
    given_up: int = 0
    inexact: int = 0


@dataclass(frozen=True)
class Snapshot:
    """One look at this node's part of the job.

    Attributes:
        node: number of the node; :data:`OUTSIDE` for a coordinator in a separate process.
        at_s: when the look was taken, in seconds since the epoch.
        looked_at_s: when the look was taken, on the monotonic clock (None: the agent has not joined the job).
        generation: the generation that began last (None: none yet).
        high_water: the highest committed step that this node knows of (None: none yet).
        incident: the incident that the ranks are being brought together for (None: none).
        respawns: how many processes were started in place of dead ones.
        exit_code: the job's exit code (None: the job has not ended).
        job: the whole job; None where the coordinator does not run.
    """

    node: int
    at_s: float = 0.0
    looked_at_s: float | None = None
    generation: int | None = None
    high_water: int | None = None
    incident: str | None = None
    respawns: int = 0
    device_checks_failed: int = 0
    exit_code: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    job: JobStatus | None = None

    def health(self, now_s: float) -> tuple[bool, str]:
        """Return whether the loop turns and the job goes on, and a short text that says so."""
        if self.looked_at_s is None:
            return False, "the agent has not joined the job yet"
        if self.exit_code is not None:
            return False, f"the job is over with exit code {self.exit_code}"
        age_s = now_s - self.looked_at_s
        if age_s > STALE_S:
            return False, f"the loop has not turned for {age_s:.1f} s"
        if self.incident is not None:
            return True, f"ok, recovering from incident {self.incident}"
        return True, "ok" if self.generation is not None else "ok, waiting for all ranks"
