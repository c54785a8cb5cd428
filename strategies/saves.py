"""Checkpoints that a fault finds being made, or made by some of the ranks.

After a fault the ranks may go back behind a save that some of them had finished. The step's end is gone through
again then, and the save comes to the same folder as before: what is there already is not written twice, and what is
not whole is written again.

A save in the background is made by a writer that is a process of its own with a copy of what it writes, so a fault
of a rank does not stop it. If all ranks still have theirs, the save is finished in the next generation like any
other. If one was lost with its rank, or failed, no part is of use: the save is made again where the ranks can go
back to where it began (:mod:`checkpointless.recovery.decide`), and else a warning says that it is lost.
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

from checkpointless.recovery.exchange import all_gather_json
from checkpointless.recovery.moment import Stage

logger = logging.getLogger(__name__)

_WRITER_ENDS_S = 5.0
_REMOVE = ModelCheckpoint.__dict__["_remove_unfinished_checkpoints"]


@dataclass(eq=False)
class _Save:
    """A save of this rank's.

    Attributes:
        path: where to.
        after: the newest moment of the rank when it began.
        number: what Megatron's queue of saves in the background numbers it with; None: it is made at once.
        finish: what ends one in the background, of whoever asked for it; None: nothing.
        is_made: this rank has done its part; in the background, begun it.
        is_finished: this rank has gone through all that ends one in the background.
    """

    path: str
    after: tuple[int, Stage]
    number: int | None
    finish: Callable[[], None] | None
    is_made: bool = False
    is_finished: bool = False

    @property
    def is_unfinished(self) -> bool:
        """Whether it is one in the background whose end this rank has not gone through."""
        return self.number is not None and not self.is_finished

    def finished(self) -> None:
        """The last thing that ends a save in the background."""
        self.is_finished = True


class Saves:
    """What a rank knows of the saves of its newest step, and of those that have not ended; it outlives restarts.

    Attributes:
        pending: the saves in the background that were not finished when the block was left.
        has_lost: one of those was lost in the last recovery.
    """

    def __init__(self) -> None:
        self.pending: PendingSaves | None = None
        self.has_lost = False
        self._made: list[_Save] = []
        self._again: set[str] = set()  # paths that will be saved to again
        self._whole: dict[str, int | None] = {}  # those of them where nothing is missing, with their numbers
        self._resumed_step = -1  # the step that this is about
        self._going_on: set[str] = set()  # paths of saves in the background that go on

    def save(
        self,
        path: str,
        after: tuple[int, Stage],
        calls: Any,
        finish: Callable[[], None] | None,
        make: Callable[[], None],
    ) -> None:
        """Make a save, unless it was made before the fault. On every rank.

        Args:
            path: where to.
            after: the newest moment of this rank.
            calls: Megatron's queue of saves in the background; None: it is made at once.
            finish: what ends it, of whoever asks for it now; None: nothing.
            make: makes it.
        """
        if after[0] != self._resumed_step:
            self._again, self._whole = set(), {}
        before = next((each for each in self._made if each.path == path), None)
        save = _Save(path, after, None if calls is None else calls.call_idx + 1, finish)
        kept = (each for each in self._made if each.after[0] == after[0] or each.is_unfinished)
        # Before it is made: a rank that is interrupted in it must not pass for one that knows nothing of it.
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
        """Saves in the background that this rank has not gone through the end of, when the block was left.

        Each with its number, the step and the stage after which it began, and whether its writer still works on it.
        """
        pending = self.pending.numbers() if self.pending is not None else []
        return tuple(
            (each.number, each.after[0], int(each.after[1]), each.number in pending)
            for each in self._made
            if each.number is not None and each.is_unfinished
        )

    def agree(self, resumed_at: tuple[int, Stage] | None, strategy: Any) -> None:
        """Agree with the other ranks on what is saved again and what goes on in the background. Collective.

        Args:
            resumed_at: the moment that all ranks were brought to; None: memory did not give it.
            strategy: of the new trainer; saves in the background that go on are its to finish.
        """
        if resumed_at is None:
            self._made = []  # of a life that is not gone on with
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
        known = {path: rest for each in reversed(again) for path, rest in each.items()}  # the first rank's count
        self._again = set(known)
        self._whole = {
            path: number
            for path, (number, is_made, _) in known.items()
            # Of a save at once the first rank's part is the last.
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
        """Have callbacks not count checkpoints that were lost, of which the state that they were given knows."""
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
        """Notice the end of what goes on, also where this rank was interrupted right behind its begin."""
        for call in calls:
            for each in self._made:
                fns = call.async_request.finalize_fns
                if each.number == call.idx and each.finished not in fns:
                    fns.append(each.finished)

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


def _is_there(save: _Save, first: bool) -> bool:
    """Whether what was saved is where it was saved to, and whole.

    A callback may have moved it; NeMo's mark of an unfinished one may have stayed, and what is marked is removed.

    Args:
        save: of this rank.
        first: whether this is the rank that marks, which others may not see the files of.
    """
    if "://" in save.path or (save.number is not None and not (first and save.is_finished)):
        return True
    there = Path(save.path).exists() or ckpt_to_dir(save.path).exists()
    return there and not (save.number is not None and ModelCheckpoint.is_checkpoint_unfinished(save.path))


def _remove(paths: Iterable[str]) -> None:
    """Remove checkpoints that will not be finished, and NeMo's marks of them."""
    for path in paths:
        if "://" not in path:
            shutil.rmtree(ckpt_to_dir(path), ignore_errors=True)
            ModelCheckpoint.format_checkpoint_unfinished_marker_path(path).unlink(missing_ok=True)


