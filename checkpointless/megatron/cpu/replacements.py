"""The replacements of the CPU platform, and what many of them have in common."""

from collections.abc import Callable
from typing import Any

from checkpointless.patches import Patches

#: The replacements of this process.
replacements = Patches()


def constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return a `Patch.make` whose replacement returns `value`, whatever it is called with."""
    return lambda _: lambda *args, **kwargs: value


def replaced_by(replacement: Any) -> Callable[[Any], Any]:
    """Return a `Patch.make` whose replacement is `replacement`."""
    return lambda _: replacement


def itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the object whose method this is, as a move does that has nothing to do."""
    return self
