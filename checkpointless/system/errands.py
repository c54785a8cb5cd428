"""Disk operations that an agent's loop needs but must not wait for long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTimeError
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_PATIENCE_S = 1.0

Result = TypeVar("Result")


class Errands:
    """Runs functions in a thread and waits for their results, but only for a moment.

    As long as one function has not returned, no other is started: a disk that has stopped costs one wait, not one
    per rank.

    Args:
        patience_s: how many seconds to wait for a result.
    """

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._last: Future[Any] | None = None

    def run(
        self,
        errand: Callable[[], Result],
        otherwise: Result,
        late: Callable[[Result], object] = lambda result: None,
    ) -> Result:
        """Return what ``errand`` returns, or ``otherwise`` if that is not known in time.

        Args:
            errand: the function to run, which may take long.
            otherwise: the result to use instead.
            late: called in the errand's thread with a result that came too late.

        Raises:
            Exception: what ``errand`` raised in time; what it raises later is logged.
        """
        if self._last is not None and not self._last.done():
            return otherwise
        result: Future[Result] = Future()
        self._last = result

        def run() -> None:
            try:
                result.set_result(errand())
            except Exception as error:  # noqa: BLE001 - the edge of the thread: whoever waits raises it
                result.set_exception(error)

        try:
            threading.Thread(target=run, name="checkpointless-errand", daemon=True).start()
        except RuntimeError as error:  # no more threads: it is as if the disk did not answer
            self._last = None
            logger.warning("%s: what needs the disk is left out", error)
            return otherwise
        try:
            return result.result(self._patience_s)
        except OutOfTimeError:
            result.add_done_callback(lambda done: _take_late(done, late))
            return otherwise


def _take_late(done: Future[Result], late: Callable[[Result], object]) -> None:
    error = done.exception()
    if error is None:
        late(done.result())
    else:
        logger.warning("what took too long has failed, too: %s", error)
