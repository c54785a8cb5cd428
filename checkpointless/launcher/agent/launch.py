"""Run a node's part of a job, or a coordinator in a process of its own, with signals, events and HTTP around it."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.launcher.agent.launch_config import LaunchConfig, rank_environment
from checkpointless.launcher.agent.links import JoinError, Link, link_to_coordinator
from checkpointless.launcher.agent.node import NodeAgent
from checkpointless.launcher.agent.ranks.fork_server import ForkServer
from checkpointless.launcher.agent.ranks.output import Output
from checkpointless.launcher.agent.ranks.preload import preloads_of
from checkpointless.launcher.agent.ranks.process_keeper import LocalRank
from checkpointless.launcher.agent.ranks.rank_process import Script, die_with_parent
from checkpointless.launcher.coordinator.hosting import TICK_S, coordinate
from checkpointless.launcher.coordinator.job import FAILED
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.protocol.board import NO_STEP, Board
from checkpointless.launcher.protocol.messages import End
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog
from checkpointless.observability.telemetry.scribe import LogRelay, scribe
from checkpointless.system.awake_clock import AwakeClock
from checkpointless.system.process_tree import ForkedProcess, own_age_s
from checkpointless.system.signals import CUT_SIGNAL, ENDING, PASSED_ON, handling
from checkpointless.system.temp_folder import SHARED_MEMORY, private_folder, private_temp_folder

if TYPE_CHECKING:  # only if HTTP is asked for
    from checkpointless.launcher.agent.watch import Watch
    from checkpointless.observability.monitoring.http_status import HttpStatus

_NO_HANDOVER = "a process that has to be replaced cannot hand its state to its successor"


def launch_coordinator(config: JobConfig, say: Callable[[str], None]) -> int:
    """Coordinate a job until it is over; return 0 if every rank ended successfully, else 1.

    It handles signals, so it must be called in the main thread.

    Raises:
        OSError: the endpoint cannot be listened on, or the run directory cannot be created.
        ValueError: the endpoint, the token or the address for HTTP cannot be used.
    """
    from checkpointless.observability.monitoring.metrics import OUTSIDE

    config.check_meeting()
    if config.run_dir is not None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    signals: list[int] = []
    events, http, watch = _observing(config, OUTSIDE)
    with handling(ENDING, signals.append), http or nullcontext(), LogRelay(), closing(scribe):
        try:
            if http is not None:
                http.open(say)
        except OSError as error:
            raise ValueError(str(error)) from error  # not an OSError: the endpoint is not to blame
        return coordinate(config, events, say, signals, None if watch is None else watch.look_from_outside)


def launch(config: LaunchConfig, say: Callable[[str], None]) -> int:
    """Run this node's part of the job until it ends.

    It handles signals, so it must be called in the main thread. The ranks' output goes to
    ``<run dir>/logs/rank-N.log`` and, except on a spare, also to stdout with the rank in front of each line. When
    this returns, no process, socket or file is left but the run directory.

    Returns:
        0 if every rank ended successfully, else 1. torchrun (2.13) also returns 1 for a rank that fails with any
        code or signal, and for a signal that ends the agent. The ranks get the same signal, and
        ``config.term_grace_s`` to end; a second Ctrl-C kills them at once.

    Raises:
        OSError: the run directory cannot be created or written to, or the endpoint cannot be listened on.
    """
    config.logs.mkdir(parents=True, exist_ok=True)
    signals: list[int] = []
    handled = (*ENDING, *PASSED_ON, *((CUT_SIGNAL,) if config.faults and not config.is_alone else ()))
    events, http, watch = _observing(
        config, config.node_rank, config.job or Path(config.script).stem, config.script
    )
    with (
        handling(handled, signals.append),
        private_temp_folder() as folder,
        http or nullcontext(),
        LogRelay(),
        closing(scribe),
    ):
        return _run(config, folder, events, signals, say, http, watch)


def _observing(
    config: JobConfig, node: int, job: str = "", script: str = ""
) -> tuple[EventLog, HttpStatus | None, Watch | None]:
    """Return the event log of this process and, if HTTP is asked for, its server and what that shows."""
    path = None if config.run_dir is None else config.run_dir / EVENTS_FILE
    if config.http_port is None:
        return EventLog(path, node=node), None, None
    from checkpointless.launcher.agent.watch import Watch
    from checkpointless.observability.monitoring.http_status import HttpStatus
    from checkpointless.observability.monitoring.metrics import JobNames

    watch = Watch(node, JobNames(job, "" if config.run_dir is None else str(config.run_dir), script))
    return watch.log(path), HttpStatus(config.http_host, config.http_port, watch), watch


def _run(
    config: LaunchConfig,
    folder: Path | None,
    events: EventLog,
    signals: list[int],
    say: Callable[[str], None],
    http: HttpStatus | None = None,
    watch: Watch | None = None,
) -> int:
    output = Output(
        config.logs,
        None if config.is_alone else config.node_rank,
        config.log_bytes,
        new_logs=config.own_ranks,
        terminal=_standard_output(),
        shown=config.shown_ranks,
        say=say,
    )
    with private_folder(lambda: SHARED_MEMORY, _NO_HANDOVER) as handover:
        env = rank_environment(config, handover)
        fork_servers = _fork_servers(config, folder, env, output)
        server = fork_servers(False)
        import torch.distributed  # noqa: F401 - takes seconds; the fork server imports it at the same time

        selector, clock = selectors.DefaultSelector(), AwakeClock()
        try:
            if http is not None:
                http.open(say)  # not earlier: the fork server may have been forked from this process
            link = link_to_coordinator(config, selector, events, signals, say, clock)
        except (JoinError, OSError) as error:
            server.close()
            output.close()
            say(str(error))
            return FAILED
        output.start()  # not earlier: an agent that is not admitted must leave the logs alone
        agent = NodeAgent(
            config,
            address=lambda: link.address,
            report=link.report,
            selector=selector,
            fork_server=server,
            bare_fork_server=lambda: fork_servers(True),
            make_rank=partial(_make_rank, config, output),
            rank_env=env,
            events=events,
            say=say,
            clock=clock,
            hosts=link.coordinator is not None,
        )
        nproc, nnodes = config.nproc_per_node * config.nnodes, config.nnodes
        began = partial(events.emit, EventName.JOB, "begin", generation=0, before_s=own_age_s())
        began(nproc=nproc, nnodes=nnodes, script=config.script)
        try:
            outcome = _serve(agent, link, selector, signals, watch, clock)
        finally:
            output.close()
        return _conclude(outcome, agent.job.generation, agent.newest, config, events, say)


def _fork_servers(
    config: LaunchConfig, folder: Path | None, env: dict[str, str], output: Output
) -> Callable[[bool], ForkServer]:
    """Return what starts a fork server: one with the script's imports, or a bare one."""
    script = Script(config.script, tuple(config.script_args), config.module)
    preload = preloads_of(script) if config.preload is None else config.preload

    def start(is_bare: bool) -> ForkServer:
        return ForkServer(
            script,
            preload=() if is_bare else preload,
            cpu=config.cpu,
            env=env,
            log=output.fork_server.begin(),
            close=output.descriptors(),
            folder=folder,
            fork_here=config.fork_here and not is_bare,
        )

    return start


