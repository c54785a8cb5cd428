"""The callbacks that ``checkpointless run`` adds to a Lightning trainer, whichever strategy it uses.

Lightning adds to every trainer what the entry points of the group ``lightning.pytorch.callbacks_factory`` return.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.callbacks import Callback

from checkpointless.callbacks.fault_injection import HPFaultInjectionCallback
from checkpointless.callbacks.step_recorder import StepRecorder

_MARK = "_checkpointless_external"


def asked_for() -> list[Callback]:
    """Return the callbacks that ``--record-steps`` and ``--fault`` ask this process for; without these, none."""
    asked = [StepRecorder.from_environment(), HPFaultInjectionCallback.from_environment()]
    found: list[Callback] = [callback for callback in asked if callback is not None]
    for callback in found:
        setattr(callback, _MARK, True)
    return found


def parted(callbacks: Iterable[Callback]) -> tuple[list[Callback], list[Callback]]:
    """Part the callbacks into those of the script and those from :func:`asked_for`, each in their order.

    With a checkpointless strategy, the latter come after all others.
    """
    scripts: list[Callback] = []
    external: list[Callback] = []
    for callback in callbacks:
        (external if getattr(callback, _MARK, False) else scripts).append(callback)
    return scripts, external
