"""One pass over a sampler that is not known: whether its items come from random streams, and when it draws.

What is drawn at the beginning of a pass can be drawn again after a fault. What is drawn in the middle can not: the
training draws from the same streams in between. A sampler that draws for each item is therefore gone through at the
beginning of its pass.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recovery.rng import RngStates

OWN = "loader"  # the random source that the samplers' own state is kept as

_ENDLESS = (
    "the sampler {} draws random numbers item by item and has no length, so its order could not be drawn again "
    "after a fault: give it __len__, or state_dict and load_state_dict"
)
_SELDOM = (
    "the sampler {} draws random numbers in the middle of a pass, which could not be drawn again after a fault: "
    "draw the whole order at the beginning of __iter__, or from a generator that the sampler has for itself"
)


def begun(sampler: Iterable[Any]) -> Iterator[Any]:
    """Go through a sampler, one item ahead of the first, and no further unless each item draws random numbers.

    Args:
        sampler: the sampler, of a class that is not known.

    Yields:
        The sampler's items.

    Raises:
        UnrecoverableError: it draws from the rank's random streams where that could not be repeated.
    """
    items = iter(sampler)
    first = list(itertools.islice(items, 1))
    before = RngStates.capture()
    second = list(itertools.islice(items, 1))
    taken = [*first, *second]
    if second and moved(before, RngStates.capture()):
        length = sized_len(sampler)
        if length is None:
            raise UnrecoverableError(_ENDLESS.format(type(sampler).__name__))
        taken += itertools.islice(items, max(0, length - len(taken)))  # some have a length and never end
    yield from taken
    while True:
        before = RngStates.capture()
        following = list(itertools.islice(items, 1))
        if not following:
            return
        if moved(before, RngStates.capture()):
            raise UnrecoverableError(_SELDOM.format(type(sampler).__name__))
        yield from following


def moved(before: RngStates, after: RngStates) -> bool:
    """Return whether a stream of the rank has moved; what samplers have for themselves does not count."""
    if before.same_streams(after):
        return False
    return without_own(before).streams != without_own(after).streams


def without_own(states: RngStates) -> RngStates:
    """Return the streams without what samplers have for themselves."""
    streams = {name: state for name, state in states.streams.items() if name != f"source:{OWN}"}
    return dataclasses.replace(states, streams=streams)
