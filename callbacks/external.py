"""The callbacks that ``checkpointless run`` adds to a Lightning trainer, through Lightning's entry points."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback

from checkpointless.callbacks.fault_injection import HPFaultInjectionCallback
from checkpointless.callbacks.step_recorder import StepRecorder

MARK = "_checkpointless_external"  # an attribute of what is added here


def asked_for() -> list[Callback]:
    """Return the callbacks that ``--record-steps`` and ``--fault`` ask this process for; without these, none."""
    asked = [StepRecorder.from_environment(), HPFaultInjectionCallback.from_environment()]
    found: list[Callback] = [callback for callback in asked if callback is not None]
    for callback in found:
        setattr(callback, MARK, True)
    return found
