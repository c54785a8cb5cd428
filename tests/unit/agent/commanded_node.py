"""Provide an agent that a test commands, and whose processes do what the test says."""

import os
import selectors
import socket
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.agent.node import NodeAgent
from checkpointless.launcher.agent.ranks.output import Printed
from checkpointless.launcher.agent.ranks.process_keeper import LocalRank, ProcessKeeper
from checkpointless.launcher.agent.ranks.zygote import ForkServer, News, Ready, Start, Started, _Exited
from checkpointless.launcher.protocol.board import Board
from checkpointless.launcher.protocol.channel import LOOPBACK
from checkpointless.launcher.protocol.messages import NodeMessage
from checkpointless.observability.telemetry.events import EventLog

SEVERAL: dict[str, Any] = {"nnodes": 2, "rdzv_endpoint": "node0", "token": "t" * 32}  # of a job of two nodes


class NoProcesses(ForkServer):
    """Starts nothing; the test says what its processes do."""

    def __init__(self) -> None:
        self.readable, self._other = socket.socketpair()
        self.coming: list[News] = [Ready(True, (), 0.0)]
        self.signals: list[tuple[int, int]] = []

    def start(self, order: Start, log: int, agent: int, board: int) -> None:
        os.close(os.dup(agent))  # this raises unless it is open
        self.coming.append(Started(order.rank, order.incarnation, 1000 + order.rank))

    def signal(self, pid: int, number: int) -> None:
        self.signals.append((pid, number))

    def ask(self) -> None:
        """Do nothing: the test says what there is to hear."""

    def news(self) -> list[News]:
        found, self.coming = self.coming, []
        return found

    def close(self) -> None:
        self.readable.close()
        self._other.close()


class CommandedNode:
    """Represents the agent of a node; its processes are started by commands, and none is real."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic, **more: Any) -> None:
        self.folder, self.starter = folder, NoProcesses()
        self.said: list[NodeMessage] = []
        self.printed: list[str] = []
        self.selector = selectors.DefaultSelector()
        config = LaunchConfig(nproc_per_node=1, script=__file__, run_dir=folder, **more)
        say, starters = self.printed.append, iter([self.starter])
        keep = partial(ProcessKeeper, config, starters, self._rank, {}, self.selector, say)
        common: dict[str, Any] = {"keep_processes": keep, "events": EventLog(None), "say": say, "clock": clock}
        self.agent = NodeAgent(config, address=lambda: LOOPBACK, report=self.said.append, **common)

    def _rank(self, number: int) -> LocalRank:
        printed = Printed(self.folder / f"rank-{number}.log")
        weakref.finalize(self, printed.close)
        return LocalRank(number, Board.create(number), printed)

    def close(self) -> None:
        self.agent.close()
        self.selector.close()

    def tick(self, after_s: float = 0.0) -> None:
        self.agent.tick(time.monotonic() + after_s)

    def ends(self, rank: int, code: int = -9) -> None:
        self.starter.coming.append(_Exited(rank, self.agent.ranks[rank].incarnation, 1000 + rank, code))
        self.tick()
