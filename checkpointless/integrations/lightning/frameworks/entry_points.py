"""Remembers which callbacks installed packages offer to trainers, which Lightning looks up for each trainer anew.

It reads the metadata of all installed packages for that, a few hundred files, in the middle of each recovery.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities import registry

from checkpointless.system.patches import Patch, Patches

_CALLBACKS = "lightning.pytorch.callbacks_factory"  # the group that each trainer asks for

_patches = Patches()


def install() -> None:
    """Have Lightning's look-up done once for a process and its search path. Idempotent."""
    if not _patches.are_made:
        _patches.make([Patch(registry, "entry_points", _remembered, "it reads the metadata of all packages")])


def look_up() -> None:
    """Look the callbacks up now, so that no process that is forked from this one has to."""
    install()
    registry.entry_points(group=_CALLBACKS)


def uninstall() -> None:
    """Restore Lightning's look-up."""
    _patches.undo()


def _remembered(original: Callable[..., Any]) -> Callable[..., Any]:
    found: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(original)
    def entry_points(**selected: str) -> Any:
        key = tuple(sys.path), tuple(selected.items())
        if key not in found:
            found[key] = original(**selected)
        return found[key]

    return entry_points
