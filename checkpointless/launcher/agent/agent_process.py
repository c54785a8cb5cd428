"""An agent in a process that is forked from this one, which has imported what the job needs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from checkpointless.launcher.agent.launch import launch
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.agent.ranks.rank_process import die_with_parent
from checkpointless.system.forked_process import ForkedProcess

_END_S = 30.0  # for the kernel to end a process that was killed


class AgentProcess:
    """Forks an agent, which runs its node's part of a job.

    Its lines, and what it and its ranks print, go to files in the run directory. The agent is not one of the
    terminal's processes, since Ctrl-C is for this process, and ends with this process.

    Args:
        folder: the agent's working directory; None: that of this process.
    """

    def __init__(self, config: LaunchConfig, folder: Path | None = None) -> None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        self._said = config.run_dir / f"agent-{config.node_rank}.said"
        self._said.write_text("")
        parent = os.getpid()
        with self._said.with_suffix(".log").open("ab") as log:
            self._process = ForkedProcess(lambda: self._run(config, folder, parent), output=log.fileno(), close=[])
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or the negative number of the signal that killed it; None as long as it runs."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Return :attr:`code`, as it is now."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send the agent a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the agent, with which its ranks end, and wait for its end."""
        self.send(signal.SIGKILL)
        self._process.wait(_END_S)

    def lines(self) -> tuple[str, ...]:
        """Return what the agent has said."""
        return tuple(self._said.read_text().splitlines())

    def _run(self, config: LaunchConfig, folder: Path | None, parent: int) -> int:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with_parent(parent, signal.SIGTERM)
        for name, number in (("stdout", 1), ("stderr", 2)):  # whatever has replaced those of this process
            setattr(sys, name, open(number, "w", buffering=1, errors="backslashreplace", closefd=False))  # noqa: SIM115
        if folder is not None:
            os.chdir(folder)
        with self._said.open("a", buffering=1) as said:
            return launch(config, lambda line: print(line, file=said))
