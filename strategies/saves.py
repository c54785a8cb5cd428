"""Checkpoints that a fault finds being made, or made by some of the ranks.

After a fault the ranks may go back behind a save that some of them had finished. The step's end is gone through
again then, and the save comes to the same folder as before: what is there already is not written twice, and what is
not whole is written again.

A save in the background is made by a writer that is a process of its own with a copy of what it writes, so a fault
of a rank does not stop it. If all ranks still have theirs, the save is finished in the next generation like any
other. If one was lost with its rank, no part is of use, and a warning says so.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from megatron.core.dist_checkpointing.strategies import filesystem_async
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.recovery.exchange import all_gather_json
from checkpointless.recovery.moment import Stage

logger = logging.getLogger(__name__)

_WRITER_ENDS_S = 5.0
_REMOVE = ModelCheckpoint.__dict__["_remove_unfinished_checkpoints"]


@dataclass
class _Save:
    """A save of this rank's.

    Attributes:
        path: where to.
        after: the newest moment of the rank when it began.
        number: what Megatron's queue of saves in the background numbers it with; None: it is made at once.
        is_made: this rank has done its part; in the background, begun it.
    """

    path: str
    after: tuple[int, Stage]
    number: int | None
    is_made: bool = False


class Saves:
    """What a rank knows of the saves of its newest step; it outlives restarts.

    Attributes:
        pending: the saves in the background that were not finished when the block was left.
    """

    def __init__(self) -> None:
        self.pending: PendingSaves | None = None
        self._made: list[_Save] = []
        self._again: set[str] = set()  # paths that will be saved to again
        self._whole: dict[str, int | None] = {}  # those of them where nothing is missing, with their numbers

    def save(self, path: str, after: tuple[int, Stage], calls: Any, finish: Any, make: Callable[[], None]) -> None:
        """Make a save, unless it was made before the fault. On every rank.

        Args:
            path: where to.
            after: the newest moment of this rank.
            calls: Megatron's queue of saves in the background; None: it is made at once.
            finish: what finishes it, of whoever asks for it now; None: nothing.
            make: makes it.
        """
        save = _Save(path, after, None if calls is None else calls.call_idx + 1)
        self._made = [each for each in self._made if each.after[0] == after[0]] + [save]
        if path in self._whole:
            save.number = self._whole.pop(path)
            if save.number is not None:
                _finish_by(finish, save.number, calls)
        else:
            make()
        save.is_made = True
        self._again.discard(path)

    def agree(self, resumed_at: tuple[int, Stage] | None, strategy: Any) -> None:
        """Agree with the other ranks on what is saved again and what goes on in the background. Collective.

        Args:
            resumed_at: the moment that all ranks were brought to; None: memory did not give it.
            strategy: of the new trainer; saves in the background that go on are its to finish.
        """
        pending, self.pending = self.pending, None
        mine = [
            [each.path, each.number, each.is_made]
            for each in self._made
            if resumed_at is not None and each.after >= resumed_at
        ]
        numbers = pending.numbers() if pending is not None else []
        everyone = all_gather_json({"again": mine, "pending": numbers, "newest": pending.newest if pending else -1})
        made = [{path: number for path, number, is_made in each["again"] if is_made} for each in everyone]
        self._again = {path for each in everyone for path, _, _ in each["again"]}
        self._whole = {
            path: number
            for path, number in made[0].items()  # of a save at once the first rank's part is the last
            if number is None or all(path in each for each in made)
        }
        in_vain = {number for each in everyone for path, number, _ in each["again"] if path not in self._whole} - {
            None
        }
        kept = [sorted(set(each["pending"]) - in_vain) for each in everyone]
        calls = getattr(strategy.checkpoint_io, "async_calls_queue", None)
        goes_on = False
        if calls is not None and all(each == kept[0] for each in kept) and not (in_vain and kept[0]):
            if pending is not None:
                pending.end(in_vain)
                calls.async_calls.extend(call for call in pending.calls if call.idx not in in_vain)
            calls.call_idx = max(each["newest"] for each in everyone)
            goes_on = bool(kept[0])
        elif any(kept):
            logger.warning(
                "a checkpoint that was being written in the background is lost with the writer of another rank"
            )
            self._whole = {path: number for path, number in self._whole.items() if number is None}
            if pending is not None:
                pending.end(pending.numbers())
            if strategy.trainer.is_global_zero:
                _remove_unfinished(strategy.trainer.callbacks)
        reset_reports(keep=goes_on)
        self._write_to_the_same(strategy.trainer.callbacks)

    def _write_to_the_same(self, callbacks: Iterable[Any]) -> None:
        """Have callbacks that would give a path that exists another name not do so where it is saved to again."""
        for each in callbacks:
            if isinstance(each, Checkpoint) and hasattr(each, "file_exists"):
                vars(each).pop("file_exists", None)  # one that was made outside of the block has ours already
                if self._again:
                    each.file_exists = self._unless_again(each.file_exists)

    def _unless_again(self, exists: Callable[..., bool]) -> Callable[..., bool]:
        def file_exists(filepath: Any, *args: Any, **kwargs: Any) -> bool:
            return str(filepath) not in self._again and exists(filepath, *args, **kwargs)

        return file_exists


def _remove_unfinished(callbacks: Iterable[Any]) -> None:
    """What NeMo does when a trainer is set up, unless it was told to leave what is still written."""
    for each in callbacks:
        if isinstance(each, ModelCheckpoint) and each.dirpath is not None:
            _REMOVE.__func__(each.dirpath)


def _finish_by(finish: Callable[[], None], number: int, calls: Any) -> None:
    """Have ``finish`` end a save in the background, and no more what the fault has ended; now, if it was ended."""
    for call in calls.async_calls:
        if call.idx == number:
            call.async_request.finalize_fns[-1] = finish  # NeMo adds its own behind Megatron's
            return
    finish()


@dataclass(frozen=True)
class PendingSaves:
    """Saves that were not finished when the block was left.

    Attributes:
        calls: Megatron's active asynchronous requests, oldest first.
        newest: the number that Megatron's queue gave last.
    """

    calls: tuple[Any, ...]
    newest: int

    @classmethod
    def of(cls, checkpoint_io: Any) -> PendingSaves | None:
        """Those of ``checkpoint_io``; None if there are none."""
        found = getattr(checkpoint_io, "async_calls_queue", None)
        calls = tuple(getattr(found, "async_calls", ()))
        return cls(calls, found.call_idx) if calls and found is not None else None

    def numbers(self) -> list[int]:
        """What Megatron's queue numbered them with, the same on every rank."""
        return [call.idx for call in self.calls]

    def end(self, numbers: Collection[int]) -> None:
        """Stop the writers of ``numbers``."""
        for call in self.calls:
            if call.idx not in numbers:
                continue
            process = getattr(call.async_caller, "process", None)
            if process is not None:
                process.kill()
                process.join(_WRITER_ENDS_S)


