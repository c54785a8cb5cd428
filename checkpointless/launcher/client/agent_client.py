"""The rank's side of the connection to its agent.

The client of a rank that is alone in its job and was not started by an agent of this package.
"""

from __future__ import annotations

import abc
import logging
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from checkpointless.launcher.coordinator.incident_policy import History
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.causes import Cause
from checkpointless.launcher.protocol.messages import AgentMessage, LineBuffer, ProtocolError, RankMessage
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.system.environment import (
    AGENT_FD_ENV,
    JOB_RESTART_COUNT_ENV,
    RANK_ENV,
    TORCHELASTIC_RESTART_COUNT_ENV,
)

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 30
_TICK_S = 0.1  # waits are cut into ticks, so that signals and asynchronous exceptions reach the waiting thread
_RECEIVE_BYTES = 64 * 1024


class AgentLostError(ConnectionError):
    """The connection to the agent is closed, so nothing regroups this rank any more."""


class RankUnknownError(AssertionError, RuntimeError):
    """It is not known which rank this process is (an ``AssertionError``, as in HyperPod's ``wait_rank``)."""


class RankClient(abc.ABC):
    """Base class of a rank's connection to what regroups it: what the rank sends, and what it receives.

    Attributes:
        on_fault: called on the listening thread with each notice that is not older than the rank's generation. It
            must return soon, because nothing is received meanwhile. :meth:`pending_fault` returns a notice that
            came before ``on_fault`` was set.
        has_launcher: whether a launcher started this process; if not, nothing is recovered from.
        on_inquire: called on the listening thread with the number of an inquiry; returns the answer to it.
        is_ending: whether the job is ending, so that no block is entered again.
        to_pause: the newest generation whose ranks are to agree on a step boundary to wait at (-1: none).
    """

    def __init__(self, rank: int) -> None:
        self.on_fault: Callable[[messages.FaultNotice], None] | None = None
        self.on_inquire: Callable[[int], messages.Answer] | None = None
        self.rank = rank
        self.is_ending = False
        self.has_launcher = True
        self.to_pause = -1
        self._news = threading.Condition()
        self._generation = 0
        self._go: messages.Go | None = None
        self._wanted: messages.HandOver | messages.Offer | None = None
        self._faults: dict[int, messages.FaultNotice] = {}
        self._finish: messages.Finish | None = None
        self._lost: str | None = None

    def send(self, message: RankMessage) -> None:
        """Send what this rank says to its agent.

        Raises:
            AgentLostError: the connection is closed.
        """
        if isinstance(message, messages.Hello):
            with self._news:
                self._go = self._finish = None  # left from a block that this process ran before, if any
                self._move_to(message.generation)
        self._send(message)

    def wait_go(
        self, after_generation: int, timeout_s: float | None = None
    ) -> messages.Go | messages.HandOver | messages.Offer:
        """Wait at the barrier for a ``go`` whose generation is larger than ``after_generation``.

        If the process has to hand its state to a successor, or to offer it and to go on waiting, return that.

        Raises:
            AgentLostError: the connection was closed before the ``go`` came.
            SystemExit: the job is ending, or a successor on another node has taken this process's place.
            TimeoutError: the ``go`` did not come within ``timeout_s`` seconds.
        """

        def arrived() -> messages.Go | messages.HandOver | messages.Offer | None:
            if self.is_ending:
                raise SystemExit(1)
            wanted = self._wanted
            if wanted is not None and wanted.generation == after_generation:
                self._wanted = None
                return wanted
            if self._finish is not None:
                raise SystemExit(0)
            return self._go if self._go is not None and self._go.generation > after_generation else None

        return self._wait(arrived, timeout_s, f"a go after generation {after_generation}")

    def wait_finish_or_fault(
        self, generation: int, timeout_s: float | None = None
    ) -> messages.Finish | messages.FaultNotice:
        """Wait, after ``done``, until all ranks are done, another rank needs this one, or the job is ending.

        Raises:
            AgentLostError: the connection was closed before either message came.
            TimeoutError: neither message came within ``timeout_s`` seconds.
        """

        def arrived() -> messages.Finish | messages.FaultNotice | None:
            if self.is_ending:
                return messages.Finish()
            notice = self._faults.get(generation)
            return notice if notice is not None else self._finish

        return self._wait(arrived, timeout_s, "finish or a fault notice")

    def pending_fault(self, generation: int) -> messages.FaultNotice | None:
        """Return the notice that ``generation`` is over if it has come at any time, else None."""
        with self._news:
            return self._faults.get(generation)

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening and release every descriptor."""

    @abc.abstractmethod
    def _send(self, message: RankMessage) -> None:
        """Send ``message``."""

    def _hear(self, message: AgentMessage) -> None:
        """Keep ``message`` for the thread that waits for it, and call the callback for it."""
        if isinstance(message, messages.Inquire):
            asked = self.on_inquire
            self._send(asked(message.id) if asked is not None else messages.Answer(message.id, False, ""))
            return
        with self._news:
            if isinstance(message, messages.Go):
                self._go = message
                self._move_to(message.generation)
            elif isinstance(message, messages.HandOver | messages.Offer):
                self._wanted = message
            elif isinstance(message, messages.Pause):
                self.to_pause = message.generation
            elif isinstance(message, messages.Finish):
                self._finish = message
            elif isinstance(message, messages.Ending):
                self.is_ending = True
            elif message.generation < self._generation:
                return  # stale: the rank has left that generation already
            else:
                self._faults[message.generation] = message
            self._news.notify_all()
        if isinstance(message, messages.FaultNotice) and self.on_fault is not None:
            self.on_fault(message)

    def _lose(self, reason: str) -> None:
        with self._news:
            self._lost = self._lost or reason
            self._news.notify_all()

    def _move_to(self, generation: int) -> None:
        with self._news:
            self._generation = max(self._generation, generation)
            self._faults = {of: notice for of, notice in self._faults.items() if of >= self._generation}

    def _wait(self, arrived: Callable[[], Any], timeout_s: float | None, what: str) -> Any:  # Any: what arrives
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._news:
            while (found := arrived()) is None:
                if self._lost is not None:
                    raise AgentLostError(f"the agent is gone ({self._lost}) while waiting for {what}")
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"waited {timeout_s} s for {what}")
                self._news.wait(_TICK_S)
            return found


class AgentClient(RankClient):
    """Talks to the agent that started this process; a daemon thread reads the agent's messages.

    If the reader fails, the client closes the connection, which it owns. The agent then replaces this process,
    because a process that receives no notices would hold up every other rank.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        super().__init__(rank)
        self._connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        self._send_lock = threading.Lock()
        _clients.add(self)
        self._reader = threading.Thread(target=self._read, name="checkpointless-agent-reader", daemon=True)
        self._reader.start()

    @classmethod
    def from_environment(cls) -> AgentClient | None:
        """Return the client of this process, or None if no checkpointless agent started it.

        The descriptor is removed from the environment, so that a child process does not take it for its own.
        Later calls return the same client.
        """
        global _of_this_process
        value = os.environ.pop(AGENT_FD_ENV, None)
        if value is not None:
            fd = int(value)
            os.set_inheritable(fd, False)
            _of_this_process = cls(socket.socket(fileno=fd), rank=int(os.environ[RANK_ENV]))
        return _of_this_process

    def close(self) -> None:
        """Close the connection and end the reader thread."""
        self._hang_up()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=5)
        self._connection.close()

    def _send(self, message: RankMessage) -> None:
        line = messages.encode(message)
        try:
            with self._send_lock:
                self._connection.sendall(line)
        except OSError as error:
            self._lose(f"could not send {message.type!r}: {error}")
            raise AgentLostError(f"the agent is gone: could not send {message.type!r}: {error}") from error

    def _read(self) -> None:
        lines = LineBuffer()
        try:
            while data := self._connection.recv(_RECEIVE_BYTES):
                for line in lines.feed(data):
                    self._hear(messages.FROM_AGENT.decode(line))
            self._lose("it closed the connection")
        except (OSError, ProtocolError) as error:
            self._lose(str(error))
        except Exception as error:
            logger.exception("rank %d can no longer listen to its agent", self.rank)
            self._lose(f"{type(error).__name__}: {error}")
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)  # frees the reader; close() alone would not
        except OSError:
            logger.debug("the connection to the agent was closed already")


