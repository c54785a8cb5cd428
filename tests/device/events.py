"""Provide events of the test device, which have happened when what was launched before them is done."""

from __future__ import annotations

import time
from typing import Any

from tests.device.device import Device, Operation


def event_class(device: Device) -> type:

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._before: list[Operation] = []
            self._recorded_s = 0.0

        def record(self, stream: object = None) -> None:
            self._before, self._recorded_s = device.queued(), time.perf_counter()

        def synchronize(self) -> None:
            for operation in self._before:
                device.synchronize(operation)

        def wait(self, stream: object = None) -> None:
            """Order what follows: every operation waits for its inputs as it is."""

        def query(self) -> bool:
            return all(operation.is_done for operation in self._before)

        def elapsed_time(self, end: Event) -> float:
            """Return the milliseconds between the records of two events."""
            return (end._recorded_s - self._recorded_s) * 1e3

    return Event
