"""The one rule for saves that fail: all ranks give the save up, nothing of it stays, and training goes on.

What one rank alone writes while the others wait for it does not raise there: the ranks gather their errors before
and after they write. If a rank raises elsewhere in a save, this is an incident, which frees the others; the saves
of that step are given up when the ranks come to them again.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron.core.dist_checkpointing.core import CheckpointingException
from nemo.lightning.ckpt_utils import WEIGHTS_PATH, ckpt_to_dir
from nemo.lightning.io.pl import ckpt_to_weights_subdir
from torch.distributed.checkpoint import CheckpointException

from checkpointless.inprocess import UnrecoverableError, active_call_wrapper
from checkpointless.inprocess.exceptions import is_victim
from checkpointless.integrations.lightning.checkpoints.unfinished import remove
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import event_log
from checkpointless.transfer.exchange import all_gather_json

if TYPE_CHECKING:
    from nemo.lightning import MegatronStrategy

logger = logging.getLogger(__name__)

OnSaveError = Literal["continue", "raise"]

_HARDLY_ANY = 64 * 1024  # bytes
_UNKNOWN = {0: "a part of it could not be written"}


class SaveFailed(Exception):
    """A checkpoint could not be saved, as all ranks know."""

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
        on_error: whether training continues after a failed save, or the job ends.
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
            SaveFailed: it has.
            UnrecoverableError: the same, if that ends the job.
        """
        everyone = all_gather_json(self.errors.pop(_folder_of(path), ""))
        reasons = {rank: reason for rank, reason in enumerate(everyone) if reason}
        if reasons:
            self.fail(path, reasons)

    def end(self, path: str, finish: Callable[[], None] | None) -> None:
        """End a background save with ``finish``, after all ranks have written what they had to. Collective.

        Raises:
            SaveFailed: not all of them have.
            UnrecoverableError: the same, if that ends the job.
        """
        self.agree(path)
        if finish is not None:
            finish()

    @contextmanager
    def attempt(self, path: str) -> Iterator[None]:
        """While the context lasts, the rank saves to ``path``. Collective.

        Raises:
            SaveFailed: the save has failed, and every rank raises this.
            UnrecoverableError: the same, if that ends the job.
        """
        step, reasons = self._given_up
        if reasons and step == self._step():  # a rank raised in a save of this step before the fault
            self.fail(path, reasons)
        try:
            with self.handling():
                yield
        except CheckpointException as error:
            self.fail(path, merged(all_gather_json(reasons_by(error))))
        except (OSError, RuntimeError, CheckpointingException) as error:
            self.note(error, path)
            raise

    def note(self, error: Exception, path: str, step: int | None = None) -> None:
        """Note that this rank raises ``error`` in a save, unless it follows from the loss of another rank.

        Args:
            step: the step after which the save was begun; None: the newest.
        """
        if not is_victim(error):
            self.raised = (self._step() if step is None else step), _reason(error, path)

    def give_up(self, raised: Sequence[tuple[int, str] | None], resumed: int) -> None:
        """Give up the saves of the step that training resumes at, if a rank raised in one of them.

        Args:
            raised: by rank, after which step it raised in a save, and why.
            resumed: the step; -1: the state is not from memory.
        """
        reasons = {rank: each[1] for rank, each in enumerate(raised) if each is not None and each[0] == resumed}
        self._given_up, self.errors = (resumed, reasons), {}
        if self.raised is not None and self.raised[0] != resumed:
            self.raised = None

    def fail(self, path: str, reasons: dict[int, str]) -> None:
        """End a save that has failed, as all ranks know.

        Raises:
            SaveFailed: always, unless it ends the job.
            UnrecoverableError: it ends the job.
        """
        strategy, call = self._strategy(), active_call_wrapper()
        failure = SaveFailed(path, reasons)
        self.errors.pop(_folder_of(path), None)
        if strategy.trainer.is_global_zero:
            remove([path])
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
        """Return the newest step of the rank."""
        return int(self._strategy().journal().newest[0])


def reasons_by(error: CheckpointException) -> dict[str, str]:
    """Return what went wrong in a save, by rank; only one rank knows it of the others."""
    return {str(rank): _reason(each) for rank, (each, _) in error.failures.items()}


def merged(reasons: Sequence[Mapping[str, str]]) -> dict[int, str]:
    """Return what all ranks know of what went wrong in a save, by rank."""
    return {int(rank): reason for each in reasons for rank, reason in each.items()} or _UNKNOWN


def noting(where: Callable[..., str | Path]) -> Callable[[Any], Any]:
    """Return what makes a function keep its error for the others, and go on, while a save is made or ended.

    Args:
        where: returns where the function writes, from its arguments.
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
    if (
        isinstance(error, RuntimeError) and path and _is_full(os.path.dirname(_folder_of(path)))
    ):  # torch.save does not say so
        return os.strerror(errno.ENOSPC)
    return " ".join(str(error).removeprefix("Worker failure: ").split()) or type(error).__name__


def _is_full(folder: str) -> bool:
    """Return whether hardly anything is free on the file system of ``folder``."""
    return os.path.isdir(folder) and shutil.disk_usage(folder).free < _HARDLY_ANY
