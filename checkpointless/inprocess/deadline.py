"""A limit for what runs in this process and may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bounded(what: str, limit_s: float, too_late: Callable[[str], object]) -> Iterator[None]:
    """Bracket what must end within ``limit_s`` seconds.

    Args:
        what: it, in words.
        limit_s: how long it may take, in seconds.
        too_late: called with the reason, in a thread of its own, when it has not ended by then. The thread that
            hangs cannot be freed: this has to end the process.
    """
    timer = threading.Timer(limit_s, too_late, [f"{what} did not end within {limit_s:g} s"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
