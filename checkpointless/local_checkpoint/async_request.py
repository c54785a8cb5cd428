"""A save whose files are written while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from checkpointless.local_checkpoint.agreement import LocalCheckpointError

logger = logging.getLogger(__name__)

_TURN_S = 0.05


class AsyncSave:
    """A save whose files are being written by a thread.

    Args:
        write: writes the files.
        what: describes in messages what is written.
    """

    def __init__(self, write: Callable[[], None], what: str) -> None:
        self._what = what
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"checkpointless-write {what}")
        self._thread.start()

    def done(self) -> bool:
        """Return whether the writing has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until this rank's files are written. Not collective: it says nothing of other ranks' files.

        Args:
            timeout: how long to wait at most; None: as long as it takes.

        Raises:
            LocalCheckpointError: the files could not be written. (Every rank's next call of the manager raises it,
                too.)
            TimeoutError: the files are not written yet.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while self._thread.is_alive():  # in turns: a thread that waits for a lock hears no interruption
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutError(f"{self._what} is still being written")
            self._thread.join(_TURN_S)
        if self._error is not None:
            raise LocalCheckpointError(f"{self._what} could not be written: {self._error}") from self._error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            logger.exception("%s could not be written", self._what)
            self._error = error
