"""What is compared of a job that went on from a checkpoint of Bridge's."""

from __future__ import annotations

from dataclasses import replace

from checkpointless.observability.report.verify import Steps
from checkpointless.observability.telemetry.steps import StepRecord


def without_streams(steps: Steps) -> dict[int, list[StepRecord]]:
    """Leave random streams out: Bridge's checkpoints have those of one data-parallel rank for all."""
    return {
        rank: [replace(record, extras=replace(record.extras, own=None)) for record in records]
        for rank, records in steps.items()
    }
