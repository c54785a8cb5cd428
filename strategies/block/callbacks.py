"""The callbacks that a fit in the block needs, whether or not the trainer was given them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from checkpointless.callbacks import CheckpointlessCallback, HPFaultInjectionCallback, StepRecorder
from checkpointless.callbacks.external import asked_for, parted
from checkpointless.inprocess.finalize import register_cleanup


def complete(present: list[Any]) -> CheckpointlessCallback:
    """Put the callbacks that the environment asks for after all others, and add what is missing.

    Args:
        present: the trainer's own list of callbacks, which is changed in place. What is added misses its ``setup``
            hook.

    Returns:
        The trainer's :class:`CheckpointlessCallback`, with the settings of the recovery.
    """
    bound = [weakref.ref(each) for each in present]
    register_cleanup("callbacks", lambda: _unbind([callback for each in bound if (callback := each())]))
    scripts, external = parted(present)
    for callback in scripts:
        if isinstance(callback, HPFaultInjectionCallback):
            callback.listen()  # it may have been made before the block was entered
    if not any(isinstance(callback, CheckpointlessCallback) for callback in scripts):
        scripts.append(CheckpointlessCallback())
    has_recorder = any(isinstance(callback, StepRecorder) for callback in scripts)
    newest = {type(callback): callback for callback in external}  # a script may give one list to several trainers
    for callback in newest.values() or asked_for():
        if not (has_recorder and isinstance(callback, StepRecorder)):
            scripts.append(callback)
    present[:] = scripts
    return next(callback for callback in present if isinstance(callback, CheckpointlessCallback))


def _unbind(callbacks: Iterable[Any]) -> None:
    """Drop what Lightning binds callbacks to, which would keep the module of the generation that is over."""
    for each in callbacks:
        for name in ("log", "log_dict"):
            vars(each).pop(name, None)
