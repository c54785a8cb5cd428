"""The threads that this process waits for before it ends, and those among them that nobody needs any more."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

_abandoned: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def waited_for() -> set[threading.Thread]:
    """Return the threads that Python would wait for at the end of this process."""
    main = threading.main_thread()
    return {thread for thread in threading.enumerate() if thread is not main and not thread.daemon}


def abandon(threads: Iterable[threading.Thread]) -> None:
    """Note threads that an earlier entry of a block has left."""
    _abandoned.update(threads)


def abandoned() -> set[threading.Thread]:
    """Return those of the threads that are waited for which :func:`abandon` has noted."""
    return waited_for() & set(_abandoned)
