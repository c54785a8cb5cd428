"""The blocks that a rank's script runs one after the other: one of them may train, others may follow."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from checkpointless.inprocess.exceptions import UnrecoverableError
from checkpointless.inprocess.facts import Facts

_LEFT, _TRAINED = "blocks_left", "trained_in_block"  # facts
_SECOND_TRAINING = (
    "a block before this one has trained in this job, whose steps are counted: train in one function that "
    "HPWrapper() wraps (it may call several fits), or in a job for each"
)
_BEGUN_ANEW = (
    "a process was lost behind a block that all ranks had left, and its successor would run that block again: do "
    "all that is to be recovered in one function that HPWrapper() wraps"
)
_IN_CHILD = "__mp_main__"  # the name of the script there
_left = 0  # in this process

logger = logging.getLogger(__name__)


def is_imported_by_child(fn: Callable[..., object]) -> bool:
    """Return whether the script of ``fn`` is being imported by a process that it started, and say so if it is.

    ``multiprocessing`` with "spawn" or "forkserver" imports the script in each new process, as ``__mp_main__``,
    before that process does its work (Megatron's writer of checkpoints, say). No block is entered there.
    """
    is_over = sys.modules["__main__"].__name__ == _IN_CHILD  # the import: then a block may be the child's work
    if is_over or getattr(fn, "__module__", "") != _IN_CHILD:
        return False
    logger.warning(
        "the wrapped function is not entered in a child process that imports the script: put the lines that call "
        'it under `if __name__ == "__main__":`, so that nothing of them runs there'
    )
    return True


class Blocks:
    """Where a rank's script stands among its blocks, when one of them is entered.

    Args:
        facts: what outlives this process.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._number = _left
        self._when_left: Callable[[], None] = lambda: None

    @property
    def left(self) -> int:
        """How many blocks all ranks have left in this process, which a successor would run again."""
        return self._number

    @property
    def obstacle(self) -> str:
        """Why this block cannot be entered: this process is a successor of one that has left it; "" if it can."""
        return _BEGUN_ANEW if self._facts.get(_LEFT, 0) > self._number else ""

    def begin_training(self, when_left: Callable[[], None] = lambda: None) -> None:
        """Note that this block trains; every entry of it does so anew.

        Args:
            when_left: is called when all ranks have left the block. It should hold no state of the training.

        Raises:
            UnrecoverableError: another block has.
        """
        if self._facts.get(_TRAINED, self._number) != self._number:
            raise UnrecoverableError(_SECOND_TRAINING)
        self._facts.keep(_TRAINED, self._number)
        self._when_left = when_left

    def leave(self) -> None:
        """Note that all ranks have left this block."""
        global _left
        self._when_left()
        _left = self._number + 1
        self._facts.keep(_LEFT, _left)
