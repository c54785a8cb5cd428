"""A time limit for code that runs in this process and may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
