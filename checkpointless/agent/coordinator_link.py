"""Chooses how the agent of a node reaches the job's coordinator, and makes that link."""

from __future__ import annotations

import errno
import selectors
from collections.abc import Callable

from checkpointless.agent.joining import REFUSED_FOR_S, Joining
from checkpointless.agent.launch_config import LaunchConfig, limits_of, meeting_of
from checkpointless.agent.links import GuestLink, HostLink, Link
from checkpointless.coordinator.coordinator import Coordinator
from checkpointless.coordinator.hosting import host
from checkpointless.posix.signals import ENDING
from checkpointless.telemetry.events import EventLog
from checkpointless.wire.handshake import SPARE


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
