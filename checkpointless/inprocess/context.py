"""What a recovery needs from the running block: the rank's board and its event log."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from checkpointless.inprocess import UnrecoverableError, active_call_wrapper
from checkpointless.launcher.protocol.board import Board
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import event_log
from checkpointless.system.environment import STRICT_ENV, YES, own_generation, own_rank


def own_board() -> Board | None:
    """Return this rank's board, or None under another launcher or outside a block."""
    call = active_call_wrapper()
    return call.board if call is not None else None


def span(stage: EventName, **fields: Any) -> AbstractContextManager[dict[str, Any]]:
    """Return a span of ``stage`` in the event log, with the generation and incident of the running block."""
    call = active_call_wrapper()
    generation = call.generation if call is not None else own_generation()
    return event_log().span(stage, generation=generation, incident=call.incident if call else None, **fields)


def emit_event(name: EventName, **fields: Any) -> None:
    """Write the event ``name`` to the log, with the generation and incident of the running block."""
    call = active_call_wrapper()
    generation = call.generation if call is not None else own_generation()
    event_log().emit(name, "point", generation=generation, incident=call.incident if call else None, **fields)


def not_exact(step: int, reason: str, **fields: Any) -> None:
    """Report that a step, which is repeated after a fault, is not the one that it was.

    Raises:
        UnrecoverableError: the job is to end then (``--strict``).
    """
    emit_event(EventName.INEXACT, step=step, reason=reason, **fields)
    call = active_call_wrapper()
    if call is not None:
        call.client.report_inexact(call.generation, reason)
    if os.environ.get(STRICT_ENV) == YES:
        raise UnrecoverableError(f"rank {own_rank()}: {reason}: the job ends, as --strict ({STRICT_ENV}) asks for")


def putting_back() -> AbstractContextManager[None]:
    """Return a context in which a fault lets ``finally`` clauses run to their ends."""
    call = active_call_wrapper()
    return call._main.putting_back() if call is not None else nullcontext()
