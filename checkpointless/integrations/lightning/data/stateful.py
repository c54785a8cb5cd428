"""Loaders that say where they stand, whose order is drawn by a sampler that does not: the order is drawn again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler

from checkpointless.integrations.compat.lightning import Stateful
from checkpointless.integrations.lightning.data.passes import Starts, one_pass
from checkpointless.integrations.lightning.data.position import DataPosition, is_megatrons
from checkpointless.integrations.lightning.data.sampler_state import (
    keep_own_state,
    place_of_sampler,
    sampler_of,
    samplers_of,
)


def repeat_order(loader: Iterable[object], starts: Starts, position: DataPosition | None) -> DrawnOrder | None:
    """Have a loader that keeps its position draw the order of an epoch that was begun before a fault once more.

    The position of such a loader counts how many indices its sampler has given. The order of these is part of it
    only if the sampler keeps it too, as torchdata's do, or follows from seed and epoch alone, as that of torch's
    ``DistributedSampler`` does.

    Args:
        loader: a loader with ``state_dict`` and a sampler.
        position: where the training stands; None: at the beginning.

    Returns:
        What stands in the place of the sampler that draws; None: the order needs nothing.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):  # torch's sampler of these gives None forever
        return None
    owner: Any = sampler_of(loader)
    name = "sampler"
    if isinstance(owner, BatchSampler) or type(owner).__module__.startswith("torchdata."):
        sampler = getattr(owner, name, None)
    else:  # one of the user's own gives whole batches, or there are no batches
        owner, name, sampler = loader, place_of_sampler(loader), owner
    if isinstance(sampler, DistributedSamplerWrapper):
        owner, name = sampler.dataset, "_sampler"
        sampler = getattr(owner, name)
    elif isinstance(sampler, Stateful) or type(sampler).__module__.startswith("torchdata."):
        return None
    if sampler is None or isinstance(sampler, DistributedSampler | SequentialSampler) or is_megatrons(sampler):
        return None
    keep_own_state(loader)
    order = DrawnOrder(sampler, starts, position)
    object.__setattr__(owner, name, order)  # torch forbids a loader's plain assignment
    return order


def begin_anew(loader: Iterable[object]) -> None:
    """Let the next pass of a loader begin at its beginning: the one that it was brought back to was over.

    torchdata's ``StatefulDistributedSampler`` takes the place that it was given for that of the pass begun next.
    """
    for sampler in samplers_of(loader):
        if getattr(sampler, "next_yielded", None) is not None:
            sampler.next_yielded = None


def without_worker_seeds(state: object) -> object:
    """Leave out of a loader's state what its batches do not depend on, so that it can be compared between ranks.

    torchdata's loaders keep the number that each of their iterators draws to seed workers. It differs between ranks
    that were seeded differently, or not at all, and between an iterator and the one that replaces it. Workers of
    a dataset that is not iterable get their streams from the job's seed and the batch instead
    (``seed_data_workers``).

    Args:
        state: what a loader's ``state_dict`` returned, or a list of these.

    Returns:
        A copy without these numbers if ``state`` has any, else ``state``.
    """
    if isinstance(state, list):
        return [without_worker_seeds(each) for each in state]
    if not isinstance(state, dict):
        return state
    snapshot = state.get("_snapshot")
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("_main_snapshot"), dict):
        return state
    workers = (snapshot.get("_worker_snapshots") or {}).values()
    if any(each.get("fetcher_state") is not None for each in workers):  # an iterable dataset's
        return state
    main = {name: value for name, value in snapshot["_main_snapshot"].items() if name != "_base_seed"}
    return {**state, "_snapshot": {**snapshot, "_main_snapshot": main}}


class DrawnOrder:
    """A sampler whose passes draw, until the training has resumed, what the interrupted pass had drawn.

    Args:
        position: where the training stands; None: at the beginning.
    """

    def __init__(self, inner: Iterable[object], starts: Starts, position: DataPosition | None) -> None:
        self._inner: Any = inner  # of torch or the user
        self._starts = starts
        self._repeats = position is not None and position.within
        self._has_repeated = self._has_resumed = False

    def resumed(self) -> None:
        """Let further passes draw orders of their own; a loader may begin the one that goes on only now."""
        self._has_resumed = True
        self._repeats = self._repeats and not self._has_repeated

    def begin_anew(self) -> None:
        """Let the next pass draw an order of its own: the interrupted one was over."""
        self._repeats = False

    def __iter__(self) -> Iterator[Any]:
        again = self._has_repeated = self._repeats
        self._repeats = self._repeats and not self._has_resumed
        yield from one_pass(self._inner, self._starts, again)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)
