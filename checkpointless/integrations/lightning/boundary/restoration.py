"""Puts back what a recovery from memory gave a trainer besides its tensors, part by part, until the loops go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl

from checkpointless.integrations.lightning.boundary.epoch_metrics import put_accumulated, warn_if_lost, with_own
from checkpointless.integrations.lightning.boundary.kinds import (
    ACCUMULATED,
    OF_LOADERS,
    SETTINGS,
    load_again,
    put_kinds,
    put_of_epoch,
    put_settings,
    when_made,
)
from checkpointless.integrations.lightning.boundary.loops import Resumption
from checkpointless.integrations.lightning.boundary.outcome import StepOutcome, with_own_loss
from checkpointless.integrations.lightning.boundary.step_keeper import StepKeeper
from checkpointless.integrations.lightning.data.position import DataPosition, put_sampler
from checkpointless.integrations.lightning.data.training import TrainingData
from checkpointless.recovery import CheckpointManager
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local.declared import put_declared, take_declared
from checkpointless.state.rng import RngStates

logger = logging.getLogger(__name__)


class Restoration:
    """What memory gave one trainer besides its tensors, which are in place.

    Args:
        trainer: the trainer, in which Lightning loads its own part of ``objects``.
    """

    def __init__(
        self,
        objects: dict[str, Any],
        trainer: pl.Trainer,
        manager: CheckpointManager,
        keeper: StepKeeper,
        data: TrainingData,
    ) -> None:
        self._waiting: dict[str, Any] | None = objects  # until the loops resume
        self._trainer = trainer
        self._manager = manager
        self._keeper = keeper
        self._data = data
        #: The streams and attributes that making a loader has left, in an epoch that begins.
        self._made_loader: tuple[RngStates, dict[str, bytes]] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether something is still to be put back."""
        return self._waiting is not None

    # --- before the loops begin ---------------------------------------------------------------------------------

    def put_sampler(self) -> None:
        """Put NeMo's sampler back, so that a loader is made as it was at the start."""
        if self._waiting is not None:
            put_sampler(self._trainer, self._waiting["sampler"])

    def position(self) -> DataPosition | None:
        """Return where the next training loader begins; None: at the beginning."""
        objects, resumed_at = self._waiting, self._manager.resumed_at
        if objects is None or resumed_at is None:
            return None
        position = DataPosition(*objects["data"])
        if not _begins_epoch(resumed_at[1], objects):
            return position
        trainer: Any = self._trainer
        length = position.length_at_start if not trainer.reload_dataloaders_every_n_epochs else None
        return position._replace(within=False, length_at_start=length)

    def resume(self) -> None:
        """Put back the part of the state that Lightning does not load, and set where the loops resume."""
        manager, objects = self._manager, self._waiting
        assert manager.resumed_at is not None
        assert objects is not None
        step, stage = manager.resumed_at
        replays = stage is SnapshotPoint.COMMITTED
        kept = objects["kinds"][ACCUMULATED]
        if manager.was_filled:
            warn_if_lost(objects["outcome"]["accumulated"] if replays else kept, manager.own.kept_at(step, stage))
        kept = self._own_of(kept, *((step - 1, SnapshotPoint(objects["base"])) if replays else (step, stage)))
        objects = {**objects, "kinds": {**objects["kinds"], ACCUMULATED: kept}}
        put_kinds(self._trainer, objects["kinds"])
        put_sampler(self._trainer, objects["sampler"])
        if _is_in_training(stage, objects):
            put_settings(self._trainer, objects["kinds"][SETTINGS], OF_LOADERS)
        if stage is SnapshotPoint.LOADED:
            self._waiting = None
            manager.restore_streams()
            return
        base = (step - 1, SnapshotPoint(objects["base"])) if replays else (step, stage)
        # The beginning of the loops draws what it drew then, and makes loaders by the attributes that there were.
        manager.own.streams.restore(*base)
        self._trainer.fit_loop.resumption = Resumption(  # type: ignore[attr-defined]
            stage,
            partial(self._go_on, objects),
            partial(self._do_again, objects),
            _begins_epoch(stage, objects),
            partial(when_made, self._trainer, objects["kinds"][SETTINGS], _begins_epoch(stage, objects)),
            partial(self._make_loader, *base),
        )

    def _own_of(self, kept: dict[str, Any], step: int, stage: SnapshotPoint) -> dict[str, Any]:
        """Return what this rank itself accumulated over the epoch, although ``kept`` may come from a peer."""
        own = self._manager.own.kept_at(step, stage)
        return with_own(kept, own) if own is not None or self._manager.was_filled else kept

    def _make_loader(self, step: int, stage: SnapshotPoint, make: Callable[[], None]) -> None:
        """Make the loader of the epoch that begins with ``make``, from the streams and attributes of a point."""
        self._manager.own.streams.restore(step, stage)
        make()
        self._made_loader = RngStates.capture(), take_declared()

    # --- when the loops have begun ------------------------------------------------------------------------------

    def _go_on(self, objects: dict[str, Any]) -> None:
        """Put the state back again, after the loops have begun with hooks and iterators that changed it."""
        trainer, manager = self._trainer, self._manager
        fit_loop: Any = trainer.fit_loop
        step, stage = manager.resumed_at or (0, SnapshotPoint.LOADED)
        position = DataPosition(*objects["data"])
        if _begins_epoch(stage, objects):
            self._data.begin_epoch_at(position)
        elif objects["base"] != SnapshotPoint.LOADED:  # after LOADED, Lightning knows where the data stood
            self._data.resume_at(position, fit_loop)
        load_again(trainer, objects["checkpoint"])
        put_kinds(trainer, objects["kinds"])
        if _is_in_training(stage, objects):
            put_of_epoch(trainer, objects["kinds"][SETTINGS], _begins_epoch(stage, objects))
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        manager.saves.forget_lost(callbacks)
        put_sampler(trainer, objects["sampler"])
        self._waiting = None
        self._keeper.journal.put_back()
        if stage is SnapshotPoint.COMMITTED:  # what led to the step is replayed, with the streams from before it
            base = SnapshotPoint(objects["base"])
            if base is not SnapshotPoint.LOADED and not manager.own.streams.restore(step - 1, base):
                logger.warning("random numbers drawn between steps %d and %d are drawn again", step - 1, step)
        else:
            manager.restore_streams()
        if self._made_loader is not None:
            streams, attributes = self._made_loader
            streams.restore()
            put_declared(attributes)

    def _do_again(self, objects: dict[str, Any], run: Callable[[], None]) -> None:
        """Let Lightning replay the last committed step without computing it."""
        outcome = StepOutcome(**objects["outcome"])
        step, _ = self._manager.resumed_at or (-1, SnapshotPoint.COMMITTED)
        states = self._manager.own.streams.newest(step)
        output = (outcome.state or {}).get("output", {})
        if self._manager.was_filled and set(output) - {"loss"}:
            logger.warning(
                "on_train_batch_end gets what a peer's training_step returned for step %d beside the loss: this "
                "rank's own is lost with its process",
                step,
            )
        replayed = with_own_loss(outcome, states.loss if states is not None else None)
        with self._keeper.steps.replay(replayed, self._put_back_what_was_before, self._manager.restore_streams):
            run()

    def _put_back_what_was_before(self) -> None:
        """Put back what the replayed step had left when its gradients were final."""
        outcome = self._keeper.steps.replayed
        assert outcome is not None
        assert self._manager.resumed_at is not None
        accumulated = cast(dict[str, Any], outcome.accumulated)  # known of every step that was computed
        if outcome.state is not None:
            load_again(self._trainer, outcome.state["checkpoint"])
            put_kinds(self._trainer, {**outcome.state["kinds"], ACCUMULATED: accumulated})
            put_of_epoch(self._trainer, outcome.state["kinds"][SETTINGS])
        put_accumulated(self._trainer, self._own_of(accumulated, *self._manager.resumed_at))


