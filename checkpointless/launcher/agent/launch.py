"""Run a node's part of a job, or a coordinator in a process of its own, with signals, events and HTTP around it."""

from __future__ import annotations

import itertools
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.launcher.agent.launch_config import LaunchConfig, import_environment
from checkpointless.launcher.agent.links import JoinError, Link, link_to_coordinator
from checkpointless.launcher.agent.node import NodeAgent
from checkpointless.launcher.agent.ranks.output import Output
from checkpointless.launcher.agent.ranks.preload import preloads_of
from checkpointless.launcher.agent.ranks.process_keeper import LocalRank, ProcessKeeper
from checkpointless.launcher.agent.ranks.rank_process import Script
from checkpointless.launcher.agent.ranks.zygote import ForkServer
from checkpointless.launcher.coordinator.hosting import TICK_S, coordinate
from checkpointless.launcher.coordinator.job import FAILED
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.protocol.board import NO_STEP, Board
from checkpointless.launcher.protocol.messages import End
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog
from checkpointless.observability.telemetry.scribe import LogRelay, scribe
from checkpointless.system.awake_clock import AwakeClock
from checkpointless.system.environment import (
    AGENT_PID_ENV,
    FAULTS_ENV,
    HANDOVER_ENV,
    PYTHONUNBUFFERED_ENV,
    RECORD_STEPS_ENV,
    RUN_DIR_ENV,
    STRICT_ENV,
    TORCH_DISABLE_ADDR2LINE_ENV,
    TORCH_FR_BUFFER_SIZE_ENV,
    TORCH_NCCL_TRACE_BUFFER_SIZE_ENV,
    TORCH_SHOW_CPP_STACKTRACES_ENV,
    YES,
)
from checkpointless.system.process_tree import ForkedProcess, die_with_parent
from checkpointless.system.signals import CUT_SIGNAL, ENDING, PASSED_ON, handling
from checkpointless.system.temp_folder import SHARED_MEMORY, private_folder

if TYPE_CHECKING:  # only if HTTP is asked for
    from checkpointless.launcher.agent.watch import Watch
    from checkpointless.observability.monitoring.http_status import HttpStatus

_NO_HANDOVER = "a process that has to be replaced cannot hand its state to its successor"


def launch_coordinator(config: JobConfig, say: Callable[[str], None]) -> int:
    """Coordinate a job until it is over, in the main thread; return 0 if every rank ended successfully, else 1."""
    from checkpointless.observability.monitoring.metrics import OUTSIDE

    config.check_meeting()
    if config.run_dir is not None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    signals: list[int] = []
    with _observed(config, ENDING, signals, OUTSIDE) as (events, http, watch):
        try:
            if http is not None:
                http.open(say)
        except OSError as error:
            raise ValueError(str(error)) from error  # not an OSError: the endpoint is not to blame
        return coordinate(config, events, say, signals, None if watch is None else partial(watch.look, None))


def launch(config: LaunchConfig, say: Callable[[str], None]) -> int:
    """Run this node's part of the job in the main thread; return 0 if every rank ended successfully, else 1.

    The ranks get this process's signals, too, and ``config.term_grace_s`` to end. Nothing is left but the run
    directory. torchrun (2.13) also returns 1 for a rank that fails with any code or signal.
    """
    config.logs.mkdir(parents=True, exist_ok=True)
    signals: list[int] = []
    handled = (*ENDING, *PASSED_ON, *((CUT_SIGNAL,) if config.faults and not config.is_alone else ()))
    job = config.job or Path(config.script).stem
    with (
        _observed(config, handled, signals, config.node_rank, job, config.script) as (events, http, watch),
        private_folder() as folder,
    ):
        return _run(config, folder, events, signals, say, http, watch)


