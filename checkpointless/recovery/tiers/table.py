"""The tiers by the names that recipes use. A new one is a module, and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from checkpointless.recovery.tiers.directories import LocalDirectory, SharedDirectory
from checkpointless.recovery.tiers.neighbor_memory import NeighborMemory
from checkpointless.recovery.tiers.tier import Tier

TIERS: Mapping[str, type[Tier]] = {
    "neighbor_memory": NeighborMemory,
    "local_directory": LocalDirectory,
    "shared_directory": SharedDirectory,
}


def make_tiers(settings: Mapping[str, Mapping[str, Any] | None]) -> list[Tier]:
    """Return the tiers that a recipe asks for.

    Args:
        settings: the arguments of each tier by its name in :data:`TIERS`, or by the dotted name of a class of one's
            own.

    Raises:
        ValueError: a tier is not known, or not made in this way; the message is one line that says what to do.
    """
    made = []
    for name, arguments in settings.items():
        kind = TIERS.get(name) or _imported(name)
        try:
            made.append(kind(**(arguments or {})))
        except (TypeError, ValueError) as error:
            raise ValueError(f"tier {name}: {str(error).replace(f'{kind.__name__}.__init__() ', '')}") from error
    return made


def _imported(name: str) -> type[Tier]:
    module, _, attribute = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), attribute) if module else None
    except (ImportError, AttributeError):
        kind = None
    if not isinstance(kind, type) or not issubclass(kind, Tier):
        raise ValueError(f"no tier is called {name}: use {', '.join(TIERS)}, or the dotted name of your class")
    return kind
