"""Handles checkpoints that are being saved, or that only some of the ranks have saved, when a fault comes.

After a fault the ranks may go back to before a save that some of them had finished. The end of the step is replayed
then, and the save goes to the same folder as before: what is already there is not written twice, and what is not
whole is written again.

A background save is made by a writer, which is a separate process with a copy of what it writes, so a fault
of a rank does not stop it. If all ranks still have their writers, the save is finished in the next generation like
any other. If one writer was lost with its rank, or failed, no part is of use: the save is made again if the ranks
can go back to where it began (:mod:`checkpointless.recovery.decide`); otherwise a warning says that it is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Checkpoint
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, _ActiveAsyncRequest
from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.recovery.moment import Stage
from checkpointless.strategies.checkpoints.agreement import Agreement
from checkpointless.strategies.checkpoints.background import PendingSaves, let_go, report_separately, reset_reports
from checkpointless.strategies.checkpoints.bookkeeping import BookkeepingOfSave, undo
from checkpointless.strategies.checkpoints.failed_saves import FailedSaves
from checkpointless.strategies.checkpoints.unfinished import leave_unfinished, remove, remove_unfinished
from checkpointless.transfer.exchange import all_gather_json

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from nemo.lightning import MegatronStrategy

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Save:
    """One save of this rank.

    Attributes:
        path: the path that is saved to.
        after: the newest moment of the rank when the save began.
        number: the number that Megatron's queue of background saves gives it; None: it is made at once.
        finish: the caller's function that ends a background save; None: there is none.
        is_made: whether this rank has done its part or, for a background save, begun it.
        is_finished: whether this rank has gone through all that ends a background save.
    """

    path: str
    after: tuple[int, Stage]
    number: int | None
    finish: Callable[[], None] | None
    is_made: bool = False
    is_finished: bool = False

    @property
    def is_unfinished(self) -> bool:
        """Whether this is a background save whose end this rank has not gone through."""
        return self.number is not None and not self.is_finished

    def finished(self) -> None:
        """Note that all that ends the background save has been done; this runs last."""
        self.is_finished = True


class Saves:
    """What a rank knows of the saves of its newest step, and of saves that have not ended; it outlives restarts.

    Attributes:
        pending: the background saves that were not finished when the block was left; None: there are none.
        has_lost: whether a background save was lost in the last recovery.
        failed: what is done about saves that fail.
    """

    def __init__(self) -> None:
        self.pending: PendingSaves | None = None
        self.has_lost = False
        self.failed = FailedSaves()
        self._made: list[_Save] = []
        self._again: set[str] = set()  # paths that will be saved to again
        self._whole: dict[str, int | None] = {}  # those of them that miss nothing, with their numbers
        self._resumed_step = -1  # the step that training resumed at
        self._lost: list[tuple[str, BookkeepingOfSave]] = []  # their folders, and what they had changed in books
        self._going_on: set[str] = set()  # paths of background saves that continue

    def save(
        self,
        path: str,
        after: tuple[int, Stage],
        calls: AsyncCallsQueue | None,
        finish: Callable[[], None] | None,
        make: Callable[[], None],
    ) -> None:
        """Make a save, unless it was made before the fault. Every rank calls this.

        Args:
            path: the path to save to.
            after: the newest moment of this rank.
            calls: Megatron's queue of background saves; None: the save is made at once.
            finish: the present caller's function that ends the save; None: there is none.
            make: makes the save.

        Raises:
            SaveFailed: the save has failed on some rank, and all ranks raise this.
        """
        if after[0] != self._resumed_step:
            self._again, self._whole = set(), {}
        before = next((each for each in self._made if each.path == path), None)
        save = _Save(path, after, None if calls is None else calls.call_idx + 1, finish)
        kept = (each for each in self._made if each.after[0] == after[0] or each.is_unfinished)
        # This is noted before the save is made: a rank that is interrupted in it must not pass for one that knows
        # nothing of it.
        self._made = [each for each in kept if each is not before] + [save]
        if path in self._whole:
            save.number = self._whole.pop(path)
            if save.number is not None:
                _finish_by(save, before, calls)
        else:
            self.failed.make(path, make)
            for call in () if calls is None else calls.async_calls:
                if call.idx == save.number:
                    call.async_request.finalize_fns.append(save.finished)
        save.is_made = True
        self._again.discard(path)
        report_separately()

    def path_of(self, number: int) -> str | None:
        """Return the path of the background save with ``number``; None if this rank does not know it."""
        return next((each.path for each in self._made if each.number == number), None)

    def forget(self, path: str) -> None:
        """Forget the save to ``path``, which has failed."""
        self._made = [each for each in self._made if each.path != path]

    @property
    def unfinished(self) -> tuple[tuple[int, int, int, bool], ...]:
        """The background saves whose end this rank had not gone through when the block was left.

        For each: its number, the step and the stage after which it began, and whether its writer still works on it.
        """
        pending = self.pending.numbers() if self.pending is not None else []
        return tuple(
            (each.number, each.after[0], int(each.after[1]), each.number in pending)
            for each in self._made
            if each.number is not None and each.is_unfinished
        )

    def agree(self, resumed_at: tuple[int, Stage] | None, strategy: MegatronStrategy) -> None:
        """Agree with the other ranks on what is saved again and what continues in the background. Collective.

        Args:
            resumed_at: the moment that all ranks were brought to; None: the state is not from memory.
            strategy: the strategy of the new trainer, which finishes the background saves that continue.
        """
        if resumed_at is None:
            self._made = []  # they belong to a state that is not resumed
        failed = [number for number, _, _, is_pending in self.unfinished if not is_pending]
        self._resumed_step = resumed_at[0] if resumed_at is not None else -1
        pending = self.pending
        first = bool(strategy.trainer.is_global_zero)
        mine = [
            [each.path, each.number, each.is_made and _is_there(each, first), each.is_finished]
            for each in self._made
            if resumed_at is not None and each.after >= resumed_at
        ]
        paths = [[each.number, each.path] for each in self._made if each.is_unfinished]
        everyone = all_gather_json(
            {
                "again": mine,
                "pending": pending.numbers() if pending is not None else [],
                "newest": pending.newest if pending else -1,
                "failed": failed,
                "paths": paths,
                "raised": self.failed.raised,
            }
        )
        self.failed.give_up([each["raised"] for each in everyone])
        calls: Any = getattr(strategy.checkpoint_io, "async_calls_queue", None)
        agreed = Agreement.of(everyone, calls is not None)
        self._again, self._whole = set(agreed.again), dict(agreed.whole)
        self._going_on, self.has_lost = set(agreed.going_on), bool(agreed.lost)
        self._lost = self.failed.replaced_by(agreed.lost_paths)
        if agreed.failed:
            logger.warning("a checkpoint that was written in the background could not be finished, and is lost")
        if agreed.continues:
            if pending is not None:
                pending.end(agreed.in_vain)
                calls.async_calls.extend(call for call in pending.calls if call.idx not in agreed.in_vain)
                self._see_the_end_of(calls.async_calls)
            calls.call_idx = agreed.newest
        elif agreed.is_cut_off:
            logger.warning(
                "a checkpoint that was being written in the background is lost with the writer of another rank"
            )
            if pending is not None:
                pending.end(pending.numbers())
        if agreed.lost and first:
            if agreed.going_on:
                remove(agreed.lost_paths)
            else:
                remove_unfinished(strategy.trainer.callbacks)
        self._made = [each for each in self._made if each.number not in agreed.forgotten]
        self.pending = None  # not earlier: a fault may come while the ranks agree
        reset_reports()
        self._write_to_the_same(strategy.trainer.callbacks)
        leave_unfinished(False)

    def watch(self, strategy: MegatronStrategy) -> None:
        """Watch what ``strategy`` writes and finishes. Idempotent."""
        self.failed.watch(strategy)

    def let_go(self, trainer: pl.Trainer | None) -> None:
        """Drop what the trainer of a generation that was left refers to, if what finishes a save refers to it."""
        if self.pending is not None:
            let_go(trainer)

    def forget_lost(self, callbacks: Iterable[Any]) -> None:
        """Make callbacks forget checkpoints that were lost but that the state they were given still knows."""
        going_on = {str(ckpt_to_dir(path)) for path in self._going_on}
        for each in callbacks:
            for folder, of_save in self._lost:
                undo(each, folder, of_save)  # what its end was to remove has its place again
            if self.has_lost and isinstance(each, ModelCheckpoint) and each.save_top_k != 0:
                unfinished = each.is_checkpoint_unfinished
                vars(each)["is_checkpoint_unfinished"] = lambda path, unfinished=unfinished: (
                    str(ckpt_to_dir(path)) not in going_on and unfinished(path)
                )
                each._remove_invalid_entries_from_topk()
                del vars(each)["is_checkpoint_unfinished"]

    def _see_the_end_of(self, calls: Iterable[Any]) -> None:
        """Note the end of saves that continue, even if this rank was interrupted right after beginning one."""
        for call in calls:
            for each in self._made:
                fns = call.async_request.finalize_fns
                if each.number == call.idx and each.finished not in fns:
                    fns.append(each.finished)

    def _write_to_the_same(self, callbacks: Iterable[Any]) -> None:
        """Keep callbacks from choosing another name for an existing path if it is to be saved to again."""
        for each in callbacks:
            if isinstance(each, Checkpoint) and hasattr(each, "file_exists"):
                vars(each).pop("file_exists", None)  # a callback from outside of the block has ours already
                if self._again:
                    each.file_exists = self._unless_again(each.file_exists)

    def _unless_again(self, exists: Callable[..., bool]) -> Callable[..., bool]:
        def file_exists(filepath: Any, *args: Any, **kwargs: Any) -> bool:
            return str(filepath) not in self._again and exists(filepath, *args, **kwargs)

        return file_exists


def _is_there(save: _Save, first: bool) -> bool:
    """Return whether what was saved is where it was saved to, and whole.

    A callback may have moved it; NeMo's marker of an unfinished checkpoint may have stayed, and what is marked is
    removed.

    Args:
        save: a save of this rank.
        first: whether this is the rank that writes the markers. Other ranks may not see its files.
    """
    if "://" in save.path or (save.number is not None and not (first and save.is_finished)):
        return True
    there = Path(save.path).exists() or ckpt_to_dir(save.path).exists()
    return there and not (save.number is not None and ModelCheckpoint.is_checkpoint_unfinished(save.path))


class _Ended:
    """Stands for the writer of a background save that has ended."""

    process = None

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Return True, on every rank alike."""
        return True

    def close(self, abort: bool = False) -> None:
        """Do nothing, because nothing runs any more."""


def _finish_by(save: _Save, before: _Save | None, calls: AsyncCallsQueue) -> None:
    """Make ``save`` end what ``before`` began in the background; if that has ended, the next time saves are ended.

    It is not ended at once, because NeMo's callback says only after the save what its end is to remove.

    Args:
        save: the save that is asked for now.
        before: the same save before the fault, if it was this process that began it; None: it was another process.
        calls: Megatron's queue of background saves.
    """
    for call in calls.async_calls:
        if call.idx == save.number:
            fns = call.async_request.finalize_fns
            old = (before.finish, before.finished) if before is not None else ()
            fns[:] = [each for each in fns if each not in old]
            fns.extend(each for each in (save.finish, save.finished) if each is not None)
            return
    calls.call_idx += 1
    save.number = calls.call_idx
    fns = [each for each in (save.finish, save.finished) if each is not None]
    calls.async_calls.append(_ActiveAsyncRequest(save.number, _Ended(), AsyncRequest(None, (), fns)))