@contextmanager
def _observed(
    config: JobConfig, handled: Iterable[int], signals: list[int], node: int, job: str = "", script: str = ""
) -> Iterator[tuple[EventLog, HttpStatus | None, Watch | None]]:
    """Note signals, and yield the event log and, if HTTP is asked for, its server and what that shows."""
    path, http, watch = None if config.run_dir is None else config.run_dir / EVENTS_FILE, None, None
    if config.http_port is not None:
        from checkpointless.launcher.agent.watch import Watch
        from checkpointless.observability.monitoring.http_status import HttpStatus

        watch = Watch(node, job, "" if config.run_dir is None else str(config.run_dir), script)
        http = HttpStatus(config.http_host, config.http_port, watch)
    events = EventLog(path, node=node) if watch is None else watch.log(path)
    with handling(handled, signals.append), http or nullcontext(), LogRelay(), closing(scribe):
        yield events, http, watch


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
        env = _rank_environment(config, handover)
        fork_servers = _fork_servers(config, folder, env, output)
        first = next(fork_servers)
        import torch.distributed  # noqa: F401 - takes seconds; the fork server imports it at the same time

        selector, clock = selectors.DefaultSelector(), AwakeClock()
        try:
            if http is not None:
                http.open(say)  # not earlier: the fork server may have been forked from this process
            link = link_to_coordinator(config, selector, events, signals, say, clock)
        except (JoinError, OSError) as error:
            first.close()
            output.close()
            say(str(error))
            return FAILED
        output.start()  # not earlier: an agent that is not admitted must leave the logs alone
        servers, make_rank = itertools.chain([first], fork_servers), partial(_make_rank, config, output)
        agent = NodeAgent(
            config,
            address=lambda: link.address,
            report=link.report,
            keep_processes=partial(ProcessKeeper, config, servers, make_rank, env, selector, say),
            events=events,
            say=say,
            clock=clock,
            hosts=link.coordinator is not None,
        )
        nproc, nnodes = config.nproc_per_node * config.nnodes, config.nnodes
        began = partial(events.emit, EventName.JOB, "begin", generation=0, before_s=_own_age_s())
        began(nproc=nproc, nnodes=nnodes, script=config.script)
        try:
            outcome = _serve(agent, link, selector, signals, watch, clock)
        finally:
            output.close()
        return _conclude(outcome, agent.job.generation, agent.newest, config, events, say)


def _rank_environment(config: LaunchConfig, handover: Path | None = None) -> dict[str, str]:
    """Return the variables of every rank and of their zygote; a process leaves its state in ``handover``."""
    env = {RUN_DIR_ENV: str(config.run_dir.resolve()), PYTHONUNBUFFERED_ENV: YES}
    if handover is not None:
        env[HANDOVER_ENV] = str(handover)
    env |= import_environment(config.nproc_per_node, config.cpu)
    asked = {**os.environ, **config.extra_env}
    is_sized = TORCH_FR_BUFFER_SIZE_ENV in asked or TORCH_NCCL_TRACE_BUFFER_SIZE_ENV in asked
    if config.cpu and not is_sized:
        # Records of gloo's collectives lie between the tensors of a step, in the same heap: what is freed stays in
        # pieces, and a model of 56 million parameters took 2.1 GB on a rank in the place of 1.3.
        env[TORCH_FR_BUFFER_SIZE_ENV] = "0"
    if asked.get(TORCH_SHOW_CPP_STACKTRACES_ENV) and TORCH_DISABLE_ADDR2LINE_ENV not in asked:
        # Processes that are forked share the pipes of the zygote's addr2line: one reads the answer that another
        # one waits for, forever and with Python's lock held.
        env[TORCH_DISABLE_ADDR2LINE_ENV] = YES
    if config.faults:
        env[FAULTS_ENV] = json.dumps(list(config.faults))
    if not config.is_alone:
        env[AGENT_PID_ENV] = str(os.getpid())
    if config.strict:
        env[STRICT_ENV] = YES
    if config.record_steps:
        env[RECORD_STEPS_ENV] = YES
    return {**env, **config.extra_env}


def _fork_servers(
    config: LaunchConfig, folder: Path | None, env: dict[str, str], output: Output
) -> Iterator[ForkServer]:
    """Start a fork server with the script's imports, and then, if it is asked for, a bare one."""
    script = Script(config.script, tuple(config.script_args), config.module)
    preload = preloads_of(script) if config.preload is None else config.preload
    for is_bare in (False, True):
        yield ForkServer(
            script,
            preload=() if is_bare else preload,
            cpu=config.cpu,
            env=env,
            log=output.fork_server.begin(),
            close=output.descriptors(),
            folder=folder,
            fork_here=config.fork_here and not is_bare,
        )


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


def _own_age_s() -> float:
    """Return for how many seconds this process has existed, at least: the kernel counts in hundredths."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    began_s = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19]) / ticks_per_s
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s - 2 / ticks_per_s)


def _conclude(
    outcome: End, generation: int, newest: int, config: LaunchConfig, events: EventLog, say: Callable[[str], None]
) -> int:
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


class AgentProcess(ForkedProcess):
    """Forks an agent, whose lines and output go to files in the run directory, and which ends with this process.

    It is not one of the terminal's processes, since Ctrl-C is for this process.
    """

    def __init__(self, config: LaunchConfig, folder: Path | None = None) -> None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        self._said = config.run_dir / f"agent-{config.node_rank}.said"
        self._said.write_text("")
        parent = os.getpid()
        with self._said.with_suffix(".log").open("ab") as log:
            super().__init__(lambda: self._run(config, folder, parent), output=log.fileno(), close=[])

    def kill(self) -> None:
        """Kill the agent, with which its ranks end, and wait for its end."""
        super().kill()
        self.wait(_END_S)

    def lines(self) -> tuple[str, ...]:
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
