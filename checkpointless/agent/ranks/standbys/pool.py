"""The standbys of a node, as the process that started them sees them."""

from __future__ import annotations

import enum
import json
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from checkpointless.agent.ranks.standbys.place import ASSIGN, MAX_REQUEST_BYTES, PING, READY, SPOILED
from checkpointless.posix.process_state import ProcessLook
from checkpointless.posix.process_tree import ProcessTree

logger = logging.getLogger(__name__)

ANSWER_S = 0.5  # a standby that waits answers in a millisecond
_MAX_ANSWER_BYTES = 4096


class Fate(str, enum.Enum):
    """What has become of a standby."""

    READY = "ready"  # it waits
    LOST = "lost"  # it ended, or was killed because it did not answer
    SPOILED = "spoiled"  # an import would have set up CUDA, and the next one is made without it


@dataclass(frozen=True)
class StandbyNews:
    """Something has become of a standby.

    Attributes:
        why: how it was lost, or which import spoiled it.
        seconds: how long it had existed.
        private_bytes: memory that it shared with no other process when it was ready.
    """

    pid: int
    fate: Fate
    why: str
    seconds: float
    private_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**vars(self), "fate": self.fate.value}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> StandbyNews:
        """Undo :meth:`to_json`; other fields are ignored."""
        return cls(body["pid"], Fate(body["fate"]), body["why"], body["seconds"], body["private_bytes"])


@dataclass
class Standby:
    """A process that waits to become a rank.

    Attributes:
        connection: the private connection to it.
        tree: it, and what it may start.
        made_s: when it was started, on the monotonic clock.
        is_ready: whether it waits.
        why: why it was killed; "" if it was not.
    """

    pid: int
    connection: socket.socket
    tree: ProcessTree
    made_s: float
    is_ready: bool = False
    why: str = ""


class StandbyPool:
    """Keeps standbys, hears them, and gives the place of a rank to one that answers.

    Args:
        tell: called with what has become of standbys.
        selector: selector in which their connections are watched; None: the caller calls :meth:`hear` now and then.
    """

    def __init__(self, tell: Callable[[StandbyNews], None], selector: selectors.BaseSelector | None = None) -> None:
        self._tell = tell
        self._selector = selector
        self._standbys: dict[int, Standby] = {}

    def __contains__(self, pid: int) -> bool:
        return pid in self._standbys

    def pids(self) -> list[int]:
        """Return the numbers of all processes that have not been waited for."""
        return list(self._standbys)

    def sockets(self) -> list[socket.socket]:
        """Return the open connections."""
        return [standby.connection for standby in self._standbys.values() if standby.connection.fileno() >= 0]

    def count(self) -> int:
        """Return how many standbys wait or will."""
        return sum(not standby.why for standby in self._standbys.values())

    def add(self, pid: int, connection: socket.socket, tree: ProcessTree) -> None:
        """Keep a process that has been started."""
        connection.setblocking(False)
        self._standbys[pid] = Standby(pid, connection, tree, time.monotonic())
        if self._selector is not None:
            self._selector.register(connection, selectors.EVENT_READ, self.hear)

    def hear(self) -> None:
        """Take what standbys have said, without blocking."""
        for standby in list(self._standbys.values()):
            while standby.connection.fileno() >= 0 and self._hear(standby):
                pass

    def take(self, env: Mapping[str, str], descriptors: tuple[int, int, int]) -> Standby | None:
        """Give the place of a rank to a standby.

        One that does not answer within :data:`ANSWER_S` is killed, and the others are not asked then, so that the
        rank does not wait longer.

        Args:
            env: environment variables of the rank, on top of the standby's.
            descriptors: its log, its connection to the agent and its board.

        Returns:
            The standby, which is in the pool no more; None if there is none.
        """
        self.hear()
        request = json.dumps({"type": ASSIGN, "env": dict(env)}).encode()
        if len(request) > MAX_REQUEST_BYTES:
            logger.warning("no standby is used: the environment of the rank has %d bytes", len(request))
            return None
        for standby in [each for each in self._standbys.values() if each.is_ready and not each.why]:
            if chr(ProcessLook.at(standby.pid).letter) in "Tt":
                self.kill(standby.pid, "it was stopped")
                continue
            standby.connection.settimeout(ANSWER_S)
            try:
                self._ask(standby)
                socket.send_fds(standby.connection, [request], descriptors)
            except TimeoutError:
                self.kill(standby.pid, f"it did not answer within {ANSWER_S:g} s")
                return None
            except OSError as error:
                self.kill(standby.pid, f"it could not be reached: {error.strerror or error}")
                continue
            self._close(standby)
            return self._standbys.pop(standby.pid)
        return None

    def kill(self, pid: int, why: str) -> None:
        """Kill a standby; it stays in the pool until it was waited for.

        Args:
            why: why it is killed, for people.
        """
        standby = self._standbys[pid]
        standby.why = standby.why or why
        self._close(standby)
        standby.tree.kill()
        try:
            os.kill(pid, signal.SIGKILL)  # it may not have made its group yet
        except ProcessLookupError:
            logger.info("standby %d has ended by itself", pid)

    def kill_older_than(self, seconds: float) -> None:
        """Kill the standbys that are not ready although they were started so many seconds ago."""
        for standby in list(self._standbys.values()):
            if not standby.is_ready and not standby.why and time.monotonic() - standby.made_s > seconds:
                self.kill(standby.pid, f"it was not ready within {seconds:g} s")

    def ended(self, pid: int, code: int) -> Standby:
        """Note that a standby was waited for; its tree is still to be cleaned.

        Args:
            code: its exit code, or minus the number of the signal that ended it.
        """
        self.hear()  # it may have said why
        standby = self._standbys.pop(pid)
        self._close(standby)
        if standby.why != SPOILED:
            how = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"
            self._say(standby, Fate.LOST, standby.why or how)
        return standby

    def _ask(self, standby: Standby) -> None:
        standby.connection.send(json.dumps({"type": PING}).encode())
        if not standby.connection.recv(_MAX_ANSWER_BYTES):
            raise ConnectionResetError("it hung up")

    def _hear(self, standby: Standby) -> bool:
        """Take one message; return whether there was one."""
        try:
            data = standby.connection.recv(_MAX_ANSWER_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:  # it ends, and is waited for
            standby.is_ready = False
            self._close(standby)
            return False
        message = json.loads(data)
        if message["type"] == READY:
            standby.is_ready = True
            self._say(standby, Fate.READY, "", message["private_bytes"])
        elif message["type"] == SPOILED:
            standby.why = SPOILED
            self._say(standby, Fate.SPOILED, message["name"])
        return True

    def _say(self, standby: Standby, fate: Fate, why: str, private: int = 0) -> None:
        self._tell(StandbyNews(standby.pid, fate, why, time.monotonic() - standby.made_s, private))

    def _close(self, standby: Standby) -> None:
        if standby.connection.fileno() < 0:
            return
        if self._selector is not None:
            self._selector.unregister(standby.connection)
        standby.connection.close()
