"""Run a node's part of a job: the agent, its zygote and the ranks, from start to exit code."""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import logging
import os
import selectors
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.agent.preload import preloads_of
from checkpointless.agent.rank_log import LogCopies, RankLog
from checkpointless.agent.rank_process import Script
from checkpointless.agent.workers import FreshStarter, Worker, ZygoteStarter
from checkpointless.faults.node import AGENT_PID_ENV, CUT_SIGNAL
from checkpointless.posix.errands import Errands
from checkpointless.posix.temp_folder import private_temp_folder
from checkpointless.telemetry.events import EVENTS_FILE, RUN_DIR_ENV, EventLog
from checkpointless.telemetry.log_relay import LogRelay
from checkpointless.telemetry.scribe import scribe
from checkpointless.wire.board import Board
from checkpointless.wire.handshake import MIN_TOKEN_CHARACTERS, SPARE, TOKEN_ENV

if TYPE_CHECKING:
    from checkpointless.agent.links import Link
    from checkpointless.agent.watch import Watch
    from checkpointless.coordinator.limits import Limits
    from checkpointless.monitoring.http_status import HttpStatus

logger = logging.getLogger(__name__)

DEFAULT_REGROUP_TIMEOUT_S = 120.0
DEFAULT_NODE_TIMEOUT_S = 10.0
DEFAULT_JOIN_TIMEOUT_S = 600.0
DEFAULT_PORT = 29400  # torchrun's default
DEFAULT_HTTP_HOST = "127.0.0.1"
_CPU_HOOK = "checkpointless.megatron.cpu_platform:install"


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
        faults: specs of the faults to inject.
        record_steps: whether the ranks record the loss and digest of every step.
        fork_here: whether to fork the ranks' zygote from this process, which has imported what they need, instead
            of starting an interpreter; only in a process with one thread and no CUDA context.
        stream_logs: whether to copy the ranks' output to stdout as it comes.
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
        http_port: port on which health, status and metrics are served over HTTP (0: any free port; None: they are
            not served).
        http_host: address to which the HTTP port is bound.

    Raises:
        ValueError: a value is out of range, or the script does not exist.
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
    faults: tuple[str, ...] = ()
    record_steps: bool = False
    stream_logs: bool = True
    fork_here: bool = False
    extra_env: Mapping[str, str] = field(default_factory=dict)
    nnodes: int = 1
    node_rank: int = 0
    spares: int = 0
    rdzv_endpoint: str = ""
    token: str = field(default="", repr=False)
    node_timeout_s: float = DEFAULT_NODE_TIMEOUT_S
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    http_port: int | None = None
    http_host: str = DEFAULT_HTTP_HOST

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
        return _endpoint(self.rdzv_endpoint)

    def __post_init__(self) -> None:
        if self.nproc_per_node < 1:
            raise ValueError(f"the number of processes must be at least 1, not {self.nproc_per_node}")
        if self.nnodes < 1 or self.spares < 0:
            raise ValueError(f"there must be at least 1 node and 0 spares, not {self.nnodes} and {self.spares}")
        if not 0 <= self.node_rank < self.nnodes + self.spares:
            last = self.nnodes + self.spares - 1
            raise ValueError(f"the node rank must be from 0 to {last} (spares included), not {self.node_rank}")
        if not self.is_alone:
            self._check_meeting()
        for name in ("heartbeat_timeout_s", "regroup_timeout_s", "node_timeout_s", "join_timeout_s"):
            limit_s = getattr(self, name)
            if limit_s is not None and not limit_s > 0:
                raise ValueError(f"{name} must be a positive number of seconds, not {limit_s}")
        if self.max_incidents is not None and self.max_incidents < 0:
            raise ValueError(f"max_incidents must be 0 or more, not {self.max_incidents}")
        _check_http_port(self.http_port)
        if self.module:
            if not _module_exists(self.script):
                raise ValueError(f"there is no module {self.script!r}")
        elif not Path(self.script).is_file():
            raise ValueError(f"there is no script {self.script!r}")

    def _check_meeting(self) -> None:
        if not self.rdzv_endpoint:
            raise ValueError("several nodes need --rdzv-endpoint HOST[:PORT], where HOST is node 0 for all of them")
        _check_token(self.token)
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
    node_timeout_s: float = DEFAULT_NODE_TIMEOUT_S
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    http_port: int | None = None
    http_host: str = DEFAULT_HTTP_HOST

    def __post_init__(self) -> None:
        _check_http_port(self.http_port)
        _check_token(self.token)
        _endpoint(self.rdzv_endpoint)


