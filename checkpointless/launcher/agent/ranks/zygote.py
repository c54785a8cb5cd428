"""A process that has imported the frameworks once and forks ranks, and the agent's side of it.

They talk over a socket that keeps message boundaries. A request to start a rank carries three descriptors: its
log, its connection to the agent, and its board. Each request is answered by :class:`_Answered`, so that the agent
notices a process that does nothing any more. The zygote adopts the orphans of ranks: when the agent ends, however
it ends, all that ranks have started is ended, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

import msgspec

from checkpointless.launcher.agent.ranks.preload import PlatformError, install_cpu_platform, preload, prepare
from checkpointless.launcher.agent.ranks.rank_process import Script, run_script
from checkpointless.system import temp_folder
from checkpointless.system.awake_clock import AwakeClock
from checkpointless.system.environment import AGENT_FD_ENV, BOARD_FD_ENV, HANDOVER_ENV, RANK_ENV
from checkpointless.system.process_tree import (
    ForkedProcess,
    ProcessLook,
    ProcessTree,
    die_with_parent,
    kill_descendants,
    wait_for_killed,
)
from checkpointless.system.signals import ENDING, PASSED_ON

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES = 128 * 1024
_KILL_GRACE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36
#: A child has ended; or the agent has, which is sent as a signal that a stopped process gets, too.
_AWAKES = (signal.SIGCHLD, signal.SIGCONT)
_NO_PROCESS_CODE = 71  # EX_OSERR
_NO_PROCESS = "the kernel gives this rank no process (%s): raise the limits on processes, memory and open files\n"


class _Setup(msgspec.Struct, frozen=True):
    """What a zygote is started with; ``descriptor`` is its end of the connection, and ``folder`` is for sockets.

    The standard library writes it as JSON, since msgspec refuses arguments and paths that are not UTF-8.
    """

    descriptor: int
    agent: int
    script: Script
    preload: tuple[str, ...]
    cpu: bool
    folder: str | None


class Start(msgspec.Struct, tag=True, frozen=True):
    """Start one process, with ``env`` on top of the agent's environment."""

    rank: int
    incarnation: int
    env: dict[str, str]


class _Signal(msgspec.Struct, tag=True, frozen=True):
    """Send a signal to a rank; SIGKILL also goes to its children."""

    pid: int
    number: int


class _Ping(msgspec.Struct, tag=True, frozen=True):
    """Answer."""


class _Answered(msgspec.Struct, tag=True, frozen=True):
    """A request has been dealt with."""


