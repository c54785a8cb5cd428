"""The replacements of the CPU platform, and what many of them have in common."""

from collections.abc import Callable
from typing import Any, TypeVar

from checkpointless.system.patches import Patches

_T = TypeVar("_T")

#: The replacements of this process.
replacements = Patches()


def constant(value: _T) -> Callable[[object], Callable[..., _T]]:
    """Return a `Patch.make` whose replacement returns `value`, whatever it is called with."""
    return lambda _: lambda *args, **kwargs: value


def replaced_by(replacement: _T) -> Callable[[object], _T]:
    """Return a `Patch.make` whose replacement is `replacement`."""
    return lambda _: replacement


def itself(self: _T, *args: Any, **kwargs: Any) -> _T:
    """Return the object whose method this is, as a move does that has nothing to do."""
    return self
