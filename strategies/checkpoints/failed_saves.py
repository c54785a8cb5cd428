"""Saves that fail: all ranks learn of it, nothing of them stays, and training goes on.

All ranks look before a save whether it can be made, and compare after it what went wrong on each of them. An error
that only one rank meets, at a point where the others wait for it, is raised: the recovery frees the others,
and the save is given up when the step's end is gone through again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo.lightning.io.pl import ckpt_to_weights_subdir
from nemo.lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import CheckpointException

from checkpointless.inprocess import UnrecoverableError, active_call_wrapper
from checkpointless.strategies.checkpoints.bookkeeping import BookkeepingOfSave, undo
from checkpointless.strategies.checkpoints.save_failed import SaveFailed
from checkpointless.strategies.checkpoints.space import Outlook, bytes_to_write, free_bytes, objections
from checkpointless.strategies.checkpoints.tolerance import SaveErrors, folder_of, tolerant_writes
from checkpointless.strategies.checkpoints.unfinished import remove
from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import event_log
from checkpointless.transfer.exchange import all_gather_json

if TYPE_CHECKING:
    from nemo.lightning import MegatronStrategy

logger = logging.getLogger(__name__)

_UNKNOWN = "a part of it could not be written"


class FailedSaves:
    """What a rank does about saves that fail; it outlives restarts.

    Attributes:
        errors: what went wrong on this rank and the others do not know of yet.
        end_job: whether a save that failed ends the job.
        raised: what this rank raised in saves that the others waited for, by folder.
    """

    def __init__(self) -> None:
        self.errors = SaveErrors()
        self.end_job = False
        self.raised: dict[str, str] = {}
        self._given_up: dict[str, dict[int, str]] = {}  # reasons by rank, by folder; all ranks have agreed on them
        self._under_way = ""  # the path that is being saved to
        self._catchers = 0
        self._replaced: dict[str, BookkeepingOfSave] = {}
        self._strategy: Callable[[], Any] = lambda: None

    # --- while a save is made -------------------------------------------------------------------------------------

    def watch(self, strategy: MegatronStrategy) -> None:
        """Watch what ``strategy`` writes and finishes. Idempotent."""
        self._strategy = weakref.ref(strategy)
        for each in strategy.trainer.callbacks:
            if isinstance(each, ModelCheckpoint) and each.dirpath and "://" not in str(each.dirpath):
                self.errors.mounts.see(Path(each.dirpath))
        writer, queue = strategy.unwrapped_checkpoint_io, strategy.checkpoint_io
        if "save_checkpoint" not in vars(writer):
            vars(writer)["save_checkpoint"] = self._looking_first(writer.save_checkpoint)
        name = "maybe_finalize_save_checkpoint"
        if hasattr(queue, name) and name not in vars(queue):
            vars(queue)[name] = self._outliving(queue, getattr(queue, name))

    def make(self, path: str, make: Callable[[], None]) -> None:
        """Make a save. Collective.

        Args:
            path: the path to save to.
            make: makes the save.

        Raises:
            SaveFailed: it failed, and every rank raises this.
            UnrecoverableError: the same, if that ends the job.
            OSError: it failed on this rank alone.
        """
        given_up = self._given_up.pop(folder_of(path), None)
        if given_up is not None:
            self._fail(path, given_up)
        self._under_way = path
        try:
            with tolerant_writes(self.errors):
                make()
        except OSError as error:
            self.raised[folder_of(path)] = str(error)
            raise
        finally:
            self._under_way = ""

    def agree(self, path: str, error: CheckpointException | None = None) -> None:
        """Learn whether the save to ``path`` has failed on any rank. Collective.

        Args:
            path: the path.
            error: what all ranks have raised in it; only one of them knows what the others have met.

        Raises:
            SaveFailed: it has.
            UnrecoverableError: the same, if that ends the job.
        """
        told = {} if error is None else {str(rank): _reason(each) for rank, (each, _) in error.failures.items()}
        everyone = all_gather_json([self.errors.take(path), told])
        reasons = {int(rank): reason for _, told in everyone for rank, reason in told.items()}
        reasons |= {rank: mine for rank, (mine, _) in enumerate(everyone) if mine}
        if not reasons and error is not None:
            reasons = {0: _UNKNOWN}
        if reasons:
            self._fail(path, reasons)

    def end(self, path: str, finish: Callable[[], None]) -> None:
        """End the save to ``path``, which is whole on this rank, with ``finish``. Collective.

        Raises:
            SaveFailed: it is not whole on all ranks.
            UnrecoverableError: the same, if that ends the job.
        """
        self.agree(path)
        self._replaced.pop(folder_of(path), None)
        finish()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While the context lasts, a save that fails raises; its caller goes on otherwise."""
        self._catchers += 1
        try:
            yield
        finally:
            self._catchers -= 1

    @property
    def is_caught(self) -> bool:
        """Whether the caller of a save makes up for its failure."""
        return self._catchers > 0

    def keep(self, path: str, of_save: BookkeepingOfSave) -> None:
        """Keep what a background save has changed in a callback's bookkeeping, in case that it fails."""
        self._replaced[folder_of(path)] = of_save

    # --- after a fault --------------------------------------------------------------------------------------------

    def give_up(self, raised: Iterable[dict[str, str]]) -> None:
        """Give up the saves in which a rank raised before the fault, if the ranks come to them again.

        Args:
            raised: by rank, what it raised, by folder.
        """
        self._given_up = {}
        for rank, each in enumerate(raised):
            for folder, reason in each.items():
                self._given_up.setdefault(folder, {})[rank] = reason
        self.raised = {}

    def replaced_by(self, paths: Iterable[str]) -> list[tuple[str, BookkeepingOfSave]]:
        """Return, for each save that was lost, its folder and what it has changed in books. Collective.

        Args:
            paths: the paths that were saved to in the background, the same on every rank.
        """
        return [(folder, self._changed_by(folder)) for folder in map(folder_of, paths)]

    # --- parts ----------------------------------------------------------------------------------------------------

    def _looking_first(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``save`` of a checkpoint IO, in which the ranks agree before it and after it."""

        def save_checkpoint(checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> Any:
            if not self._under_way:
                return save(checkpoint, path, storage_options)
            self._look(checkpoint, str(path))
            request, raised = None, None
            try:
                request = save(checkpoint, path, storage_options)
            except CheckpointException as error:  # all ranks raise it
                raised = error
            self.agree(str(path), raised)
            return request

        return save_checkpoint

    def _look(self, checkpoint: dict[str, Any], path: str) -> None:
        """Look whether a save can be made. Collective.

        Raises:
            SaveFailed: it cannot.
        """
        outlook = Outlook(self.errors.take(path))
        if "://" not in path and not outlook.problem:
            try:
                problem = self.errors.mounts.problem(Path(path).parent)
                folder = ckpt_to_weights_subdir(path, is_saving=True)
                if not problem:
                    folder.mkdir(parents=True, exist_ok=True)
                    shares = ModelCheckpoint.is_checkpoint_unfinished(path)
                    outlook = Outlook("", bytes_to_write(checkpoint), free_bytes(folder), shares)
                else:
                    outlook = Outlook(problem)
            except OSError as error:
                outlook = Outlook(str(error))
        everyone = [Outlook(**each) for each in all_gather_json(outlook.to_plain())]
        reasons = objections(everyone)
        if reasons:
            self._fail(path, dict(reasons))

    def _outliving(self, queue: Any, finalize: Callable[..., bool]) -> Callable[..., bool]:
        """Return ``finalize`` of a checkpoint IO that saves in the background, which outlives saves that fail."""

        def maybe_finalize_save_checkpoint(blocking: bool = False) -> bool:
            while True:
                before = list(queue.async_calls_queue.async_calls)
                if not before:
                    return finalize(blocking)
                try:
                    with tolerant_writes(self.errors):
                        return finalize(blocking)
                except CheckpointException as error:
                    failed = before[len(before) - len(queue.async_calls_queue.async_calls) - 1]
                    self._failed_in_background(failed.idx, error)
                except SaveFailed as failure:
                    self._undo(failure.path)

        return maybe_finalize_save_checkpoint

    def _failed_in_background(self, number: int, error: CheckpointException) -> None:
        known = all_gather_json(self._strategy().checkpoint_manager.saves.path_of(number))
        path = next((each for each in known if each is not None), None)
        if path is None:
            raise error
        try:
            self.agree(path, error)
        except SaveFailed:
            self._undo(path)

    def _fail(self, path: str, reasons: dict[int, str]) -> None:
        """End a save that has failed, as all ranks know.

        Raises:
            SaveFailed: always, unless it ends the job.
            UnrecoverableError: it ends the job.
        """
        self.errors.take(path)
        strategy, call = self._strategy(), active_call_wrapper()
        failure = SaveFailed(path, reasons)
        trainer = strategy.trainer
        if trainer.is_global_zero:
            remove([path])
        strategy.checkpoint_manager.saves.forget(path)
        if trainer.global_rank == min(reasons):
            logger.warning("%s: training goes on, and the next one that is due is made", failure)
            event_log().emit(
                EventName.SAVE_FAILED,
                "point",
                generation=call.generation if call is not None else 0,
                path=folder_of(path),
                reason=reasons[min(reasons)],
                ranks=sorted(reasons),
            )
        if self.end_job:
            raise UnrecoverableError(f"{failure}, and failed_saves_end_job is set")
        raise failure

    def _undo(self, path: str) -> None:
        """Undo what a background save that failed has changed in the bookkeeping of callbacks. Collective."""
        before = self._changed_by(folder_of(path))
        for each in self._strategy().trainer.callbacks:
            undo(each, folder_of(path), before)

    def _changed_by(self, folder: str) -> BookkeepingOfSave:
        """Return what the background save to ``folder`` has changed in books, and forget it. Collective."""
        kept = self._replaced.get(folder)
        if kept is not None:
            kept.drop_removals()
        said = all_gather_json(kept.to_plain() if kept is not None else None)
        self._replaced.pop(folder, None)  # not earlier: a fault may come while the ranks agree
        known = next((each for each in said if each is not None), None)
        return kept or BookkeepingOfSave.from_plain(known or {})


def _reason(error: BaseException) -> str:
    """Return in one line what went wrong with a rank's writers."""
    if str(error) == "results_queue should not be empty":
        return "the process that wrote it in the background was lost"
    return " ".join(str(error).removeprefix("Worker failure: ").split()) or type(error).__name__
