"""How a node's part of a job ends: what is written last, what is said last, and the exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import EventLog
from checkpointless.telemetry.scribe import scribe
from checkpointless.wire.board import NO_STEP
from checkpointless.wire.node_messages import End


def conclude(
    outcome: End,
    generation: int,
    *,
    node: int,
    run_dir: Path,
    events: EventLog,
    say: Callable[[str], None],
    newest: int = NO_STEP,
) -> int:
    """Write and say how the job ended on this node.

    Args:
        outcome: how the job ended.
        generation: the last generation that this node knew of (-1: none).
        node: the node's number.
        run_dir: directory of the events, for messages.
        events: the job's event log.
        say: called with each line for the terminal.
        newest: the highest step that a rank of this node was seen to commit (-1: none).

    Returns:
        The exit code.
    """
    step = None if newest == NO_STEP else newest
    events.emit(
        EventName.JOB, "end", generation=max(generation, 0), code=outcome.code, reason=outcome.last_words, step=step
    )
    if not scribe.flush():
        say(f"the disk of {run_dir} does not answer: the last events of node {node} may be lost")
    for line in outcome.last_words:
        say(line)
    return outcome.code
