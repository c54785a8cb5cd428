"""What is asked of a job as a whole: its nodes, where they meet, and the limits on ranks, nodes and incidents."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from checkpointless.launcher.protocol.channel import MIN_TOKEN_CHARACTERS
from checkpointless.system.environment import TOKEN_ENV

DEFAULT_PORT = 29400  # torchrun's default
FLOOR_S, _CEILING_S = 30.0, 600.0
_LONGEST_TIMES = 10.0
PAUSE_TIMES = 3.0  # a job that has paused for so long by itself may pause again, and longer


@dataclass(frozen=True)
class Heartbeat:
    """How long a rank in its block may show no progress, in seconds; without ``given_s`` that follows the job."""

    given_s: float | None = None

    @property
    def limit_s(self) -> float:
        """The limit in seconds where nothing is known of the job."""
        return _CEILING_S if self.given_s is None else self.given_s

    def within_step_s(self, longest_s: float) -> float:
        """Return the limit within a step, by the longest time between beats so far (0: not known)."""
        if self.given_s is not None or longest_s <= 0:
            return self.limit_s
        return min(_CEILING_S, max(FLOOR_S, _LONGEST_TIMES * longest_s))

    def ceiling_s(self, pause_s: float) -> float:
        """Return the limit outside of a step, and for a stall that ranks share, by the longest pause so far."""
        return max(_CEILING_S, PAUSE_TIMES * pause_s) if self.given_s is None else self.given_s


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What all nodes of a job, and its coordinator, are asked for.

    Attributes:
        rdzv_endpoint: ``HOST[:PORT]`` of the coordinator, as all nodes reach it; required if there are several
            nodes. Node 0 coordinates, unless HOST is not its own address or ``checkpointless coordinator`` listens
            there.
        token: secret that only the agents of this job know; required if there are several nodes.
        run_dir: directory for events and logs; None: no events are written.
        heartbeat_timeout_s: how long a rank in its block may show no progress (None: within a step, ten times the
            longest silence of any rank so far, from 30 s to 10 minutes; elsewhere three times the longest pause so
            far, but at least 10 minutes).
        regroup_timeout_s: how long ranks may take to reach the barrier of an incident.
        max_incidents: how many incidents the job may recover from (None: any number).
        max_restarts: how often the whole job may begin again, from the script's own checkpoint, where it would end.
        node_timeout_s: after how much silence a node counts as lost, and how long the nodes of a running job may
            take to find a new coordinator.
        join_timeout_s: how long to try to reach the coordinator, and how long the coordinator waits for all nodes.
        move_stragglers: whether a spare takes over the ranks of a node on which a rank is slow.
        http_port: port on which health, status and metrics are served (0: any free port; None: they are not).
    """

    nproc_per_node: int
    nnodes: int = 1
    rdzv_endpoint: str = ""
    token: str = field(default="", repr=False)
    run_dir: Path | None = None
    heartbeat_timeout_s: float | None = None
    regroup_timeout_s: float = 120.0
    max_incidents: int | None = None
    max_restarts: int = 0
    node_timeout_s: float = 10.0
    join_timeout_s: float = 600.0
    move_stragglers: bool = False
    http_port: int | None = None
    http_host: str = "127.0.0.1"

    @property
    def heartbeat(self) -> Heartbeat:
        """How long a rank in its block may show no progress."""
        return Heartbeat(self.heartbeat_timeout_s)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Address and port of the coordinator; ``ValueError`` if ``rdzv_endpoint`` is not ``HOST[:PORT]``."""
        host, colon, port = self.rdzv_endpoint.rpartition(":")
        if not colon:
            host, port = port, str(DEFAULT_PORT)
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"the rendezvous endpoint must be HOST[:PORT], not {self.rdzv_endpoint!r}")
        return host.strip("[]"), int(port)

    def check_meeting(self) -> None:
        """Raise ``ValueError`` if several nodes could not meet, because of the endpoint or the token."""
        if not self.rdzv_endpoint:
            raise ValueError("several nodes need --rdzv-endpoint HOST[:PORT], where HOST is node 0 for all of them")
        if len(self.token) < MIN_TOKEN_CHARACTERS:
            raise ValueError(
                f"several nodes need a secret of at least {MIN_TOKEN_CHARACTERS} characters in {TOKEN_ENV}, "
                "the same on all of them (openssl rand -hex 32 makes one)"
            )
        _ = self.endpoint
