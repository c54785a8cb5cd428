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

    def finished(self) -> None:
        """The last thing that ends a save in the background."""
        self.is_finished = True


class Saves:
    """What a rank knows of the saves of its newest step; it outlives restarts.

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
        if path in self._whole:
            save.number = self._whole.pop(path)
            if save.number is not None and before is not None:
                _finish_by(save, before, calls)
        else:
            make()
            for call in () if calls is None else calls.async_calls:
                if call.idx == save.number:
                    call.async_request.finalize_fns.append(save.finished)
        save.is_made = True
        self._made = [each for each in self._made if each.after[0] == after[0] and each is not before] + [save]
        self._again.discard(path)

    def agree(self, resumed_at: tuple[int, Stage] | None, strategy: Any) -> None:
        """Agree with the other ranks on what is saved again and what goes on in the background. Collective.

        Args:
            resumed_at: the moment that all ranks were brought to; None: memory did not give it.
            strategy: of the new trainer; saves in the background that go on are its to finish.
        """
        if resumed_at is None:
            self._made = []  # of a life that is not gone on with
        self._resumed_step = resumed_at[0] if resumed_at is not None else -1
        pending = self.pending
        mine = [
            [each.path, each.number, each.is_made and _is_there(each), each.is_finished]
            for each in self._made
            if resumed_at is not None and each.after >= resumed_at
        ]
        numbers = pending.numbers() if pending is not None else []
        everyone = all_gather_json({"again": mine, "pending": numbers, "newest": pending.newest if pending else -1})
        again = [{path: rest for path, *rest in each["again"]} for each in everyone]
        self._again = {path for each in again for path in each}
        self._whole = {
            path: number
            for path, (number, is_made, _) in again[0].items()
            # Of a save at once the first rank's part is the last.
            if (is_made if number is None else _is_one_save(path, number, again, everyone))
        }
        in_vain = {number for each in again for path, (number, *_) in each.items() if path not in self._whole}
        kept = [sorted(set(each["pending"]) - in_vain) for each in everyone]
        calls = getattr(strategy.checkpoint_io, "async_calls_queue", None)
        goes_on, self.has_lost = False, False
        if calls is not None and all(each == kept[0] for each in kept) and not (in_vain - {None} and kept[0]):
            if pending is not None:
                pending.end(in_vain)
                calls.async_calls.extend(call for call in pending.calls if call.idx not in in_vain)
            calls.call_idx = max(each["newest"] for each in everyone)
            goes_on = bool(kept[0])
        elif any(kept):
            logger.warning(
                "a checkpoint that was being written in the background is lost with the writer of another rank"
            )
            self.has_lost = True
            self._whole = {path: number for path, number in self._whole.items() if number is None}
            if pending is not None:
                pending.end(pending.numbers())
            if strategy.trainer.is_global_zero:
                _remove_unfinished(strategy.trainer.callbacks)
        self.pending = None  # not earlier: a fault may come while the ranks agree
        reset_reports(keep=goes_on)
        self._write_to_the_same(strategy.trainer.callbacks)

    def forget_lost(self, callbacks: Iterable[Any]) -> None:
        """Have callbacks not count checkpoints that were lost, of which the state that they were given knows."""
        for each in callbacks:
            if self.has_lost and isinstance(each, ModelCheckpoint) and each.save_top_k != 0:
                each._remove_invalid_entries_from_topk()

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


def _is_there(save: _Save) -> bool:
    """Whether what was saved at once is where it was saved to; a callback may have moved it."""
    if save.number is not None or "://" in save.path:
        return True
    return Path(save.path).exists() or ckpt_to_dir(save.path).exists()


def _is_one_save(
    path: str, number: int, again: Sequence[dict[str, Any]], everyone: Sequence[dict[str, Any]]
) -> bool:
    """Whether a save in the background is pending on every rank, or finished on every rank."""
    found = [each.get(path, (None, False, False)) for each in again]
    if not all(each[0] == number and each[1] for each in found):
        return False
    return all(number in each["pending"] for each in everyone) or all(each[2] for each in found)


class _Ended:
    """Stands for the writer of a save in the background that has ended."""

    process = None

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """On every rank alike."""
        return True

    def close(self, abort: bool = False) -> None:
        """Nothing runs any more."""


def _finish_by(save: _Save, before: _Save, calls: Any) -> None:
    """Have ``save`` end what ``before`` has begun in the background; if that was ended, whenever one is ended next.

    Not at once: NeMo's callback says only behind the save what its end is to remove.
    """
    for call in calls.async_calls:
        if call.idx == save.number:
            fns = call.async_request.finalize_fns
            fns[:] = [each for each in fns if each not in (before.finish, before.finished)]
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
