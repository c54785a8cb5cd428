"""What is compared of a job that went on from a checkpoint of Bridge's."""

from __future__ import annotations

from msgspec.structs import replace

from checkpointless.observability.report.verify import Steps, compare
from checkpointless.observability.telemetry.steps import StepRecord
from tests.ranks.jobs import Job


def without_streams(steps: Steps) -> dict[int, list[StepRecord]]:
    """Leave random streams out: Bridge's checkpoints have those of one data-parallel rank for all."""
    return {rank: [replace(record, own=None) for record in records] for rank, records in steps.items()}


def require_same_from_the_checkpoint(calm: Job, job: Job) -> None:
    """Require that a job that lost the state in step 4 went on from the checkpoint after step 2."""
    verdict = compare(without_streams(calm.steps), without_streams(job.steps))
    assert verdict.difference is None, "what was done again has other bits"
    assert not verdict.missing
    assert {place.step for place in verdict.repeated} == {3}
