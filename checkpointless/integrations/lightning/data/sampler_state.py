"""What samplers keep from pass to pass: generators, and the numbers that a user's sampler counts with.

A sampler that is made by the script after a fault lacks it. It is kept with the random streams of the rank: as of
the beginning of a pass, from which the pass is drawn again, and as of each step boundary. An iterable dataset that
is gone through in the training process takes a sampler's place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import IterableDataset

from checkpointless.state.rank_local.declared import is_generator, put_object, take_object
from checkpointless.state.rng import RngSource, register_rng_source

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


def is_of_a_library(sampler: object) -> bool:
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
    """What the samplers of one loader keep from pass to pass.

    Args:
        owners: the loader, and the samplers that its order comes from. The generators in their attributes are kept,
            and of a user's class the numbers.
    """

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
            counts = number > 0 and not is_of_a_library(owner)
            for name, value in getattr(owner, "__dict__", {}).items():
                if is_generator(value) or (counts and isinstance(value, int | float)):
                    yield f"{number}:{type(owner).__qualname__}|{name}", owner, name, value


def keep_own_state(loader: Iterable[object]) -> None:
    """Keep, with the random streams of the rank, what the samplers of ``loader`` keep from pass to pass.

    An iterable dataset has no sampler, and takes its place.
    """
    dataset = getattr(loader, "dataset", None)
    owners = [dataset] if isinstance(dataset, IterableDataset) else samplers_of(loader)
    state = SamplerState([loader, *owners])
    if _kept or state.take():
        _kept[:] = [state]
        register_rng_source(OWN, RngSource(state.take, state.put))


def place_of_sampler(loader: Iterable[object]) -> str:
    """Return the name of the attribute of ``loader`` that determines its samples."""
    return "batch_sampler" if getattr(loader, "batch_sampler", None) is not None else "sampler"


def sampler_of(loader: Iterable[object]) -> Iterable[object] | None:
    """Return the batch sampler of ``loader`` if it has one, else its sampler, or None."""
    return getattr(loader, place_of_sampler(loader), None)


def samplers_of(loader: Iterable[object]) -> list[Any]:
    """Return the sampler of ``loader`` and those that it takes its items from, also one that Lightning divides."""
    return samplers_within(sampler_of(loader))
