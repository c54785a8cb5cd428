"""What a rank's block records for later generations, and for a successor of its process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from checkpointless.launcher.protocol.board import Board

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.plain import Json, Parsed


class Facts:
    """The facts that a rank keeps on its board, by name, as plain data.

    The fact ``environment`` holds environment variables that a successor is given.

    Args:
        board: this rank's board (None under another launcher: the facts live as long as this process).
    """

    def __init__(self, board: Board | None) -> None:
        self._board = board
        self._facts: dict[str, Parsed] = board.facts() if board is not None else {}
        for name, value in self._facts.get("environment", {}).items():
            os.environ.setdefault(name, value)

    def get(self, name: str, default: Json = None) -> Parsed:
        """Return the fact of this name, or ``default``."""
        return self._facts.get(name, default)

    def keep(self, name: str, value: Json) -> None:
        """Record a fact that a later generation, or a successor of this process, must know from the start."""
        if self._facts.get(name) != value:
            self._facts = {**self._facts, name: value}
            if self._board is not None:
                self._board.put_facts(self._facts)
