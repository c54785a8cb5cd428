"""A process that has imported the frameworks once and forks the agents of whole jobs, one job after the other."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointless.agent.agent_process import AgentProcess
from checkpointless.agent.launch_config import LaunchConfig
from checkpointless.demo.trainers import Trainer
from checkpointless.environment import CPU_ENV, OMP_NUM_THREADS_ENV, YES

_REAP_EVERY_S = 0.02
_LEAVE_S = 10.0  # for agents that were interrupted together with this process


@dataclass(frozen=True)
class Ended:
    """How an agent ended.

    Attributes:
        code: exit code, or the negative number of the signal that killed the agent; None if it was still running.
        said: lines of the agent for the terminal.
    """

    code: int | None
    said: tuple[str, ...]


class Nursery:
    """Turns this process into one that forks agents, with a trainer's modules imported and with one thread.

    Args:
        trainer: the trainer of the jobs.

    Raises:
        ImportError: one of the trainer's modules is not installed.
    """

    def __init__(self, trainer: Trainer) -> None:
        os.environ[CPU_ENV] = YES
        os.environ[OMP_NUM_THREADS_ENV] = "1"  # otherwise sums would depend on the number of ranks of a node
        trainer.prepare()
        for name in ("checkpointless.agent.node_run", *trainer.preload()):
            importlib.import_module(name)
        import torch

        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()

    def run(self, configs: Sequence[LaunchConfig], limit_s: float) -> list[Ended]:
        """Run the agents of one job until all have ended.

        Args:
            configs: one configuration per agent.
            limit_s: number of seconds after which the agents that are left are killed.
        """
        agents = [AgentProcess(config) for config in configs]
        try:
            _wait(agents, time.monotonic() + limit_s)
        except KeyboardInterrupt:
            for agent in agents:
                agent.send(signal.SIGINT)
            _wait(agents, time.monotonic() + _LEAVE_S)
            raise
        finally:
            codes = [agent.poll() for agent in agents]
            for agent in agents:
                agent.kill()
        return [Ended(code, agent.lines()) for code, agent in zip(codes, agents, strict=True)]


def _wait(agents: Sequence[AgentProcess], until_s: float) -> None:
    while any([agent.poll() is None for agent in agents]) and time.monotonic() < until_s:
        time.sleep(_REAP_EVERY_S)
