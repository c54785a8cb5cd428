"""Records how long a generation takes to build its process groups, and then model and optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from checkpointless.inprocess import HPCallWrapper
from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import event_log


class Rebuild:
    """Times the build of one generation.

    Args:
        call: the running wrapper.
    """

    def __init__(self, call: HPCallWrapper) -> None:
        self._call = call
        self._began_s = 0.0

    @contextmanager
    def process_groups(self) -> Iterator[None]:
        """Time the build of the process groups, which the context makes; the rest begins when it ends."""
        call = self._call
        call.steps.entered()
        call.enter_phase("init", call.high_water)
        with event_log().span(EventName.INIT, generation=call.generation, incident=call.incident):
            yield
        call.beat()
        self._began_s = time.monotonic()
        event_log().emit(EventName.REBUILD, "begin", generation=call.generation, incident=call.incident)

    def end(self) -> None:
        """Record that everything is built anew and waits for its state."""
        event_log().emit(
            EventName.REBUILD,
            "end",
            generation=self._call.generation,
            incident=self._call.incident,
            seconds=time.monotonic() - self._began_s,
        )
