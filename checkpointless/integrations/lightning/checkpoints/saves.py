"""Handles checkpoints that are being saved, or that only some of the ranks have saved, when a fault comes.

After a fault the ranks may go back to before a save that some of them had finished. The end of the step is replayed
then, and the save goes to the same folder as before: what is already there is not written twice, and what is not
whole is written again.

A background save is made by a writer, which is a separate process with a copy of what it writes, so a fault
of a rank does not stop it. If all ranks still have their writers, the save is finished in the next generation like
any other. If one writer was lost with its rank, or failed, no part is of use: the save is repeated if the ranks
can go back to where it began (:mod:`checkpointless.recovery.decide`); otherwise a warning says that it is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Checkpoint
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import CheckpointException

from checkpointless.integrations.compat.megatron import ActiveAsyncRequest
from checkpointless.integrations.lightning.checkpoints.callbacks import Replaced, replaced, undo
from checkpointless.integrations.lightning.checkpoints.failed_saves import (
    FailedSaves,
    SaveFailed,
    merged,
    reasons_by,
)
from checkpointless.integrations.lightning.checkpoints.unfinished import leave_unfinished, remove, remove_unfinished
from checkpointless.launcher.protocol.causes import Json
from checkpointless.state.port import SnapshotPoint
from checkpointless.transfer.exchange import all_gather_json

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import CheckpointIO
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from nemo.lightning import MegatronStrategy

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Save:
    """One save of this rank.

    Attributes:
        after: the newest point of the rank when the save began.
        number: the number that Megatron's queue of background saves gives it; None: it is made at once.
        finish: the caller's function that ends a background save; None: there is none.
        is_made: whether this rank has done its part or, for a background save, begun it.
        is_finished: whether this rank has gone through all that ends a background save.
        replaced: what a background save has replaced in the books of its callback; empty: nothing.
    """

    path: str
    after: tuple[int, SnapshotPoint]
    number: int | None
    finish: Callable[[], None] | None
    is_made: bool = False
    is_finished: bool = False
    replaced: Replaced = field(default_factory=dict)
    spare: Callable[[], None] = lambda: None

    @property
    def is_unfinished(self) -> bool:
        """Whether this is a background save whose end this rank has not gone through."""
        return self.number is not None and not self.is_finished

    def finished(self) -> None:
        """Note that all that ends the background save has been done; this runs last."""
        self.is_finished = True


@dataclass(frozen=True)
class _Agreement:
    """Which saves are repeated, which continue in the background, and which are lost, as all ranks conclude.

    Background saves go by the numbers that Megatron's queues gave them, which are the same on every rank.

    Attributes:
        whole: those of them that miss nothing, each with the number of its background save; None: it was made at
            once.
        failed: the background saves whose writer failed on some rank, and that are not started over.
        forgotten: those of ``lost`` that no rank passes again.
        lost_paths: the known paths of ``lost``, the newest first.
        continues: whether the pending background saves of all ranks, if there are any, can continue.
        is_cut_off: whether there are some that cannot, because a rank has lost its writer.
        newest: the number that a queue assigned last; -1: none.
    """

    again: frozenset[str]
    whole: Mapping[str, int | None]
    in_vain: frozenset[int | None]
    failed: frozenset[int]
    lost: frozenset[int]
    forgotten: frozenset[int]
    lost_paths: tuple[str, ...]
    going_on: frozenset[str]
    continues: bool
    is_cut_off: bool
    newest: int

    @classmethod
    def of(cls, everyone: Sequence[Mapping[str, Any]], in_background: bool) -> _Agreement:
        """Return what follows from what every rank says.

        Args:
            everyone: by rank, what it says: ``again``, for each save that it passes again its path, its number,
                whether its part is made and whether its end is gone through; ``pending``, the numbers of its
                pending background saves; ``newest``, the number that its queue assigned last (-1: none);
                ``failed``, the numbers of its saves whose writer failed; ``paths``, number and path of each
                unfinished save.
            in_background: whether the new trainers can continue background saves.
        """
        again = [{path: rest for path, *rest in each["again"]} for each in everyone]
        known = {path: rest for each in reversed(again) for path, rest in each.items()}  # the lowest rank's count
        whole = {
            path: number
            for path, (number, is_made, _) in known.items()
            # In a save that is made at once, the first rank's part is the last.
            if (is_made and path in again[0] if number is None else _is_one_save(path, number, again, everyone))
        }
        in_vain = {number for each in again for path, (number, *_) in each.items() if path not in whole}
        kept = [sorted(set(each["pending"]) - in_vain) for each in everyone]
        failed = {number for each in everyone for number in each["failed"]} - in_vain
        continues = in_background and all(each == kept[0] for each in kept)
        is_cut_off = not continues and any(kept)
        lost = set(failed)
        if is_cut_off:
            lost |= {number for each in kept for number in each}
            whole = {path: number for path, number in whole.items() if number is None}
        path_of = {number: path for each in everyone for number, path in each["paths"]}
        return cls(
            again=frozenset(known),
            whole=whole,
            in_vain=frozenset(in_vain),
            failed=frozenset(failed),
            lost=frozenset(lost),
            forgotten=frozenset(lost - {number for each in again for number, *_ in each.values()}),
            lost_paths=tuple(path_of[number] for number in sorted(lost, reverse=True) if number in path_of),
            going_on=frozenset(path_of[number] for number in kept[0] if number in path_of and number not in lost),
            continues=continues,
            is_cut_off=is_cut_off,
            newest=max(each["newest"] for each in everyone),
        )


def _is_one_save(
    path: str, number: int, again: Sequence[Mapping[str, Any]], everyone: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether a background save is pending on every rank, or finished on every rank that knows of it."""
    found = [each[path] for each in again if path in each]
    if not all(each[0] == number and each[1] for each in found):
        return False
    if any(number in each["pending"] for each in everyone):
        return len(found) == len(again) and all(number in each["pending"] for each in everyone)
    return all(each[2] for each in found)


