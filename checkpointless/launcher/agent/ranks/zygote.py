"""A process that has imported the frameworks once and forks ranks.

The agent starts it by ``python -m checkpointless.launcher.agent.ranks.zygote``.

It talks to the agent over a socket that keeps message boundaries. Each request to start a rank carries three
descriptors: the rank's log, its connection to the agent, and its board. Each request is answered at the end by
:class:`Answered`, so that the agent notices a process that does nothing any more.

It adopts the orphans of ranks. When the agent ends, however it ends, all that ranks have started is ended, too.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

import msgspec

from checkpointless.launcher.agent.ranks.preload import PlatformError, install_cpu_platform, preload, prepare
from checkpointless.launcher.agent.ranks.rank_process import Script, die_with_parent, run_script
from checkpointless.system import temp_folder
from checkpointless.system.environment import AGENT_FD_ENV, BOARD_FD_ENV, HANDOVER_ENV, RANK_ENV
from checkpointless.system.process_tree import ProcessTree, adopt_orphans, kill_descendants
from checkpointless.system.signals import ENDING, PASSED_ON

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES = 128 * 1024
_KILL_GRACE_S = 5.0
#: A child has ended; or the agent has, which is sent as a signal that a stopped process gets, too.
_AWAKES = (signal.SIGCHLD, signal.SIGCONT)
_NO_PROCESS_CODE = 71  # EX_OSERR
_NO_PROCESS = "the kernel gives this rank no process (%s): raise the limits on processes, memory and open files\n"


class Start(msgspec.Struct, tag=True, frozen=True):
    """Start one process.

    Attributes:
        env: environment variables of the process, on top of the agent's environment.
    """

    rank: int
    incarnation: int
    env: dict[str, str]


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Send a signal to a rank; SIGKILL also goes to its children."""

    pid: int
    number: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Answer."""


class Answered(msgspec.Struct, tag=True, frozen=True):
    """A request has been dealt with."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The zygote cannot start ranks, and ends."""

    why: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The zygote has imported what it was asked for.

    Attributes:
        can_fork: whether ranks may be forked from it (no CUDA context exists).
    """

    can_fork: bool
    failed: tuple[str, ...]
    seconds: float


class Started(msgspec.Struct, tag=True, frozen=True):
    """A process was started."""

    rank: int
    incarnation: int
    pid: int


class _Exited(msgspec.Struct, tag=True, frozen=True):
    """A process has ended; ``code`` is its exit code, or minus the number of the signal that killed it.

    A process that the kernel has refused counts as one that ends at once (its ``pid`` is 0); its log says why.
    """

    rank: int
    incarnation: int
    pid: int
    code: int


Request: TypeAlias = Start | Signal | Ping
News: TypeAlias = Ready | Started | _Exited
Event: TypeAlias = News | Answered | Failed
_REQUESTS = msgspec.json.Decoder(Request)


class _Zygote:
    """Forks ranks on request, and reports at once how each of them ended.

    When the connection to the agent closes, the zygote and every rank end.
    """

    def __init__(self, connection: socket.socket, script: Script, folder: Path | None) -> None:
        self._connection = connection
        self._script = script
        self._folder = folder
        self._ranks: dict[int, tuple[int, int, ProcessTree]] = {}  # pid -> rank, incarnation, its processes
        self._wakeup, self._wake = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in _AWAKES:
            signal.signal(number, lambda *_: None)
        self._agent = os.getppid()
        # A service manager signals every process; this one has to outlive the ranks, and ends with the agent.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING, *PASSED_ON))
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, self._on_request)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_awake)
        self._open = True

    def serve(self) -> None:
        """Serve until the agent closes the connection or ends, then end all processes that ranks have led to."""
        adopt_orphans()
        die_with_parent(self._agent, signal.SIGCONT)
        while self._open:
            for key, _ in self._selector.select():
                key.data()
        self._end_all()

    def say(self, event: Event) -> None:
        try:
            self._connection.send(msgspec.json.encode(event))
        except OSError as error:
            logger.warning("the agent is gone: %s", error)
            self._open = False

    def _on_request(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._connection, _MAX_REQUEST_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        if not data:
            self._open = False
            return
        request = _REQUESTS.decode(data)
        if isinstance(request, Start):
            self._start(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        elif isinstance(request, Signal):
            self._signal(request.pid, request.number)
        self.say(Answered())

    def _start(self, start: Start, descriptors: list[int]) -> None:
        zygote_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.write(descriptors[0], (_NO_PROCESS % error.strerror).encode())
            self.say(_Exited(start.rank, start.incarnation, 0, _NO_PROCESS_CODE))
            return
        if pid == 0:
            self._become_rank(zygote_pid, start.env, *descriptors)
        self._ranks[pid] = (start.rank, start.incarnation, ProcessTree(pid, self._folder))
        self.say(Started(start.rank, start.incarnation, pid))

    def _become_rank(self, zygote_pid: int, env: dict[str, str], log: int, agent: int, board: int) -> NoReturn:
        """Run the script in the forked child."""
        try:
            os.setsid()  # the terminal's Ctrl-C is for the agent, and the rank's own children die with its group
            die_with_parent(zygote_pid)
            signal.set_wakeup_fd(-1)
            for number in _AWAKES:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            self._selector.close()
            for own in (self._connection, self._wakeup, self._wake):
                own.close()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # what was printed before belongs to the log of before
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.environ.update(env)
            os.environ[AGENT_FD_ENV] = str(agent)
            os.environ[BOARD_FD_ENV] = str(board)
            _set_lightnings_rank(int(env[RANK_ENV]))
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed()  # a fresh interpreter's state differs from rank to rank
            logging.getLogger().handlers.clear()  # the zygote's own handlers
            temp_folder.use(self._folder)
            run_script(self._script)
        finally:
            os._exit(1)

    def _on_awake(self) -> None:
        self._wakeup.recv(4096)
        self._open = self._open and os.getppid() == self._agent
        while self._reap(os.WNOHANG):
            pass

    def _reap(self, flags: int) -> bool:
        """Reap one child that has ended, and what it left in its process group; return whether there was one."""
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | flags)
        except ChildProcessError:
            return False
        if ended is None:
            return False
        if ended.si_pid not in self._ranks:
            os.waitpid(ended.si_pid, 0)
            return True
        rank, incarnation, tree = self._ranks.pop(ended.si_pid)
        tree.kill()
        _, status = os.waitpid(ended.si_pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self.say(_Exited(rank, incarnation, ended.si_pid, code))
        tree.clean()
        return True

    def _signal(self, pid: int, number: int) -> None:
        if pid not in self._ranks:
            return  # it has ended meanwhile
        if number == signal.SIGKILL:
            self._ranks[pid][2].kill()
        os.kill(pid, number)

    def _end_all(self) -> None:
        deadline = time.monotonic() + _KILL_GRACE_S
        for pid, (_, _, tree) in self._ranks.items():
            tree.kill()
            os.kill(pid, signal.SIGKILL)
        while kill_descendants(os.getpid()) and time.monotonic() < deadline:
            while self._reap(os.WNOHANG):
                pass
            time.sleep(0.005)


def _set_lightnings_rank(rank: int) -> None:
    """Set the rank that Lightning noted when it was imported, when no rank was known."""
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    if module is not None:
        module.rank_zero_only.rank = rank


def can_fork() -> bool:
    """Return whether forked children can use CUDA, as far as torch is concerned."""
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    try:
        pid = os.fork()
    except OSError as error:  # the starts of ranks report it
        logger.warning("cannot fork a process to test CUDA: %s", error)
        return not torch.cuda.is_initialized()
    if pid == 0:
        os._exit(1 if torch.cuda._is_in_bad_fork() else 0)
    _, status = os.waitpid(pid, 0)
    return status == 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Preload, then serve the agent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--script", type=Script.from_json, required=True)
    parser.add_argument("--temp-folder", type=Path)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--preload", default="")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    logging.basicConfig(level=logging.INFO, format="zygote: %(message)s")
    os.set_inheritable(options.fd, False)
    connection = socket.socket(fileno=options.fd)
    started_s = time.monotonic()
    failed = preload(tuple(name for name in options.preload.split(",") if name), options.script)
    try:
        if options.cpu:
            install_cpu_platform()
    except PlatformError as error:
        connection.send(msgspec.json.encode(Failed(str(error))))
        sys.exit(1)
    prepare(options.script)
    gc.collect()
    gc.freeze()  # what is loaded now is never garbage: collections in the ranks need not scan it
    zygote = _Zygote(connection, options.script, options.temp_folder)
    zygote.say(Ready(can_fork(), tuple(failed), time.monotonic() - started_s))
    zygote.serve()
    shutil.rmtree(os.environ.get(HANDOVER_ENV, ""), ignore_errors=True)  # an agent that was killed leaves it


if __name__ == "__main__":
    main()
