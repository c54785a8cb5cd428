"""Samplers and iterable datasets: what they keep from pass to pass, and a pass that a fault has interrupted.

Samplers keep generators, and those of a user's class the numbers that they count with. A sampler that the script
makes after a fault lacks these. They are kept with the random streams of the rank: as of the beginning of a pass,
from which the pass is drawn again, and as of each step boundary. An iterable dataset that is gone through in the
training process takes a sampler's place.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import IterableDataset

from checkpointless.inprocess import UnrecoverableError
from checkpointless.state.rank_local.declared import is_generator, put_object, take_object
from checkpointless.state.rng import RngSource, RngStates, register_rng_source

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
    if _is_of_a_library(owner):
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


OWN = "loader"  # the random source that the samplers' own state is kept as

#: Whose samplers are known to keep nothing but generators between passes, and to draw at a pass's beginning or from
#: a generator of their own.
_LIBRARIES = {
    "builtins",
    "torch",
    "lightning",
    "pytorch_lightning",
    "torchdata",
    "megatron",
    "nemo",
    "checkpointless",
}
_kept: list[SamplerState] = []  # what is registered, if anything was


def _is_of_a_library(sampler: object) -> bool:
    """Return whether ``sampler``, and what it takes its items from, is of torch, Lightning, NeMo or the like."""
    return all(type(each).__module__.partition(".")[0] in _LIBRARIES for each in samplers_within(sampler))


def samplers_within(sampler: object) -> list[Any]:
    """Return ``sampler`` and those that it takes its items from, also one that Lightning divides."""
    found: list[Any] = []
    each: Any = sampler
    while each is not None and all(each is not known for known in found):
        found.append(each)
        is_divided = isinstance(each, DistributedSamplerWrapper)
        each = each.dataset._sampler if is_divided else getattr(each, "sampler", None)
    return found


class SamplerState:
    """What the ``owners``, a loader and the samplers that its order comes from, keep from pass to pass."""

    def __init__(self, owners: Iterable[object]) -> None:
        self._owners = list(owners)

    def take(self) -> dict[str, Any]:
        """Return what is kept, by owner and attribute."""
        return {key: take_object(value) for key, _, _, value in self._kept()}

    def put(self, states: Mapping[str, Any]) -> None:
        """Put back what :meth:`take` returned, also in another process; an owner of another class is left alone."""
        for key, owner, name, value in list(self._kept()):
            if key not in states:
                continue
            if is_generator(value):
                put_object(value, states[key])
            elif value != states[key]:
                setattr(owner, name, states[key])

    def _kept(self) -> Iterator[tuple[str, object, str, Any]]:
        """Yield the key, the owner, the name and the value of each attribute that is kept."""
        for number, owner in enumerate(self._owners):
            counts = number > 0 and not _is_of_a_library(owner)
            for name, value in getattr(owner, "__dict__", {}).items():
                if is_generator(value) or (counts and isinstance(value, int | float)):
                    yield f"{number}:{type(owner).__qualname__}|{name}", owner, name, value


def keep_own_state(loader: Iterable[object]) -> None:
    """Keep, with the random streams of the rank, what the samplers of ``loader`` keep from pass to pass."""
    dataset = getattr(loader, "dataset", None)
    owners = [dataset] if isinstance(dataset, IterableDataset) else samplers_of(loader)
    state = SamplerState([loader, *owners])
    if _kept or state.take():
        _kept[:] = [state]
        register_rng_source(OWN, RngSource(state.take, state.put))


class StandIn:
    """Stands in the place of a sampler of torch, Megatron or the user, which it asks for what it does not know."""

    def __init__(self, inner: object) -> None:
        self._inner: Any = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)


def place_of_sampler(loader: Iterable[object]) -> str:
    """Return the name of the attribute of ``loader`` that determines its samples."""
    return "batch_sampler" if getattr(loader, "batch_sampler", None) is not None else "sampler"


def sampler_of(loader: Iterable[object]) -> Iterable[object] | None:
    """Return the batch sampler of ``loader`` if it has one, else its sampler, or None."""
    return getattr(loader, place_of_sampler(loader), None)


def samplers_of(loader: Iterable[object]) -> list[Any]:
    """Return the sampler of ``loader`` and those that it takes its items from, also one that Lightning divides."""
    return samplers_within(sampler_of(loader))
