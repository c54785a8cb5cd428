"""What a node's agent, or a coordinator in a process of its own, is asked to do; checked before anything starts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkpointless.launcher.agent.ranks.device_check import DEFAULT_DEVICE_CHECK_TIMEOUT_S, DeviceCheck
from checkpointless.launcher.agent.ranks.script_end import DEFAULT_EXIT_GRACE_S
from checkpointless.launcher.coordinator.hangs.policy import Heartbeat
from checkpointless.launcher.coordinator.hosting import Meeting
from checkpointless.launcher.coordinator.limits import Limits
from checkpointless.launcher.protocol.handshake import check_token

DEFAULT_REGROUP_TIMEOUT_S = 120.0
DEFAULT_NODE_TIMEOUT_S = 10.0
DEFAULT_JOIN_TIMEOUT_S = 600.0
DEFAULT_TERM_GRACE_S = 30.0  # torchrun's
DEFAULT_PORT = 29400  # torchrun's default
DEFAULT_HTTP_HOST = "127.0.0.1"
_LIMITS = (
    "heartbeat_timeout_s",
    "regroup_timeout_s",
    "node_timeout_s",
    "join_timeout_s",
    "term_grace_s",
    "exit_grace_s",
    "device_check_timeout_s",
)


@dataclass(frozen=True)
class LaunchConfig:
    """What to run on a node, and how.

    Attributes:
        nproc_per_node: number of ranks on the node.
        script: path of a script, or name of a module if ``module`` is set.
        script_args: arguments of the script.
        run_dir: directory for events and logs; created if it does not exist.
        preload: dotted names to import once before the ranks are forked; None: what the script imports from
            installed distributions.
        cpu: whether to install the CPU platform for Megatron-core.
        heartbeat_timeout_s: how many seconds a rank in its block may show no progress (None: within a step, ten
            times the longest silence of any rank so far, from 30 s to 10 minutes; elsewhere three times the longest
            pause so far, but at least 10 minutes).
        regroup_timeout_s: how many seconds ranks may take to reach the barrier of an incident.
        max_incidents: how many incidents the job may recover from (None: any number).
        max_restarts: how often the whole job may begin again, from the script's own checkpoint, where it would end.
        faults: specs of the faults to inject.
        strict: whether the job ends if a step that is made again after a fault is not the one that it was.
        record_steps: whether the ranks record the loss and digest of every step.
        fork_here: whether to fork the ranks' zygote from this process, which has imported what they need, instead
            of starting an interpreter; only in a process with one thread and no CUDA context.
        stream_logs: whether to copy the ranks' output to stdout as it comes.
        local_ranks_filter: the ranks of the node, from 0, whose output is copied (None: all).
        log_dir: directory of the logs; None: ``logs`` in ``run_dir``.
        log_bytes: size of the log of each rank, with the older files that it was divided into.
        extra_env: additional environment variables of the ranks.
        nnodes: how many nodes train.
        node_rank: this node's number, from 0; the number of a spare is ``nnodes`` or more.
        spares: how many nodes wait to take the place of a lost node.
        rdzv_endpoint: ``HOST[:PORT]`` of the coordinator, as all nodes reach it; required if there are several
            nodes. Node 0 coordinates, unless HOST is not its own address or ``checkpointless coordinator`` listens
            there.
        token: secret that only the agents of this job know; required if there are several nodes.
        node_timeout_s: after how many seconds of silence a node counts as lost.
        join_timeout_s: how many seconds to try to reach the coordinator, and how many seconds the coordinator waits
            for all nodes.
        term_grace_s: how many seconds the ranks have to end once the job was told to end, or has failed.
        exit_grace_s: how many seconds a rank's process may be idle once its script, or else its block, has ended.
        device_check: command that is run before a rank's process is started again, and that exits with 0 if the
            rank's device may be used ("": none).
        device_check_timeout_s: how many seconds it may take, less than ``regroup_timeout_s``.
        http_port: port on which health, status and metrics are served over HTTP (0: any free port; None: they are
            not served).
        http_host: address to which the HTTP port is bound.
        job: name of the job, for its metrics (default: that of the script).

    Raises:
        ValueError: a value is out of range, or the script or the device check does not exist.
    """

    nproc_per_node: int
    script: str
    run_dir: Path
    script_args: tuple[str, ...] = ()
    module: bool = False
    preload: tuple[str, ...] | None = None
    cpu: bool = False
    heartbeat_timeout_s: float | None = None
    regroup_timeout_s: float = DEFAULT_REGROUP_TIMEOUT_S
    max_incidents: int | None = None
    max_restarts: int = 0
    faults: tuple[str, ...] = ()
    strict: bool = False
    record_steps: bool = False
    stream_logs: bool = True
    local_ranks_filter: tuple[int, ...] | None = None
    log_dir: Path | None = None
    log_bytes: int = 1 << 30
    fork_here: bool = False
    extra_env: Mapping[str, str] = field(default_factory=dict)
    nnodes: int = 1
    node_rank: int = 0
    spares: int = 0
    rdzv_endpoint: str = ""
    token: str = field(default="", repr=False)
    node_timeout_s: float = DEFAULT_NODE_TIMEOUT_S
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    term_grace_s: float = DEFAULT_TERM_GRACE_S
    exit_grace_s: float = DEFAULT_EXIT_GRACE_S
    device_check: str = ""
    device_check_timeout_s: float = DEFAULT_DEVICE_CHECK_TIMEOUT_S
    http_port: int | None = None
    http_host: str = DEFAULT_HTTP_HOST
    job: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether this is the job's only node."""
        return self.nnodes + self.spares == 1

    @property
    def endpoint(self) -> tuple[str, int]:
        """Address and port of the coordinator.

        Raises:
            ValueError: ``rdzv_endpoint`` is not ``HOST[:PORT]``.
        """
        return endpoint_of(self.rdzv_endpoint)

    @property
    def shown_ranks(self) -> list[int]:
        """The ranks of this node whose output is copied to stdout."""
        first, chosen = self.node_rank * self.nproc_per_node, self.local_ranks_filter
        return [rank for rank in self.own_ranks if self.stream_logs and (chosen is None or rank - first in chosen)]

    @property
    def logs(self) -> Path:
        """The directory of the logs."""
        return self.log_dir or self.run_dir / "logs"

    @property
    def check(self) -> DeviceCheck | None:
        """The device check (None: none)."""
        return DeviceCheck.of(self.device_check, self.device_check_timeout_s) if self.device_check else None

    @property
    def own_ranks(self) -> range:
        """The ranks that this node runs from the beginning; a spare runs none."""
        first = self.node_rank * self.nproc_per_node
        return range(first, first + self.nproc_per_node) if self.node_rank < self.nnodes else range(0)

    def __post_init__(self) -> None:
        if self.nproc_per_node < 1:
            raise ValueError(f"the number of processes must be at least 1, not {self.nproc_per_node}")
        if self.nnodes < 1 or self.spares < 0:
            raise ValueError(f"there must be at least 1 node and 0 spares, not {self.nnodes} and {self.spares}")
        if not 0 <= self.node_rank < self.nnodes + self.spares:
            last = self.nnodes + self.spares - 1
            raise ValueError(f"the node rank must be from 0 to {last} (spares included), not {self.node_rank}")
        if any(rank >= self.nproc_per_node for rank in self.local_ranks_filter or ()):
            raise ValueError(f"the local ranks to show must be from 0 to {self.nproc_per_node - 1}")
        if not self.is_alone:
            self._check_meeting()
        for name in _LIMITS:
            limit_s = getattr(self, name)
            if limit_s is not None and not limit_s > 0:
                raise ValueError(f"{name} must be a positive number of seconds, not {limit_s}")
        if self.max_incidents is not None and self.max_incidents < 0:
            raise ValueError(f"max_incidents must be 0 or more, not {self.max_incidents}")
        _check_http_port(self.http_port)
        limit_s, regroup_s = self.device_check_timeout_s, self.regroup_timeout_s
        if self.check is not None and limit_s >= regroup_s:
            said = f"{limit_s:g} s must be less than --regroup-timeout, {regroup_s:g} s"
            raise ValueError(f"--device-check-timeout, {said}")
        if self.module:
            if not _module_exists(self.script):
                raise ValueError(f"there is no module {self.script!r}")
        elif not Path(self.script).is_file():
            raise ValueError(f"there is no script {self.script!r}")

    def _check_meeting(self) -> None:
        if not self.rdzv_endpoint:
            raise ValueError("several nodes need --rdzv-endpoint HOST[:PORT], where HOST is node 0 for all of them")
        check_token(self.token)
        _ = self.endpoint


