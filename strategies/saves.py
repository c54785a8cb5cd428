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
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, _ActiveAsyncRequest
from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.recovery.moment import Stage
from checkpointless.transfer.exchange import all_gather_json

logger = logging.getLogger(__name__)

_WRITER_ENDS_S = 5.0
_REMOVE = ModelCheckpoint.__dict__["_remove_unfinished_checkpoints"]


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
    """

    def __init__(self) -> None:
        self.pending: PendingSaves | None = None
        self.has_lost = False
        self._made: list[_Save] = []
        self._again: set[str] = set()  # paths that will be saved to again
        self._whole: dict[str, int | None] = {}  # those of them that miss nothing, with their numbers
        self._resumed_step = -1  # the step that training resumed at
        self._going_on: set[str] = set()  # paths of background saves that continue

    def save(
        self,
        path: str,
        after: tuple[int, Stage],
        calls: Any,
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
            make()
            for call in () if calls is None else calls.async_calls:
                if call.idx == save.number:
                    call.async_request.finalize_fns.append(save.finished)
        save.is_made = True
        self._again.discard(path)
        report_separately()

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

    def agree(self, resumed_at: tuple[int, Stage] | None, strategy: Any) -> None:
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
        numbers = pending.numbers() if pending is not None else []
        newest = pending.newest if pending else -1
        paths = [[each.number, each.path] for each in self._made if each.is_unfinished]
        everyone = all_gather_json(
            {"again": mine, "pending": numbers, "newest": newest, "failed": failed, "paths": paths}
        )
        again = [{path: rest for path, *rest in each["again"]} for each in everyone]
        known = {path: rest for each in reversed(again) for path, rest in each.items()}  # the lowest rank's count
        self._again = set(known)
        self._whole = {
            path: number
            for path, (number, is_made, _) in known.items()
            # In a save that is made at once, the first rank's part is the last.
            if (is_made and path in again[0] if number is None else _is_one_save(path, number, again, everyone))
        }
        in_vain = {number for each in again for path, (number, *_) in each.items() if path not in self._whole}
        kept = [sorted(set(each["pending"]) - in_vain) for each in everyone]
        calls = getattr(strategy.checkpoint_io, "async_calls_queue", None)
        lost = {number for each in everyone for number in each["failed"]} - in_vain
        if lost:
            logger.warning("a checkpoint that was written in the background could not be finished, and is lost")
        if calls is not None and all(each == kept[0] for each in kept):
            if pending is not None:
                pending.end(in_vain)
                calls.async_calls.extend(call for call in pending.calls if call.idx not in in_vain)
                self._see_the_end_of(calls.async_calls)
            calls.call_idx = max(each["newest"] for each in everyone)
        elif any(kept):
            logger.warning(
                "a checkpoint that was being written in the background is lost with the writer of another rank"
            )
            lost |= {number for each in kept for number in each}
            self._whole = {path: number for path, number in self._whole.items() if number is None}
            if pending is not None:
                pending.end(pending.numbers())
        self.has_lost = bool(lost)
        path_of = {number: path for each in everyone for number, path in each["paths"]}
        self._going_on = {path_of[number] for number in kept[0] if number in path_of and number not in lost}
        if self.has_lost and first:
            if self._going_on:
                _remove([path_of[number] for number in lost if number in path_of])
            else:
                _remove_unfinished(strategy.trainer.callbacks)
        lost -= {number for each in again for number, *_ in each.values()}
        self._made = [each for each in self._made if each.number not in lost]
        self.pending = None  # not earlier: a fault may come while the ranks agree
        reset_reports()
        self._write_to_the_same(strategy.trainer.callbacks)

    def forget_lost(self, callbacks: Iterable[Any]) -> None:
        """Make callbacks forget checkpoints that were lost but that the state they were given still knows."""
        going_on = {str(ckpt_to_dir(path)) for path in self._going_on}
        for each in callbacks:
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


def _remove_unfinished(callbacks: Iterable[Any]) -> None:
    """Remove unfinished checkpoints, as NeMo does at a trainer's set-up unless it was told to leave them."""
    for each in callbacks:
        if isinstance(each, ModelCheckpoint) and each.dirpath is not None:
            _REMOVE.__func__(each.dirpath)


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


