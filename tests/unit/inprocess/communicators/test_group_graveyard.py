"""Old process groups end in threads of their own: their destructors may block for as long as a group's timeout."""

import sys
import threading

from checkpointless.inprocess.communicators.process_groups import _bury, process_groups
from tests.waiting import wait_until


def test_the_last_reference_is_never_dropped_by_the_thread_that_reaps() -> None:
    ended_in: list[str] = []

    class Group:
        def __del__(self) -> None:
            ended_in.append(threading.current_thread().name)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the new thread runs at once
    try:
        groups = [Group() for _ in range(300)]
        _bury(groups)
        groups.clear()
        process_groups.reap()
        wait_until(lambda: len(ended_in) == 300)
    finally:
        sys.setswitchinterval(interval)
    assert set(ended_in) == {"checkpointless-reaper"}
