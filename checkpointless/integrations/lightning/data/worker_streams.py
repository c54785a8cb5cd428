"""Determines which random numbers the data-loader workers of a training draw."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import lightning.pytorch as pl
import torch
from torch.utils.data import IterableDataset

from checkpointless.inprocess.worker_streams import Place, seed_data_workers
from checkpointless.integrations.lightning.data.loaders import keeps_its_position
from checkpointless.state.rng import RngStates, register_rng_source
from checkpointless.transfer.exchange import all_gather_json

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

logger = logging.getLogger(__name__)

_SOURCE = "data_workers"
_SAME_EACH_TIME = functools.partial(Place, None)  # a validation draws the same, whichever step it comes after


class WorkerSeed:
    """The seed of all data-loader workers of a job.

    It is kept with the random streams of every rank, so that it outlives processes: a script need not use the same
    seed when it is entered again.
    """

    def __init__(self) -> None:
        self.value: int | None = None  # before agree()
        value = functools.partial(getattr, self, "value")
        register_rng_source(_SOURCE, value, lambda _: None)

    def agree(self, states: RngStates | None) -> None:
        """Agree with the other ranks on the seed that ``states`` of the point to resume at have, or else a new one.

        All ranks use the same seed, because ranks that share a model must get the same batch, whereas Megatron
        seeds pipeline stages differently. Collective.
        """
        kept = states.of_source(_SOURCE) if states is not None else None
        answers = all_gather_json({"kept": kept, "fresh": _seed_of_this_process()})
        known = [answer["kept"] for answer in answers if answer["kept"] is not None]
        self.value = known[0] if known else answers[0]["fresh"]


def _seed_of_this_process() -> int:
    """Return the seed that ``seed_everything`` was given, or else the one that torch was seeded with last."""
    given = os.environ.get("PL_GLOBAL_SEED", "")
    return int(given) if given.isdecimal() else torch.initial_seed()


def repeat_worker_draws(loader: Iterable[object], seed: int, trainer: pl.Trainer, rank: int) -> None:
    """Make the workers of ``loader``, for the trainer's stage, draw after a fault what they would have without it.

    If that is not possible, or not certain, a warning is emitted, once.
    """
    training, is_persistent = trainer.training, bool(getattr(loader, "persistent_workers", False))
    is_iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
    from_the_beginning = is_iterable and not keeps_its_position(loader)  # it is gone through once more
    try:
        seed_data_workers(
            loader,
            seed,
            rank=rank,
            stream="training" if training else "evaluation",
            place=functools.partial(_place, trainer, is_persistent, from_the_beginning)
            if training
            else _SAME_EACH_TIME,
        )
    except (TypeError, ValueError) as error:
        _warn_once(f"{error}: random numbers that its workers draw are others after a fault")
        return
    seeded = cast("DataLoader[object]", loader)  # anything else has raised TypeError, or has no workers
    if is_iterable and seeded.num_workers > 0 and not (training and from_the_beginning):
        _warn_once(
            f"{type(seeded.dataset).__name__} is iterable: random numbers that data-loader workers draw are the "
            "same after a fault only if it goes on exactly behind the last batch that was trained on"
        )


def _place(trainer: pl.Trainer, is_persistent: bool, from_the_beginning: bool) -> Place:
    """Return where the loop stands when it makes an iterator; the loop counts steps, the loader microbatches.

    The loader itself is not referred to: it refers to what calls this, and a loader in a cycle is freed by the
    garbage collector alone, which takes five seconds per worker (the queue to the worker is closed by then).
    """
    if is_persistent and getattr(trainer.fit_loop, "has_spare_iterator", False):
        return Place(trainer.current_epoch - 1)  # of these workers' next iterator the epoch is one more
    if from_the_beginning:
        return Place(trainer.current_epoch)
    steps = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    sampler = getattr(trainer.strategy, "data_sampler", None)
    return Place(trainer.current_epoch, steps * getattr(sampler, "num_microbatches", 1))


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
