"""The limits that the coordinator enforces on ranks, nodes and incidents."""

from __future__ import annotations

from dataclasses import dataclass

from checkpointless.launcher.coordinator.hangs.policy import Heartbeat


@dataclass(frozen=True)
class Limits:
    """The limits that the coordinator enforces on ranks, nodes and incidents.

    Attributes:
        heartbeat: how long a rank in its block may show no progress.
        regroup_timeout_s: how many seconds ranks may take to reach the barrier of an incident.
        max_incidents: how many incidents the job may recover from (None: any number).
        join_timeout_s: how many seconds nodes may take to join the job at its start.
        node_timeout_s: how many seconds the nodes of a running job may take to find this coordinator (again) before
            they count as lost.
        max_restarts: how often the whole job may begin again where it would end.
    """

    heartbeat: Heartbeat
    regroup_timeout_s: float
    max_incidents: int | None
    join_timeout_s: float = 600.0
    node_timeout_s: float = 10.0
    max_restarts: int = 0