def _make_rank(config: LaunchConfig, output: Output, number: int) -> LocalRank:
    is_shown = config.is_alone and number in config.shown_ranks
    return LocalRank(number, Board.create(number), output.of_rank(number), is_shown=is_shown)


def _serve(
    agent: NodeAgent,
    link: Link,
    selector: selectors.BaseSelector,
    signals: list[int],
    watch: Watch | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> End:
    """Run a node's part of a job until every rank's process has ended, and return how the job ended."""
    try:
        while agent.job.outcome is None or agent.alive() or link.is_needed(clock()):
            for key, _ in selector.select(TICK_S):
                key.data()
            now_s = clock()
            while signals:
                number = signals.pop(0)
                if number == CUT_SIGNAL:
                    link.cut()
                else:
                    agent.interrupted(number)
            agent.tick(now_s)
            link.deliver(agent, now_s)
            if watch is not None:
                watch.look(agent, link.coordinator, time.monotonic())
        return agent.job.outcome
    finally:
        agent.close()
        link.close()
        selector.close()


def _conclude(
    outcome: End, generation: int, newest: int, config: LaunchConfig, events: EventLog, say: Callable[[str], None]
) -> int:
    """Write and print how the job ended on this node, and return the exit code."""
    step = None if newest == NO_STEP else newest
    events.emit(
        EventName.JOB, "end", generation=max(generation, 0), code=outcome.code, reason=outcome.last_words, step=step
    )
    if not scribe.flush():
        say(f"the disk of {config.run_dir} does not answer: the last events of node {config.node_rank} may be lost")
    for line in outcome.last_words:
        say(line)
    return outcome.code


def _standard_output() -> int | None:
    """Return the descriptor of standard output; None if it has none, as in a notebook, or was closed."""
    try:
        return None if sys.stdout is None else sys.stdout.fileno()
    except OSError:
        return None


_END_S = 30.0  # for the kernel to end a process that was killed


class AgentProcess:
    """Forks an agent, which runs its node's part of a job.

    Its lines, and what it and its ranks print, go to files in the run directory. The agent is not one of the
    terminal's processes, since Ctrl-C is for this process, and ends with this process.
    """

    def __init__(self, config: LaunchConfig, folder: Path | None = None) -> None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        self._said = config.run_dir / f"agent-{config.node_rank}.said"
        self._said.write_text("")
        parent = os.getpid()
        with self._said.with_suffix(".log").open("ab") as log:
            self._process = ForkedProcess(lambda: self._run(config, folder, parent), output=log.fileno(), close=[])
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or the negative number of the signal that killed it; None as long as it runs."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Return :attr:`code`, as it is now."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send the agent a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the agent, with which its ranks end, and wait for its end."""
        self.send(signal.SIGKILL)
        self._process.wait(_END_S)

    def lines(self) -> tuple[str, ...]:
        """Return what the agent has said."""
        return tuple(self._said.read_text().splitlines())

    def _run(self, config: LaunchConfig, folder: Path | None, parent: int) -> int:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with_parent(parent, signal.SIGTERM)
        for name, number in (("stdout", 1), ("stderr", 2)):  # whatever has replaced those of this process
            setattr(sys, name, open(number, "w", buffering=1, errors="backslashreplace", closefd=False))  # noqa: SIM115
        if folder is not None:
            os.chdir(folder)
        with self._said.open("a", buffering=1) as said:
            return launch(config, lambda line: print(line, file=said))