def _is_one_save(
    path: str, number: int, again: Sequence[dict[str, Any]], everyone: Sequence[dict[str, Any]]
) -> bool:
    """Whether a save in the background is pending on every rank, or finished on every one that knows of it."""
    found = [each[path] for each in again if path in each]
    if not all(each[0] == number and each[1] for each in found):
        return False
    if any(number in each["pending"] for each in everyone):
        return len(found) == len(again) and all(number in each["pending"] for each in everyone)
    return all(each[2] for each in found)


class _Ended:
    """Stands for the writer of a save in the background that has ended."""

    process = None

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """On every rank alike."""
        return True

    def close(self, abort: bool = False) -> None:
        """Nothing runs any more."""


def _finish_by(save: _Save, before: _Save | None, calls: Any) -> None:
    """Have ``save`` end what ``before`` has begun in the background; if that was ended, whenever one is ended next.

    Not at once: NeMo's callback says only behind the save what its end is to remove.

    Args:
        save: of now.
        before: of the process that ran before the fault; None: that was another one.
        calls: Megatron's queue of saves in the background.
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

    def end(self, numbers: Collection[int | None]) -> None:
        """Stop the writers of ``numbers``."""
        for call in self.calls:
            if call.idx not in numbers:
                continue
            process = getattr(call.async_caller, "process", None)
            if process is not None:
                process.kill()
                process.join(_WRITER_ENDS_S)


def report_separately() -> None:
    """Have the writers of the next save report to a queue of their own.

    Megatron has one queue for all saves of a rank. With two under way the reports of the second may come first, and
    each save takes those of the other for its own.
    """
    reports = filesystem_async._results_queue
    manager = getattr(reports, "_manager", None)
    if manager is None:
        return
    try:
        filesystem_async._results_queue = manager.Queue()
    except (OSError, EOFError) as error:  # the process that has the queues is gone
        logger.warning("the process that checkpoints in the background report to is replaced: %s", error)
        filesystem_async._results_queue = None  # Megatron makes another one


def reset_reports() -> None:
    """Have writers report on a connection that nothing is left on, the next ones to a queue of their own.

    Megatron's writers report to their rank by a queue in a process of its own. A rank that was interrupted while it
    asked that process would take the answer for that to its next question, and what was reported for the report of
    its next save.
    """
    reports = filesystem_async._results_queue
    if reports is not None:
        vars(reports._tls).pop("connection", None)  # of this thread; multiprocessing makes another one
        report_separately()


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