def skip_fit(trainer: pl.Trainer, objects: dict[str, Any] | None) -> dict[str, Any]:
    """Skip a fit that was over before the fault, which came in a later fit of the same block.

    Args:
        objects: the non-tensor state that the fit ended in; None if no rank knows it.

    Returns:
        The part of that state that Lightning loads.
    """
    logger.warning(
        "this fit had ended before the fault and is not repeated; until the next fit of the block begins, the "
        "model's weights are not those that it ended with"
    )
    trainer.fit_loop.was_finished = True  # type: ignore[attr-defined]
    if objects is None:
        return {}
    put_kinds(trainer, objects["kinds"])
    put_of_epoch(trainer, objects["kinds"][SETTINGS])
    checkpoint: dict[str, Any] = objects["checkpoint"]
    return checkpoint


def _begins_epoch(stage: SnapshotPoint, objects: Mapping[str, Any]) -> bool:
    """Return whether an epoch begins where the loops resume."""
    return stage is SnapshotPoint.TURNED or (
        stage is SnapshotPoint.COMMITTED and objects["base"] == SnapshotPoint.TURNED
    )


def _is_in_training(stage: SnapshotPoint, objects: Mapping[str, Any]) -> bool:
    """Return whether the hooks at the start of training had run; what they set, they have set again."""
    return (
        SnapshotPoint(objects["base"]) if stage is SnapshotPoint.COMMITTED else stage
    ) is not SnapshotPoint.LOADED