def _remove(paths: Iterable[str]) -> None:
    """Remove checkpoints that will not be finished, and NeMo's markers of them."""
    for path in paths:
        if "://" not in path:
            shutil.rmtree(ckpt_to_dir(path), ignore_errors=True)
            ModelCheckpoint.format_checkpoint_unfinished_marker_path(path).unlink(missing_ok=True)


def _is_one_save(
    path: str, number: int, again: Sequence[dict[str, Any]], everyone: Sequence[dict[str, Any]]
) -> bool:
    """Return whether a background save is pending on every rank, or finished on every rank that knows of it."""
    found = [each[path] for each in again if path in each]
    if not all(each[0] == number and each[1] for each in found):
        return False
    if any(number in each["pending"] for each in everyone):
        return len(found) == len(again) and all(number in each["pending"] for each in everyone)
    return all(each[2] for each in found)


class _Ended:
    """Stands for the writer of a background save that has ended."""

    process = None

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Return True, on every rank alike."""
        return True

    def close(self, abort: bool = False) -> None:
        """Do nothing, because nothing runs any more."""


def _finish_by(save: _Save, before: _Save | None, calls: Any) -> None:
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


@dataclass(frozen=True)
class PendingSaves:
    """Saves that were not finished when the block was left.

    Attributes:
        calls: Megatron's active asynchronous requests, oldest first.
        newest: the number that Megatron's queue assigned last.
    """

    calls: tuple[Any, ...]
    newest: int

    @classmethod
    def of(cls, checkpoint_io: Any) -> PendingSaves | None:
        """Return the pending saves of ``checkpoint_io``, or None if there are none."""
        found = getattr(checkpoint_io, "async_calls_queue", None)
        calls = tuple(getattr(found, "async_calls", ()))
        return cls(calls, found.call_idx) if calls and found is not None else None

    def numbers(self) -> list[int]:
        """Return the numbers that Megatron's queue gave the saves, which are the same on every rank."""
        return [call.idx for call in self.calls]

    def end(self, numbers: Collection[int | None]) -> None:
        """Stop the writers of the saves with these ``numbers``."""
        for call in self.calls:
            if call.idx not in numbers:
                continue
            process = getattr(call.async_caller, "process", None)
            if process is not None:
                process.kill()
                process.join(_WRITER_ENDS_S)


def report_separately() -> None:
    """Make the writers of the next save report to a separate queue.

    Megatron has one queue for all saves of a rank. With two saves under way, the reports of the second may come
    first, and each save takes the other's reports for its own.
    """
    reports = filesystem_async._results_queue
    manager = getattr(reports, "_manager", None)
    if manager is None:
        return
    try:
        filesystem_async._results_queue = manager.Queue()
    except (OSError, EOFError) as error:  # the process that holds the queues is gone
        logger.warning("the process that checkpoints in the background report to is replaced: %s", error)
        filesystem_async._results_queue = None  # Megatron makes another one


def reset_reports() -> None:
    """Make writers report on a connection with nothing left on it, and the next ones to a separate queue.

    Megatron's writers report to their rank through a queue in a separate process. A rank that was interrupted while
    it asked that process would take the old answer for the answer to its next question, and an old report for the
    report of its next save.
    """
    reports = filesystem_async._results_queue
    if reports is not None:
        vars(reports._tls).pop("connection", None)  # of this thread; multiprocessing makes another one
        report_separately()


def leave_unfinished(leave: bool) -> None:
    """Set whether NeMo must leave unfinished checkpoints at a trainer's set-up: it must while they are written."""
    name = "_remove_unfinished_checkpoints"
    setattr(ModelCheckpoint, name, staticmethod(lambda *_: None) if leave else _REMOVE)


def let_go(trainer: Any) -> None:
    """Drop a trainer's references to model, optimizer and data: what finishes a save refers to the trainer."""
    if trainer is None:
        return
    strategy = trainer.strategy
    for name in ("megatron_parallel", "model", "_model", "_lightning_module"):
        if name in vars(strategy):
            setattr(strategy, name, None)
    strategy.optimizers = []
    trainer.fit_loop._data_fetcher = trainer.fit_loop._combined_loader = None
