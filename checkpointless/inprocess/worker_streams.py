"""Random numbers drawn in data-loader workers, made a function of the batch instead of the worker's history.

Torch's streams begin with a seed drawn when a worker starts; here every batch sets them, from job seed and
identity.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import pickle
import random
import sys
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, _DatasetKind, get_worker_info

logger = logging.getLogger(__name__)
_samplers: list[weakref.ref[Any]] = []  # of the loaders whose workers were seeded, with an epoch

_NO_EPOCH = (
    "%s has no epoch: data-loader workers draw the same random numbers for the same indices in every pass. Give "
    "seed_data_workers(place=lambda: Place(epoch)), or a sampler with set_epoch()"
)


@dataclass(frozen=True)
class Place:
    """Where an iterator over a data loader begins.

    Attributes:
        epoch: how many passes over the data precede it; None: every pass draws the same, as validations do.
        batch: how many batches of this pass precede it.
    """

    epoch: int | None = 0
    batch: int = 0


def seed_data_workers(
    loader: object, seed: int, *, rank: int = 0, stream: str = "", place: Callable[[], Place] | None = None
) -> None:
    """Make the random numbers that the workers of ``loader`` draw depend on ``seed`` and the batch alone.

    Before each batch, the worker's streams (torch on the CPU, NumPy's global one, Python's ``random``) are set from
    ``seed``, ``rank``, ``stream``, the epoch and the batch. The batch is identified by the sampler's indices, or by
    its number if the dataset is iterable and has no indices. Generators that a dataset keeps for itself, and the
    ``seed`` of torch's ``get_worker_info()``, are left alone. The loader's ``worker_init_fn`` is still called,
    after the streams were set from the worker's number. Without workers nothing is changed.

    Call this function before the loader is iterated over; once is enough for all epochs. After a fault, an iterable
    dataset must resume exactly where ``place`` says.

    Args:
        loader: a ``torch.utils.data.DataLoader``; its ``worker_init_fn`` is replaced.
        seed: the seed, which must be the same before and after a fault.
        rank: the data-parallel rank, so that ranks with equal indices draw different numbers.
        stream: a name that distinguishes loaders of one job that share indices (training, validation).
        place: returns where the next iterator begins; called at the start of each worker. With persistent workers,
            each further iterator counts as one epoch more. Default: at the beginning of the sampler's epoch
            (``DistributedSampler.set_epoch``). If the sampler has none, every pass draws the same for the same
            indices, and a warning is emitted.

    Raises:
        TypeError: ``loader`` is not torch's ``DataLoader``, or makes its workers in a different way.
        ValueError: the loader's persistent workers run already.
    """
    sampler = _sampler_with_epoch(loader)
    if sampler is not None:
        with contextlib.suppress(TypeError):  # of a class with slots
            _samplers.append(weakref.ref(sampler))
    if getattr(loader, "num_workers", None) == 0:
        return
    if not isinstance(loader, DataLoader) or not _starts_workers_as_torch_does(loader):
        raise TypeError(f"{type(loader).__name__} is not torch's DataLoader, or starts its workers itself")
    init: Any = loader.worker_init_fn
    if isinstance(init, _WorkerStreams):
        init = init.init
    elif loader._iterator is not None:
        raise ValueError(
            "the workers of this data loader are running already: call this before the first iteration"
        )
    if place is None:
        if sampler is None:
            logger.warning(_NO_EPOCH, type(loader.sampler).__name__)
        place = functools.partial(_epoch_of, sampler)
    loader.worker_init_fn = _WorkerStreams((seed, rank, stream), place, init)


def _sampler_with_epoch(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None), getattr(batches, "sampler", None), batches]
    return next((each for each in samplers if isinstance(getattr(each, "epoch", None), int)), None)


def epochs_begun() -> int:
    """Return the sum of the epochs of all samplers that were given to :func:`seed_data_workers`."""
    _samplers[:] = [each for each in _samplers if each() is not None]
    return sum(sampler.epoch for each in _samplers if (sampler := each()) is not None)


def _epoch_of(sampler: Any) -> Place:
    return Place(None if sampler is None else sampler.epoch)


def _starts_workers_as_torch_does(loader: DataLoader[Any]) -> bool:
    """Return whether workers call the ``worker_init_fn`` and then torch's fetcher, as torchdata's do, too."""
    get_iterator = type(loader)._get_iterator
    if get_iterator is DataLoader._get_iterator:
        return True
    # Of an iterable dataset, torchdata's workers replace the iterator of the fetcher.
    return get_iterator.__module__.startswith("torchdata.stateful_dataloader") and not _is_iterable(loader)


def _is_iterable(loader: object) -> bool:
    """Return whether the batches of ``loader`` are identified by number only, as its dataset has no indices."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


class _WorkerStreams:
    """The ``worker_init_fn`` of :func:`seed_data_workers`: ``key`` (seed, rank, stream); ``init``: the loader's."""

    def __init__(
        self, key: tuple[int, int, str], place: Callable[[], Place], init: Callable[[int], None] | None
    ) -> None:
        self.key = key
        self.place = place
        self.init = init
        self._home = os.getpid()

    def __call__(self, worker_id: int) -> None:
        if os.getpid() == self._home:  # not in a separate process: these streams are the training's
            if self.init is not None:
                self.init(worker_id)
            return
        place = self.place()
        _set_streams(self.key, place.epoch or 0, "worker", worker_id)
        if self.init is not None:
            self.init(worker_id)
        self._seed_fetchers(worker_id, place)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker that is spawned: where to begin, not the trainer that knows it."""
        return {**vars(self), "place": functools.partial(_known, self.place())}

    def _seed_fetchers(self, worker_id: int, place: Place) -> None:
        """Make every fetcher that torch makes in this process (one per pass) set the streams before each batch."""
        info = get_worker_info()
        step = info.num_workers if info is not None else 1
        create = _DatasetKind.create_fetcher
        begin = place.epoch or 0
        epochs = itertools.count(begin, 0 if place.epoch is None else 1)  # persistent workers make several passes

        def create_seeded(kind: int, *args: Any) -> _SeededFetcher:
            epoch = next(epochs)
            first = worker_id + (place.batch if epoch == begin else 0)
            _set_streams(self.key, epoch, "pass", worker_id)  # an iterable dataset may draw when it begins
            numbers = itertools.count(first, step) if kind == _DatasetKind.Iterable else None
            return _SeededFetcher(create(kind, *args), (*self.key, epoch), numbers)

        _DatasetKind.create_fetcher = staticmethod(create_seeded)  # type: ignore[method-assign]


class _SeededFetcher:
    """Torch's fetcher of one pass, which sets streams by ``key`` and the batch: its indices or ``numbers``."""

    def __init__(self, inner: Any, key: tuple[Any, ...], numbers: itertools.count[int] | None) -> None:
        self._inner = inner
        self._key = key
        self._numbers = numbers

    def fetch(self, index: Any) -> Any:
        # As bytes: an index may be of any type, and not every type's text is the same in two processes.
        batch = pickle.dumps(index, protocol=4) if self._numbers is None else next(self._numbers)
        _set_streams(self._key, "batch", batch)
        return self._inner.fetch(index)


def _known(place: Place) -> Place:
    return place


def _set_streams(*key: Any) -> None:
    """Set the streams of torch (CPU), NumPy and Python from ``key``: numbers, text and bytes."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=32).digest()
    # Not torch.manual_seed(): that also seeds the devices, which a worker must leave alone.
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
    random.seed(digest[8:16])
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(array("I", digest[16:]))
