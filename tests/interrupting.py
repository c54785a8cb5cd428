"""Interrupt code right before one of its instructions, as the fault of another rank may."""

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """Stands in for what the fault of another rank raises in the main thread."""


def interrupt(run: Callable[[], object], at: int, files: Collection[str | None]) -> bool:
    """Run it, and raise right before the ``at``-th instruction in ``files``; return whether there are so many."""
    passed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            passed += 1
            if passed == at:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 reports opcodes only if a frame asked before settrace
    sys.settrace(trace)
    try:
        run()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False