class _Failed(msgspec.Struct, tag=True, frozen=True):
    """The zygote cannot start ranks, and ends."""

    why: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The zygote has imported what it was asked for, and ranks may be forked from it if no CUDA context exists."""

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


_Request: TypeAlias = Start | _Signal | _Ping
News: TypeAlias = Ready | Started | _Exited
_Event: TypeAlias = News | _Answered | _Failed
_REQUESTS = msgspec.json.Decoder(_Request)
_EVENTS = msgspec.json.Decoder(_Event)


class _Zygote:
    """Forks ranks on request, reports at once how each ended, and ends with them when the connection closes."""

    def __init__(self, connection: socket.socket, script: Script, folder: Path | None) -> None:
        self._connection, self._script, self._folder = connection, script, folder
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
        _adopt_orphans()
        die_with_parent(self._agent, signal.SIGCONT)
        with contextlib.suppress(ConnectionResetError):  # the agent was killed before it had read all
            while self._open:
                for key, _ in self._selector.select():
                    key.data()
        self._end_all()

    def say(self, event: _Event) -> None:
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
        elif isinstance(request, _Signal):
            self._signal(request.pid, request.number)
        self.say(_Answered())

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


def _adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, instead of the machine's first."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        logger.warning("orphans are not adopted, and may be left: %s", os.strerror(ctypes.get_errno()))


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


def main(setup: _Setup) -> None:
    die_with_parent(setup.agent)
    logging.basicConfig(level=logging.INFO, format="zygote: %(message)s")
    os.set_inheritable(setup.descriptor, False)
    connection = socket.socket(fileno=setup.descriptor)
    started_s = time.monotonic()
    failed = preload(setup.preload, setup.script)
    try:
        if setup.cpu:
            install_cpu_platform()
    except PlatformError as error:
        connection.send(msgspec.json.encode(_Failed(str(error))))
        sys.exit(1)
    prepare(setup.script)
    gc.collect()
    gc.freeze()  # what is loaded now is never garbage: collections in the ranks need not scan it
    zygote = _Zygote(connection, setup.script, None if setup.folder is None else Path(setup.folder))
    zygote.say(Ready(can_fork(), tuple(failed), time.monotonic() - started_s))
    zygote.serve()
    shutil.rmtree(os.environ.get(HANDOVER_ENV, ""), ignore_errors=True)  # an agent that was killed leaves it


# --- The agent's side ---------------------------------------------------------------------------------------------

_MODULE = "checkpointless.launcher.agent.ranks.zygote"
_CLOSE_TIMEOUT_S = 5.0
ANSWER_LIMIT_S = 20.0  # a zygote answers in milliseconds, or in a second on a machine that is starved
_ASK_EVERY_S = 1.0
_CLOSE_SILENT_S = 1.0


class ForkServerLostError(RuntimeError):
    """The fork server has ended."""


class ForkServer:
    """Starts, signals and reaps the processes of ranks, which a zygote forks.

    With ``fork_here`` the zygote is forked from this process, which must have one thread and no CUDA context, and
    closes the descriptors ``close``; else it is an interpreter.
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
        setup = _Setup(theirs.fileno(), os.getpid(), script, preload, cpu, None if folder is None else str(folder))
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with theirs:
            if fork_here:
                self.process = ForkedProcess(
                    lambda: _zygote_in_this_process(setup, env),
                    output=log,
                    close=[self._connection.fileno(), *close],
                )
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, json.dumps(msgspec.to_builtins(setup))],
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
        self._request(_Signal(pid, int(number)), [])

    def ask(self) -> None:
        """Find out whether ranks are still watched; :meth:`news` raises if they are not."""
        if not self._unanswered and self._clock() - self._heard_s > _ASK_EVERY_S:
            self._request(_Ping(), [])

    def news(self) -> list[News]:
        """Return what happened since the last call, without blocking."""
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
            found += self._heard(_EVENTS.decode(data))
        self._send()
        if not found and self._unanswered and self._clock() - self._heard_s > ANSWER_LIMIT_S:
            look = ProcessLook.at(self.process.pid)
            self._kill()
            raise ForkServerLostError(
                f"the fork server has not answered for {ANSWER_LIMIT_S:g} s "
                f"({look.state_since(look, 0.0).value}), and was killed with the ranks"
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

    def _request(self, request: _Request, descriptors: list[int]) -> None:
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

    def _heard(self, event: _Event) -> list[News]:
        if isinstance(event, _Answered):
            self._unanswered -= 1
            return []
        if isinstance(event, _Failed):
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


def _zygote_in_this_process(setup: _Setup, env: Mapping[str, str]) -> None:
    """Run the zygote in this process, which was forked for it."""
    wanted = zygote_env(env)
    os.environ.clear()
    os.environ.update(wanted)
    _forget_handlers()
    main(setup)


def _forget_handlers() -> None:
    """Give this process, which was forked from one that handles signals, their default actions again."""
    for number in (*ENDING, *PASSED_ON):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def zygote_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the zygote's environment without a pod's rank, since libraries check at import whether that is 0."""
    return {**{name: value for name, value in os.environ.items() if name != RANK_ENV}, **env}


if __name__ == "__main__":
    main(msgspec.convert(json.loads(sys.argv[1]), _Setup))
