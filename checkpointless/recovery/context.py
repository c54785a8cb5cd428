"""What a recovery needs of the running block: its board, its events, and a thread beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from checkpointless.agent.board import Board
from checkpointless.inprocess import active_call_wrapper
from checkpointless.inprocess.aside import Helper
from checkpointless.telemetry.events import event_log

_Result = TypeVar("_Result")


def own_board() -> Board | None:
    """This rank's board, or None under another launcher or outside of a block."""
    call = active_call_wrapper()
    return call.board if call is not None else None


def span(stage: str, **fields: Any) -> Any:
    """A span of ``stage`` in the event log, with the generation and incident of the running block."""
    call = active_call_wrapper()
    generation = call.generation if call is not None else int(os.environ.get("JOB_RESTART_COUNT", "0"))
    return event_log().span(stage, generation=generation, incident=call.incident if call else None, **fields)


def aside(transfer: Callable[[], _Result]) -> _Result:
    """Run a transfer in a thread of its own, which waits for each message without turns; wait for it interruptibly.

    What an interruption leaves running ends when its connections do.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> _Result:
        if device is not None:
            torch.cuda.set_device(device)  # the current device is the thread's own
        return transfer()

    helper = Helper()
    try:
        return helper.run(run)
    finally:
        helper.end()
