"""Wait for what comes soon on a quiet machine, and on a busy one later."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], limit_s: float = 120.0, meanwhile: Callable[[], object] = int
) -> None:
    """Wait until ``condition`` holds, and do something between two looks."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        meanwhile()
        time.sleep(0.01)
