"""An agent in a process that is forked from this one, which has imported what the job needs."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpointless.launcher.agent.launch import launch
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.agent.ranks.rank_process import die_with_parent


class AgentProcess:
    """Forks an agent, which runs its node's part of a job.

    Its lines, and what it and its ranks print, go to files in the run directory. The agent is not one of the
    terminal's processes, since Ctrl-C is for this process, and ends with this process.

    Args:
        config: the agent's configuration.
        folder: the agent's working directory; None: that of this process.

    Attributes:
        pid: its process ID.
        code: its exit code, or the negative number of the signal that killed it; None as long as it runs.
    """

    def __init__(self, config: LaunchConfig, folder: Path | None = None) -> None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        self._said = config.run_dir / f"agent-{config.node_rank}.said"
        self._said.write_text("")
        self.code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            die_with_parent(parent, signal.SIGTERM)
            with self._said.open("a", buffering=1) as said, _into(self._said.with_suffix(".log")):
                if folder is not None:
                    os.chdir(folder)
                code = launch(config, lambda line: print(line, file=said))
        except BaseException:  # noqa: BLE001 - the edge of the process
            traceback.print_exc()
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        """Return :attr:`code`, as it is now."""
        if self.code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def send(self, number: int) -> None:
        """Send the agent a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the agent, with which its ranks end, and wait for its end."""
        self.send(signal.SIGKILL)
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def lines(self) -> tuple[str, ...]:
        """Return what the agent has said."""
        return tuple(self._said.read_text().splitlines())


@contextmanager
def _into(log: Path) -> Iterator[None]:
    """Redirect everything that this process and its children print to a file."""
    with log.open("ab") as file:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        for name, number in (("stdout", 1), ("stderr", 2)):  # whatever has replaced those of this process
            setattr(sys, name, open(number, "w", buffering=1, errors="backslashreplace", closefd=False))  # noqa: SIM115
        yield
        sys.stdout.flush()
        sys.stderr.flush()
