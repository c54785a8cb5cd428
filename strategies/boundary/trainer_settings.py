"""What of a trainer hooks may change in the middle, and its loops read while they run.

A script that is entered again makes the trainer that it had made at first. Plain settings are therefore taken at
every moment, and put back. Which callbacks and schedulers there are cannot be put back: a change of them is refused
in the step in which it happens, unless it happens again whenever the script is entered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities import GradClipAlgorithmType

from checkpointless.inprocess import UnrecoverableError

_LIMITS = ("limit_train_batches", "limit_val_batches")
_CLIPPING = "gradient_clip_algorithm"
#: What makes the training loader from then on; the rest is read in every step, or at the end of an epoch.
_OF_LOADERS = (
    "val_check_interval",
    "check_val_every_n_epoch",
    "reload_dataloaders_every_n_epochs",
    "fit_loop.val_made",
)
#: What is set when the training loader is made.
_MADE = ("fit_loop.max_batches", "fit_loop._last_train_dl_reload_epoch", "fit_loop.made_at_step")
_VALIDATES = "val_check_batch"  # set with the training loader, too, and missing before
_READ = (
    *_LIMITS,
    *_OF_LOADERS,
    *_MADE,
    _CLIPPING,
    "accumulate_grad_batches",
    "gradient_clip_val",
    "log_every_n_steps",
    "fit_loop.max_epochs",
    "fit_loop.min_epochs",
    "fit_loop.epoch_loop.max_steps",
    "fit_loop.epoch_loop.min_steps",
)
_read: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*_READ)
_OF_LOOP = "_checkpointless_settings"


class TrainerSettings:
    """What hooks may change of one trainer, as it was when its loaders were made and its steps began.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer: Any = trainer
        vars(trainer.fit_loop).setdefault("made_at_step", 0)
        self.begin_fit()

    def begin_fit(self) -> None:
        """Forget what an earlier fit of the trainer was; between fits its script may change it as it likes."""
        self._trainer.fit_loop.val_made = None  # the epoch and step in which the validation loaders were made
        self._limits: dict[str, Any] = {}  # with which the newest loaders were made
        self._seen: tuple[Any, ...] = ()
        self._callbacks: list[Any] | None = None
        self._schedulers: list[Any] | None = None

    @classmethod
    def of(cls, trainer: pl.Trainer) -> TrainerSettings:
        """Return those of ``trainer``, always the same object."""
        known: TrainerSettings | None = vars(trainer.fit_loop).get(_OF_LOOP)
        if known is None:
            known = cls(trainer)
            setattr(trainer.fit_loop, _OF_LOOP, known)
        return known

    # --- plain settings -------------------------------------------------------------------------------------------

    def take(self) -> Callable[[], dict[str, Any]]:
        """Take the settings as they are now; return what makes plain data of them.

        Raises:
            UnrecoverableError: one was changed that loaders were made with.
        """
        trainer = self._trainer
        values, validates = _read(trainer), vars(trainer).get(_VALIDATES)
        if values != self._seen:
            self._refuse_other_limits(values)
            self._seen = values

        def make() -> dict[str, Any]:
            made = dict(zip(_READ, values))
            algorithm = made[_CLIPPING]
            made[_CLIPPING] = str(getattr(algorithm, "value", algorithm)) if algorithm is not None else None
            return {**made, _VALIDATES: validates}

        return make

    def loader_is_made(self, limit: str) -> None:
        """Note that a loader is made with ``limit``, the name of a setting."""
        self._limits[limit] = getattr(self._trainer, limit)

    def _refuse_other_limits(self, values: tuple[Any, ...]) -> None:
        for name, value in zip(_LIMITS, values):
            made = self._limits.get(name, value)
            if value == made or (name == _LIMITS[1] and not value):  # validations may be switched off
                continue
            raise UnrecoverableError(
                f"trainer.{name} was changed from {made} to {value} behind the loader that was made with {made}, "
                f"and a rank that is made anew would use {value} at once: leave it as the Trainer was given it"
            )

    def put_for_loaders(self, state: Mapping[str, Any]) -> None:
        """Put back what the training loader is made with, before it is made."""
        self._put(state, _OF_LOADERS)

    def put(self, state: Mapping[str, Any], begins_epoch: bool = False) -> None:
        """Put the settings back.

        Args:
            state: what :meth:`take` made.
            begins_epoch: whether an epoch begins, of which the training loader may be another one.
        """
        made: tuple[str, ...] = (*_MADE, _VALIDATES)
        if self.when_made(state, begins_epoch) is None:
            made = ()
        self._put(state, (*(name for name in _READ if name not in _MADE), *made))

    def when_made(self, state: Mapping[str, Any], begins_epoch: bool = False) -> tuple[int, int] | None:
        """Return the epoch and the step in which the training loader was made; None: it is still to be made.

        Args:
            state: what :meth:`take` made.
            begins_epoch: whether an epoch begins, of which the training loader may be another one.
        """
        every, last = state["reload_dataloaders_every_n_epochs"], state[_MADE[1]]
        is_of_epoch = begins_epoch and every and self._trainer.current_epoch - last >= every
        if is_of_epoch or state[_VALIDATES] is None:  # before the loader was made
            return None
        return last, state[_MADE[2]]

    def _put(self, state: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            path, _, last = name.rpartition(".")
            owner = operator.attrgetter(path)(self._trainer) if path else self._trainer
            value = state[name]
            if name == _CLIPPING and value is not None:
                value = GradClipAlgorithmType(value)
            if getattr(owner, last, None) != value:
                setattr(owner, last, value)

    # --- callbacks and schedulers ---------------------------------------------------------------------------------

    def steps_begin(self) -> None:
        """Note that the first batch is about to be computed: what hooks have added before, every process adds.

        NeMo's PEFT adds callbacks and makes optimizers in ``on_train_epoch_start``.
        """
        if self._schedulers is None:
            self._callbacks = list(self._trainer.callbacks)
            self._schedulers = schedulers_of(self._trainer)

    def check_parts(self) -> None:
        """Look whether the trainer has the callbacks and schedulers that it will have when it is made anew.

        Raises:
            UnrecoverableError: it has others.
        """
        now: list[Any] = self._trainer.callbacks
        if self._callbacks is not None and not _are_same(now, self._callbacks):
            added, removed = _other_than(now, self._callbacks), _other_than(self._callbacks, now)
            names = ", ".join(type(each).__name__ for each in added or removed)
            what = f"{names} was {'added' if added else 'removed'}" if names else "their order was changed"
            raise UnrecoverableError(
                f"trainer.callbacks was changed while training ({what}), which no rank that is made anew does: "
                "give all callbacks to the Trainer, and let those that wait do nothing"
            )
        if self._schedulers is not None and not _are_same(schedulers_of(self._trainer), self._schedulers):
            raise UnrecoverableError(
                "the trainer has another learning-rate scheduler than when training began, which no rank that is "
                "made anew has: let configure_optimizers return the one that is used to the end (SequentialLR)"
            )


def schedulers_of(trainer: pl.Trainer) -> list[_Stateful]:
    """Return the learning-rate schedulers of ``trainer``."""
    return [config.scheduler for config in trainer.strategy.lr_scheduler_configs]


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _other_than(some: list[Any], others: list[Any]) -> list[Any]:
    known = set(map(id, others))
    return [each for each in some if id(each) not in known]
