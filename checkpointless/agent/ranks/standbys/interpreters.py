"""Standbys in interpreters of their own, made and kept by the agent itself."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpointless.agent.ranks.rank_process import Script
from checkpointless.agent.ranks.standbys.pool import Fate, StandbyNews, StandbyPool
from checkpointless.environment import (
    FAULT_AT_ENV,
    GROUP_RANK_ENV,
    GROUP_WORLD_SIZE_ENV,
    INCARNATION_ENV,
    JOB_RESTART_COUNT_ENV,
    LOCAL_RANK_ENV,
    LOCAL_WORLD_SIZE_ENV,
    MASTER_ADDR_ENV,
    MASTER_PORT_ENV,
    NODE_RANK_ENV,
    RANK_ENV,
    ROLE_NAME_ENV,
    ROLE_RANK_ENV,
    ROLE_WORLD_SIZE_ENV,
    TORCHELASTIC_MAX_RESTARTS_ENV,
    TORCHELASTIC_RESTART_COUNT_ENV,
    TORCHELASTIC_RUN_ID_ENV,
    TORCHELASTIC_USE_AGENT_STORE_ENV,
    WORLD_SIZE_ENV,
)
from checkpointless.posix.process_tree import ProcessTree, wait_for_killed

logger = logging.getLogger(__name__)

PREPARE_LIMIT_S = 900.0  # for its imports, at a low priority
#: What a rank learns when it is started. Imports do without it, as they do in the zygote.
ASSIGNED = frozenset(
    {
        RANK_ENV,
        LOCAL_RANK_ENV,
        ROLE_RANK_ENV,
        WORLD_SIZE_ENV,
        LOCAL_WORLD_SIZE_ENV,
        ROLE_WORLD_SIZE_ENV,
        ROLE_NAME_ENV,
        NODE_RANK_ENV,
        GROUP_RANK_ENV,
        GROUP_WORLD_SIZE_ENV,
        MASTER_ADDR_ENV,
        MASTER_PORT_ENV,
        TORCHELASTIC_RUN_ID_ENV,
        TORCHELASTIC_RESTART_COUNT_ENV,
        TORCHELASTIC_MAX_RESTARTS_ENV,
        TORCHELASTIC_USE_AGENT_STORE_ENV,
        JOB_RESTART_COUNT_ENV,
        INCARNATION_ENV,
        FAULT_AT_ENV,
    }
)


@dataclass(frozen=True)
class StandbyProgram:
    """What a standby runs.

    Attributes:
        script: what the ranks run.
        preload: names that the standby imports.
        platform: name of the platform that it installs after the imports; None: none.
        env: its whole environment.
        log: descriptor that its output goes to until it is a rank; it is only lent.
        folder: folder in which the ranks keep their sockets (:mod:`checkpointless.posix.temp_folder`).
    """

    script: Script
    preload: tuple[str, ...]
    platform: str | None
    env: Mapping[str, str]
    log: int
    folder: Path | None

    def command(self, connection: int, left_out: set[str]) -> list[str]:
        """Return the command of a standby.

        Args:
            connection: descriptor of its connection to this process.
            left_out: names that it does not import.
        """
        names = ",".join(name for name in self.preload if name not in left_out)
        command = [sys.executable, "-m", "checkpointless.agent.ranks.standbys.process"]
        command += ["--fd", str(connection), "--parent", str(os.getpid())]
        command += ["--preload", names, "--script", self.script.to_json()]
        if self.platform is not None:
            command += ["--platform", self.platform]
        if self.folder is not None:
            command += ["--temp-folder", str(self.folder)]
        return command


class InterpreterStandbys:
    """Makes standbys, and gives them the places of ranks.

    Args:
        program: what they run.
    """

    def __init__(self, program: StandbyProgram) -> None:
        self._program = program
        self._news: list[StandbyNews] = []
        self._pool = StandbyPool(self._on_news)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._left_out: set[str] = set()

    def keep(self, count: int) -> None:
        """Start what is missing of ``count`` standbys."""
        try:
            while self._pool.count() < count:
                self._make()
        except OSError as error:
            self._on_news(StandbyNews(0, Fate.LOST, f"it could not be started: {error.strerror}", 0.0))

    def take(
        self, env: Mapping[str, str], descriptors: tuple[int, int, int]
    ) -> tuple[subprocess.Popen[bytes], ProcessTree] | None:
        """Give the place of a rank to a standby, if there is one that has imported all with the rank's environment.

        Args:
            env: environment variables of the rank, on top of the agent's.
            descriptors: its log, its connection to the agent and its board.

        Returns:
            The process, which is the rank now, and its tree; None if no standby can be used.
        """
        differs = [
            name for name, value in env.items() if name not in ASSIGNED and self._program.env.get(name) != value
        ]
        if differs:
            logger.warning("no standby is used: %s of the rank is not what it was at the imports", differs)
            return None
        standby = self._pool.take(env, descriptors)
        return None if standby is None else (self._processes.pop(standby.pid), standby.tree)

    def news(self) -> list[StandbyNews]:
        """Return what has become of standbys since the last call, without blocking."""
        self._pool.hear()
        self._pool.kill_older_than(PREPARE_LIMIT_S)
        for pid in self._pool.pids():
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._pool.ended(pid, self._processes.pop(pid).wait()).tree.clean()
        found, self._news = self._news, []
        return found

    def close(self, timeout_s: float) -> None:
        """Kill and reap the standbys; one that the kernel does not end in time is left to it.

        Args:
            timeout_s: how long to wait for all together.
        """
        for pid in self._pool.pids():
            self._pool.kill(pid, "the job has ended")
        deadline_s = time.monotonic() + timeout_s
        for pid in self._pool.pids():
            process = self._processes.pop(pid)
            code = wait_for_killed(process, max(0.1, deadline_s - time.monotonic()))
            if code is not None:
                self._pool.ended(pid, code).tree.clean()

    def _make(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = subprocess.Popen(
                self._program.command(theirs.fileno(), self._left_out),
                env=dict(self._program.env),
                stdin=subprocess.DEVNULL,
                stdout=self._program.log,
                stderr=self._program.log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._processes[process.pid] = process
        self._pool.add(process.pid, ours, ProcessTree(process.pid, self._program.folder))

    def _on_news(self, news: StandbyNews) -> None:
        if news.fate is Fate.SPOILED:
            self._left_out.add(news.why)
        self._news.append(news)
