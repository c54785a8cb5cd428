"""The run of a node's part of a job, from the link to the coordinator to the end of the last rank."""

from __future__ import annotations

import errno
import selectors
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.launcher.agent.joining import REFUSED_FOR_S, JoinError, Joining
from checkpointless.launcher.agent.launch_config import LaunchConfig, limits_of, meeting_of
from checkpointless.launcher.agent.links import GuestLink, HostLink, Link
from checkpointless.launcher.agent.node import NodeAgent
from checkpointless.launcher.agent.rank_program import RankProgram
from checkpointless.launcher.agent.ranks.local_rank import LocalRank
from checkpointless.launcher.agent.ranks.output import Output
from checkpointless.launcher.agent.ranks.platforms import PlatformMissingError
from checkpointless.launcher.agent.ranks.starters import Starter
from checkpointless.launcher.agent.watch import Watch
from checkpointless.launcher.coordinator.coordinator import FAILED, Coordinator
from checkpointless.launcher.coordinator.hangs.policy import Heartbeat
from checkpointless.launcher.coordinator.hosting import TICK_S, host
from checkpointless.launcher.protocol.board import NO_STEP, Board
from checkpointless.launcher.protocol.handshake import SPARE
from checkpointless.launcher.protocol.node_messages import End
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.observability.telemetry.scribe import scribe
from checkpointless.system.awake_clock import AwakeClock
from checkpointless.system.signals import CUT_SIGNAL, ENDING

if TYPE_CHECKING:  # only if HTTP is asked for
    from checkpointless.observability.monitoring.http_status import HttpStatus


