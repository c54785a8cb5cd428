"""A thread that reads the event log while somebody asks for metrics.

The run directory may be on a disk that many nodes share and that may stop answering: health must be reported even
then, so neither the agent's loop nor the threads that answer clients read it.
"""

from __future__ import annotations

import logging
import math
import threading
import time

logger = logging.getLogger(__name__)

MAX_BYTES = 4 * 1024 * 1024  # that are read at once
ASKED_FOR_S = 300.0  # how long reading continues after a request
_EVERY_S = 1.0
_CLOSE_TIMEOUT_S = 1.0


class EventReader:
    """Calls :meth:`look` once per second, for :data:`ASKED_FOR_S` after each :meth:`asked`.

    Args:
        name: what is read, for the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked_at_s = -math.inf
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def asked(self) -> None:
        """Note that somebody asks; one thread at a time may call this."""
        self._asked_at_s = time.monotonic()
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._read, name=f"checkpointless-{self._name}", daemon=True)
            self._thread.start()

    def look(self, now_s: float) -> None:
        """Read what was appended.

        Args:
            now_s: the current time on the monotonic clock.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)  # not forever: the disk may not answer

    def _read(self) -> None:
        try:
            while True:
                now_s = time.monotonic()
                if now_s - self._asked_at_s <= ASKED_FOR_S:
                    self.look(now_s)
                if self._closing.wait(_EVERY_S):
                    return
        except Exception:
            logger.exception("the event log is read no more: the metrics that come from it stay as they are")
