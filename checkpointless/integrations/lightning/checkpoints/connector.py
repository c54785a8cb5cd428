"""Lightning's checkpoint connector, which asks memory before storage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from checkpointless.inprocess import StateLostError, UnrecoverableError, active_call_wrapper
from checkpointless.inprocess.exceptions import is_victim, line_of
from checkpointless.inprocess.wrap import emit_event
from checkpointless.integrations.compat.lightning import CheckpointConnector
from checkpointless.integrations.lightning.boundary.step_keeper import InMemoryCheckpoint
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.wording import printable
from checkpointless.recovery.decide import Verdict

_WEIGHTS = "weights"  # the folder in a checkpoint of NeMo's that it resumes from
_LONGEST = 200  # characters of an error
logger = logging.getLogger(__name__)


class CheckpointlessCompatibleConnector(CheckpointConnector):
    """Restores a trainer from living replicas or, failing that, from the checkpoint that Lightning would load.

    If neither is possible although steps were committed, the job ends with the reason, unless the manager allows a
    restart from scratch.
    """

    @classmethod
    def adopt(cls, connector: CheckpointConnector) -> CheckpointlessCompatibleConnector:
        """Return a connector that takes the place of ``connector``, with all its attributes."""
        if isinstance(connector, cls):
            return connector
        adopted = cls(connector.trainer)
        vars(adopted).update(vars(connector))
        return adopted

    @override
    def resume_start(self, checkpoint_path: str | Path | None = None, **options: Any) -> None:
        """Load from memory if this is a restart and memory suffices, else from storage.

        ``checkpoint_path`` None is the one that the delayed auto-resume finds. ``options`` are Lightning's (2.6).
        """
        strategy: Any = self.trainer.strategy
        call = active_call_wrapper()
        manager = getattr(strategy, "checkpoint_manager", None)  # a strategy of another kind has none
        if call is None or manager is None or call.generation == 0 or not self._fits:
            self._load(self._storage_path(checkpoint_path), options)
            return
        if strategy.awaits_adapters and manager.checkpointless_recovery_feasible(self.trainer):
            strategy.add_adapters()
        strategy.rebuilt()
        call.enter_phase("recovery", call.high_water)
        checkpoint = manager.try_checkpointless_load(self.trainer)
        if manager.verdict is Verdict.SKIP:
            finished = manager.fits.share_finished()
            self._loaded_checkpoint = InMemoryCheckpoint.of_finished_fit(self.trainer, finished)
            return
        if checkpoint is not None:
            self._loaded_checkpoint = InMemoryCheckpoint(checkpoint)
            return
        self._from_storage(checkpoint_path, options, manager, call)

    @override
    def resume_end(self) -> None:
        """End the restore, and notify the strategy that the state is whole from now on."""
        super().resume_end()
        restored = getattr(self.trainer.strategy, "restored", None)
        if restored is not None and self._fits:
            restored()

    @property
    def _fits(self) -> bool:
        """Whether the trainer was asked for a fit; a validation that follows a fit has no separate state."""
        return bool(self.trainer.state.fn == TrainerFn.FITTING)

    def _from_storage(
        self, checkpoint_path: str | Path | None, options: dict[str, Any], manager: Any, call: Any
    ) -> None:
        path = self._storage_path(checkpoint_path)
        if not path and call.high_water > 0 and manager.verdict is not Verdict.START:
            looked = getattr(getattr(self.trainer, "fresume", None), "looks_in", None)
            where = "fit() was given no ckpt_path" if looked is None else f"looked for in {looked}"
            reason = (
                f"{manager.refusal or 'no rank holds the state in memory'}; "
                f"there is no checkpoint on storage to fall back to ({where})"
            )
            if not manager.allow_restart_from_scratch:
                raise StateLostError(reason)
            logger.error("%s: starting over at step 0, as allow_restart_from_scratch allows", reason)
        require_anew = getattr(self.trainer.strategy, "require_anew", None)
        if require_anew is not None:
            require_anew(whole=bool(path))
        emit_event(EventName.FALLBACK, reason=manager.refusal, storage=str(path) if path else None)
        try:
            self._load(path, options)
        except Exception as error:
            if not path or isinstance(error, UnrecoverableError) or is_victim(error):
                raise
            raise UnrecoverableError(_cannot_be_loaded(Path(path), error)) from error
        manager.delete_checkpoint()

    def _load(self, path: Any, options: dict[str, Any]) -> None:
        """Load the checkpoint at ``path`` or, without one, what NeMo's ``restore_config`` names."""
        restore_from_storage = getattr(self.trainer.strategy, "restore_from_storage", None)
        if not path and restore_from_storage is not None:
            restore_from_storage()
        super().resume_start(path, **options)

    def _storage_path(self, checkpoint_path: str | Path | None) -> Any:
        delayed = getattr(self.trainer, "fresume", None)
        if checkpoint_path is None and delayed is not None:
            delayed.setup(self.trainer, self.trainer.lightning_module, force_setup=True)
            return self.trainer.ckpt_path
        return checkpoint_path


def keep_names(callbacks: Iterable[Any], again: Collection[str]) -> None:
    """Keep callbacks from choosing another name for an existing path that is to be saved to ``again``."""
    for each in callbacks:
        if isinstance(each, Checkpoint) and hasattr(each, "file_exists"):
            vars(each).pop("file_exists", None)  # a callback from outside of the block has ours already
            if again:
                each.file_exists = partial(_exists, each.file_exists, again)


def _exists(exists: Callable[..., bool], again: Collection[str], path: Any, trainer: Any, *args: Any) -> bool:
    # Ranks may name a file differently: the first of them decides, and every rank asks it.
    is_again = trainer.strategy.broadcast(str(path) in again)
    return exists(path, trainer, *args) and not is_again


def _cannot_be_loaded(path: Path, error: Exception) -> str:
    path = path.parent if path.name == _WEIGHTS else path
    others = [each for each in path.parent.glob("*") if each != path and (each.is_dir() or each.suffix == ".ckpt")]
    newest = max(others, key=lambda each: each.stat().st_mtime, default=None)
    last = (
        f"no other is in {path.parent}"
        if newest is None
        else f"remove it, and start the job again from the one before it, {newest.name}"
    )
    return (
        f"no rank holds the state in memory, and the checkpoint {path} cannot be loaded "
        f"({printable(line_of(error), _LONGEST)}): {last}"
    )
