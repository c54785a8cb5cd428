"""Let a helper thread wait in C++, and wait for the helper in Python, where an interruption is handled."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch

_TURN_S = 0.05

T = TypeVar("T")

_awaited: int | None = None  # identifier of the thread that the main thread waits for


def awaited_thread() -> int | None:
    """Return the identifier of the thread that currently works on behalf of the main thread, or None."""
    return _awaited


@contextmanager
def awaiting(thread: int | None) -> Iterator[None]:
    """Note meanwhile that the main thread waits for the thread of that identifier."""
    global _awaited
    before, _awaited = _awaited, thread
    try:
        yield
    finally:
        _awaited = before


def run_in_helper_thread(blocking: Callable[[], T], limit_s: float = math.inf) -> T:
    """Call ``blocking`` in a thread on this CUDA device and stream; wait interruptibly, at most ``limit_s``.

    A call that an interruption leaves running ends when its connections do; one that blocks in the kernel may
    never.
    """
    done, outcome = threading.Event(), list[Any]()
    stream: Any = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def call() -> None:
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                outcome.append(blocking())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            outcome.append(error)
        done.set()

    thread = threading.Thread(target=call, name="checkpointless-helper", daemon=True)
    thread.start()
    deadline_s = time.monotonic() + limit_s
    with awaiting(thread.ident):
        while not done.wait(_TURN_S):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no answer within {limit_s:g} s")
    result = outcome.pop()
    try:
        if isinstance(result, BaseException):
            raise result
        return cast(T, result)
    finally:
        del result  # its traceback has this frame
