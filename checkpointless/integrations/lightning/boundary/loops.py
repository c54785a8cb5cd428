"""Lightning's training loops, which resume at the exact point after a step at which they were left.

Lightning guesses what had happened before a checkpoint was written. Here it is known: the loops do what still
follows the last committed step, once, before they ask for the next batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from checkpointless.integrations.compat.lightning import FitLoop, TrainingEpochLoop
from checkpointless.integrations.lightning.boundary.epoch_metrics import make_results_resumable
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local.declared import declared_state

_FOLLOWED = (SnapshotPoint.COMMITTED, SnapshotPoint.ENDED)  # a part of the step is still to come


class _ResumableEpochLoop(TrainingEpochLoop):
    """Lightning's loop over the batches of an epoch, which reports its points and can resume at each of them."""

    observer: Any  # Any: a recoverable fit, to which the points are reported
    resumption: Any  # Any: a Restoration, by which the loop resumes when it is run next; None: as Lightning would
    not_delivered: int  # how many batches the fetcher counts that no iterator of this process delivered
    has_asked: bool  # whether a batch was asked for since the epoch was resumed

    @property
    @override
    def done(self) -> bool:
        pending = self.resumption is not None and self.resumption.stage in _FOLLOWED
        return False if pending else bool(super().done)

    def update_restart_stage(self) -> None:
        """Leave Lightning, which guesses since 2.6, nothing to guess if it is known where the loop resumes."""
        if self.resumption is None:
            super().update_restart_stage()  # type: ignore[misc]
        else:  # the stage in which nothing is made up for
            self._restart_stage = "restarted_on_last"

    @override
    def on_run_start(self, data_fetcher: Any) -> None:
        resumption = self.resumption
        within = resumption is not None and not resumption.begins_epoch
        if not within and not self.has_asked:
            self.observer.epoch_begins()
        self.has_asked = not within
        if within and self.trainer.current_epoch > 0:
            self._restarting = True  # otherwise Lightning makes a second iterator
        super().on_run_start(data_fetcher)
        self.not_delivered = self.batch_progress.current.ready
        if resumption is not None and within:
            self.restarting = False  # what is due is known, and need not be guessed
            resumption.go_on()
            if resumption.stage not in _FOLLOWED:
                self.resumption = None

    @override
    def advance(self, data_fetcher: Any) -> None:
        resumption, self.resumption = self.resumption, None
        if resumption is not None and resumption.stage is SnapshotPoint.ENDED:
            return
        self.has_asked = True
        if resumption is not None:
            try:
                resumption.do_again(functools.partial(super().advance, data_fetcher))
            except StopIteration as error:  # which would end the epoch
                raise RuntimeError("the data of a step that is made again is missing") from error
        else:
            may_only_validate = self.restarting and self._should_check_val_fx(data_fetcher)
            begun = self.batch_progress.total.ready
            super().advance(data_fetcher)
            # From a checkpoint that was written before its validation; since 2.6 Lightning may make a step instead.
            if may_only_validate and self.batch_progress.total.ready == begun:
                # Lightning would begin it behind the batches of the validation before, which the checkpoint counts.
                # With NeMo the data may then end within a step, and the stages of a pipeline wait for each other.
                self.val_loop.restarting = False
                return
        if not self._should_accumulate() and self._should_check_val_fx(data_fetcher):
            self.observer.reached(SnapshotPoint.ENDED)

    @override
    def on_advance_end(self, data_fetcher: Any) -> None:
        super().on_advance_end(data_fetcher)
        self.observer.reached(SnapshotPoint.ACCUMULATED if self._should_accumulate() else SnapshotPoint.CHECKED)

    @override
    def _on_before_fetch(self) -> None:
        self.observer.before_fetch()
        super()._on_before_fetch()


