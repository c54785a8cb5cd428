"""Provide an agent whose ranks use devices that a test speaks for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpointless.agent.ranks.device_guard import DeviceGuard
from checkpointless.devices.health import Device, DeviceSurvey, Problem, ProblemKind
from checkpointless.wire.node_messages import RankEnded, Spawn
from tests.unit.agent.commanded_node import CommandedNode

FATAL = Problem(ProblemKind.RECOVERY, "the driver wants a reset", True)
WARNING = Problem(ProblemKind.PCIE, "its PCIe link has 8 of 16 lanes", False)


def survey(*problems: tuple[Problem, ...]) -> DeviceSurvey:
    return DeviceSurvey(tuple(Device(n, f"GPU-{n}", "H100", "", found) for n, found in enumerate(problems)))


class Looks:
    """Stands in for looks at devices; a test says what they find, and may hold them up."""

    def __init__(self, found: DeviceSurvey) -> None:
        self.found = found
        self.asked: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, timeout_s: float, *, first: int = -1, **more: Any) -> DeviceSurvey:
        self.asked.append(first)
        assert self.go_on.wait(10)
        return self.found


class NoXids:
    """Stands in for the process that waits for Xids."""

    def found(self) -> frozenset[tuple[str, int]]:
        return frozenset()

    def close(self) -> None:
        """Do nothing; nothing is left."""


class GuardedNode(CommandedNode):
    """Represents an agent of ranks 0 and 1, which use devices 1 and 0."""

    def __init__(self, folder: Path, looks: Looks, limit_s: float = 60.0) -> None:
        self.later_s = 0.0
        self.looks = looks
        guard = DeviceGuard({"CUDA_VISIBLE_DEVICES": "1,0"}, 2, looks, limit_s=limit_s, clock=self._now_s)
        super().__init__(folder, guard=guard, clock=self._now_s)

    def _now_s(self) -> float:
        return time.monotonic() + self.later_s

    def begin(self) -> None:
        self.tick_until(lambda: self.agent.joined)
        for rank in (0, 1):
            self.spawn(rank, 0)
        self.tick_until(lambda: all(rank.pid for rank in self.agent.ranks.values()))

    def spawn(self, rank: int, incarnation: int, anyway: bool = False) -> None:
        self.agent.obey(Spawn(rank, incarnation, 0, "1", {"LOCAL_RANK": str(rank)}, anyway))

    def ends(self, rank: int, code: int = -9, words: str = "") -> None:
        self.agent.ranks[rank].last_words = words
        super().ends(rank, code)
        assert isinstance(self.said[-1], RankEnded)

    def trains(self, rank: int, step: int) -> None:
        self.agent.ranks[rank].board.set_committed(step)

    def is_started(self, rank: int) -> bool:
        return self.agent.ranks[rank].pid is not None

    def tick_until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline_s
            self.agent.tick(time.monotonic())
            time.sleep(0.002)
