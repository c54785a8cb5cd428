"""The agent's side of the fork server (:mod:`.zygote`), which starts the ranks."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from checkpointless.launcher.agent.ranks import zygote
from checkpointless.launcher.agent.ranks.rank_process import Script
from checkpointless.launcher.agent.ranks.zygote import (
    Answered,
    Event,
    Failed,
    News,
    Ping,
    Ready,
    Request,
    Signal,
    Start,
    Started,
)
from checkpointless.system.awake_clock import AwakeClock
from checkpointless.system.environment import RANK_ENV
from checkpointless.system.process_tree import (
    ForkedProcess,
    ProcessLook,
    ProcessTree,
    kill_descendants,
    state_of,
    wait_for_killed,
)
from checkpointless.system.signals import forget_handlers

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
ANSWER_LIMIT_S = 20.0  # a zygote answers in milliseconds, or in a second on a machine that is starved
_ASK_EVERY_S = 1.0
_CLOSE_SILENT_S = 1.0
_NEWS = msgspec.json.Decoder(Event)


class ForkServerLostError(RuntimeError):
    """The fork server has ended."""


class ForkServer:
    """Starts, signals and reaps the processes of ranks, which a zygote forks.

    Args:
        cpu: whether the zygote installs the CPU platform after the imports.
        env: environment variables of the zygote, on top of this process's environment.
        log: descriptor that the zygote's own output goes to; it is only lent.
        folder: folder in which the ranks keep their sockets (:mod:`checkpointless.system.temp_folder`).
        fork_here: whether to fork the zygote from this process, which has imported everything, instead of starting
            an interpreter; this process must have one thread and no CUDA context.
        close: descriptors that a zygote which is forked from this process closes.
    """

    def __init__(
        self,
        script: Script,
        *,
        preload: tuple[str, ...],
        cpu: bool,
        env: dict[str, str],
        log: int,
        folder: Path | None,
        fork_here: bool = False,
        clock: Callable[[], float] | None = None,
        close: Sequence[int] = (),
    ) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        arguments += ["--preload", ",".join(preload), "--script", script.to_json()]
        if folder is not None:
            arguments += ["--temp-folder", str(folder)]
        if cpu:
            arguments.append("--cpu")
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with theirs:
            if fork_here:
                self.process = ForkedProcess(
                    lambda: _zygote_in_this_process(arguments, env),
                    output=log,
                    close=[self._connection.fileno(), *close],
                )
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "checkpointless.launcher.agent.ranks.zygote", *arguments],
                    env=zygote_env(env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        self._connection.setblocking(False)
        self.readable = self._connection
        self._is_ready = False
        self._pids: set[int] = set()
        self._clock = clock or AwakeClock()
        self._queue: deque[tuple[bytes, list[int]]] = deque()  # requests that the zygote has not taken
        self._unanswered = 0
        self._heard_s = self._clock()  # or when the first request was made that is not answered

    def start(self, order: Start, log: int, agent: int, board: int) -> None:
        """Start one process; :class:`.Started` follows. The descriptors that it inherits are only borrowed."""
        self._request(order, [log, agent, board])

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a rank; SIGKILL also goes to its children. A rank that has ended is left alone."""
        self._request(Signal(pid, int(number)), [])

    def ask(self) -> None:
        """Find out whether ranks are still watched; :meth:`news` raises if they are not."""
        if not self._unanswered and self._clock() - self._heard_s > _ASK_EVERY_S:
            self._request(Ping(), [])

    def news(self) -> list[News]:
        """Return what happened since the last call, without blocking.

        Raises:
            ForkServerLostError: no process can be started any more.
        """
        found: list[News] = []
        while True:
            try:
                data = self._connection.recv(64 * 1024)
            except BlockingIOError:
                break
            except OSError as error:
                raise self._lost() from error
            if not data:
                if found:
                    return found  # the next call sees the end again
                raise self._lost()
            self._heard_s = self._clock()
            found += self._heard(_NEWS.decode(data))
        self._send()
        if not found and self._unanswered and self._clock() - self._heard_s > ANSWER_LIMIT_S:
            look = ProcessLook.at(self.process.pid)
            self._kill()
            raise ForkServerLostError(
                f"the fork server has not answered for {ANSWER_LIMIT_S:g} s "
                f"({state_of(look, look, 0.0).value}), and was killed with the ranks"
            )
        return found

    def close(self) -> None:
        """Kill and reap every remaining process, in bounded time."""
        self._connection.close()
        for _, descriptors in self._queue:
            for descriptor in descriptors:
                os.close(descriptor)
        if not self._is_ready:
            self.process.kill()  # it would first finish its imports
        try:
            self.process.wait(_CLOSE_SILENT_S if self._unanswered else _CLOSE_TIMEOUT_S + 1)
        except subprocess.TimeoutExpired:
            logger.warning("the zygote did not end by itself and is killed")
            self._kill()
        if self.process.returncode == 0:
            return
        trees = [ProcessTree(pid, None) for pid in self._pids]
        for tree in trees:  # the kernel kills the ranks, but not what they started
            tree.kill()
        for tree in trees:
            tree.clean()

    def _kill(self) -> None:
        """Kill the zygote and all that it has led to, without its help."""
        kill_descendants(self.process.pid)
        self.process.kill()
        wait_for_killed(self.process, _CLOSE_TIMEOUT_S)

    def _request(self, request: Request, descriptors: list[int]) -> None:
        if not self._unanswered:
            self._heard_s = self._clock()
        self._unanswered += 1
        self._queue.append((msgspec.json.encode(request), [os.dup(each) for each in descriptors]))
        self._send()

    def _send(self) -> None:
        """Send the requests that the zygote takes now; the others wait for :meth:`news`."""
        while self._queue:
            data, descriptors = self._queue[0]
            try:
                socket.send_fds(self._connection, [data], descriptors)
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("the zygote cannot be reached: %s", error)  # news() reports this too
            self._queue.popleft()
            for descriptor in descriptors:
                os.close(descriptor)

    def _heard(self, event: Event) -> list[News]:
        if isinstance(event, Answered):
            self._unanswered -= 1
            return []
        if isinstance(event, Failed):
            raise ForkServerLostError(event.why)
        if isinstance(event, Ready):
            self._is_ready = True
        elif isinstance(event, Started):
            self._pids.add(event.pid)
        else:
            self._pids.discard(event.pid)
        return [event]

    def _lost(self) -> ForkServerLostError:
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            return ForkServerLostError("the fork server hung up")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return ForkServerLostError(f"the fork server {how}")


def _zygote_in_this_process(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Run the zygote in this process, which was forked for it."""
    wanted = zygote_env(env)
    os.environ.clear()
    os.environ.update(wanted)
    forget_handlers()
    zygote.main(arguments)


def zygote_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the zygote's environment, without the rank that a pod may have given to the agent.

    Libraries check whether that rank is 0 when they are imported.
    """
    return {**{name: value for name, value in os.environ.items() if name != RANK_ENV}, **env}
