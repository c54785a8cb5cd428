"""A process that has imported the frameworks once and forks ranks: ``python -m checkpointless.agent.ranks.zygote``.

It talks to the agent over a socket that keeps message boundaries. Each request to start a rank carries three
descriptors: the rank's log, its connection to the agent, and its board.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpointless.agent.ranks.platforms import install_platform
from checkpointless.agent.ranks.preload import preload
from checkpointless.agent.ranks.rank_process import Script, die_with_parent, run_script
from checkpointless.environment import AGENT_FD_ENV, BOARD_FD_ENV, RANK_ENV
from checkpointless.posix import temp_folder
from checkpointless.posix.process_tree import ProcessTree

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 128 * 1024
_KILL_GRACE_S = 5.0


class Zygote:
    """Forks ranks on request, and reports at once how each of them ended.

    Args:
        connection: connection to the agent; when it closes, the zygote and every rank end.
        script: what the ranks run.
        folder: folder in which the ranks keep their sockets (:mod:`checkpointless.posix.temp_folder`).
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
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, self._on_request)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_child)
        self._open = True

    def serve(self) -> None:
        """Serve until the agent closes the connection, then kill the remaining ranks."""
        while self._open:
            for key, _ in self._selector.select():
                key.data()
        self._end_all()

    def say(self, **event: Any) -> None:
        """Send an event to the agent."""
        try:
            self._connection.send(json.dumps(event).encode())
        except OSError as error:
            logger.warning("the agent is gone: %s", error)
            self._open = False

    def _on_request(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._connection, MAX_REQUEST_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        if not data:
            self._open = False
            return
        request = json.loads(data)
        if request["type"] == "start":
            self._start(request, descriptors)
        else:
            self._signal(request["pid"], request["signal"])

    def _start(self, request: dict[str, Any], descriptors: list[int]) -> None:
        zygote_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_rank(zygote_pid, request["env"], *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._ranks[pid] = (request["rank"], request["incarnation"], ProcessTree(pid, self._folder))
        self.say(type="started", rank=request["rank"], incarnation=request["incarnation"], pid=pid)

    def _become_rank(self, zygote_pid: int, env: dict[str, str], log: int, agent: int, board: int) -> None:
        """Run the script in the forked child; does not return."""
        try:
            os.setsid()  # the terminal's Ctrl-C is for the agent, and the rank's own children die with its group
            die_with_parent(zygote_pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            self._selector.close()
            for own in (self._connection, self._wakeup, self._wake):
                own.close()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.environ.update(env)
            os.environ[AGENT_FD_ENV] = str(agent)
            os.environ[BOARD_FD_ENV] = str(board)
            _tell_rank(int(env[RANK_ENV]))
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed()  # a fresh interpreter's state differs from rank to rank
            logging.getLogger().handlers.clear()  # the zygote's own handlers
            temp_folder.use(self._folder)
            run_script(self._script)
        finally:
            os._exit(1)

    def _on_child(self) -> None:
        self._wakeup.recv(4096)
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
        self.say(type="exited", rank=rank, incarnation=incarnation, pid=ended.si_pid, code=code)
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
        while self._ranks and time.monotonic() < deadline:
            if not self._reap(os.WNOHANG):
                time.sleep(0.005)


def _tell_rank(rank: int) -> None:
    """Tell Lightning the rank: it notes the rank when it is imported, and the zygote that imported it has none."""
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    if module is not None:
        module.rank_zero_only.rank = rank


def can_fork() -> bool:
    """Return whether forked children can use CUDA, as far as torch is concerned."""
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(1 if torch.cuda._is_in_bad_fork() else 0)
    _, status = os.waitpid(pid, 0)
    return status == 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Preload, then serve the agent.

    Args:
        arguments: command-line arguments (default: those of this process).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--preload", default="")
    parser.add_argument("--platform")
    parser.add_argument("--script", type=Script.from_json, required=True)
    parser.add_argument("--temp-folder", type=Path)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    logging.basicConfig(level=logging.INFO, format="zygote: %(message)s")
    os.set_inheritable(options.fd, False)
    connection = socket.socket(fileno=options.fd)
    started_s = time.monotonic()
    failed = preload(tuple(name for name in options.preload.split(",") if name), options.script)
    if options.platform is not None:
        install_platform(options.platform)
    gc.collect()
    gc.freeze()  # what is loaded now is never garbage: collections in the ranks need not scan it
    zygote = Zygote(connection, options.script, options.temp_folder)
    zygote.say(type="ready", can_fork=can_fork(), failed=failed, seconds=time.monotonic() - started_s)
    zygote.serve()


if __name__ == "__main__":
    main()
