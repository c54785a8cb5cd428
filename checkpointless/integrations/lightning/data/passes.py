"""One pass over a sampler of the user's: what it draws item by item is drawn at the beginning of the pass.

The training draws from the same streams in between, so that it could not be drawn again after a fault.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len

from checkpointless.state.rng import RngStates

OWN = "loader"  # the random source that the samplers' own state is kept as


def begun(sampler: Iterable[Any]) -> Iterator[Any]:
    """Go through a sampler; if its second item draws random numbers, take all items that its length promises.

    Args:
        sampler: the sampler, of a class that is not known.

    Yields:
        The sampler's items.
    """
    items = iter(sampler)
    taken = list(itertools.islice(items, 1))
    before, length = RngStates.capture(), sized_len(sampler)
    taken += itertools.islice(items, 1)
    if length is not None and moved(before, RngStates.capture()):
        taken += itertools.islice(items, max(0, length - len(taken)))  # some have a length and never end
    yield from itertools.chain(taken, items)


def moved(before: RngStates, after: RngStates) -> bool:
    """Return whether a stream of the rank has moved; what samplers have for themselves does not count."""
    return not before.same_streams(after) and without_own(before).streams != without_own(after).streams


def without_own(states: RngStates) -> RngStates:
    """Return the streams without what samplers have for themselves."""
    streams = {name: state for name, state in states.streams.items() if name != f"source:{OWN}"}
    return dataclasses.replace(states, streams=streams)