class Saves:
    """What a rank knows of the saves of its newest step, and of saves that have not ended; it outlives restarts.

    Attributes:
        pending: the background saves that were not finished when the block was left; None: there are none.
    """

    def __init__(self) -> None:
        self.pending: PendingSaves | None = None
        self.failed = FailedSaves()
        self._made: list[_Save] = []
        self._again: set[str] = set()  # paths that will be saved to again
        self._whole: dict[str, int | None] = {}  # those of them that miss nothing, with their numbers
        self._resumed_step = -1  # the step that training resumed at
        self._lost: list[tuple[str, Replaced]] = []  # their paths, and what they had replaced in books

    def save(
        self,
        path: str,
        after: tuple[int, SnapshotPoint],
        make: Callable[[], None],
        calls: AsyncCallsQueue | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Make a save, unless it was made before the fault. Every rank calls this.

        Args:
            after: the newest point of this rank.
            calls: Megatron's queue of background saves; None: the save is made at once.
            finish: the present caller's function that ends the save; None: there is none.

        Raises:
            SaveFailed: the save has failed, as all ranks know, and its caller makes up for that.
        """
        if after[0] != self._resumed_step:
            self._again, self._whole = set(), {}
        before = next((each for each in self._made if each.path == path), None)
        save = _Save(path, after, None if calls is None else calls.call_idx + 1, finish)
        if before is not None:
            save.replaced, save.spare = before.replaced, before.spare
        kept = (each for each in self._made if each.after[0] == after[0] or each.is_unfinished)
        # This is noted before the save is made: a rank that is interrupted in it must not pass for one that knows
        # nothing of it.
        self._made = [each for each in kept if each is not before] + [save]
        if path in self._whole:
            save.number = self._whole.pop(path)
            if save.number is not None:
                _finish_by(save, before, calls)
        else:
            try:
                with self.failed.attempt(path):
                    make()
            except SaveFailed:
                self._forget(path)
                if FailedSaves.active is None:  # the script itself saves
                    return
                raise
            for call in () if calls is None else calls.async_calls:
                if call.idx == save.number:
                    call.async_request.finalize_fns.append(save.finished)
        save.is_made = True
        self._again.discard(path)
        _report_separately()

    def keep(self, path: str, callback: ModelCheckpoint, books: Mapping[str, Any]) -> None:
        """Keep what the background save to ``path`` has replaced in a callback's books, in case that it fails.

        Args:
            books: the callback's books before the save.
        """
        for each in self._made:
            if each.path == path:
                each.replaced = replaced(callback, books)
                each.spare = partial(_drop, callback, callback.deferred_ckpts_to_remove[-1])

    def _forget(self, path: str) -> None:
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

    def agree(self, resumed_at: tuple[int, SnapshotPoint] | None, strategy: MegatronStrategy) -> None:
        """Agree with the other ranks on what is saved again and what continues in the background. Collective.

        Args:
            resumed_at: the point that all ranks were brought to; None: the state is not from memory.
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
        unfinished = [each for each in self._made if each.is_unfinished]
        everyone = all_gather_json(
            {
                "again": mine,
                "pending": pending.numbers() if pending is not None else [],
                "newest": pending.newest if pending else -1,
                "failed": failed,
                "paths": [[each.number, each.path] for each in unfinished],
                "replaced": {each.path: each.replaced for each in unfinished if each.replaced},
                "raised": self.failed.raised,
            }
        )
        self.failed.give_up([each["raised"] for each in everyone], self._resumed_step)
        calls: Any = getattr(strategy.checkpoint_io, "async_calls_queue", None)
        agreed = _Agreement.of(everyone, calls is not None)
        self._again, self._whole = set(agreed.again), dict(agreed.whole)
        was = {path: each for rank in reversed(everyone) for path, each in rank["replaced"].items()}
        self._lost = [(path, was.get(path, {})) for path in agreed.lost_paths]
        for save in unfinished:
            if save.path in agreed.lost_paths:
                save.spare()
        self._go_on(agreed, calls, strategy.trainer)
        self._made = [each for each in self._made if each.number not in agreed.forgotten]
        self.pending = None  # not earlier: a fault may come while the ranks agree
        _reset_reports()
        self._write_to_the_same(strategy.trainer.callbacks)
        leave_unfinished(False)

    def _go_on(self, agreed: _Agreement, calls: Any, trainer: pl.Trainer) -> None:
        """Let the background saves continue that can, and remove what is left of those that are lost.

        Args:
            calls: Megatron's queue of background saves, which is new; None: there is none.
        """
        pending = self.pending
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
        if agreed.lost and trainer.is_global_zero:
            if agreed.going_on:
                remove(agreed.lost_paths)
            else:
                remove_unfinished(trainer.callbacks)  # type: ignore[attr-defined]

    def watch(self, strategy: MegatronStrategy) -> None:
        """Watch the background saves that ``strategy`` finishes. Idempotent."""
        self.failed.watch(strategy)
        io: Any = strategy.checkpoint_io
        name = "maybe_finalize_save_checkpoint"
        if hasattr(io, name) and name not in vars(io):
            vars(io)[name] = self._outliving(io.async_calls_queue, getattr(io, name), strategy.trainer.callbacks)

    def _outliving(
        self, queue: AsyncCallsQueue, finalize: Callable[..., bool], callbacks: Sequence[Any]
    ) -> Callable[..., bool]:
        """Return ``finalize``, which ends background saves, so that it outlives those that fail."""

        def maybe_finalize_save_checkpoint(blocking: bool = False) -> bool:
            while True:
                before = [call.idx for call in queue.async_calls]
                try:
                    with self.failed.handling():
                        return finalize(blocking)
                except (CheckpointException, SaveFailed, OSError, RuntimeError) as error:
                    ended = before[: len(before) - len(queue.async_calls)]  # the last of them, in vain
                    save = next((each for each in self._made if each.number in ended[-1:]), None)
                    if isinstance(error, CheckpointException | SaveFailed):
                        self._give_up(save, error, callbacks)
                        continue
                    if save is not None:
                        self.failed.note(error, save.path, save.after[0])
                    raise

        return maybe_finalize_save_checkpoint

    def _give_up(
        self, save: _Save | None, error: CheckpointException | SaveFailed, callbacks: Sequence[Any]
    ) -> None:
        """Give up a background save in whose end all ranks have raised. Collective.

        Args:
            save: the save; None: this rank does not know it.

        Raises:
            CheckpointException: no rank knows the save.
            UnrecoverableError: a failed save ends the job.
        """
        mine: Json = None if save is None else [save.path, save.replaced]
        reasons = reasons_by(error) if isinstance(error, CheckpointException) else {}
        everyone = all_gather_json({"save": mine, "reasons": reasons})
        known = [each["save"] for each in everyone if each["save"] is not None]
        if not known:
            raise error
        path, was = max(known, key=lambda each: bool(each[1]))
        try:
            if isinstance(error, CheckpointException):
                self.failed.fail(path, merged([each["reasons"] for each in everyone]))
        except SaveFailed:
            pass  # as all ranks know
        if save is not None:
            save.spare()
        self._forget(path)
        for each in callbacks:
            undo(each, path, was)

    def let_go(self, trainer: pl.Trainer | None) -> None:
        """Drop what the trainer of a generation that was left refers to, if what finishes a save refers to it."""
        if self.pending is not None:
            let_go(trainer)

    def forget_lost(self, callbacks: Iterable[Any]) -> None:
        """Make callbacks forget checkpoints that were lost but that the state they were given still knows.

        What the ends of these saves were to remove has its place again.
        """
        for each in callbacks:
            for path, was in self._lost:
                undo(each, path, was)

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


def _drop(callback: Any, removal: list[str]) -> None:
    """Drop one of a callback's lists of what the ends of its saves remove."""
    removals = callback.deferred_ckpts_to_remove
    removals[:] = [each for each in removals if each is not removal]


def _is_there(save: _Save, first: bool) -> bool:
    """Return whether what was saved is where it was saved to, and whole.

    A callback may have moved it; NeMo's marker of an unfinished checkpoint may have stayed, and what is marked is
    removed.

    Args:
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
        before: the same save before the fault, if it was this process that began it; None: it was another process.
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
    calls.async_calls.append(ActiveAsyncRequest(save.number, _Ended(), AsyncRequest(None, (), fns)))


# --- background saves that were not finished when the block was left, and their writers' reports ------------------

_WRITER_ENDS_S = 5.0


@dataclass(frozen=True)
class PendingSaves:
    """Saves that were not finished when the block was left."""

    calls: tuple[Any, ...]
    newest: int

    @classmethod
    def of(cls, checkpoint_io: CheckpointIO | None) -> PendingSaves | None:
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


def _report_separately() -> None:
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


def _reset_reports() -> None:
    """Make writers report on a connection with nothing left on it, and the next ones to a separate queue.

    Megatron's writers report to their rank through a queue in a separate process. A rank that was interrupted while
    it asked that process would take the old answer for the answer to its next question, and an old report for the
    report of its next save.
    """
    reports = filesystem_async._results_queue
    if reports is not None:
        vars(reports._tls).pop("connection", None)  # of this thread; multiprocessing makes another one
        _report_separately()


def let_go(trainer: pl.Trainer | None) -> None:
    """Drop a trainer's references to model, optimizer and data: what finishes a save refers to the trainer."""
    if trainer is None:
        return
    strategy = trainer.strategy
    for name in ("megatron_parallel", "model", "_model", "_lightning_module"):
        if name in vars(strategy):
            setattr(strategy, name, None)
    strategy.optimizers = []
    trainer.fit_loop._data_fetcher = trainer.fit_loop._combined_loader = None