class NodeRun:
    """One run of a node's part of a job.

    Args:
        config: what to run.
        program: what the ranks run.
        starter: the zygote, which has been started.
        output: takes what ranks and zygote print.
        events: the job's event log.
        signals: the signals that this process got; a handler appends to it.
        say: called with each line for the terminal.
        http: serves health, status and metrics.
        watch: looks at the job in every turn of the loop.
    """

    def __init__(
        self,
        config: LaunchConfig,
        program: RankProgram,
        starter: Starter,
        output: Output,
        *,
        events: EventLog,
        signals: list[int],
        say: Callable[[str], None],
        http: HttpStatus | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._config = config
        self._program = program
        self._starter = starter
        self._events = events
        self._signals = signals
        self._say = say
        self._http = http
        self._watch = watch
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._clock = AwakeClock()

    def run(self) -> int:
        """Run until the job has ended on this node.

        Returns:
            The exit code.
        """
        config = self._config
        try:
            self._program.check()
            if self._http is not None:
                self._http.open(self._say)  # not earlier: the zygote may have been forked from this process
            link = link_to_coordinator(config, self._selector, self._events, self._signals, self._say, self._clock)
        except (JoinError, PlatformMissingError, OSError) as error:
            self._starter.close()
            self._output.close()
            self._say(str(error))
            return FAILED
        self._output.start()  # not earlier: an agent that is not admitted must leave the logs alone
        return self._serve(self._agent(link), link)

    def _agent(self, link: Link) -> NodeAgent:
        return NodeAgent(
            index=self._config.node_rank,
            heartbeat=Heartbeat.of(self._config.heartbeat_timeout_s),
            address=lambda: link.address,
            report=link.report,
            selector=self._selector,
            starter=self._starter,
            fresh_starter=self._program.interpreters,
            make_rank=self._make_rank,
            rank_env=self._program.environment,
            events=self._events,
            say=self._say,
            clock=self._clock,
            device_check=self._config.check,
            term_grace_s=self._config.term_grace_s,
            exit_grace_s=self._config.exit_grace_s,
            hosts=link.coordinator is not None,
        )

    def _make_rank(self, number: int) -> LocalRank:
        log, is_shown = self._output.of_rank(number), self._config.is_alone and number in self._config.shown_ranks
        return LocalRank(number, Board.create(number), log, is_shown=is_shown)

    def _serve(self, agent: NodeAgent, link: Link) -> int:
        config, events = self._config, self._events
        nproc, nnodes = config.nproc_per_node, config.nnodes
        events.emit(EventName.JOB, "begin", generation=0, nproc=nproc * nnodes, nnodes=nnodes, script=config.script)
        try:
            outcome = serve(agent, link, self._selector, self._signals, self._watch, self._clock)
        finally:
            self._output.close()
        return conclude(
            outcome,
            agent.generation,
            node=config.node_rank,
            run_dir=config.run_dir,
            events=events,
            say=self._say,
            newest=agent.newest,
        )


def link_to_coordinator(
    config: LaunchConfig,
    selector: selectors.BaseSelector,
    events: EventLog,
    signals: list[int],
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> Link:
    """Return the link to the coordinator, which runs here on node 0 unless there is one elsewhere.

    Args:
        config: what this node runs.
        selector: selector of the loop.
        events: the job's event log, for a coordinator that runs here.
        signals: the signals that this process got; one that ends a job ends an attempt to join it.
        say: called with each line for the terminal.
        clock: clock with which limits are measured.

    Raises:
        JoinError: the coordinator cannot be reached, or has no place for this node.
        OSError: the address cannot be resolved or listened on.
    """
    if config.is_alone:
        limits, nproc = limits_of(config), config.nproc_per_node
        return HostLink(Coordinator(limits, nnodes=1, nproc=nproc, events=events, say=say, clock=clock), None)
    if config.node_rank == 0:
        try:
            return HostLink(*host(meeting_of(config), limits_of(config), selector, events, say, clock))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
    address, port = config.endpoint
    say(f"node {config.node_rank}: joining the job at {address}:{port}")
    return GuestLink(
        _Attempts(config),
        config.node_rank if config.node_rank < config.nnodes else SPARE,
        nproc=config.nproc_per_node,
        selector=selector,
        silence_s=config.node_timeout_s,
        say=say,
        stopped=lambda: any(number in ENDING for number in signals),
        clock=clock,
    )


class _Attempts:
    """Joins the job; attempts after the first have the limits of a node that looks for a lost coordinator."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._again = False

    def __call__(self, number: int, stopped: Callable[[], bool]) -> Joining:
        config = self._config
        again, self._again = self._again, True
        return Joining(
            *config.endpoint,
            token=config.token,
            node=number,
            nproc=config.nproc_per_node,
            timeout_s=config.regroup_timeout_s if again else config.join_timeout_s,
            stopped=stopped,
            refused_for_s=REFUSED_FOR_S + (config.node_timeout_s if again else 0.0),
        )


def conclude(
    outcome: End,
    generation: int,
    *,
    node: int,
    run_dir: Path,
    events: EventLog,
    say: Callable[[str], None],
    newest: int = NO_STEP,
) -> int:
    """Write and say how the job ended on this node.

    Args:
        outcome: how the job ended.
        generation: the last generation that this node knew of (-1: none).
        node: the node's number.
        run_dir: directory of the events, for messages.
        events: the job's event log.
        say: called with each line for the terminal.
        newest: the highest step that a rank of this node was seen to commit (-1: none).

    Returns:
        The exit code.
    """
    step = None if newest == NO_STEP else newest
    events.emit(
        EventName.JOB, "end", generation=max(generation, 0), code=outcome.code, reason=outcome.last_words, step=step
    )
    if not scribe.flush():
        say(f"the disk of {run_dir} does not answer: the last events of node {node} may be lost")
    for line in outcome.last_words:
        say(line)
    return outcome.code


def serve(
    agent: NodeAgent,
    link: Link,
    selector: selectors.BaseSelector,
    signals: list[int],
    watch: Watch | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> End:
    """Run a node's part of a job until every rank's process has ended.

    Args:
        agent: the agent of this node.
        link: the agent's link to the coordinator.
        selector: selector with which both register their descriptors; the data of a descriptor's key is called when
            the descriptor is ready.
        signals: the signals that this process got; a handler appends to it.
        watch: looks at the job in every turn of the loop.
        clock: clock with which limits are measured.

    Returns:
        How the job ended.
    """
    try:
        while agent.outcome is None or agent.alive() or link.is_needed(clock()):
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
        return agent.outcome
    finally:
        agent.close()
        link.close()
        selector.close()
