"""Provide what tests of local checkpoints need of the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def files(folder: Path, iteration: int | None = None) -> list[Path]:
    """Return the files of the manager of these tests: all, or those of one iteration."""
    pattern = "*" if iteration is None else f"iter_{iteration:010d}*"
    return sorted((folder / "local" / "checkpoints").glob(pattern))


def fail(error: OSError) -> Callable[..., None]:
    """Return a function that raises ``error``."""

    def failing(*arguments: Any, **settings: Any) -> None:
        raise error

    return failing
