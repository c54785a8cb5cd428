"""The run of a node's part of a job, from the link to the coordinator to the end of the last rank."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import TYPE_CHECKING

from checkpointless.agent.coordinator_link import link_to_coordinator
from checkpointless.agent.ending import conclude
from checkpointless.agent.joining import JoinError
from checkpointless.agent.launch_config import LaunchConfig
from checkpointless.agent.links import Link
from checkpointless.agent.node import NodeAgent
from checkpointless.agent.rank_program import RankProgram
from checkpointless.agent.ranks.local_rank import LocalRank
from checkpointless.agent.ranks.output import Output
from checkpointless.agent.ranks.platforms import PlatformMissingError
from checkpointless.agent.ranks.starters import Starter
from checkpointless.agent.server import serve
from checkpointless.agent.watch import Watch
from checkpointless.coordinator.coordinator import FAILED
from checkpointless.coordinator.hangs.policy import Heartbeat
from checkpointless.posix.awake_clock import AwakeClock
from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import EventLog
from checkpointless.wire.board import Board

if TYPE_CHECKING:  # only if HTTP is asked for
    from checkpointless.monitoring.http_status import HttpStatus


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
