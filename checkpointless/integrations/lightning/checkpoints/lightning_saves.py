"""Checkpoints that Lightning writes at once: those that ranks make again after a fault keep their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import Strategy

from checkpointless.state.port import SnapshotPoint
from checkpointless.transfer.exchange import all_gather_json


class LightningSaves:
    """What a rank knows of the saves of its newest step; it outlives restarts.

    After a fault the ranks may go back to before a save. It is repeated then, under the same name: Lightning's
    callbacks would choose another one for a path that exists.

    Attributes:
        unfinished: the background saves whose end this rank has not gone through: there are none.
    """

    unfinished: tuple[()] = ()

    def __init__(self) -> None:
        self._made: list[
            tuple[str, tuple[int, SnapshotPoint]]
        ] = []  # paths, and the newest point when they were saved to
        self._again: set[str] = set()
        self._resumed_step = -1

    def save(self, path: str, after: tuple[int, SnapshotPoint], make: Callable[[], None]) -> None:
        """Make a save.

        Args:
            after: the newest point of this rank.
        """
        if after[0] != self._resumed_step:
            self._again = set()
        # This is noted first: a rank that is interrupted in the save may have written the file.
        self._made = [each for each in self._made if each[1][0] == after[0] and each[0] != path] + [(path, after)]
        make()
        self._again.discard(path)

    def agree(self, resumed_at: tuple[int, SnapshotPoint] | None, strategy: Strategy) -> None:
        """Agree with the other ranks on what is saved again. Collective.

        Args:
            resumed_at: the point that all ranks were brought to; None: the state is not from memory.
        """
        mine = [path for path, after in self._made if resumed_at is not None and after >= resumed_at]
        self._again = {path for each in all_gather_json(mine) for path in each}
        self._resumed_step = resumed_at[0] if resumed_at is not None else -1
        for each in _callbacks_of(strategy):
            if isinstance(each, Checkpoint) and hasattr(each, "file_exists"):
                vars(each).pop("file_exists", None)  # a callback from outside of the block has ours already
                if self._again:
                    each.file_exists = self._unless_again(each.file_exists)

    def _unless_again(self, exists: Callable[..., bool]) -> Callable[..., bool]:
        def file_exists(filepath: Any, trainer: Any) -> bool:
            # Ranks may name a file differently: the first of them decides, and every rank asks it.
            again = trainer.strategy.broadcast(str(filepath) in self._again)
            return exists(filepath, trainer) and not again

        return file_exists

    def forget_lost(self, callbacks: Iterable[Any]) -> None:
        """Do nothing: no save is lost."""

    def watch(self, strategy: Strategy) -> None:
        """Note what callbacks link to a checkpoint, too. Idempotent."""
        for each in _callbacks_of(strategy):
            if hasattr(each, "_link_checkpoint") and "_link_checkpoint" not in vars(each):
                vars(each)["_link_checkpoint"] = self._noting_links(each._link_checkpoint)

    def _noting_links(self, link: Callable[..., None]) -> Callable[..., None]:
        def link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
            if self._made:
                self._made.append((str(linkpath), self._made[-1][1]))
            link(trainer, filepath, linkpath)

        return link_checkpoint

    def let_go(self, trainer: object) -> None:
        """Do nothing: no save outlasts the trainer."""


def _callbacks_of(strategy: Strategy) -> Iterable[Any]:
    """Return the callbacks of the trainer that ``strategy`` belongs to."""
    trainer: Any = strategy.lightning_module.trainer if strategy.lightning_module is not None else None
    return trainer.callbacks if trainer is not None else ()
