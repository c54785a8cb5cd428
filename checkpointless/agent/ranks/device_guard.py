"""Looks at the devices of a node, so that no rank is started again on one that is bad; nothing here blocks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from checkpointless.devices.evidence import FAILURES_LIMIT
from checkpointless.devices.health import Device, DeviceSurvey, Problem, ProblemKind, look
from checkpointless.devices.visible import device_of
from checkpointless.devices.xids import XidCollector
from checkpointless.environment import CUDA_DEVICE_ORDER_ENV, CUDA_VISIBLE_DEVICES_ENV

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S = (
    10.0  # NVML takes milliseconds for a device in order, and seconds to begin without persistence mode
)

Look = Callable[..., DeviceSurvey]


@dataclass(frozen=True)
class Finding:
    """What is wrong with the device of a rank.

    Attributes:
        device: the device, for people.
        problems: what is wrong; empty if nothing is known to be.
    """

    device: str
    problems: tuple[Problem, ...] = ()

    @property
    def why(self) -> str:
        """The problems because of which the device must not be used, in one line ("": none)."""
        return "; ".join(problem.what for problem in self.problems if problem.is_fatal)


class DeviceGuard:
    """Knows what is wrong with the devices of this node's ranks.

    Looks run in threads, one at a time, which do nothing but wait for a child process.

    Args:
        environment: the environment of the ranks.
        nproc: how many ranks this node runs.
        look: looks at the devices, and may take long.
        timeout_s: how many seconds NVML may take.
    """

    def __init__(
        self, environment: Mapping[str, str], nproc: int, look: Look = look, timeout_s: float = LOOK_TIMEOUT_S
    ) -> None:
        self._visible = environment.get(CUDA_VISIBLE_DEVICES_ENV)
        self._order = environment.get(CUDA_DEVICE_ORDER_ENV)
        self._nproc = nproc
        self._look = look
        self._timeout_s = timeout_s
        self._xids: XidCollector | None = None
        self._first: Future[DeviceSurvey] = self._run(lambda: look(timeout_s))
        self._looks: dict[int, Future[DeviceSurvey]] = {}
        self._failures: dict[int, int] = {}

    @property
    def has_begun(self) -> bool:
        """Whether it is known which devices there are."""
        return self._first.done()

    @property
    def at_begin(self) -> DeviceSurvey:
        """The devices as they were when the agent began; none before that is known."""
        if not self._first.done():
            return DeviceSurvey()
        survey = self._first.result()
        if survey.devices and self._xids is None:
            try:
                self._xids = XidCollector()
            except OSError as error:
                logger.warning("Xids are not collected: %s", error)
        return survey

    def begin_look(self, local_rank: int) -> None:
        """Begin to look at the device of a rank whose process has ended, unless that has been begun."""
        if local_rank in self._looks or not self.at_begin.devices:
            return
        running = next((each for each in self._looks.values() if not each.done()), None)
        self._looks[local_rank] = running or self._run(lambda: self._look_again(local_rank))

    def finding(self, local_rank: int) -> Finding | None:
        """Return what is wrong with the device of a rank that is to be started; None while that is not known yet.

        It is known once for each look: the next process needs another one.
        """
        if not self.has_begun:
            return None
        self.begin_look(local_rank)
        running = self._looks.get(local_rank)
        if running is not None and not running.done():
            return None
        survey = self._looks.pop(local_rank).result() if running is not None else self.at_begin
        device = self._device(local_rank, survey)
        problems = (device.problems if device is not None else ()) + survey.network
        failures = self._failures.get(local_rank, 0)
        if failures >= FAILURES_LIMIT:
            what = f"{failures} processes in a row have ended because of it"
            problems = (*problems, Problem(ProblemKind.FAILURES, what, True))
        return Finding(str(device) if device is not None else f"the device of local rank {local_rank}", problems)

    def note_end(self, local_rank: int, blames_device: bool) -> None:
        """Note that a process of the rank has ended.

        Args:
            blames_device: whether it ended because of its device, by its own words.
        """
        self._failures[local_rank] = self._failures.get(local_rank, 0) + 1 if blames_device else 0

    def bad_at_begin(self) -> str:
        """Return which devices of ranks must not be used, as was known when the agent began, and why ("": none)."""
        used = (self._device(local, self.at_begin) for local in range(self._nproc))
        found = (Finding(str(device), device.problems) for device in used if device is not None)
        return "; ".join(f"{each.device}: {each.why}" for each in found if each.why)

    def close(self) -> None:
        """End the process that waits for Xids."""
        if self._xids is not None:
            self._xids.close()

    def _device(self, local_rank: int, survey: DeviceSurvey) -> Device | None:
        """Return the device of a rank: the one that was it at the begin, since the numbers may have changed."""
        first = self.at_begin
        was = device_of(local_rank, first.devices, self._visible, self._order)
        if was is None or survey is first:
            return was
        return next((device for device in survey.devices if device.uuid == was.uuid), was if not was.uuid else None)

    def _look_again(self, local_rank: int) -> DeviceSurvey:
        first = self.at_begin
        was = device_of(local_rank, first.devices, self._visible, self._order)
        xids = self._xids.found() if self._xids is not None else frozenset()
        return self._look(self._timeout_s, before=first, xids=xids, first=was.index if was is not None else 0)

    def _run(self, task: Callable[[], DeviceSurvey]) -> Future[DeviceSurvey]:
        future: Future[DeviceSurvey] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except Exception as error:
                logger.exception("the devices cannot be looked at")
                future.set_result(DeviceSurvey(error=f"the devices cannot be looked at: {error}"))

        threading.Thread(target=run, name="checkpointless-devices", daemon=True).start()
        return future
