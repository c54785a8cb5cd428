"""The rank's side of the talk with its agent."""

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
from typing import TypeVar, cast

from checkpointless.agent.protocol import (
    AGENT_FD_ENV,
    AgentMessage,
    Answer,
    Barrier,
    Done,
    FaultNotice,
    FaultReport,
    Finish,
    GiveUp,
    Go,
    Hello,
    Inquire,
    LineBuffer,
    ProtocolError,
    RankMessage,
    Replace,
    Sender,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 30
_TICK_S = 0.1  # waits are cut into ticks, so that signals and asynchronous exceptions reach the waiting thread
_RECEIVE_BYTES = 64 * 1024

T = TypeVar("T")


class AgentLostError(ConnectionError):
    """The connection to the agent is closed: nobody regroups this rank any more."""


class RankUnknownError(AssertionError, RuntimeError):
    """Nobody says which rank this process is. (An ``AssertionError``, as HyperPod's ``wait_rank`` has it.)"""


class RankClient(abc.ABC):
    """What a rank says to whoever regroups it, and what it hears.

    Args:
        rank: this process's global rank.

    Attributes:
        on_fault: called on the listening thread with each notice that is not older than the rank's generation;
            must return soon, since nothing is heard meanwhile. A notice that came before it was set is found
            with :meth:`pending_fault`.
        on_inquire: called on the listening thread; returns whether the main thread waits in a collective, and
            the main thread's stack as text.
    """

    def __init__(self, rank: int) -> None:
        self.on_fault: Callable[[FaultNotice], None] | None = None
        self.on_inquire: Callable[[], tuple[bool, str]] | None = None
        self.rank = rank
        self._news = threading.Condition()
        self._generation = 0
        self._go: Go | None = None
        self._faults: dict[int, FaultNotice] = {}
        self._finish: Finish | None = None
        self._lost: str | None = None

    def hello(self, generation: int) -> None:
        """Say that this rank stands at the entry of its RCB.

        Raises:
            AgentLostError: (as in every method that sends) the connection is closed.
        """
        with self._news:
            self._go = self._finish = None  # of a block that this process ran before, if any
            self._move_to(generation)
        self._send(Hello(rank=self.rank, pid=os.getpid(), generation=generation))

    def wait_go(self, after_generation: int, timeout_s: float | None = None) -> Go:
        """Wait for a ``go`` whose generation is larger than ``after_generation``.

        Raises:
            AgentLostError: the connection closed before it came.
            TimeoutError: it did not come within ``timeout_s``.
        """

        def arrived() -> Go | None:
            return self._go if self._go is not None and self._go.generation > after_generation else None

        return self._wait(arrived, timeout_s, f"a go after generation {after_generation}")

    def report_fault(
        self, generation: int, *, error: str, message: str, traceback: str, step: int, victim: bool
    ) -> None:
        """Tell the agent that this rank failed; see :class:`~checkpointless.agent.protocol.FaultReport`."""
        self._send(FaultReport(generation, error, message, traceback, step, victim))

    def barrier(self, generation: int) -> None:
        """Say that this rank left ``generation``, is clean and healthy, and waits for ``go``."""
        self._send(Barrier(generation))

    def request_replacement(self, generation: int, reason: str) -> None:
        """Say that this process must not be used again. It has to exit next."""
        self._send(Replace(generation, reason))

    def done(self, generation: int) -> None:
        """Say that the RCB returned."""
        self._send(Done(generation))

    def give_up(self, generation: int, reason: str, code: int = 1) -> None:
        """End the job; ``reason`` becomes its last word, and ``code`` what it exits with."""
        self._send(GiveUp(generation, reason, code))

    def wait_finish_or_fault(self, generation: int, timeout_s: float | None = None) -> Finish | FaultNotice:
        """After :meth:`done`: wait until all are done, or somebody still needs this rank.

        Raises:
            AgentLostError: the connection closed before either came.
            TimeoutError: neither came within ``timeout_s``.
        """

        def arrived() -> Finish | FaultNotice | None:
            notice = self._faults.get(generation)
            return notice if notice is not None else self._finish

        return cast(Finish | FaultNotice, self._wait(arrived, timeout_s, "finish or a fault notice"))

    def pending_fault(self, generation: int) -> FaultNotice | None:
        """The notice that ``generation`` is over, if it has come at any time."""
        with self._news:
            return self._faults.get(generation)

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening and let go of every descriptor."""

    @abc.abstractmethod
    def _send(self, message: RankMessage) -> None:
        """Say ``message``."""

    def _hear(self, message: AgentMessage) -> None:
        """Keep what was said for the thread that waits for it, and call back."""
        if isinstance(message, Inquire):
            waits, stack = self.on_inquire() if self.on_inquire is not None else (False, "")
            self._send(Answer(message.id, waits, stack))
            return
        with self._news:
            if isinstance(message, Go):
                self._go = message
                self._move_to(message.generation)
            elif isinstance(message, Finish):
                self._finish = message
            elif message.generation < self._generation:
                return  # stale: the rank has left that generation already
            else:
                self._faults[message.generation] = message
            self._news.notify_all()
        if isinstance(message, FaultNotice) and self.on_fault is not None:
            self.on_fault(message)

    def _lose(self, reason: str) -> None:
        with self._news:
            self._lost = self._lost or reason
            self._news.notify_all()

    def _move_to(self, generation: int) -> None:
        with self._news:
            self._generation = max(self._generation, generation)
            self._faults = {of: notice for of, notice in self._faults.items() if of >= self._generation}

    def _wait(self, arrived: Callable[[], T | None], timeout_s: float | None, what: str) -> T:
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
    """Talks to the agent that started this process; a daemon thread reads what the agent says.

    A client whose reader fails closes the connection: the agent then replaces this process, since one that hears
    no notice would hold up every other rank.

    Args:
        connection: one end of the socket pair to the agent; the client owns it from now on.
        rank: this process's global rank.
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
        """The client of this process, or None if no checkpointless agent started it.

        The descriptor is taken out of the environment, so that a process started by this one does not take
        it for its own; later calls return the same client.
        """
        global _of_this_process
        value = os.environ.pop(AGENT_FD_ENV, None)
        if value is not None:
            fd = int(value)
            os.set_inheritable(fd, False)
            _of_this_process = cls(socket.socket(fileno=fd), rank=int(os.environ["RANK"]))
        return _of_this_process

    def close(self) -> None:
        """Close the connection and end the reader thread."""
        self._hang_up()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=5)
        self._connection.close()

    def _send(self, message: RankMessage) -> None:
        line = encode(message)
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
                    self._hear(cast(AgentMessage, decode(line, Sender.AGENT)))
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

    def _forget_after_fork(self) -> None:
        """In a forked child: the connection is the parent's; a copy of it would hide the parent's death."""
        self._connection.close()
        self._lost = "this process was forked by the rank"


_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()
_of_this_process: AgentClient | None = None


def _forget_clients() -> None:
    global _of_this_process
    _of_this_process = None
    for client in list(_clients):
        client._forget_after_fork()
    _clients.clear()


os.register_at_fork(after_in_child=_forget_clients)