_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()
_of_this_process: AgentClient | None = None


def _forget_clients() -> None:
    """Close a forked child's copies of the parent's connections, which would hide the parent's death."""
    global _of_this_process
    _of_this_process = None
    for client in list(_clients):
        client._connection.close()
        client._lost = "this process was forked by the rank"
    _clients.clear()


os.register_at_fork(after_in_child=_forget_clients)


class CountingClient(RankClient):
    """Base class of a client without our agent, whose limits on incidents it applies to what the ranks report."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._incidents = 0
        self._high_water = -1  # the highest step that must have been committed, according to reports
        self._history = History()

    def _count(self, cause: Cause) -> str | None:
        """Count one more incident; return why the job must end (None: it need not)."""
        if cause.step > 0:
            self._high_water = max(self._high_water, cause.step - 1)
        self._history, give_up = self._history.after(cause, self._high_water)
        return None if give_up is None else f"{give_up.reason}\n{give_up.last_words}".rstrip()

    def _interrupt(self, generation: int, cause: Cause, last_word: str | None) -> None:
        """End a generation, and the job with ``last_word``; the rank at fault logs it, since no agent does."""
        self._incidents += 1
        incident, said = str(self._incidents), str(cause)
        if cause.rank == self.rank:
            about: dict[str, Any] = {"cause": said, "culprit": cause.culprit, "how": cause.how}
            EventLog.here().emit(EventName.DETECT, "point", generation=generation, incident=incident, **about)
        self._hear(messages.FaultNotice(generation, incident, said, cause.rank))
        if last_word is not None:
            self._lose(last_word)


class StandaloneClient(CountingClient):
    """Regroups the only rank of a job that consists of this process."""

    def __init__(self, has_launcher: bool = True) -> None:
        super().__init__(rank=0)
        self.has_launcher = has_launcher

    def close(self) -> None:
        """Close the client, which holds no resources."""
        self._lose("closed")

    def _send(self, message: RankMessage) -> None:
        if isinstance(message, messages.Hello):
            self._hear(messages.Go(message.generation, None, {}, -1))
        elif isinstance(message, messages.FaultReport):
            self._interrupt(message.generation, message.cause, self._count(message.cause))
        elif isinstance(message, messages.Barrier) and self._lost is None:
            coming = message.generation + 1
            env = {
                JOB_RESTART_COUNT_ENV: str(coming),
                TORCHELASTIC_RESTART_COUNT_ENV: str(coming),
            }
            self._hear(messages.Go(coming, str(self._incidents), env, self._high_water))
        elif isinstance(message, messages.Done):
            self._hear(messages.Finish())
