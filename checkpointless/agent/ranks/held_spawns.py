"""The processes that are to be started once the device of their rank has been looked at."""

from __future__ import annotations

import time
from collections.abc import Callable

from checkpointless.agent.ranks.device_guard import DeviceGuard, Finding
from checkpointless.agent.ranks.known_job import KnownJob
from checkpointless.devices.survey import NO_DRIVER, Problem, ProblemKind
from checkpointless.telemetry.event_names import EventName
from checkpointless.wire.node_messages import DeviceBad, NodeMessage, Spawn

HELD_LIMIT_S = 60.0  # for all looks together; ranks that do not come in time are replaced after 120 s
REPORT_AGAIN_S = 10.0  # a report may be lost with the connection, and the device may be in order by then


class HeldSpawns:
    """Holds the starts of processes while devices are looked at, and reports devices that must not be used.

    The first process of the job for a rank is not held: there is no reason yet to doubt its device.

    Args:
        job: what this node knows of the job.
        guard: knows which devices must not be used; None if the ranks use none.
        report: sends a message to the coordinator.
        say: called with each line for the terminal.
        clock: clock of the times at which a refused device is looked at again.

    Attributes:
        bad_at_begin: which devices of ranks must not be used, as was known when the agent began, and why.
    """

    def __init__(
        self,
        job: KnownJob,
        guard: DeviceGuard | None,
        report: Callable[[NodeMessage], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._guard = guard
        self._report = report
        self._say = say
        self._clock = clock
        # What is asked for by rank, with its local rank, and until when it is held.
        self._held: dict[int, tuple[Spawn, int, float]] = {}
        self._refused: dict[int, float] = {}  # rank -> when its device is looked at again
        self._told: set[tuple[str, Problem]] = set()
        self._told_errors: set[str] = set()
        self.bad_at_begin = ""

    def has(self, rank: int) -> bool:
        """Return whether a process of the rank is held."""
        return rank in self._held

    def is_of(self, spawn: Spawn) -> bool:
        """Return whether it is this process of the rank that is held."""
        held = self._held.get(spawn.rank)
        return held is not None and held[0].incarnation == spawn.incarnation

    def hold(self, spawn: Spawn, local_rank: int) -> bool:
        """Hold the start of a process, unless nothing speaks against it.

        Args:
            local_rank: the rank within this node.
        """
        self.drop(spawn.rank)
        if self._guard is None or spawn.incarnation == 0 or spawn.anyway:
            return False
        self._held[spawn.rank] = spawn, local_rank, self._clock() + HELD_LIMIT_S
        return not self._is_released(*self._held[spawn.rank])

    def released(self) -> list[Spawn]:
        """Return the processes that may be started by now, and report those that must not be."""
        return [held[0] for held in list(self._held.values()) if self._is_released(*held)]

    def drop(self, rank: int) -> bool:
        """Start no process for the rank; return whether one was held."""
        self._refused.pop(rank, None)
        held = self._held.pop(rank, None)
        if held is not None and self._guard is not None:
            self._guard.forget_look(held[1])
        return held is not None

    def report_again(self) -> None:
        """Look again at devices that must not be used, and report them anew: the coordinator does not know them."""
        self._refused.clear()

    def tell_of_begin(self) -> None:
        """Tell of the problems that the devices of this machine had when the agent began."""
        if self._guard is None:
            return
        for device in self._guard.at_begin.devices:
            self._tell(Finding(str(device), device.problems), None)
        self._tell_error(self._guard.at_begin.error)
        self.bad_at_begin = self._guard.bad_at_begin()

    def _is_released(self, spawn: Spawn, local_rank: int, by_s: float) -> bool:
        if self._guard is None or self._refused.get(spawn.rank, 0.0) > self._clock():  # the coordinator decides
            return False
        finding = self._guard.finding(local_rank)
        if finding is None and self._clock() < by_s:
            return False
        if finding is None:
            finding = Finding(
                "", error=f"a device was not known within {HELD_LIMIT_S:g} s, and is used without a look"
            )
        self._tell(finding, spawn.rank)
        self._tell_error(finding.error)
        if finding.why:
            self._refused[spawn.rank] = self._clock() + REPORT_AGAIN_S
            self._report(DeviceBad(spawn.rank, spawn.incarnation, finding.device, finding.why))
            return False
        self.drop(spawn.rank)
        return True

    def _tell(self, finding: Finding, rank: int | None) -> None:
        """Write and say each problem of a device once."""
        for problem in finding.problems:
            device = "network" if problem.kind is ProblemKind.NETWORK else finding.device
            if (device, problem) in self._told:
                continue
            self._told.add((device, problem))
            kind, what, is_fatal = problem.kind.name.lower(), problem.what, problem.is_fatal
            self._job.emit(
                EventName.DEVICE, "point", rank=rank, device=device, kind=kind, what=what, is_fatal=is_fatal
            )
            self._say(f"{device}: {'must not be used' if is_fatal else 'warning'}: {what}")

    def _tell_error(self, error: str) -> None:
        """Say once why it is not known how the devices are."""
        if error and error != NO_DRIVER and error not in self._told_errors:
            self._told_errors.add(error)
            self._say(f"warning: {error}")
