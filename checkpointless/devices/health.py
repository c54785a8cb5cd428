"""Looks at the devices of this machine, in bounded time whatever state they are in."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpointless.devices.child import Lines, end
from checkpointless.devices.judge import judged, port_problems
from checkpointless.devices.nvml_process import LOOK
from checkpointless.devices.survey import (
    NO_DRIVER,
    NO_MODULE,
    Device,
    DeviceSurvey,
    Problem,
    ProblemKind,
    Reading,
)

logger = logging.getLogger(__name__)

__all__ = ["NO_DRIVER", "NO_MODULE", "Device", "DeviceSurvey", "Problem", "ProblemKind", "Reading", "look"]

START_S = 10.0  # a busy machine takes seconds to start an interpreter
DRIVER_FOLDER = Path("/proc/driver/nvidia")  # exists while NVIDIA's kernel module is loaded


def look(
    timeout_s: float,
    *,
    start_s: float = START_S,
    before: DeviceSurvey | None = None,
    xids: Callable[[], Collection[tuple[str, int]]] = frozenset,
    first: int = 0,
) -> DeviceSurvey:
    """Look at the devices of this machine.

    NVML may hang on a bad device, in a way that no signal ends. So a child process asks it, once, and is killed if
    it takes too long; at the end it reads the states of network ports, which may hang, too. The device that was
    being asked about then has a fatal problem; if NVML did not even begin to answer, each device of ``before`` has,
    since CUDA needs the same driver. A child that does not even start, on a machine that is too busy, says nothing
    of devices.

    Args:
        timeout_s: how many seconds NVML may take to begin, and to answer for each device.
        start_s: how many seconds the child may take to start.
        before: an earlier look, of when the devices were in order.
        xids: called after the look; returns UUID of the device and number of each Xid since then.
        first: index of the device to ask about first, because a later one may not be reached.
    """
    if importlib.util.find_spec("pynvml") is None:
        return DeviceSurvey(error=NO_MODULE if DRIVER_FOLDER.is_dir() else NO_DRIVER)
    said = _Said()
    said.listen(timeout_s, start_s, first)
    earlier = before.readings if before is not None else ()
    devices = judged(said.readings, is_complete=said.is_complete, before=earlier, xids=xids())
    if said.is_silent:
        silent = [reading for reading in earlier if said.asking in (None, reading.index)]
        if said.asking is not None and not silent:
            silent = [Reading(said.asking)]
        devices = (*devices, *(_silent(reading, said.error) for reading in silent))
    network = port_problems(said.ports, before.ports) if before is not None and said.ports is not None else ()
    readings, ports = tuple(said.readings), said.ports or ()
    return DeviceSurvey(devices, said.driver, said.cuda, said.error, network, readings, ports)


def _silent(reading: Reading, why: str) -> Device:
    problem = Problem(ProblemKind.SILENT, why, True)
    return Device(reading.index, reading.uuid, reading.name, reading.bus_id, (problem,), reading.mig_uuids)


class _Said:
    """What the process that asks NVML has said.

    Attributes:
        driver: version of the driver.
        cuda: newest version of CUDA that it supports.
        readings: what NVML said of each device.
        ports: name and state of each RDMA port (None: not read).
        asking: index of the device that was asked about last, and not answered for (None: none).
        is_complete: whether NVML was asked about all devices.
        is_silent: whether NVML did not answer in time.
        error: why not everything could be read.
    """

    def __init__(self) -> None:
        self.driver = self.cuda = self.error = ""
        self.readings: list[Reading] = []
        self.ports: tuple[tuple[str, str], ...] | None = None
        self.asking: int | None = None
        self.is_complete = self.is_silent = False
        self._has_begun = False

    def listen(self, timeout_s: float, start_s: float, first: int) -> None:
        """Ask, for ``timeout_s`` seconds each time, once the process has started, which may take ``start_s``."""
        command = [sys.executable, "-m", "checkpointless.devices.nvml_process", LOOK, "--first", str(first)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            self.error = f"the process that asks NVML cannot be started: {error}"
            return
        try:
            lines = Lines(process)
            for line in lines.until(time.monotonic() + start_s):
                self._take(line)
                if self._has_begun:
                    break
            while self._has_begun and self.ports is None:
                said = next(lines.until(time.monotonic() + timeout_s), None)
                if said is None:
                    break
                self._take(said)
        finally:
            end(process)
        if self.is_complete or self.error:
            return
        self.is_silent = self._has_begun and not lines.are_over
        if self.is_silent:
            self.error = f"NVML did not answer within {timeout_s:g} s"
        elif lines.are_over:
            self.error = "the process that asks NVML ended without an answer"
        else:
            self.error = f"the process that asks NVML did not start within {start_s:g} s"

    def _take(self, line: bytes) -> None:
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:  # something else in that process has printed it
            logger.info("the process that asks NVML printed %r", line)
            return
        if "begun" in said:
            self._has_begun = True
        elif "ports" in said:
            self.ports = tuple((name, state) for name, state in said["ports"])
        elif "driver" in said:
            self.driver, self.cuda = said["driver"], said["cuda"]
        elif "asking" in said:
            self.asking = said["asking"]
        elif "reading" in said:
            self.asking = None
            row = said["reading"]
            if row is None:
                return
            links = tuple((number, is_active) for number, is_active in row["links"])
            self.readings.append(replace(Reading(**row), mig_uuids=tuple(row["mig_uuids"]), links=links))
        elif "error" in said:
            self.error = said["error"]
        else:
            self.is_complete = True
