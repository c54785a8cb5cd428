"""What ``--record-steps`` records of a step in a loop of one's own, besides loss and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpointless.recovery.training.repeated_steps import repeated_steps
from checkpointless.serialization.digest import MemoryChecksumManager, digest_buffers
from checkpointless.telemetry.steps import StepExtras

if TYPE_CHECKING:
    from checkpointless.recovery.manager import CheckpointManager
    from checkpointless.recovery.training.loop import LoopTraining


def extras_of(training: LoopTraining, manager: CheckpointManager, call_number: int) -> StepExtras:
    """Return what is recorded of the committed step of a training.

    Args:
        training: the training.
        manager: its manager, which has kept the rank-local state.
        call_number: the number of the call of ``steps()`` that gave the step.
    """
    rates = [values.get("lr", 0.0) for groups in training.groups() for values in groups]
    epoch, was_validated = repeated_steps.passes.look()
    return StepExtras(
        buffers=digest_buffers(training.modules),
        lr=tuple(float(rate).hex() for rate in rates),
        optimizer=MemoryChecksumManager().digest_all(training.shard()),
        own=manager.own_digests(training.step),
        batch=repeated_steps.batch_of(training.step),
        epoch=epoch + call_number,
        validated=was_validated or None,
    )
