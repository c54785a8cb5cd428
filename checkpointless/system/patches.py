"""Replacements of attributes of other packages: each has a reason; all are undone in the reverse order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One replacement: ``target.attribute`` becomes ``make(its current value, or None)``."""

    target: object
    attribute: str
    make: Callable[[Any], Any]
    why: str


class Patches:
    """Replacements that were made, each with what it takes to undo it.

    A replacement may outlive ``undo()`` in a module that imported it by name. It asks ``are_made`` at each call,
    and acts as the original if they are not.
    """

    def __init__(self) -> None:
        self._undos: list[tuple[object, str, object]] = []  # _ABSENT: what was there was inherited, or nothing

    @property
    def are_made(self) -> bool:
        return bool(self._undos)

    def touch(self, target: object) -> bool:
        """Return whether an attribute of ``target`` is replaced."""
        return any(each is target for each, _, _ in self._undos)

    def make(self, patches: Sequence[Patch]) -> None:
        """Make the replacements of ``patches`` in their order; if one fails, undo these and all earlier ones."""
        try:
            for patch in patches:
                own = vars(patch.target).get(patch.attribute, _ABSENT)
                replacement = patch.make(getattr(patch.target, patch.attribute, None))
                self._undos.append((patch.target, patch.attribute, own))
                setattr(patch.target, patch.attribute, replacement)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore what stood there before, the last replacement first."""
        while self._undos:
            target, attribute, original = self._undos.pop()
            if original is _ABSENT:
                delattr(target, attribute)
            else:
                setattr(target, attribute, original)
