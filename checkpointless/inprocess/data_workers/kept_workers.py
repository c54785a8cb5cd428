"""Data-loader workers that stay at work over a fault, in a process that lives through it.

A worker holds nothing of process groups: what it does follows from the indices that it is asked for and from its
copy of the dataset. So the loader of the next entry of the block takes over the workers of the last, and gives them
indices in the way in which torch does so for a further pass with ``persistent_workers``: what they had read ahead
is dropped (``_MultiProcessingDataLoaderIter._reset``, torch 2.4 to 2.14). They are not forked again, nor do they
begin with what datasets do at first, and they read the next batches while the process recovers.

That needs the very same map-style dataset, a loader that is made as the one before was, and the pass that the
workers were made for, since each pass has its own. Else they end, and others are made.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from typing_extensions import override

from checkpointless.inprocess.data_workers.loader_workers import are_alive, end_workers, watch_no_more
from checkpointless.inprocess.data_workers.streams import WorkerStreams, is_iterable
from checkpointless.inprocess.finalize import register_cleanup

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0  # for what workers have read ahead or have under way
_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "drop_last", "_auto_collation", "in_order")


#: Is told whether workers were taken over, why not, and after how many seconds.
Told = Callable[[bool, str, float], None]


class _Made:
    """What the workers of a loader depend on.

    Args:
        loader: the loader.

    Raises:
        TypeError: a part of it cannot be referred to weakly.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._objects = {name: _weakly(each) for name, each in _objects_of(loader).items()}
        self._settings = _settings_of(loader)
        self._pass = _pass_of(loader)

    def difference(self, loader: DataLoader[Any]) -> str:
        """Return what differs in ``loader``; "": nothing."""
        for name, value in _objects_of(loader).items():
            if not _is_same(self._objects[name], value):
                return f"another {name}"
        if self._settings != _settings_of(loader):
            return "other settings of the loader"
        return "" if self._pass == _pass_of(loader) else "another pass or rank"


def _objects_of(loader: DataLoader[Any]) -> dict[str, Any]:
    init = _streams_of(loader).init
    return {"dataset": loader.dataset, "collate_fn": loader.collate_fn, "worker_init_fn": init}


def _settings_of(loader: DataLoader[Any]) -> list[object]:
    return [type(loader), loader.multiprocessing_context, *(getattr(loader, name, None) for name in _SETTINGS)]


def _pass_of(loader: DataLoader[Any]) -> tuple[object, int | None]:
    return _streams_of(loader).key, _streams_of(loader).place().epoch


def _streams_of(loader: DataLoader[Any]) -> WorkerStreams:
    return cast(WorkerStreams, loader.worker_init_fn)


def _is_same(known: Callable[[], object] | None, value: object) -> bool:
    if known is None or value is None:
        return known is value
    mine = known()
    return mine is value or (inspect.ismethod(mine) and mine == value)


def _weakly(value: Any) -> Callable[[], object] | None:
    if value is None:
        return None
    return weakref.WeakMethod(value) if inspect.ismethod(value) else weakref.ref(value)


class _LastingIterator(_MultiProcessingDataLoaderIter):
    """Torch's iterator over a loader with workers, which another loader can go on with.

    Args:
        loader: the loader.
        made: what its workers depend on.

    Attributes:
        made: likewise.
        is_torn: whether something was left in the middle, or is over.
    """

    def __init__(self, loader: DataLoader[Any], made: _Made) -> None:
        self.made, self.is_torn = made, True
        super().__init__(loader)
        self._worker_init_fn = None  # the workers have it; it leads to the trainer
        self.is_torn = False

    @override
    def __next__(self) -> Any:
        self.is_torn = True
        batch = super().__next__()
        self.is_torn = False
        return batch

    def let_go(self) -> None:
        """Drop what leads to the training that is over."""
        self._index_sampler = self._sampler_iter = iter(())  # type: ignore[assignment]
        self._collate_fn = self._dataset = None  # type: ignore[assignment]

    def go_on(self, loader: DataLoader[Any]) -> None:
        """Begin the pass of another loader, with the workers that there are.

        Raises:
            Exception: a worker has ended, or does not answer.
        """
        self.is_torn = True
        self._dataset, self._collate_fn, self._index_sampler = (
            loader.dataset,
            loader.collate_fn,
            loader._index_sampler,
        )
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as where an iterator is made
        signal_handling._set_worker_pids(id(self), tuple(cast(int, worker.pid) for worker in self._workers))
        self._worker_pids_set = True
        self._timeout = loader.timeout
        self._reset(loader)
        self.is_torn = False


