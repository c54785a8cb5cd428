"""The callbacks that a fit in the block needs, whether or not the trainer was given them."""

from __future__ import annotations

from typing import Any

from checkpointless.callbacks import CheckpointlessCallback, HPFaultInjectionCallback, StepRecorder
from checkpointless.callbacks.external import without_external


def complete(present: list[Any], fault_injection: HPFaultInjectionCallback | None) -> CheckpointlessCallback:
    """Add callbacks that the environment asks for or that are missing; they missed their ``setup`` hook.

    Args:
        present: the trainer's own list of callbacks, which is changed in place.
        fault_injection: the callback that the environment asks for; None: it asks for no faults.

    Returns:
        The trainer's :class:`CheckpointlessCallback`, with the settings of the recovery.
    """
    present[:] = without_external(present)
    for callback in present:
        if isinstance(callback, HPFaultInjectionCallback):
            callback.listen()  # it may have been made before the block was entered
    added: list[Any] = []
    if not any(isinstance(callback, CheckpointlessCallback) for callback in present):
        added.append(CheckpointlessCallback())
    recorder = StepRecorder.from_environment()
    if recorder is not None and not any(isinstance(callback, StepRecorder) for callback in present):
        added.append(recorder)
    if fault_injection is not None:
        added.append(fault_injection)
        fault_injection.listen()
    present.extend(added)
    return next(callback for callback in present if isinstance(callback, CheckpointlessCallback))
