"""Checkpoints on storage that could not be saved, as a run's events say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import Event


@dataclass(frozen=True)
class FailedSave:
    """One checkpoint that could not be saved.

    Attributes:
        path: folder of the checkpoint.
        reason: what went wrong on the first of the ranks.
        ranks: the ranks on which something went wrong.
    """

    path: str
    reason: str
    ranks: tuple[int, ...] = ()


def failed_saves(events: Sequence[Event]) -> tuple[FailedSave, ...]:
    """Return the checkpoints that could not be saved, in the order in which they were due."""
    found = [event for event in events if event.stage == EventName.SAVE_FAILED]
    return tuple(
        FailedSave(
            str(event.fields.get("path")),
            str(event.fields.get("reason")),
            tuple(rank for rank in event.fields.get("ranks") or () if isinstance(rank, int)),
        )
        for event in sorted(found, key=lambda event: event.ts)
    )