_in_use: list[_LastingIterator] = []  # a trainer that is left drops it before anybody aborts anything
_parked: list[_LastingIterator] = []  # of the entry of the block that is over


def keep_workers(loader: object, told: Told) -> None:
    """Have the workers of ``loader`` stay over a fault, and take over those of the loader before.

    Nothing is changed if that is not possible: without workers, or with an iterable dataset, persistent workers or
    a loader that makes its iterators itself.

    Args:
        loader: the loader of a training, which
            :func:`~checkpointless.inprocess.data_workers.streams.seed_data_workers` was given.
        told: is told at the next iteration, if there were workers.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.worker_init_fn, WorkerStreams):
        return
    is_torchs = type(loader)._get_iterator is DataLoader._get_iterator
    if not is_torchs or loader.num_workers == 0 or loader.persistent_workers:
        return
    if is_iterable(loader) or isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return
    register_cleanup("data-loader workers", _let_go)
    # In the instance, since the class is everybody's; weakly, so that no cycle keeps the loader.
    object.__setattr__(loader, "_get_iterator", functools.partial(_iterate, weakref.ref(loader), told))


def forget_workers() -> None:
    """Let the workers end as torch has it: the training is over."""
    _in_use.clear()


def leave_workers(iterators: Iterable[_MultiProcessingDataLoaderIter]) -> None:
    """Leave workers at work for the next loader if that is possible, or end them. Any thread may call it.

    Args:
        iterators: torch's iterators that the trainer still has. Those that it has dropped are known here.
    """
    for iterator in {*iterators, *_in_use}:
        if isinstance(iterator, _LastingIterator) and not iterator.is_torn and are_alive(iterator):
            watch_no_more(iterator)
            if iterator not in _parked:
                _parked.append(iterator)
        else:
            end_workers(iterator)
    _in_use.clear()


def _let_go() -> None:
    leave_workers(())
    for iterator in _parked:
        iterator.let_go()


def _iterate(reference: weakref.ref[DataLoader[Any]], told: Told) -> Any:
    """Return an iterator over the loader that ``reference`` leads to, with workers of the one before if it may."""
    loader = reference()
    assert loader is not None, "it is the loader that asks"
    began_s, reason = time.monotonic(), ""
    found: _LastingIterator | None = None
    _in_use.clear()
    parked, _parked[:] = list(_parked), []
    for iterator in parked:
        differs = iterator.made.difference(loader) if found is None else "there were several loaders"
        if not differs and _goes_on(iterator, loader):
            found = iterator
        else:
            reason = differs or "a worker does not answer"
            end_workers(iterator)
    if parked:
        told(found is not None, "" if found is not None else reason, time.monotonic() - began_s)
    if found is not None:
        _in_use.append(found)
        return found
    loader.check_worker_number_rationality()
    try:
        made = _Made(loader)
    except TypeError:  # a list as a dataset
        return _MultiProcessingDataLoaderIter(loader)
    iterator = _LastingIterator(loader, made)
    _in_use.append(iterator)
    return iterator


def _goes_on(iterator: _LastingIterator, loader: DataLoader[Any]) -> bool:
    if iterator.is_torn or not are_alive(iterator):
        return False
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        end_workers(iterator)  # which frees who waits for one, in a queue or where it hands a tensor over

    timer = threading.Timer(_ANSWER_S, end)
    timer.daemon = True
    timer.start()
    try:
        iterator.go_on(loader)
    except Exception as error:  # noqa: BLE001 - what a worker has sent may fail in any way where it is unpickled
        logger.warning("data-loader workers are made anew: %s", error)
        return False
    except BaseException:  # the next fault
        end_workers(iterator)
        raise
    finally:
        timer.cancel()
    timer.join()
    return not is_late.is_set()