def launch_coordinator(config: CoordinatorConfig, say: Callable[[str], None]) -> int:
    """Coordinate a job until it is over.

    It handles signals, so it must be called in the main thread.

    Args:
        say: called with each line for the terminal.

    Returns:
        0 if every rank ended successfully, else 1.

    Raises:
        OSError: the endpoint cannot be listened on, or the run directory cannot be created.
        ValueError: HTTP cannot be served at the configured address.
    """
    from checkpointless.agent.watch import Watch
    from checkpointless.coordinator.hosting import Meeting, coordinate
    from checkpointless.monitoring.snapshot import OUTSIDE

    if config.run_dir is not None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    address, port = _endpoint(config.rdzv_endpoint)
    events_path = config.run_dir / EVENTS_FILE if config.run_dir is not None else None
    meeting = Meeting(config.nnodes, config.nproc_per_node, address, port, config.token, config.node_timeout_s)
    signals: list[int] = []
    if config.http_port is None:
        with _handling(signals.append), LogRelay(), closing(scribe):
            return coordinate(meeting, _limits(config), EventLog(events_path, node=OUTSIDE), say, signals)
    from checkpointless.monitoring.http_status import HttpStatus

    watch = Watch(OUTSIDE)
    http = HttpStatus(config.http_host, config.http_port, watch)
    with _handling(signals.append), http, LogRelay(), closing(scribe):
        try:
            http.open(say)
        except OSError as error:
            raise ValueError(str(error)) from error  # not an OSError: the endpoint is not to blame
        return coordinate(meeting, _limits(config), watch.log(events_path), say, signals, watch.look_from_outside)


def launch(config: LaunchConfig, say: Callable[[str], None]) -> int:
    """Run this node's part of the job until it ends.

    It handles signals, so it must be called in the main thread. The ranks' output goes to
    ``<run dir>/logs/rank-N.log`` and, except on a spare, also to stdout with the rank in front of each line. When
    this returns, no process, socket or file is left but the run directory.

    Args:
        say: called with each line for the terminal: incidents, and why a job failed.

    Returns:
        0 if every rank ended successfully, else 1. torchrun (2.13) also returns 1 for a rank that fails with any
        code or signal, and for SIGINT or SIGTERM sent to itself. SIGTERM and the first Ctrl-C ask the ranks to end
        and give them 5 s; a second Ctrl-C kills them at once.

    Raises:
        OSError: the run directory cannot be created or written to, or the endpoint cannot be listened on.
    """
    logs = config.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    first = config.node_rank * config.nproc_per_node
    own = range(first, first + config.nproc_per_node) if config.node_rank < config.nnodes else range(0)
    events_path = config.run_dir / EVENTS_FILE
    signals: list[int] = []
    cuts = (CUT_SIGNAL,) if config.faults and not config.is_alone else ()
    if config.http_port is None:
        with _handling(signals.append, *cuts), private_temp_folder() as folder, LogRelay(), closing(scribe):
            return _run(config, own, folder, EventLog(events_path, node=config.node_rank), signals, say)
    from checkpointless.agent.watch import Watch
    from checkpointless.monitoring.http_status import HttpStatus

    watch = Watch(config.node_rank)
    http = HttpStatus(config.http_host, config.http_port, watch)
    with _handling(signals.append, *cuts), private_temp_folder() as folder, http, LogRelay(), closing(scribe):
        return _run(config, own, folder, watch.log(events_path), signals, say, http, watch)


