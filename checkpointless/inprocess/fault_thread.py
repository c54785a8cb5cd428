"""The thread that handles fault notices, while the main thread may be blocked."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from checkpointless.inprocess.exceptions import line_of

logger = logging.getLogger(__name__)


class FaultThread:
    """Handles the fault notices of one rank, in order of arrival, in a separate thread.

    Args:
        handle: called with the generation that is over; its run time must be bounded.
        failed: called with the reason if ``handle`` raised; this process cannot be trusted to leave its block then.
    """

    def __init__(self, handle: Callable[[int], None], failed: Callable[[str], None]) -> None:
        self._handle = handle
        self._failed = failed
        self._notices: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpointless-fault-thread", daemon=True)
        self._thread.start()

    def notify(self, generation: int) -> None:
        """Queue a notice and return at once."""
        self._notices.put(generation)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """End the thread."""
        self._notices.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (generation := self._notices.get()) is not None:
            try:
                self._handle(generation)
            except Exception as error:
                logger.exception("the fault of generation %d could not be handled", generation)
                self._failed(line_of(error))
