"""A thread that does one task after the other, and begins no task any more once it is left."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

_LEAVING_S = 5.0  # an error that is followed by a fault's notice belongs to that fault
_TURN_S = 0.02

_T = TypeVar("_T")


class Lane:
    """Does tasks in a thread, in their order, until one fails or the lane is left.

    Args:
        name: what the tasks do, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._asked = 0  # how many tasks; counted by the thread that gives them
        self._done = 0  # counted by the lane
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"checkpointless-{name}", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether no task is being done, and none waits that will be done."""
        return self._done >= self._asked or not self._thread.is_alive()

    @property
    def has_ended(self) -> bool:
        """Whether the thread is gone: the lane was left, and the last task is done."""
        return not self._thread.is_alive()

    @property
    def thread(self) -> int | None:
        """The identifier of the thread."""
        return self._thread.ident

    @property
    def is_left(self) -> bool:
        """Whether no task is begun any more."""
        return self._left.is_set()

    def do(self, task: Callable[[], None]) -> None:
        """Have ``task`` done after the tasks that were given before."""
        self._asked += 1
        self._tasks.put(task)

    def leave(self) -> None:
        """Begin no task any more. One that is being done ends by itself."""
        self._left.set()
        self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None and not self._left.is_set():
            try:
                task()
            except Exception as error:
                if not self._left.wait(_LEAVING_S):
                    logger.exception("%s: no task is done any more until the next recovery: %s", self._name, error)
                return
            finally:
                self._done += 1
            task = None  # it may hold a copy of the state


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Call a function that may block in the kernel, for example on a storage that is gone, in a thread of its own.

    Args:
        seconds: how long to wait for it.
        call: the function.

    Raises:
        TimeoutError: it has not returned in time. Its thread is left behind.
        Exception: what the function raises.
    """
    outcome: list[_T | Exception] = []
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:  # noqa: BLE001 - raised in the waiting thread
            outcome.append(error)
        ended.set()

    deadline_s = time.monotonic() + seconds
    threading.Thread(target=run, name="checkpointless-bounded", daemon=True).start()
    while not ended.wait(_TURN_S):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no answer within {seconds:g} s")
    (found,) = outcome
    if isinstance(found, Exception):
        raise found
    return found
