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

import copy
import ctypes
import errno
import functools
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint as LightningModelCheckpoint
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from nemo.lightning.callback_group import CallbackGroup
from nemo.lightning.ckpt_utils import WEIGHTS_PATH, ckpt_to_dir
from nemo.lightning.io.pl import ckpt_to_weights_subdir
from nemo.lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import CheckpointException

from checkpointless.inprocess import UnrecoverableError, active_call_wrapper
from checkpointless.inprocess.exceptions import is_victim
from checkpointless.integrations.compat.megatron import RESULTS_QUEUE, ActiveAsyncRequest, disable_gc
from checkpointless.launcher.protocol.causes import Json
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import event_log
from checkpointless.state.port import SnapshotPoint
from checkpointless.system.patches import Patch, Patches
from checkpointless.transfer.exchange import all_gather_json

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    import lightning.pytorch as pl
    from lightning.pytorch.plugins import CheckpointIO
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from nemo.lightning import MegatronStrategy


# --- The processes that write a rank's part of a checkpoint: one that is killed is noticed ------------------------
#
# Megatron-core counts what its writers say. If one is killed, for example because the memory is used up, the rank
# or the process that writes in the background waits for ever, and no later background save is finished.

_PR_SET_PDEATHSIG = 1
_ENDS_S = 5.0


class _Report:
    """A writer's connection to its rank; it stands for both of the queues that Megatron-core gives a writer."""

    def __init__(self, connection: Connection) -> None:
        self.put = connection.send

    def get(self) -> None:
        """Do nothing: nobody counts."""

    task_done = get


