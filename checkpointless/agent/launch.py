"""Run a job on one node: the agent, its zygote and the ranks, from start to exit code."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import selectors
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from checkpointless.agent.board import Board
from checkpointless.agent.preload import preloads_of
from checkpointless.agent.rank_process import Script
from checkpointless.agent.workers import FreshStarter, Worker, ZygoteStarter
from checkpointless.telemetry.events import EVENTS_FILE, RUN_DIR_ENV, EventLog

logger = logging.getLogger(__name__)

DEFAULT_HEARTBEAT_TIMEOUT_S = 600.0
DEFAULT_REGROUP_TIMEOUT_S = 120.0
_CPU_HOOK = "checkpointless.megatron.cpu_platform:install"


@dataclass(frozen=True)
class LaunchConfig:
    """What to run, and how.

    Attributes:
        nproc_per_node: number of ranks.
        script: path of a script, or name of a module if ``module``.
        script_args: its arguments.
        run_dir: where events and logs go; made if it is not there.
        preload: dotted names to import once before the ranks are forked; None: what the script imports from
            installed distributions.
        cpu: install the CPU platform for Megatron-core.
        heartbeat_timeout_s: how long a rank in its block may show no progress.
        regroup_timeout_s: how long ranks may take to the barrier of an incident.
        max_incidents: how many incidents the job may recover from (None: any number).
        faults: specs of faults to be injected.
        record_steps: have ranks record every step's loss and digest.
        fork_here: fork the ranks' zygote from this process, which has imported what they need, instead of starting
            an interpreter; only in a process with one thread and no CUDA context.
        stream_logs: copy the ranks' output to stdout as it comes.
        extra_env: what the ranks' environment gets besides.

    Raises:
        ValueError: a value is out of range, or the script is not there.
    """

    nproc_per_node: int
    script: str
    run_dir: Path
    script_args: tuple[str, ...] = ()
    module: bool = False
    preload: tuple[str, ...] | None = None
    cpu: bool = False
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
    regroup_timeout_s: float = DEFAULT_REGROUP_TIMEOUT_S
    max_incidents: int | None = None
    faults: tuple[str, ...] = ()
    record_steps: bool = False
    stream_logs: bool = True
    fork_here: bool = False
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.nproc_per_node < 1:
            raise ValueError(f"the number of processes must be at least 1, not {self.nproc_per_node}")
        for name in ("heartbeat_timeout_s", "regroup_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a positive number of seconds, not {getattr(self, name)}")
        if self.max_incidents is not None and self.max_incidents < 0:
            raise ValueError(f"max_incidents must be 0 or more, not {self.max_incidents}")
        if self.module:
            if not _module_exists(self.script):
                raise ValueError(f"there is no module {self.script!r}")
        elif not Path(self.script).is_file():
            raise ValueError(f"there is no script {self.script!r}")


def launch(config: LaunchConfig, say: Callable[[str], None]) -> int:
    """Run the job and wait for its end. Must be called in the main thread, since it handles signals.

    The ranks' output goes to ``<run dir>/logs/rank-N.log`` and, each line with its rank in front, to stdout.
    When this returns, no process, socket or file is left but the run directory.

    Args:
        say: takes lines for the terminal: incidents, and why a job failed.

    Returns:
        0 if every rank ended well, else 1, as torchrun (2.13) does for a rank that fails with whatever code or
        signal, and for SIGINT or SIGTERM to itself. SIGTERM and the first Ctrl-C ask the ranks to end and give
        them 5 s; a second Ctrl-C kills them at once.

    Raises:
        OSError: the run directory cannot be made or written to.
    """
    logs = config.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log_paths = {rank: logs / f"rank-{rank}.log" for rank in range(config.nproc_per_node)}
    for path in log_paths.values():
        path.write_bytes(b"")
    events = EventLog(config.run_dir / EVENTS_FILE)
    signals: list[int] = []
    with _handling(signals.append):
        return _run(config, log_paths, events, signals, say)


def _run(
    config: LaunchConfig,
    log_paths: dict[int, Path],
    events: EventLog,
    signals: list[int],
    say: Callable[[str], None],
) -> int:
    script = Script(config.script, tuple(config.script_args), config.module)
    hooks = (_CPU_HOOK,) if config.cpu else ()
    rank_env = _rank_env(config)
    starter = ZygoteStarter(
        script,
        preload=preloads_of(script) if config.preload is None else config.preload,
        after_preload=hooks,
        env=rank_env,
        log_path=config.run_dir / "logs" / "zygote.log",
        fork_here=config.fork_here,
    )
    # These load torch, which takes seconds; the zygote does so at the same time.
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog

    from checkpointless.agent.coordinator import Coordinator, Limits
    from checkpointless.agent.node import NodeAgent
    from checkpointless.agent.rendezvous import LOOPBACK, Rendezvous
    from checkpointless.agent.server import LocalLink, serve

    selector = selectors.DefaultSelector()
    link = LocalLink()
    coordinator = Coordinator(
        Limits(config.heartbeat_timeout_s, config.regroup_timeout_s, config.max_incidents),
        nnodes=1,
        nproc=config.nproc_per_node,
        rendezvous=Rendezvous(1, config.nproc_per_node),
        events=events,
        say=say,
    )
    agent = NodeAgent(
        index=0,
        address=LOOPBACK,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        report=link.report,
        selector=selector,
        starter=starter,
        fresh_starter=lambda: FreshStarter(script, hooks),
        workers=[Worker(rank, Board.create(rank), path) for rank, path in log_paths.items()],
        rank_env=rank_env,
        events=events,
        say=say,
    )
    tail = TailLog(
        "rank",
        {rank: str(path) for rank, path in log_paths.items()} if config.stream_logs else {},
        sys.stdout,
        log_line_prefixes={rank: f"[rank {rank}] " for rank in log_paths},
        interval_sec=0.05,
    ).start()
    events.emit("job", "begin", generation=0, nproc=config.nproc_per_node, script=config.script)
    try:
        outcome = serve(agent, coordinator, link, selector, signals)
    finally:
        tail.stop()
    events.emit("job", "end", generation=max(agent.generation, 0), code=outcome.code, reason=outcome.last_words)
    for line in outcome.last_words:
        say(line)
    return outcome.code


def _rank_env(config: LaunchConfig) -> dict[str, str]:
    env = {RUN_DIR_ENV: str(config.run_dir.resolve()), "PYTHONUNBUFFERED": "1"}
    if config.nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = "1"
    if config.cpu:
        env["CHECKPOINTLESS_CPU"] = "1"
    if config.faults:
        env["CHECKPOINTLESS_FAULTS"] = json.dumps(list(config.faults))
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
def _handling(note: Callable[[int], None]) -> Iterator[None]:
    """Note SIGINT and SIGTERM instead of dying of them."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda received, _: note(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
