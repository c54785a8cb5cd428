"""A rank as the agent of its node sees it, over all its processes.

What a node knows of the job that its ranks take part in.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from checkpointless.launcher.agent.ranks.output import Printed
from checkpointless.launcher.protocol.board import NO_STEP, Board
from checkpointless.launcher.protocol.messages import FROM_RANK, AgentMessage, LineBuffer, RankMessage, encode
from checkpointless.launcher.protocol.node_messages import End, RankEnded, RankState
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Edge, EventLog

logger = logging.getLogger(__name__)


class NodeJobState:
    """The job as the coordinator has told it to this node.

    Attributes:
        generation: the generation that began last (-1: none).
        began_after: the highest step that was known to be committed when the generation began.
        incident: the incident that the coordinator spoke of last; None if the generation began without one.
        finished: whether every rank's block has returned, on this node and all others.
        outcome: how the job ended; None until it has.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.generation = -1
        self.began_after = NO_STEP
        self.incident: str | None = None
        self.run_id = ""
        self.finished = False
        self.outcome: End | None = None
        self._told: tuple[str, float] = ("", 0.0)  # an incident, and when its fault happened

    def interrupt(self, incident: str, fault_at_s: float) -> None:
        """Note the incident that ends the generation.

        Args:
            fault_at_s: when the fault happened, as far as that is known, on the monotonic clock.
        """
        self.incident = incident
        self._told = incident, fault_at_s

    def fault_at(self, incident: str) -> float:
        """Return when the fault of an incident happened, on the monotonic clock: now if this node knows of none."""
        told_of, at_s = self._told
        return at_s if told_of == incident else time.monotonic()

    def emit(self, stage: EventName, edge: Edge, *, rank: int | None = None, **fields: object) -> None:
        """Write an event of the generation and incident that this node knows of."""
        generation = max(self.generation, 0)
        self._events.emit(stage, edge, generation=generation, incident=self.incident, rank=rank, **fields)

    def emit_preload(self, seconds: float, failed: tuple[str, ...]) -> None:
        """Write that this node has imported what its ranks need, before any generation."""
        self._events.emit(EventName.PRELOAD, "point", generation=0, seconds=seconds, failed=failed)


class RankLink:
    """The agent's end of a socket pair; nothing that is done with it blocks.

    Args:
        connection: the agent's end, which belongs to the link from here on.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        on_readable: Callable[[], None],
    ) -> None:
        connection.setblocking(False)
        self._rank = rank
        self._connection = connection
        self._selector = selector
        self._lines = LineBuffer()
        selector.register(connection, selectors.EVENT_READ, on_readable)

    def send(self, message: AgentMessage) -> bool:
        """Send ``message`` to the rank.

        Returns:
            False if the rank cannot be reached: it has ended, or has read nothing for a long time.
        """
        try:
            data = encode(message)
            return self._connection.send(data) == len(data)
        except OSError as error:
            logger.info("rank %d cannot be told %r: %s", self._rank, message.type, error)
            return False

    def receive(self) -> list[RankMessage] | None:
        """Return the messages that are complete after one read; None if there was nothing to read.

        Raises:
            EOFError: the rank has hung up.
            ProtocolError: the rank does not keep to the protocol.
        """
        try:
            data = self._connection.recv(64 * 1024)
        except BlockingIOError:
            return None
        except OSError as error:
            logger.info("rank %d hung up: %s", self._rank, error)
            data = b""
        if not data:
            raise EOFError
        return [FROM_RANK.decode(line) for line in self._lines.feed(data)]

    def close(self) -> None:
        """Close the connection, and take it from the loop."""
        self._selector.unregister(self._connection)
        self._connection.close()


EXIT_GRACE_S = 1.0  # for a process to end after it hung up or said that it would exit


@dataclass
class _Beats:
    """The beats of a rank's main thread, as they were seen on its board.

    Attributes:
        at_s: when the beat last changed, on the agent's clock.
        seen_at_s: when the beat last changed, on the monotonic clock, which does not stand still with the agent.
        in_step: whether the rank is within an optimizer step, but not in the first ones of a generation.
    """

    last: int = 0
    at_begin: int = 0
    at_s: float = 0.0
    seen_at_s: float = field(default_factory=time.monotonic)
    in_step: bool = False


@dataclass
class LocalRank:
    """One rank, over all its processes.

    Attributes:
        log: what its processes print; whoever made it closes it.
        pid: process ID of the living process; None until it is known.
        link: the connection to the living process; None once either side has closed it.
        said_hello: whether the living process has said hello.
        forgiven: whether the end of the process is a consequence of what is known already, and no fault by itself.
        started_at_s: when the living process was started, on the monotonic clock.
        ended: how the last process ended, once it has.
        is_cut_off: whether the process is killed because it does not end.
        is_shown: whether all that it prints is on the terminal of the job, which has no other node.
        kill_at_s: when the agent kills the process if it still runs, on the agent's clock (None: never).
    """

    number: int
    board: Board
    log: Printed
    incarnation: int = -1
    state: RankState = RankState.GONE
    pid: int | None = None
    link: RankLink | None = None
    said_hello: bool = False
    forgiven: bool = False
    handed_over: bool = False
    beats: _Beats = field(default_factory=_Beats)
    started_at_s: float = 0.0
    ended: RankEnded | None = None
    is_cut_off: bool = False
    is_shown: bool = False
    kill_at_s: float | None = None

    def send(self, message: AgentMessage) -> bool:
        """Send ``message`` to the rank.

        Returns:
            False if the rank cannot be reached: it has ended, or has read nothing for a long time.
        """
        return self.link is not None and self.link.send(message)

    def begin(self, now_s: float) -> None:
        """Note that the rank enters its block."""
        self.state = RankState.RUNNING
        beat = self.board.read().beat
        self.beats = _Beats(beat, beat, now_s)

    def disconnect(self) -> None:
        """Close the connection, if there is one."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def close(self) -> None:
        """Release all resources."""
        self.disconnect()
        self.board.close()