@disable_gc()
def _write_buckets(
    transforms: Sequence[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: Queue[Any]
) -> None:
    """Stand in for ``write_preloaded_data_multiproc``: write each bucket of a rank's part in a separate process.

    ``results`` gets what each writer says, by its number, or the first error.
    """
    context = multiprocessing.get_context("fork")
    writers: list[tuple[Any, Connection]] = []
    said: list[Any] = []
    try:
        for number, bucket in enumerate(buckets):
            receiver, sender = context.Pipe(duplex=False)
            writer = context.Process(target=_write, args=(transforms, use_msc, number, bucket, sender))
            writer.start()
            sender.close()  # so that the receiver ends with the process
            writers.append((writer, receiver))
        said = [_said(*each) for each in writers]
    except OSError as error:  # no process could be started
        said = [error]
    finally:
        for writer, receiver in writers:
            writer.kill()  # it has ended or is about to, unless a fault came
            writer.join(_ENDS_S)
            receiver.close()
    errors = [each for each in said if isinstance(each, Exception)]
    results.put(errors[0] if errors else dict(enumerate(said)))


def _said(writer: Any, receiver: Connection) -> Any:
    """Wait for a writer, and return its results or its error."""
    try:
        return receiver.recv()[1]
    except EOFError:
        writer.join(_ENDS_S)
        code = writer.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return RuntimeError(f"the process that wrote a part of it ended with {how}")


def _write(transforms: Sequence[Any], use_msc: bool, number: int, bucket: Any, sender: Connection) -> None:
    """Be a writer, which ends with the process that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    report = _Report(sender)
    more = {"use_msc": True} if use_msc else {}
    FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, report, report, use_fsync=True, **more)


_patches = Patches()


def install() -> None:
    """Make the saves of trainers with our strategy outlive what fails in them. Idempotent."""
    if _patches.are_made:
        return
    books = "a save that failed must not stay in the books, and what it replaces must not be removed"
    alone = "one rank writes it, and the others wait"
    killed = "a writer that is killed is waited for for ever"
    writer, buckets = FileSystemWriterAsync, staticmethod(_write_buckets)
    _patches.make(
        [
            Patch(LightningModelCheckpoint, "_save_topk_checkpoint", _with_books, books),
            Patch(LightningModelCheckpoint, "_save_last_checkpoint", _with_books, books),
            Patch(ModelCheckpoint, "set_checkpoint_unfinished_marker", _marking, alone),
            Patch(TorchCommonSaveStrategy, "save_common", _noting(lambda _strategy, _state, folder: folder), alone),
            Patch(serialization, "save_config", _noting(lambda _config, folder: folder), alone),
            Patch(writer, "finish", _noting(lambda self, *_: self.checkpoint_dir), alone),
            Patch(writer, "write_preloaded_data_multiproc", lambda _: buckets, killed),
        ]
    )


def _with_books(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``original``, which saves, with the books put back if the save fails."""

    @functools.wraps(original)
    def save(callback: Any, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        failed: FailedSaves | None = getattr(trainer.strategy, "failed_saves", None)
        if failed is None:  # of another strategy, or outside of a fit
            original(callback, trainer, monitor_candidates)
            return
        books = _books_of(callback)
        try:
            with failed.handling():
                original(callback, trainer, monitor_candidates)
        except _SaveFailed:
            vars(callback).update(books)
            callback._last_global_step_saved = trainer.global_step  # it is not tried again in the same step
            CallbackGroup.get_instance().on_save_checkpoint_end()
            return
        if getattr(callback, "async_save", False):
            for path in _new_paths(callback, books):
                trainer.strategy.checkpoint_manager.saves.keep(path, callback, books)

    return save


def _marking(original: Callable[..., None]) -> Any:
    """Return ``original``, which marks a checkpoint as unfinished, with its error kept until the ranks have met."""
    mark = _noting(lambda path: path)(original)

    @functools.wraps(original)
    def marking(checkpoint_path: str | Path, barrier_after: bool = False) -> None:
        mark(checkpoint_path)
        if barrier_after and dist.is_initialized():
            dist.barrier()

    return staticmethod(marking)


# --- books --------------------------------------------------------------------------------------------------------

#: What a background save has replaced in a callback's books, as plain data: ``models``, which are no longer among
#: the best, with their scores; ``best`` and ``last``, the best model and the last checkpoint before it.
Replaced = dict[str, Any]


def _books_of(callback: LightningModelCheckpoint) -> dict[str, Any]:
    """Return a copy of all that ``callback`` knows, to put it back with ``vars(callback).update(books)``."""
    return {
        name: copy.copy(value) if isinstance(value, list | dict) else value
        for name, value in vars(callback).items()
    }


def _new_paths(callback: LightningModelCheckpoint, books: dict[str, Any]) -> list[str]:
    """Return the paths that ``callback`` has begun to believe in since its books were ``books``."""
    then = {*books["best_k_models"], books["best_model_path"], books["last_model_path"], ""}
    now = [*callback.best_k_models, callback.best_model_path, callback.last_model_path]
    return list(dict.fromkeys(path for path in now if path not in then))


def _replaced(callback: LightningModelCheckpoint, books: Mapping[str, Any]) -> Replaced:
    """Return what a save of ``callback`` has replaced since its books were ``books``."""
    models = books["best_k_models"].items()
    gone = {path: float(score) for path, score in models if path not in callback.best_k_models}
    return {"models": gone, "best": str(books["best_model_path"]), "last": str(books["last_model_path"])}


def _undo(callback: object, path: str, was: Replaced) -> None:
    """Strike a save that failed out of a callback's books, if it keeps any, and take back what it replaced."""
    if not isinstance(callback, LightningModelCheckpoint):
        return
    known = {*callback.best_k_models, callback.best_model_path, callback.last_model_path} - {""}
    failed = {each for each in known if ckpt_to_dir(each) == ckpt_to_dir(path)}
    if not failed:
        return
    scores = {each: torch.tensor(score) for each, score in was.get("models", {}).items()}
    models = scores | {each: score for each, score in callback.best_k_models.items() if each not in failed}
    callback.best_k_models = models
    if callback.last_model_path in failed:
        callback.last_model_path = was.get("last", "")
    links = getattr(callback, "ckpts_to_link", {})
    for each in [each for each in links if ckpt_to_dir(each) == ckpt_to_dir(path)]:
        del links[each]
    if callback.monitor is None:
        if callback.best_model_path in failed:
            callback.best_model_path = was.get("best", "")
        return
    by_score = sorted(models, key=lambda each: float(models[each]), reverse=callback.mode != "min")
    callback.best_model_path, callback.kth_best_model_path = (by_score[0], by_score[-1]) if by_score else ("", "")
    callback.best_model_score = models[by_score[0]] if by_score else None
    callback.kth_value = models[by_score[-1]] if by_score else None  # type: ignore[assignment]  # as NeMo does


_REMOVAL_S = 10.0
_removing = threading.Lock()  # NeMo removes checkpoints in threads if saves are made in the background
_REMOVE = ModelCheckpoint.__dict__["_remove_unfinished_checkpoints"]


def leave_unfinished(leave: bool) -> None:
    """Set whether NeMo must leave unfinished checkpoints at a trainer's set-up: it must while they are written."""
    name = "_remove_unfinished_checkpoints"
    setattr(ModelCheckpoint, name, staticmethod(lambda *_: None) if leave else _REMOVE)


def _remove_unfinished(callbacks: Iterable[Any]) -> None:
    """Remove unfinished checkpoints, as NeMo does at a trainer's set-up unless it is set to leave them."""
    for each in callbacks:
        if isinstance(each, ModelCheckpoint) and each.dirpath is not None:
            _REMOVE.__func__(each.dirpath)


def _remove(paths: Iterable[str]) -> None:
    """Remove checkpoints that will not be finished, and NeMo's markers; what cannot be removed stays marked."""
    for path in paths:
        if "://" in path:
            continue
        folder = Path(ckpt_to_dir(path))
        shutil.rmtree(folder, ignore_errors=True)
        try:
            if not folder.exists():
                ModelCheckpoint.format_checkpoint_unfinished_marker_path(path).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("what is left of checkpoint %s could not be removed: %s", folder, error)


def remove_whole(folder: Path) -> None:
    """Remove a whole checkpoint so that, whenever the process is killed, nothing half removed passes for one.

    It gets another name first, which NeMo takes for that of an unfinished checkpoint.
    """
    with _removing:
        gone = folder.with_name(f"{folder.name}-removed")
        marker = ModelCheckpoint.format_checkpoint_unfinished_marker_path(gone)
        try:
            marker.touch()
            folder.rename(gone)
        except FileNotFoundError:  # somebody else has removed it
            marker.unlink(missing_ok=True)
            return
        shutil.rmtree(gone)
        marker.unlink()


def wait_for_removals() -> None:
    """Wait until no thread of NeMo's removes a checkpoint any more, or for ten seconds."""
    if _removing.acquire(timeout=_REMOVAL_S):
        _removing.release()


OnSaveError = Literal["continue", "raise"]

_HARDLY_ANY = 64 * 1024  # bytes that are free on a file system which is full
_UNKNOWN = {0: "a part of it could not be written"}


class _SaveFailed(Exception):
    def __init__(self, path: str, reasons: Mapping[int, str]) -> None:
        super().__init__(path, reasons)
        self.path = path
        self.reasons = reasons

    def __str__(self) -> str:
        rank = min(self.reasons)
        return (
            f"checkpoint {self.path.removesuffix('.ckpt')} could not be saved (rank {rank}: {self.reasons[rank]})"
        )


class FailedSaves:
    """What a rank does about saves that fail; it outlives restarts.

    Attributes:
        active: the one that handles the errors of what is running; None: nothing does.
        errors: what went wrong on this rank and the others do not know of yet, by the checkpoint's folder.
        raised: the step after which this rank raised in a save, and why; None: it has not.
    """

    active: ClassVar[FailedSaves | None] = None

    def __init__(self) -> None:
        self.on_error: OnSaveError = "continue"
        self.errors: dict[str, str] = {}
        self.raised: tuple[int, str] | None = None
        self._given_up: tuple[int, dict[int, str]] = -1, {}  # the step whose saves are given up, and why, by rank
        self._strategy: Callable[[], Any] = lambda: None

    def watch(self, strategy: MegatronStrategy) -> None:
        """Watch what ``strategy`` writes. Idempotent."""
        self._strategy = weakref.ref(strategy)
        writer = strategy.unwrapped_checkpoint_io
        if "save_checkpoint" not in vars(writer):
            vars(writer)["save_checkpoint"] = self._agreeing(writer.save_checkpoint)

    @contextmanager
    def handling(self) -> Iterator[None]:
        """While the context lasts, what one rank writes while the others wait for it notes its errors."""
        before, FailedSaves.active = FailedSaves.active, self
        try:
            yield
        finally:
            FailedSaves.active = before

    def _agreeing(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``save`` of a checkpoint IO, in which the ranks agree before they write and after it."""

        def save_checkpoint(checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> Any:
            if FailedSaves.active is not self:
                return save(checkpoint, path, storage_options)
            try:
                if "://" not in str(path):
                    ckpt_to_weights_subdir(path, is_saving=True).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self.keep(path, error)
            self.agree(str(path))
            request = save(checkpoint, path, storage_options)
            self.agree(str(path))
            return request

        return save_checkpoint

    def keep(self, path: str | Path, error: Exception) -> None:
        """Keep an error for the others; only the first is kept, because others follow from it."""
        reason = _reason(error, str(path))
        logger.warning("%s could not be written: %s", path, reason)
        self.errors.setdefault(_folder_of(path), reason)

    def agree(self, path: str) -> None:
        """Learn whether anything of the save to ``path`` has failed on any rank. Collective.

        Raises:
            _SaveFailed: it has.
            UnrecoverableError: the same, if that ends the job.
        """
        everyone = all_gather_json(self.errors.pop(_folder_of(path), ""))
        reasons = {rank: reason for rank, reason in enumerate(everyone) if reason}
        if reasons:
            self.fail(path, reasons)

    def end(self, path: str, finish: Callable[[], None] | None) -> None:
        """End a background save with ``finish``, if :meth:`agree` says that all ranks have written. Collective."""
        self.agree(path)
        if finish is not None:
            finish()

    @contextmanager
    def attempt(self, path: str) -> Iterator[None]:
        """While the context lasts, save to ``path``; if that fails, all ranks :meth:`fail`. Collective."""
        step, reasons = self._given_up
        if reasons and step == self._step():  # a rank raised in a save of this step before the fault
            self.fail(path, reasons)
        try:
            with self.handling():
                yield
        except CheckpointException as error:
            self.fail(path, _merged(all_gather_json(_reasons_by(error))))
        except (OSError, RuntimeError, CheckpointingException) as error:
            self.note(error, path)
            raise

    def note(self, error: Exception, path: str, step: int | None = None) -> None:
        """Note that this rank raises ``error`` in a save of ``step`` (None: the newest), unless it is a victim."""
        if not is_victim(error):
            self.raised = (self._step() if step is None else step), _reason(error, path)

    def give_up(self, raised: Sequence[tuple[int, str] | None], resumed: int) -> None:
        """Give up the saves of the step that training resumes at (-1: at storage), if a rank raised in one."""
        reasons = {rank: each[1] for rank, each in enumerate(raised) if each is not None and each[0] == resumed}
        self._given_up, self.errors = (resumed, reasons), {}
        if self.raised is not None and self.raised[0] != resumed:
            self.raised = None

    def fail(self, path: str, reasons: dict[int, str]) -> None:
        """End a save that has failed, as all ranks know: raise ``_SaveFailed``, or what ends the job."""
        strategy, call = self._strategy(), active_call_wrapper()
        failure = _SaveFailed(path, reasons)
        self.errors.pop(_folder_of(path), None)
        if strategy.trainer.is_global_zero:
            _remove([path])
        if strategy.trainer.global_rank == min(reasons):
            logger.warning("%s: training goes on, and the next one that is due is made", failure)
            event_log().emit(
                EventName.SAVE_FAILED,
                "point",
                generation=call.generation if call is not None else 0,
                path=_folder_of(path),
                reason=reasons[min(reasons)],
                ranks=sorted(reasons),
            )
        if self.on_error == "raise":
            raise UnrecoverableError(f"{failure}, and on_save_error is 'raise'")
        raise failure

    def _step(self) -> int:
        return int(self._strategy().journal().newest[0])


def _reasons_by(error: CheckpointException) -> dict[str, str]:
    """Return what went wrong in a save, by rank; only one rank knows it of the others."""
    return {str(rank): _reason(each) for rank, (each, _) in error.failures.items()}


def _merged(reasons: Sequence[Mapping[str, str]]) -> dict[int, str]:
    return {int(rank): reason for each in reasons for rank, reason in each.items()} or _UNKNOWN


def _noting(where: Callable[..., str | Path]) -> Callable[[Any], Any]:
    """Return what makes a function keep its error for the others, and go on, while a save is made or ended.

    ``where`` returns where the function writes, from its arguments.
    """

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def noted(*args: Any) -> None:
            try:
                original(*args)
            except (OSError, RuntimeError) as error:
                if FailedSaves.active is None:
                    raise
                FailedSaves.active.keep(where(*args), error)

        return noted

    return make


def _folder_of(path: str | Path) -> str:
    """Return the folder of the checkpoint that ``path`` names, whose weights ``path`` may be."""
    folder = Path(ckpt_to_dir(path))
    return str(folder.parent if folder.name == WEIGHTS_PATH else folder)


def _reason(error: BaseException, path: str = "") -> str:
    """Return in one line what went wrong."""
    if str(error) == "results_queue should not be empty":
        return "the process that wrote it in the background was lost"
    if isinstance(error, RuntimeError) and path:  # torch.save does not say that the disk is full
        folder = os.path.dirname(_folder_of(path))
        if os.path.isdir(folder) and shutil.disk_usage(folder).free < _HARDLY_ANY:
            return os.strerror(errno.ENOSPC)
    return " ".join(str(error).removeprefix("Worker failure: ").split()) or type(error).__name__


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Save:
    path: str
    after: tuple[int, SnapshotPoint]  # the newest point of the rank when the save began
    number: int | None  # that Megatron's queue of background saves gives it; None: it is made at once
    finish: Callable[[], None] | None  # the caller's, which ends a background save
    is_made: bool = False  # whether this rank has done its part or, for a background save, begun it
    is_finished: bool = False  # whether this rank has gone through all that ends a background save
    replaced: Replaced = field(default_factory=dict)
    spare: Callable[[], None] = lambda: None

    @property
    def is_unfinished(self) -> bool:
        return self.number is not None and not self.is_finished

    def finished(self) -> None:
        """Note that all that ends the background save has been done; this runs last."""
        self.is_finished = True


@dataclass(frozen=True)
class _Agreement:
    """Which saves are repeated, which continue in the background, and which are lost, as all ranks conclude.

    Background saves go by the numbers that Megatron's queues gave them, which are the same on every rank.
    """

    again: frozenset[str]
    whole: Mapping[str, int | None]  # those of ``again`` that miss nothing, with their numbers; None: made at once
    in_vain: frozenset[int | None]
    failed: frozenset[int]  # whose writer failed on some rank, and that are not started over
    lost: frozenset[int]
    forgotten: frozenset[int]  # those of ``lost`` that no rank passes again
    lost_paths: tuple[str, ...]  # those that are known, the newest first
    going_on: frozenset[str]
    continues: bool  # whether the pending background saves of all ranks, if there are any, can continue
    is_cut_off: bool  # whether there are some that cannot, because a rank has lost its writer
    newest: int  # the number that a queue assigned last; -1: none

    @classmethod
    def of(cls, everyone: Sequence[Mapping[str, Any]], in_background: bool) -> _Agreement:
        """Return what follows from what every rank says, as :meth:`Saves.agree` gathers it.

        ``again`` has, for each save that the rank passes again, its path, its number, whether the rank's part is
        made and whether its end is gone through. ``in_background`` says whether new trainers can continue saves.
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
    """What a rank knows of the saves of its newest step, and of saves that have not ended; it outlives restarts."""

    def __init__(self) -> None:
        self.pending: _PendingSaves | None = None  # background saves not finished when the block was left
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
            except _SaveFailed:
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
        """Keep what the background save to ``path`` has replaced in the callback's ``books`` from before it."""
        for each in self._made:
            if each.path == path:
                each.replaced = _replaced(callback, books)
                each.spare = partial(_drop, callback, callback.deferred_ckpts_to_remove[-1])

    def keep_pending(self, checkpoint_io: CheckpointIO | None) -> None:
        """Keep, after a fault, what ``checkpoint_io`` writes in the background, to finish it later."""
        queue = getattr(checkpoint_io, "async_calls_queue", None)
        calls = tuple(getattr(queue, "async_calls", ()))
        if queue is not None and calls:
            self.pending = _PendingSaves(calls, queue.call_idx)

    def _forget(self, path: str) -> None:
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
        """Let the background saves continue that can, and remove what is left of those that are lost."""
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
                _remove(agreed.lost_paths)
            else:
                _remove_unfinished(trainer.callbacks)  # type: ignore[attr-defined]

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
                except (CheckpointException, _SaveFailed, OSError, RuntimeError) as error:
                    ended = before[: len(before) - len(queue.async_calls)]  # the last of them, in vain
                    save = next((each for each in self._made if each.number in ended[-1:]), None)
                    if isinstance(error, CheckpointException | _SaveFailed):
                        self._give_up(save, error, callbacks)
                        continue
                    if save is not None:
                        self.failed.note(error, save.path, save.after[0])
                    raise

        return maybe_finalize_save_checkpoint

    def _give_up(
        self, save: _Save | None, error: CheckpointException | _SaveFailed, callbacks: Sequence[Any]
    ) -> None:
        """Give up a background save in whose end all ranks have raised; raise if no rank knows it. Collective."""
        mine: Json = None if save is None else [save.path, save.replaced]
        reasons = _reasons_by(error) if isinstance(error, CheckpointException) else {}
        everyone = all_gather_json({"save": mine, "reasons": reasons})
        known = [each["save"] for each in everyone if each["save"] is not None]
        if not known:
            raise error
        path, was = max(known, key=lambda each: bool(each[1]))
        try:
            if isinstance(error, CheckpointException):
                self.failed.fail(path, _merged([each["reasons"] for each in everyone]))
        except _SaveFailed:
            pass  # as all ranks know
        if save is not None:
            save.spare()
        self._forget(path)
        for each in callbacks:
            _undo(each, path, was)

    def let_go(self, trainer: pl.Trainer | None) -> None:
        """Drop the references to model, optimizer and data of a trainer that what finishes a save refers to."""
        if self.pending is None or trainer is None:
            return
        strategy = trainer.strategy
        for name in ("megatron_parallel", "model", "_model", "_lightning_module"):
            if name in vars(strategy):
                setattr(strategy, name, None)
        strategy.optimizers = []
        trainer.fit_loop._data_fetcher = trainer.fit_loop._combined_loader = None

    def forget_lost(self, callbacks: Iterable[Any]) -> None:
        """Make callbacks forget checkpoints that were lost but that the state they were given still knows.

        What the ends of these saves were to remove has its place again.
        """
        for each in callbacks:
            for path, was in self._lost:
                _undo(each, path, was)

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
    removed. Only the ``first`` rank writes markers, and others may not see its files.
    """
    if "://" in save.path or (save.number is not None and not (first and save.is_finished)):
        return True
    there = Path(save.path).exists() or ckpt_to_dir(save.path).exists()
    return there and not (save.number is not None and ModelCheckpoint.is_checkpoint_unfinished(save.path))


class _Ended:
    """Stands for the writer of a background save that has ended."""

    process = None

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        return True

    def close(self, abort: bool = False) -> None:
        pass


def _finish_by(save: _Save, before: _Save | None, calls: AsyncCallsQueue) -> None:
    """Make ``save`` end what ``before`` began in the background; if that has ended, the next time saves are ended.

    It is not ended at once, because NeMo's callback says only after the save what its end is to remove. Without
    ``before`` it was another process that began it.
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
class _PendingSaves:
    """Saves that were not finished when the block was left."""

    calls: tuple[Any, ...]
    newest: int

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
    reports = getattr(filesystem_async, RESULTS_QUEUE)
    manager = getattr(reports, "_manager", None)
    if manager is None:
        return
    try:
        setattr(filesystem_async, RESULTS_QUEUE, manager.Queue())
    except (OSError, EOFError) as error:  # the process that holds the queues is gone
        logger.warning("the process that checkpoints in the background report to is replaced: %s", error)
        setattr(filesystem_async, RESULTS_QUEUE, None)  # Megatron makes another one


def _reset_reports() -> None:
    """Make writers report on a connection with nothing left on it, and the next ones to a separate queue.

    Megatron's writers report to their rank through a queue in a separate process. A rank that was interrupted while
    it asked that process would take the old answer for the answer to its next question, and an old report for the
    report of its next save.
    """
    reports = getattr(filesystem_async, RESULTS_QUEUE)
    if reports is not None:
        vars(reports._tls).pop("connection", None)  # of this thread; multiprocessing makes another one
        _report_separately()
