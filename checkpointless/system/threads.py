"""The threads that this process waits for before it ends, and those among them that nobody needs any more."""

from __future__ import annotations

import threading
import weakref

#: Threads that an earlier entry of a block has left.
abandoned: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def waited_for() -> set[threading.Thread]:
    """Return the threads that Python would wait for at the end of this process."""
    main = threading.main_thread()
    return {thread for thread in threading.enumerate() if thread is not main and not thread.daemon}