def _run(
    config: LaunchConfig,
    own: range,
    folder: Path | None,
    events: EventLog,
    signals: list[int],
    say: Callable[[str], None],
    http: HttpStatus | None = None,
    watch: Watch | None = None,
) -> int:
    script = Script(config.script, tuple(config.script_args), config.module)
    hooks = (_CPU_HOOK,) if config.cpu else ()
    rank_env = _rank_env(config)
    zygote_log = "zygote.log" if config.is_alone else f"zygote-{config.node_rank}.log"
    starter = ZygoteStarter(
        script,
        preload=preloads_of(script) if config.preload is None else config.preload,
        after_preload=hooks,
        env=rank_env,
        log_path=config.run_dir / "logs" / zygote_log,
        folder=folder,
        fork_here=config.fork_here,
    )
    # These load torch, which takes seconds; the zygote does so at the same time.
    from checkpointless.agent.joining import JoinError
    from checkpointless.agent.node import NodeAgent
    from checkpointless.agent.server import serve
    from checkpointless.coordinator.hangs.policy import Heartbeat
    from checkpointless.posix.awake_clock import AwakeClock

    selector = selectors.DefaultSelector()
    try:
        if http is not None:
            http.open(say)  # not earlier: the zygote may have been forked from this process
        clock = AwakeClock()
        link = _link(config, selector, events, signals, say, clock)
    except (JoinError, OSError) as error:
        starter.close()
        say(str(error))
        return 1
    errands = Errands()
    # Not earlier, because an agent that is not admitted must leave the logs alone; and only briefly, because the
    # others wait to hear from this node from here on.
    if not errands.run(functools.partial(_begin_logs, config, own), False):
        say(f"the disk of {config.run_dir} does not answer: logs that are there already are not moved away")
    agent = NodeAgent(
        index=config.node_rank,
        heartbeat=Heartbeat.of(config.heartbeat_timeout_s),
        address=lambda: link.address,
        report=link.report,
        selector=selector,
        starter=starter,
        fresh_starter=lambda: FreshStarter(script, hooks, folder),
        make_worker=lambda rank: Worker(rank, Board.create(rank), RankLog(_log_path(config, rank), errands, say)),
        rank_env=rank_env,
        events=events,
        say=say,
        clock=clock,
    )
    copies = LogCopies(
        {rank: _log_path(config, rank) for rank in own} if config.stream_logs else {}, sys.stdout, errands
    )
    nproc, nnodes = config.nproc_per_node, config.nnodes
    events.emit("job", "begin", generation=0, nproc=nproc * nnodes, nnodes=nnodes, script=config.script)
    try:
        outcome = serve(agent, link, selector, signals, watch, clock)
    finally:
        if not copies.stop():
            say(f"the disk of {config.run_dir} does not answer: what the ranks printed last is not shown")
    events.emit("job", "end", generation=max(agent.generation, 0), code=outcome.code, reason=outcome.last_words)
    if not scribe.flush():
        say(f"the disk of {config.run_dir} does not answer: the last events of node {config.node_rank} may be lost")
    for line in outcome.last_words:
        say(line)
    return outcome.code


