"""A time limit for code that runs in this process and may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta


def time_limit(name: str, given: float | timedelta) -> timedelta:
    """Return a time limit that a user gave.

    Args:
        name: name of the setting, for the error message.
        given: the limit, as a number of seconds or as a ``timedelta``.

    Raises:
        ValueError: the limit is not positive.
    """
    limit = given if isinstance(given, timedelta) else timedelta(seconds=given)
    if limit <= timedelta():
        raise ValueError(f"{name} must be a positive number of seconds, not {given}")
    return limit


@contextmanager
def bounded(what: str, limit_s: float, too_late: Callable[[str], object]) -> Iterator[None]:
    """Bracket code that must end within ``limit_s`` seconds.

    Args:
        what: description of the bracketed code, for the reason.
        limit_s: time limit in seconds.
        too_late: called with the reason, in a separate thread, if the code has not ended within the limit. It has
            to end the process, because the thread that hangs cannot be freed.
    """
    timer = threading.Timer(limit_s, too_late, [f"{what} did not end within {limit_s:g} s"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
