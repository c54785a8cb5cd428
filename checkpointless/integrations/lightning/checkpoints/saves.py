"""Handles checkpoints that are being saved, or that only some of the ranks have saved, when a fault comes.

The ranks may go back to before a save. It then goes to the same folder: what is there is not written twice, and
what is not whole is written again. A background save, whose writer is a separate process, is finished in the next
generation if all ranks still have their writers; else it is repeated if the ranks can go back to where it began
(:mod:`checkpointless.recovery.decide`), or a warning says that it is lost.
"""

from __future__ import annotations

import copy
import errno
import functools
import logging
import multiprocessing
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
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
from checkpointless.integrations.lightning.checkpoints.connector import keep_names
from checkpointless.launcher.protocol.causes import Json
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.state.port import SnapshotPoint
from checkpointless.system.patches import Patch, Patches
from checkpointless.system.process_tree import die_with_parent
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

_ENDS_S = 5.0


@disable_gc()
def _write_buckets(
    transforms: Sequence[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: Queue[Any]
) -> None:
    """Stand in for ``write_preloaded_data_multiproc``: a process per bucket; ``results`` gets what each says."""
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
    try:
        return receiver.recv()[1]
    except EOFError:
        writer.join(_ENDS_S)
        code = writer.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return RuntimeError(f"the process that wrote a part of it ended with {how}")


def _write(transforms: Sequence[Any], use_msc: bool, number: int, bucket: Any, sender: Connection) -> None:
    """Be a writer, which ends with the process that started it."""
    with suppress(OSError):  # where the kernel does not allow it, a save is worth more
        die_with_parent(os.getppid())
    # It stands for both queues that Megatron-core gives a writer, one of which counts what is done.
    report: Any = SimpleNamespace(put=sender.send, get=lambda: None, task_done=lambda: None)
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
        saves: Saves | None = getattr(trainer.strategy, "watched_saves", None)
        if saves is None:  # of another strategy, or outside of a fit
            original(callback, trainer, monitor_candidates)
            return
        books = _books_of(callback)
        try:
            with saves.failed.handling():
                original(callback, trainer, monitor_candidates)
        except _SaveFailed:
            vars(callback).update(books)
            callback._last_global_step_saved = trainer.global_step  # it is not tried again in the same step
            CallbackGroup.get_instance().on_save_checkpoint_end()
            return
        if getattr(callback, "async_save", False):
            saves.keep(callback, books)

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
    return {
        name: copy.copy(value) if isinstance(value, list | dict) else value
        for name, value in vars(callback).items()
    }


def _replaced(callback: LightningModelCheckpoint, books: Mapping[str, Any]) -> Replaced:
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


def begin_set_up(is_writing: bool) -> None:
    """Have NeMo leave unfinished checkpoints if they are being written; first wait (10 s) for its removals."""
    if _removing.acquire(timeout=_REMOVAL_S):
        _removing.release()
    _leave_unfinished(is_writing)


def _leave_unfinished(leave: bool) -> None:
    name = "_remove_unfinished_checkpoints"
    setattr(ModelCheckpoint, name, staticmethod(lambda *_: None) if leave else _REMOVE)


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
    """Remove a checkpoint, renamed as an unfinished one first: if the process is killed no half counts as whole."""
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


OnSaveError = Literal["continue", "raise"]

_HARDLY_ANY = 64 * 1024  # bytes that are free on a file system which is full
_UNKNOWN = {0: "a part of it could not be written"}


class _SaveFailed(Exception):
    def __init__(self, path: str, reasons: Mapping[int, str]) -> None:
        where, rank = path.removesuffix(".ckpt"), min(reasons)
        super().__init__(f"checkpoint {where} could not be saved (rank {rank}: {reasons[rank]})")
        self.reasons = reasons


class _FailedSaves:
    """What a rank does about saves that fail; it outlives restarts."""

    active: ClassVar[_FailedSaves | None] = None  # which handles the errors of what is running; None: nothing does

    def __init__(self) -> None:
        self.on_error: OnSaveError = "continue"
        self.errors: dict[str, str] = {}  # what the others do not know of yet, by the checkpoint's folder
        self.raised: tuple[int, str] | None = None  # the step after which this rank raised in a save, and why
        self._given_up: tuple[int, dict[int, str]] = -1, {}  # the step whose saves are given up, and why, by rank
        self._strategy: Callable[[], Any] = lambda: None

    def watch(self, strategy: MegatronStrategy) -> None:
        self._strategy = weakref.ref(strategy)
        writer = strategy.unwrapped_checkpoint_io
        if "save_checkpoint" not in vars(writer):
            vars(writer)["save_checkpoint"] = partial(self._save, writer.save_checkpoint)

    @contextmanager
    def handling(self) -> Iterator[None]:
        """While the context lasts, what one rank writes while the others wait for it notes its errors."""
        before, _FailedSaves.active = _FailedSaves.active, self
        try:
            yield
        finally:
            _FailedSaves.active = before

    def _save(self, save: Callable[..., Any], checkpoint: Any, path: Any, storage_options: Any = None) -> Any:
        """Stand in for ``save`` of a checkpoint IO: the ranks agree before they write and after it."""
        if _FailedSaves.active is not self:
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

    def keep(self, path: str | Path, error: Exception) -> None:
        """Keep an error for the others; only the first is kept, because others follow from it."""
        reason = _reason(error, str(path))
        logger.warning("%s could not be written: %s", path, reason)
        self.errors.setdefault(_folder_of(path), reason)

    def agree(self, path: str) -> None:
        """Raise, on all ranks, if anything of the save to ``path`` has failed on one. Collective."""
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
            EventLog.here().emit(
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
    """Return what makes a function that writes to ``where(...)`` keep its error for the others, and go on."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def noted(*args: Any) -> None:
            try:
                original(*args)
            except (OSError, RuntimeError) as error:
                if _FailedSaves.active is None:
                    raise
                _FailedSaves.active.keep(where(*args), error)

        return noted

    return make


def _folder_of(path: str | Path) -> str:
    """Return the folder of the checkpoint that ``path`` names, whose weights ``path`` may be."""
    folder = Path(ckpt_to_dir(path))
    return str(folder.parent if folder.name == WEIGHTS_PATH else folder)


def _reason(error: BaseException, path: str = "") -> str:
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


class _Word(NamedTuple):
    """What a rank says of a save."""

    number: int | None
    is_passed: bool  # whether the rank comes past the save again
    state: str  # _PENDING: its writer works; _DONE: nothing is missing; _BEGUN: neither is known
    replaced: Replaced


_PENDING, _DONE, _BEGUN = "pending", "done", "begun"
_WHOLE, _AGAIN, _GOES_ON, _LOST = "whole", "again", "goes on", "lost"


def _fate(words: Sequence[_Word | None], in_background: bool) -> str:
    """Conclude what becomes of a save: passed again: ``_WHOLE`` or ``_AGAIN``, else ``_GOES_ON`` or ``_LOST``."""
    known = [each for each in words if each is not None]
    states, numbers = {each.state for each in known}, {each.number for each in known}
    if None in numbers:  # in a save that is made at once, the first rank's part is the last
        is_whole = words[0] is not None and words[0].state == _DONE
    elif states == {_PENDING}:
        is_whole = in_background and len(known) == len(words)
    else:
        is_whole = states == {_DONE}
    is_whole = is_whole and len(numbers) == 1
    if any(each.is_passed for each in known):
        return _WHOLE if is_whole else _AGAIN
    return _GOES_ON if is_whole else _LOST


class Saves:
    """What a rank knows of the saves of its newest step, and of saves that have not ended; it outlives restarts."""

    def __init__(self) -> None:
        self.pending: tuple[Any, ...] = ()  # Megatron's background saves not finished when the block was left
        self._newest = -1  # the number that the queue of these assigned last
        self.failed = _FailedSaves()
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
        """Make a save ``after`` the newest point, through ``calls`` in the background. Every rank calls this."""
        if after[0] != self._resumed_step:
            self._again.clear()
            self._whole.clear()
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
                if _FailedSaves.active is None:  # the script itself saves
                    return
                raise
            if calls is not None:
                _note_end(save, calls.async_calls)
        save.is_made = True
        self._again.discard(path)
        _report_separately()

    def keep(self, callback: ModelCheckpoint, books: Mapping[str, Any]) -> None:
        """Keep what a background save has replaced in the callback's ``books`` from before it."""
        then = {*books["best_k_models"], books["best_model_path"], books["last_model_path"]}
        now = {*callback.best_k_models, callback.best_model_path, callback.last_model_path}
        for each in self._made:
            if each.path in now - then:
                each.replaced = _replaced(callback, books)
                each.spare = partial(_drop, callback, callback.deferred_ckpts_to_remove[-1])

    def keep_pending(self, checkpoint_io: CheckpointIO | None) -> None:
        """Keep, after a fault, what ``checkpoint_io`` writes in the background, to finish it later."""
        queue = getattr(checkpoint_io, "async_calls_queue", None)
        if queue is not None and queue.async_calls:
            self.pending, self._newest = tuple(queue.async_calls), queue.call_idx

    def _forget(self, path: str) -> None:
        self._made = [each for each in self._made if each.path != path]

    @property
    def unfinished(self) -> tuple[tuple[int, int, int, bool], ...]:
        """Number, step and stage of each background save that has not ended, and whether its writer works."""
        pending = {call.idx for call in self.pending}
        return tuple(
            (each.number, each.after[0], int(each.after[1]), each.number in pending)
            for each in self._made
            if each.number is not None and each.is_unfinished
        )

    def _words(self, resumed_at: tuple[int, SnapshotPoint] | None, is_first: bool) -> dict[str, _Word]:
        pending = {call.idx for call in self.pending}
        said = {f"save {number}": _Word(number, False, _PENDING, {}) for number in pending}  # not made in a fit
        for each in self._made:
            said.pop(f"save {each.number}", None)
            is_passed = resumed_at is not None and each.after >= resumed_at
            state = _BEGUN
            if each.is_made and each.number in pending:
                state = _PENDING
            elif each.is_made and not each.is_unfinished and _is_there(each, is_first):
                state = _DONE
            if is_passed or each.is_unfinished:
                said[each.path] = _Word(each.number, is_passed, state, each.replaced)
        return said

    def agree(self, resumed_at: tuple[int, SnapshotPoint] | None, strategy: MegatronStrategy) -> None:
        """Agree on what is saved again after ``resumed_at`` (None: not from memory) or continues. Collective."""
        is_first = bool(strategy.trainer.is_global_zero)
        said = self._words(resumed_at, is_first)
        everyone = all_gather_json({"saves": said, "newest": self._newest, "raised": self.failed.raised})
        self._resumed_step = resumed_at[0] if resumed_at is not None else -1
        self.failed.give_up([each["raised"] for each in everyone], self._resumed_step)
        calls: Any = getattr(strategy.checkpoint_io, "async_calls_queue", None)
        words = [{path: _Word(*each) for path, each in rank["saves"].items()} for rank in everyone]
        known = {path: each for rank in reversed(words) for path, each in rank.items()}  # the lowest rank's counts
        fates = {path: _fate([rank.get(path) for rank in words], calls is not None) for path in known}
        self._whole = {path: known[path].number for path, fate in fates.items() if fate == _WHOLE}
        self._again = {path for path, fate in fates.items() if fate in (_WHOLE, _AGAIN)}
        lost = sorted((path for path in fates if fates[path] == _LOST), key=lambda path: -(known[path].number or 0))
        was = {path: each.replaced for rank in reversed(words) for path, each in rank.items() if each.replaced}
        self._lost = [(path, was.get(path, {})) for path in lost]
        self._go_on({known[path].number for path, fate in fates.items() if fate in (_WHOLE, _GOES_ON)}, calls)
        if calls is not None:
            calls.call_idx = max(calls.call_idx, *(each["newest"] for each in everyone))
        for save in self._made:
            if save.path in lost:
                save.spare()
        belong = [each for each in self._made if resumed_at is not None or each.is_unfinished]  # to what is resumed
        self._made = [each for each in belong if each.path not in lost]
        for path in lost:
            logger.warning("%s, which was written in the background, could not be finished, and is lost", path)
        if is_first:  # one that is not marked is whole: all ranks had written it
            _remove(path for path in lost if ModelCheckpoint.is_checkpoint_unfinished(path))
        self.pending = ()  # not earlier: a fault may come while the ranks agree
        _reset_reports()
        keep_names(strategy.trainer.callbacks, self._again)
        _leave_unfinished(False)

    def _go_on(self, numbers: Collection[int | None], calls: Any) -> None:
        """Let the background saves with these ``numbers`` continue, and stop the writers of all others."""
        for call in self.pending:
            if call.idx in numbers:
                calls.async_calls.append(call)
            elif (process := getattr(call.async_caller, "process", None)) is not None:
                process.kill()
                process.join(_ENDS_S)
        for save in self._made if calls is not None else ():
            _note_end(save, calls.async_calls)  # a rank may have been interrupted right after it had begun one

    def watch(self, strategy: MegatronStrategy) -> None:
        """Watch the background saves that ``strategy`` finishes. Idempotent."""
        self.failed.watch(strategy)
        io: Any = strategy.checkpoint_io
        name = "maybe_finalize_save_checkpoint"
        if hasattr(io, name) and name not in vars(io):
            finalize = partial(self._finalize, io.async_calls_queue, getattr(io, name), strategy.trainer.callbacks)
            vars(io)[name] = finalize

    def _finalize(
        self,
        queue: AsyncCallsQueue,
        finalize: Callable[..., bool],
        callbacks: Iterable[Any],
        blocking: bool = False,
    ) -> bool:
        """Stand in for ``finalize``, which ends background saves, and outlive those that fail."""
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

    def _give_up(
        self, save: _Save | None, error: CheckpointException | _SaveFailed, callbacks: Iterable[Any]
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
        if not self.pending or trainer is None:
            return
        strategy = trainer.strategy
        for name in ("megatron_parallel", "model", "_model", "_lightning_module"):
            if name in vars(strategy):
                setattr(strategy, name, None)
        strategy.optimizers = []
        trainer.fit_loop._data_fetcher = trainer.fit_loop._combined_loader = None

    def forget_lost(self, callbacks: Iterable[Any]) -> None:
        """Make callbacks forget checkpoints that were lost but that the state they were given still knows."""
        for each in callbacks:
            for path, was in self._lost:
                _undo(each, path, was)


def _note_end(save: _Save, calls: Iterable[Any]) -> None:
    for call in calls:
        fns = call.async_request.finalize_fns
        if save.number == call.idx and save.finished not in fns:
            fns.append(save.finished)


def _drop(callback: Any, removal: list[str]) -> None:
    removals = callback.deferred_ckpts_to_remove
    removals[:] = [each for each in removals if each is not removal]


def _is_there(save: _Save, first: bool) -> bool:
    """Return whether what was saved is there, and not marked as unfinished by the ``first`` rank."""
    if "://" in save.path or (save.number is not None and not (first and save.is_finished)):
        return True
    there = Path(save.path).exists() or ckpt_to_dir(save.path).exists()
    return there and not (save.number is not None and ModelCheckpoint.is_checkpoint_unfinished(save.path))


def _finish_by(save: _Save, before: _Save | None, calls: AsyncCallsQueue) -> None:
    """Make ``save`` end what ``before`` began, but later: NeMo's callback says only after it what that removes."""
    fns = [each for each in (save.finish, save.finished) if each is not None]
    for call in calls.async_calls:
        if call.idx == save.number:
            old = (before.finish, before.finished) if before is not None else ()
            present = call.async_request.finalize_fns
            present[:] = [*(each for each in present if each not in old), *fns]
            return
    ended: Any = SimpleNamespace(is_current_async_call_done=lambda *_, **__: True)
    calls.call_idx += 1
    save.number = calls.call_idx
    calls.async_calls.append(ActiveAsyncRequest(save.number, ended, AsyncRequest(None, (), fns)))


# --- the reports of the writers of background saves --------------------------------------------------------------


def _report_separately() -> None:
    """Make the writers of the next save report to a separate queue: one for all saves mixes them up."""
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
    """Renew the writers' connection and queue: a rank interrupted in a question would get its old answer."""
    reports = getattr(filesystem_async, RESULTS_QUEUE)
    if reports is not None:
        vars(reports._tls).pop("connection", None)  # of this thread; multiprocessing makes another one
        _report_separately()