def _link(
    config: LaunchConfig,
    selector: selectors.BaseSelector,
    events: EventLog,
    signals: list[int],
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> Link:
    """Return the link to the coordinator, which runs here on node 0 unless there is one elsewhere."""
    from checkpointless.agent.joining import REFUSED_FOR_S, Joining
    from checkpointless.agent.links import GuestLink, HostLink
    from checkpointless.coordinator.coordinator import Coordinator
    from checkpointless.coordinator.hosting import Meeting, host

    limits = _limits(config)
    if config.is_alone:
        alone = Coordinator(limits, nnodes=1, nproc=config.nproc_per_node, events=events, say=say, clock=clock)
        return HostLink(alone, None)
    address, port = config.endpoint
    if config.node_rank == 0:
        meeting = Meeting(config.nnodes, config.nproc_per_node, address, port, config.token, config.node_timeout_s)
        try:
            return HostLink(*host(meeting, limits, selector, events, say, clock))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
    say(f"node {config.node_rank}: joining the job at {address}:{port}")
    first = True

    def join(number: int, stopped: Callable[[], bool]) -> Joining:
        nonlocal first
        again, first = not first, False
        return Joining(
            address,
            port,
            token=config.token,
            node=number,
            nproc=config.nproc_per_node,
            timeout_s=config.regroup_timeout_s if again else config.join_timeout_s,
            stopped=stopped,
            refused_for_s=REFUSED_FOR_S + (config.node_timeout_s if again else 0.0),
        )

    return GuestLink(
        join,
        config.node_rank if config.node_rank < config.nnodes else SPARE,
        nproc=config.nproc_per_node,
        selector=selector,
        silence_s=config.node_timeout_s,
        say=say,
        stopped=lambda: bool(signals),
        clock=clock,
    )


def _limits(config: LaunchConfig | CoordinatorConfig) -> Limits:
    from checkpointless.coordinator.hangs.policy import Heartbeat
    from checkpointless.coordinator.limits import Limits

    return Limits(
        Heartbeat.of(config.heartbeat_timeout_s),
        config.regroup_timeout_s,
        config.max_incidents,
        config.join_timeout_s,
        config.node_timeout_s,
    )


def _endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = port, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"the rendezvous endpoint must be HOST[:PORT], not {text!r}")
    return host.strip("[]"), int(port)


def _check_http_port(port: int | None) -> None:
    if port is not None and not 0 <= port < 65536:
        raise ValueError(f"the HTTP port must be from 0 to 65535, not {port}")


def _check_token(token: str) -> None:
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ValueError(
            f"several nodes need a secret of at least {MIN_TOKEN_CHARACTERS} characters in {TOKEN_ENV}, "
            "the same on all of them (openssl rand -hex 32 makes one)"
        )


def _begin_logs(config: LaunchConfig, own: range) -> bool:
    for rank in own:
        _keep_old(_log_path(config, rank))
        _log_path(config, rank).write_bytes(b"")
    return True


def _keep_old(log: Path) -> None:
    """Move away the log that this node's lost predecessor left in a shared run directory."""
    if log.exists():
        count = len(list(log.parent.glob(f"{log.stem}.*.log")))
        log.rename(log.with_name(f"{log.stem}.{count + 1}.log"))


def _log_path(config: LaunchConfig, rank: int) -> Path:
    return config.run_dir / "logs" / f"rank-{rank}.log"


def _rank_env(config: LaunchConfig) -> dict[str, str]:
    env = {RUN_DIR_ENV: str(config.run_dir.resolve()), "PYTHONUNBUFFERED": "1"}
    if config.nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = "1"
    if config.cpu:
        env["CHECKPOINTLESS_CPU"] = "1"
    if config.faults:
        env["CHECKPOINTLESS_FAULTS"] = json.dumps(list(config.faults))
    if not config.is_alone:
        env[AGENT_PID_ENV] = str(os.getpid())
    if config.record_steps:
        env["CHECKPOINTLESS_RECORD_STEPS"] = "1"
    return {**env, **config.extra_env}


def _module_exists(name: str) -> bool:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def _handling(note: Callable[[int], None], *more: int) -> Iterator[None]:
    """Pass SIGINT, SIGTERM and the signals in ``more`` to ``note`` instead of dying from them."""
    numbers = (signal.SIGINT, signal.SIGTERM, *more)
    before = {number: signal.signal(number, lambda received, _: note(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
