"""Looks at the devices of a node, so that no rank is started again on one that is bad; nothing here blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from checkpointless.devices.evidence import FAILURES_LIMIT
from checkpointless.devices.health import (
    NO_DRIVER,
    NO_MODULE,
    Device,
    DeviceSurvey,
    Problem,
    ProblemKind,
    look,
)
from checkpointless.devices.visible import device_of
from checkpointless.devices.xids import XidCollector
from checkpointless.environment import CUDA_DEVICE_ORDER_ENV, CUDA_VISIBLE_DEVICES_ENV

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 10.0  # NVML answers in milliseconds, and takes seconds to begin without persistence mode
LOOK_LIMIT_S = 60.0  # a machine of eight devices is through before
SETTLE_S = 0.25
MAX_AGE_S = 30.0  # of an answer, when a process is to be started because of it

Look = Callable[..., DeviceSurvey]


@dataclass(frozen=True)
class Finding:
    """What is wrong with the device of a rank.

    Attributes:
        device: the device, for people.
        problems: what is wrong; empty if nothing is known to be.
        error: why it is not known what is wrong ("": it is known).
    """

    device: str
    problems: tuple[Problem, ...] = ()
    error: str = ""

    @property
    def why(self) -> str:
        """The problems because of which the device must not be used, in one line ("": none)."""
        return "; ".join(problem.what for problem in self.problems if problem.is_fatal)


class DeviceGuard:
    """Knows what is wrong with the devices of this node's ranks.

    Looks run in threads, which do nothing but wait for a child process.

    Args:
        environment: the environment of the ranks.
        nproc: how many ranks this node runs.
        look: looks at the devices, and may take long.
        timeout_s: how many seconds NVML may take for each device.
        limit_s: how many seconds a look may take; a later answer is not waited for, and nothing is known then.
        clock: clock of all times; it should stand still while this process does.
        settle_s: how many seconds after the end of a process the look at its device begins, so that ranks that end
            together share one.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        nproc: int,
        look: Look = look,
        *,
        timeout_s: float = LOOK_TIMEOUT_S,
        limit_s: float = LOOK_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._visible = environment.get(CUDA_VISIBLE_DEVICES_ENV)
        self._order = environment.get(CUDA_DEVICE_ORDER_ENV)
        self._nproc = nproc
        self._look = look
        self._timeout_s = timeout_s
        self._limit_s = limit_s
        self._clock = clock
        self._settle_s = settle_s
        self._xids: XidCollector | None = None
        self._is_closed = False
        self._first = self._run(self._look_first)
        self._looks: dict[int, _Look] = {}
        self._doubted: set[int] = set()  # local ranks whose device is looked at for the second time
        self._failures: dict[int, int] = {}

    @property
    def has_begun(self) -> bool:
        """Whether it is known which devices there are, or that this cannot be known."""
        return self._first.is_over

    @property
    def at_begin(self) -> DeviceSurvey:
        """The devices as they were when the agent began; none before that is known."""
        return self._first.survey

    def begin_look(self, local_rank: int) -> None:
        """Begin to look at the device of a rank whose process has ended, unless that has been begun."""
        if local_rank in self._looks or not self.has_begun:
            return
        first = self.at_begin
        if first.error in (NO_DRIVER, NO_MODULE):
            return
        coming = next((each for each in self._looks.values() if not each.has_begun), None)
        if coming is None and first.error:  # it could not be made, or not to the end: this one takes its place
            coming = self._first = self._run(self._look_first, self._settle_s)
        self._looks[local_rank] = coming or self._run(lambda: self._look_again(local_rank, first), self._settle_s)

    def finding(self, local_rank: int) -> Finding | None:
        """Return what is wrong with the device of a rank that is to be started; None while that is not known yet.

        It is known once for each look: the next process needs another one. What is fatal is looked at twice, since
        a busy machine answers late, and a process that is torn down leaves its device in disorder for a moment.
        """
        if not self.has_begun:
            return None
        self.begin_look(local_rank)
        running = self._looks.get(local_rank)
        if running is not None and not running.is_over:
            return None
        self._looks.pop(local_rank, None)
        if running is not None and running.age_s > MAX_AGE_S:
            self.begin_look(local_rank)
            return None
        survey = running.survey if running is not None else self.at_begin
        device = self._device(local_rank, survey)
        is_doubtful = bool(device.fatal) if device is not None else bool(survey.error)
        if running is not None and is_doubtful and local_rank not in self._doubted:
            self._doubted.add(local_rank)
            self.begin_look(local_rank)
            return None
        self._doubted.discard(local_rank)
        problems = (device.problems if device is not None else ()) + survey.network
        failures = self._failures.get(local_rank, 0)
        if failures >= FAILURES_LIMIT:
            what = f"{failures} processes in a row have ended because of it"
            problems = (*problems, Problem(ProblemKind.FAILURES, what, True))
        name = str(device) if device is not None else f"the device of local rank {local_rank}"
        return Finding(name, problems, survey.error)

    def forget_look(self, local_rank: int) -> None:
        """Forget what was seen of a device: the process that it was looked at for is not started."""
        self._looks.pop(local_rank, None)
        self._doubted.discard(local_rank)

    def note_end(self, local_rank: int, blames_device: bool, made_progress: bool) -> None:
        """Note that a process of the rank has ended.

        Args:
            blames_device: whether it ended because of its device, by its own words.
            made_progress: whether it had committed a step, so that its device had worked.
        """
        earlier = 0 if made_progress else self._failures.get(local_rank, 0)
        self._failures[local_rank] = earlier + 1 if blames_device else 0

    def bad_at_begin(self) -> str:
        """Return which devices of ranks must not be used, as was known when the agent began, and why ("": none).

        A device that did not answer may do so later, so that does not count.
        """
        used = (self._device(local, self.at_begin) for local in range(self._nproc))
        found = (
            Finding(str(device), tuple(each for each in device.problems if each.kind is not ProblemKind.SILENT))
            for device in used
            if device is not None
        )
        return "; ".join(f"{each.device}: {each.why}" for each in found if each.why)

    def close(self) -> None:
        """End the process that waits for Xids."""
        self._is_closed = True
        if self._xids is not None:
            self._xids.close()

    def _device(self, local_rank: int, survey: DeviceSurvey) -> Device | None:
        """Return the device of a rank: the one that was it at the begin, since the numbers may have changed."""
        first = self.at_begin
        was = device_of(local_rank, first.devices, self._visible, self._order)
        if was is None or survey is first:
            return was
        return next((each for each in survey.devices if each.uuid == was.uuid), None)

    def _look_again(self, local_rank: int, first: DeviceSurvey) -> DeviceSurvey:
        was = device_of(local_rank, first.devices, self._visible, self._order)
        xids = self._xids.found if self._xids is not None else frozenset
        return self._look(self._timeout_s, before=first, xids=xids, first=was.index if was is not None else 0)

    def _look_first(self) -> DeviceSurvey:
        survey = self._look(self._timeout_s)
        if survey.error not in ("", NO_DRIVER, NO_MODULE):  # a busy machine answers late
            survey = self._look(self._timeout_s)
        if survey.devices and self._xids is None:
            try:
                self._xids = XidCollector()
            except OSError as error:
                logger.warning("Xids are not collected: %s", error)
        if self._is_closed and self._xids is not None:
            self._xids.close()
        return survey

    def _run(self, task: Callable[[], DeviceSurvey], after_s: float = 0.0) -> _Look:
        look = _Look(self._clock, self._clock() + after_s + self._limit_s, self._limit_s)

        def run() -> None:
            time.sleep(after_s)
            look.has_begun = True
            try:
                look.answer(task())
            except Exception as error:
                logger.exception("the devices cannot be looked at")
                look.answer(DeviceSurvey(error=f"the devices cannot be looked at: {error}"))

        try:
            threading.Thread(target=run, name="checkpointless-devices", daemon=True).start()
        except RuntimeError as error:  # no more threads
            look.has_begun = True
            look.answer(DeviceSurvey(error=f"the devices cannot be looked at: {error}"))
        return look


class _Look:
    """A look that may be under way.

    Args:
        clock: clock of all times.
        by_s: until when it is waited for.
        limit_s: how many seconds that is, for people.

    Attributes:
        has_begun: whether devices have been asked already; until then others may share it.
    """

    def __init__(self, clock: Callable[[], float], by_s: float, limit_s: float) -> None:
        self.has_begun = False
        self._clock = clock
        self._by_s = by_s
        self._limit_s = limit_s
        self._answer: tuple[DeviceSurvey, float] | None = None  # and when it came

    def answer(self, survey: DeviceSurvey) -> None:
        """Note what was found."""
        self._answer = survey, self._clock()

    @property
    def is_over(self) -> bool:
        """Whether there is an answer, or none is waited for any more."""
        return self._answer is not None or self._clock() >= self._by_s

    @property
    def age_s(self) -> float:
        """How long ago the answer came, in seconds."""
        return self._clock() - self._answer[1] if self._answer is not None else 0.0

    @property
    def survey(self) -> DeviceSurvey:
        """The answer; nothing before it has come."""
        if self._answer is not None:
            return self._answer[0]
        late = f"the look at the devices was not over within {self._limit_s:g} s"
        return DeviceSurvey(error=late if self.is_over else "")
