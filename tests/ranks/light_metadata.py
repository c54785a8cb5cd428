"""Have ranks know what installed packages offer: each would read the metadata of a few hundred, 50 ms of a core."""

import sys
from typing import Any


def install() -> None:
    """Read the entry points of all installed packages, once for this process and those that it forks."""
    for name in ("importlib.metadata", "importlib_metadata"):
        if name in sys.modules:
            _remember(sys.modules[name].Distribution)
    sys.modules["importlib.metadata"].entry_points()


def _remember(distribution: Any) -> None:
    original = distribution.entry_points.fget
    known: dict[str, Any] = {}  # by folder of a package's metadata

    def entry_points(self: Any) -> Any:
        folder = getattr(self, "_path", None)
        if folder is None:
            return original(self)
        if str(folder) not in known:
            known[str(folder)] = original(self)
        return known[str(folder)]

    distribution.entry_points = property(entry_points)
