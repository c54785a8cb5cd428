"""Let a helper thread wait in C++, and wait for the helper in Python, where an interruption is handled."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

_TURN_S = 0.05

T = TypeVar("T")

_awaited: int | None = None  # identifier of the thread that the main thread waits for


def awaited_thread() -> int | None:
    """Return the identifier of the thread that currently works on behalf of the main thread, or None."""
    return _awaited


@contextmanager
def awaiting(thread: int | None) -> Iterator[None]:
    """Say, as long as the context lasts, that the main thread waits for another one.

    Args:
        thread: the identifier of that thread.
    """
    global _awaited
    before, _awaited = _awaited, thread
    try:
        yield
    finally:
        _awaited = before


class HelperThread:
    """A thread that waits on behalf of another thread.

    It ends when nobody refers to this object any more, since an interruption may come before anybody does.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        weakref.finalize(self, self._calls.put, None).atexit = False
        self._thread = threading.Thread(
            target=_serve, args=(self._calls,), name="checkpointless-helper", daemon=True
        )
        self._thread.start()

    def run(self, blocking: Callable[[], T]) -> T:
        """Call ``blocking`` in the helper thread, wait for it interruptibly and return its result."""
        done = self._done = threading.Event()
        outcome: list[Any] = []

        def call() -> None:
            try:
                outcome.append(blocking())
            except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
                outcome.append(error)
            done.set()

        with awaiting(self._thread.ident):
            self._calls.put(call)
            while not done.wait(_TURN_S):
                pass
        result = outcome[0]
        if isinstance(result, BaseException):
            raise result
        return cast(T, result)

    def is_alive(self) -> bool:
        """Return whether the thread is there."""
        return self._thread.is_alive()

    def idle(self) -> bool:
        """Return whether the thread has no call in progress."""
        return self._done.is_set()

    def end(self) -> None:
        """Let the thread end when it is idle."""
        self._calls.put(None)


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        call = None  # an exception that it raised holds the frames of the waiting thread


class SpareHelper:
    """Has calls made in a helper thread, always the same one unless an interruption left it with a call."""

    def __init__(self) -> None:
        self._spare: HelperThread | None = None

    def run(self, blocking: Callable[[], T]) -> T:
        """Call ``blocking`` in the helper thread, wait for it interruptibly and return its result."""
        helper, self._spare = self._spare, None
        if helper is None or not helper.is_alive():  # in a process that was forked there are no other threads
            helper = HelperThread()
        try:
            return helper.run(blocking)
        finally:
            if helper.idle():
                self._spare = helper
            else:
                helper.end()  # the helper ends when its call does, if ever

    def end(self) -> None:
        """Let the thread end."""
        if self._spare is not None:
            self._spare.end()
            self._spare = None