def reset_reports(*, keep: bool) -> None:
    """Have writers report on a connection that nothing is left on.

    Megatron's writers report to their rank by a queue in a process of its own. A rank that was interrupted while it
    asked that process would take the answer for that to its next question, and what was reported for the report of
    its next save.

    Args:
        keep: the reports that are there are still wanted.
    """
    reports = filesystem_async._results_queue
    if reports is None:
        return
    vars(reports._tls).pop("connection", None)  # of this thread; multiprocessing makes another one
    while not keep:
        try:
            reports.get_nowait()
        except queue.Empty:
            return


def leave_unfinished(leave: bool) -> None:
    """Say whether NeMo may remove unfinished checkpoints when a trainer is set up: not while they are written."""
    name = "_remove_unfinished_checkpoints"
    setattr(ModelCheckpoint, name, staticmethod(lambda *_: None) if leave else _REMOVE)


def let_go(trainer: Any) -> None:
    """What finishes a save refers to its trainer: have that refer no longer to model, optimizer and data."""
    if trainer is None:
        return
    strategy = trainer.strategy
    for name in ("megatron_parallel", "model", "_model", "_lightning_module"):
        if name in vars(strategy):
            setattr(strategy, name, None)
    strategy.optimizers = []
    trainer.fit_loop._data_fetcher = trainer.fit_loop._combined_loader = None
