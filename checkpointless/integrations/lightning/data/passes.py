"""Passes over samplers and iterable datasets, of which one that a fault has interrupted is gone through again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import IterableDataset

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.lightning.data.sampler_state import OWN, is_of_a_library
from checkpointless.state.rng import RngStates

_DRAWS = (
    "{} draws random numbers of the training process item by item, so that it would give other items after a fault "
    "(docs/contract.md, 5): draw from a generator that it has for itself, let a worker draw (num_workers=1), or "
    "give it state_dict and load_state_dict, or a sampler __len__"
)


class Starts(Protocol):
    """Keeps a rank's random streams as of the beginning of an epoch's iterator, and outlives the process."""

    def keep_data_start(self, streams: RngStates) -> None:
        """Keep the streams of an iterator that begins: a sampler that shuffles draws its order from them."""

    def data_start(self) -> RngStates | None:
        """Return the streams that were kept last."""


def one_pass(
    items: Iterable[Any], starts: Starts, again: bool, skip: int = 0, owner: object = None
) -> Iterator[Any]:
    """Go over a sampler or an iterable dataset. What it draws before its first item is drawn again after a fault.

    Everything happens when the first item is asked for: torch makes two iterators of a loader with workers, and
    uses the second.

    Args:
        items: the sampler, the dataset, or an iterator over it that has drawn nothing yet.
        again: whether the pass was begun before a fault.
        skip: how many of its items were used already, and are left out.
        owner: the dataset that ``items`` come from; None: ``items``.

    Yields:
        The items.

    Raises:
        UnrecoverableError: the items cannot be drawn again, as they and the training draw from the same streams.
    """
    now = RngStates.capture()
    start = starts.data_start() if again else None
    if start is not None:
        start.restore()
    elif not again:
        starts.keep_data_start(now)
    given = _begun(items, items if owner is None else owner)
    first = list(itertools.islice(given, max(skip, 1)))
    if start is not None:
        _without_own(now).restore()  # what samplers keep is put back with the state of the step boundary
    yield from first[skip:]
    yield from given


def _begun(items: Iterable[Any], owner: object) -> Iterator[Any]:
    """Begin a pass; if the second item draws random numbers, take all items that a sampler's length promises."""
    if is_of_a_library(owner):
        yield from items
        return
    iterator = iter(items)
    taken = list(itertools.islice(iterator, 1))
    before = RngStates.capture()
    taken += itertools.islice(iterator, 1)
    if len(taken) > 1 and _without_own(before).streams != _without_own(RngStates.capture()).streams:
        length = None if isinstance(owner, IterableDataset) else sized_len(owner)  # type: ignore[arg-type]
        if length is None:
            raise UnrecoverableError(_DRAWS.format(type(owner).__name__))
        taken += itertools.islice(iterator, max(0, length - len(taken)))  # some have a length and never end
    yield from itertools.chain(taken, iterator)


def _without_own(states: RngStates) -> RngStates:
    """Return the streams without what samplers have for themselves."""
    streams = {name: state for name, state in states.streams.items() if name != f"source:{OWN}"}
    return dataclasses.replace(states, streams=streams)