class _ResumableFitLoop(FitLoop):
    """Lightning's loop over epochs, which can resume at each point after a step."""

    epoch_loop: _ResumableEpochLoop
    resumption: Any  # Any: as that of the epoch loop
    was_finished: bool  # whether the whole fit was over before the fault
    made_at_step: int
    is_beginning: bool  # whether the loop does what precedes the first epoch

    @override
    def setup_data(self) -> None:
        if not self.was_finished:
            loader, step = self._combined_loader, self.epoch_loop.global_step
            when = self.resumption.when_made() if self.resumption is not None else None
            if when is None and self.resumption is not None and self.resumption.begins_epoch and loader is None:
                self.resumption.make_loader(super().setup_data)
            elif when is None:
                super().setup_data()
            else:
                _, step = when
                with self._as_in(*when):
                    super().setup_data()
            if self._combined_loader is not loader:
                self.made_at_step = step
            if self._combined_loader is not None:
                self.epoch_loop.observer.data_is_set_up(self._combined_loader.flattened)

    @property
    def has_spare_iterator(self) -> bool:
        """Whether the epoch loop makes an iterator when it is run next, after the one of :meth:`setup_data`."""
        begins = self.resumption.begins_epoch if self.resumption is not None else not self.epoch_loop.restarting
        return begins and self.trainer.current_epoch > 0

    @contextmanager
    def _as_in(self, epoch: int, step: int) -> Iterator[None]:
        """Let ``train_dataloader()`` see the epoch and the step in which the loader was made at first."""
        source: Any = self._data_source

        def make() -> Any:
            with _seen_as(self, epoch, step):
                return type(source).dataloader(source)

        source.dataloader = make
        try:
            yield
        finally:
            del source.dataloader

    def update_restart_stage(self) -> None:
        """Count as Lightning 2.4 does, and leave it nothing to guess, if it is known where the loop resumes."""
        if self.resumption is None:
            super().update_restart_stage()  # type: ignore[misc]
            return
        if self.restarting:
            self.epoch_progress.reset_on_restart()
        self.epoch_loop.resumption = self.resumption
        self.epoch_loop.update_restart_stage()
        self._resuming_from_checkpoint = not self.resumption.begins_epoch

    @property
    @override
    def skip(self) -> bool:
        if self.was_finished:
            return True
        return bool(self.trainer.limit_train_batches == 0) if self.resumption is not None else bool(super().skip)

    @property
    @override
    def done(self) -> bool:
        within = self.resumption is not None and self.resumption.stage is not SnapshotPoint.TURNED
        return False if within else bool(super().done)

    @override
    def on_run_start(self) -> None:
        self.is_beginning = True
        try:
            super().on_run_start()
        finally:
            self.is_beginning = False
        if self.resumption is not None and self.resumption.begins_epoch:
            self._restarting = self.epoch_loop.restarting = False
            self.resumption.go_on()
            if self.resumption.stage is SnapshotPoint.TURNED:
                self.resumption = None

    @override
    def on_advance_start(self) -> None:
        super().on_advance_start()
        if self.resumption is not None:
            self._restarting = False  # else Lightning leaves out what a plateau's scheduler does at the epoch's end
        self.epoch_loop.resumption, self.resumption = self.resumption, None

    @override
    def on_advance_end(self) -> None:
        super().on_advance_end()
        self.epoch_loop.observer.reached(SnapshotPoint.TURNED)


@contextmanager
def _seen_as(fit_loop: Any, epoch: int, step: int) -> Iterator[None]:
    """Let the trainer say, in the context, that it is in ``epoch`` and has made ``step`` steps."""
    epochs = fit_loop.epoch_progress.current
    steps = fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    now = epochs.completed, steps.completed
    epochs.completed, steps.completed = epoch, step
    try:
        yield
    finally:
        epochs.completed, steps.completed = now


def _validation_loaders(fit_loop: Any, source: Any) -> Any:
    """Have the validation loaders of a fit made; after a fault, as in the epoch and step in which they were."""
    val_loop, trainer = fit_loop.epoch_loop.val_loop, fit_loop.trainer
    made, every = fit_loop.val_made, trainer.reload_dataloaders_every_n_epochs
    is_lost = made is not None and val_loop._combined_loader is None
    # Before the first step Lightning only asks how many batches there are, and makes what is due when it validates.
    is_due = every and trainer.current_epoch - made[0] >= every if is_lost and not fit_loop.is_beginning else False
    fit_loop.val_is_made_again = is_lost and not is_due
    if not fit_loop.val_is_made_again:
        fit_loop.val_made = trainer.current_epoch, fit_loop.epoch_loop.global_step
        return type(source).dataloader(source)
    if every:
        val_loop._last_val_dl_reload_epoch = made[0]
    attributes = declared_state.take()
    with _seen_as(fit_loop, *made):
        loaders = type(source).dataloader(source)
    declared_state.put(attributes)  # the hook has run twice, and would have run once
    return loaders


def make_resumable(trainer: pl.Trainer, observer: object) -> None:
    """Make the loops of ``trainer`` resumable and report their points to ``observer``."""
    fit_loop: Any = trainer.fit_loop
    for loop, kind in ((fit_loop, _ResumableFitLoop), (fit_loop.epoch_loop, _ResumableEpochLoop)):
        if not isinstance(loop, kind):
            base = type(loop)
            loop.__class__ = kind if base in kind.__mro__ else type(base.__name__, (kind, base), {})
        loop.resumption = None
    make_results_resumable(trainer)
    fit_loop.val_made = None  # the epoch and step in which the validation loaders were made
    fit_loop.val_is_made_again = False  # whether a fault alone has had them made
    fit_loop.made_at_step = getattr(fit_loop, "made_at_step", 0)
    source = fit_loop.epoch_loop.val_loop._data_source
    source.dataloader = functools.partial(_validation_loaders, fit_loop, source)
    fit_loop.was_finished = fit_loop.is_beginning = False
    fit_loop.epoch_loop.observer = observer
    fit_loop.epoch_loop.not_delivered = 0
    fit_loop.epoch_loop.has_asked = True
