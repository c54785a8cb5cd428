"""Run several aborts, clean-ups or health checks as one."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from checkpointless.inprocess.exceptions import line_of

logger = logging.getLogger(__name__)


class Compose:
    """Calls ``instances`` from the last to the first, as a composition of functions does.

    HyperPod's and NVRx's ``Compose`` do the same. Every instance runs even if one before it raises, because half a
    clean-up is worse than a noisy one. All errors are logged, and the first one is raised at the end.

    Args:
        *instances: callables. Each is called with as many of the positional arguments as it takes.
    """

    def __init__(self, *instances: Callable[..., object]) -> None:
        self.instances: tuple[Callable[..., object], ...] = instances

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        first: Exception | None = None
        for instance in reversed(self.instances):
            try:
                instance(*taken(instance, args), **kwargs)
            except Exception as error:  # noqa: BLE001 - collected, and raised below
                logger.error("%s failed: %s", _name(instance), line_of(error))
                first = first or error
        if first is not None:
            raise first

    def register_attributes(self, trainer: object) -> None:
        """Pass the trainer to every instance that has a method of this name."""
        for instance in self.instances:
            register = getattr(instance, "register_attributes", None)
            if register is not None:
                register(trainer)

    def __repr__(self) -> str:
        return f"Compose({', '.join(_name(instance) for instance in self.instances)})"


def taken(function: Callable[..., object], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first of ``args``: as many as ``function`` takes by position."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function in C that does not say
        return args
    kinds = [each.kind for each in parameters]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return args
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return args[: sum(kind in by_position for kind in kinds)]


def _name(instance: Callable[..., object]) -> str:
    return getattr(instance, "__name__", type(instance).__name__)