@dataclass(frozen=True)
class CoordinatorConfig:
    """What to coordinate from a separate process. The fields are those of :class:`LaunchConfig`.

    Attributes:
        run_dir: directory for the job's events (None: they are not written).

    Raises:
        ValueError: the endpoint, the token or the port is invalid.
    """

    nnodes: int
    nproc_per_node: int
    rdzv_endpoint: str
    token: str = field(repr=False)
    run_dir: Path | None = None
    heartbeat_timeout_s: float | None = None
    regroup_timeout_s: float = DEFAULT_REGROUP_TIMEOUT_S
    max_incidents: int | None = None
    max_restarts: int = 0
    node_timeout_s: float = DEFAULT_NODE_TIMEOUT_S
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    http_port: int | None = None
    http_host: str = DEFAULT_HTTP_HOST

    @property
    def endpoint(self) -> tuple[str, int]:
        """Address and port to listen on."""
        return endpoint_of(self.rdzv_endpoint)

    def __post_init__(self) -> None:
        _check_http_port(self.http_port)
        check_token(self.token)
        endpoint_of(self.rdzv_endpoint)


def limits_of(config: LaunchConfig | CoordinatorConfig) -> Limits:
    """Return the limits that a coordinator with this configuration keeps."""
    return Limits(
        Heartbeat.of(config.heartbeat_timeout_s),
        config.regroup_timeout_s,
        config.max_incidents,
        config.join_timeout_s,
        config.node_timeout_s,
        config.max_restarts,
    )


def meeting_of(config: LaunchConfig | CoordinatorConfig) -> Meeting:
    """Return where the agents of a job with this configuration meet.

    Raises:
        ValueError: the job has no endpoint.
    """
    address, port = config.endpoint
    return Meeting(config.nnodes, config.nproc_per_node, address, port, config.token, config.node_timeout_s)


def endpoint_of(text: str) -> tuple[str, int]:
    """Return address and port of a coordinator.

    Args:
        text: ``HOST[:PORT]``; the default port is torchrun's.

    Raises:
        ValueError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = port, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"the rendezvous endpoint must be HOST[:PORT], not {text!r}")
    return host.strip("[]"), int(port)


def _check_http_port(port: int | None) -> None:
    if port is not None and not 0 <= port < 65536:
        raise ValueError(f"the HTTP port must be from 0 to 65535, not {port}")


def _module_exists(name: str) -> bool:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
