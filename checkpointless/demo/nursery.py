"""A process that has imported the frameworks once and forks the agents of whole jobs, one job after the other."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from checkpointless.agent.launch import launch
from checkpointless.agent.launch_config import LaunchConfig
from checkpointless.agent.ranks.rank_process import die_with_parent
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
        agents = [(_fork(config), config) for config in configs]
        codes: dict[int, int | None] = {}
        try:
            _reap([pid for pid, _ in agents], codes, time.monotonic() + limit_s)
        except KeyboardInterrupt:
            _reap([pid for pid, _ in agents], codes, time.monotonic() + _LEAVE_S)
            raise
        finally:
            for pid, _ in agents:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        return [Ended(codes.get(pid), tuple(_said(config).read_text().splitlines())) for pid, config in agents]


def _fork(config: LaunchConfig) -> int:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    _said(config).write_text("")
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(nursery)
        with _said(config).open("a", buffering=1) as said, _into(config.run_dir / f"agent-{config.node_rank}.log"):
            code = launch(config, lambda line: print(line, file=said))
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    finally:
        os._exit(code)


@contextmanager
def _into(log: Path) -> Iterator[None]:
    """Redirect everything that this process and its children print to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        yield
        sys.stdout.flush()
        sys.stderr.flush()


def _reap(pids: Sequence[int], codes: dict[int, int | None], until_s: float) -> None:
    while len(codes) < len(pids) and time.monotonic() < until_s:
        for pid in pids:
            if pid not in codes and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(_REAP_EVERY_S)


def _said(config: LaunchConfig) -> Path:
    return config.run_dir / f"agent-{config.node_rank}.said"
