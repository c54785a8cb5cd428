"""Where a trainer's loaders stand in their data, and how loaders that were rebuilt are brought there.

A training loader is made as at the start, so that length and order are the same; its first iterator begins after
what was delivered. What samplers keep is stored with the rank's random streams: as of the beginning of a pass,
which is drawn again, and of each step boundary. An iterable dataset takes a sampler's place. Loaders with a
``state_dict`` are restored by Lightning; what validation loaders keep continues from one to the next.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    SequentialSampler,
)

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.compat.lightning import Stateful
from checkpointless.state.rank_local.declared import is_generator, put_object, take_object
from checkpointless.state.rng import RngStates, register_rng_source

if TYPE_CHECKING:
    from nemo.lightning.pytorch.plugins import MegatronDataSampler

    from checkpointless.integrations.compat.lightning import DataFetcher

_DRAWS = (
    "{} draws random numbers of the training process item by item, so that it would give other items after a fault "
    "(docs/contract.md, 5): draw from a generator that it has for itself, let a worker draw (num_workers=1), or "
    "give it state_dict and load_state_dict, or a sampler __len__"
)


class _Starts(Protocol):
    """Keeps a rank's random streams as of the beginning of an epoch's iterator, and outlives the process."""

    def keep_data_start(self, streams: RngStates) -> None: ...

    def data_start(self) -> RngStates | None: ...


def _one_pass(
    items: Iterable[Any], starts: _Starts, again: bool, skip: int = 0, owner: object = None
) -> Iterator[Any]:
    """Go over ``items``, beginning when the first is asked for: torch makes two iterators, and uses the second."""
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
_kept: list[_SamplerState] = []  # what is registered, if anything was


def _is_of_a_library(sampler: object) -> bool:
    """Return whether ``sampler``, and what it takes its items from, is of torch, Lightning, NeMo or the like."""
    return all(type(each).__module__.partition(".")[0] in _LIBRARIES for each in _samplers_within(sampler))


def _samplers_within(sampler: object) -> list[Any]:
    """Return ``sampler`` and those that it takes its items from, also one that Lightning divides."""
    found: list[Any] = []
    each: Any = sampler
    while each is not None and all(each is not known for known in found):
        found.append(each)
        is_divided = isinstance(each, DistributedSamplerWrapper)
        each = each.dataset._sampler if is_divided else getattr(each, "sampler", None)
    return found


class _SamplerState:
    """What the ``owners``, a loader and the samplers that its order comes from, keep from pass to pass."""

    def __init__(self, owners: Iterable[object]) -> None:
        self._owners = list(owners)

    def take(self) -> dict[str, Any]:
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
        for number, owner in enumerate(self._owners):
            counts = number > 0 and not _is_of_a_library(owner)
            for name, value in getattr(owner, "__dict__", {}).items():
                if is_generator(value) or (counts and isinstance(value, int | float)):
                    yield f"{number}:{type(owner).__qualname__}|{name}", owner, name, value


def _keep_own_state(loader: Iterable[object]) -> None:
    """Keep, with the random streams of the rank, what the samplers of ``loader`` keep from pass to pass."""
    dataset = getattr(loader, "dataset", None)
    owners = [dataset] if isinstance(dataset, IterableDataset) else _samplers_of(loader)
    state = _SamplerState([loader, *owners])
    if _kept or state.take():
        _kept[:] = [state]
        register_rng_source(OWN, state.take, state.put)


class _StandIn:
    """Stands in the place of a sampler of torch, Megatron or the user, which it asks for what it does not know."""

    def __init__(self, inner: object) -> None:
        self._inner: Any = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)


def _place_of_sampler(loader: Iterable[object]) -> str:
    return "batch_sampler" if getattr(loader, "batch_sampler", None) is not None else "sampler"


def _sampler_of(loader: Iterable[object]) -> Iterable[object] | None:
    return getattr(loader, _place_of_sampler(loader), None)


def _samplers_of(loader: Iterable[object]) -> list[Any]:
    return _samplers_within(_sampler_of(loader))


# --- Where a training stands in its data -------------------------------------------------------------------------


class DataPosition(NamedTuple):
    """Where a training stands in an epoch's data; None: not known, or there is no Megatron sampler."""

    fetched: int  # batches
    delivered: int
    began_at: int | None = None  # the samples that Megatron's sampler counted as consumed when its iterator began
    consumed: int | None = None  # and now
    within: bool = True  # whether the epoch goes on; False: the next iterator begins another one
    length: int | None = None  # of the epoch, in batches, as Lightning's fetcher has asked for it
    length_at_start: int | None = None  # as Lightning has asked for it when the fit was set up
    ahead: int = 0  # delivered batches that no step has had yet, where a loader has no length


def megatron_sampler(trainer: pl.Trainer) -> MegatronDataSampler | None:
    sampler = getattr(trainer.strategy, "data_sampler", None)
    return sampler if hasattr(sampler, "init_consumed_samples") else None


def _ahead_of_steps(loader: object) -> str | None:
    """Return why the position of ``loader`` cannot be restored if Lightning fetches its batches; None: it can."""
    if sized_len(loader) is not None:  # type: ignore[arg-type]
        return None
    if isinstance(loader, Stateful):
        return (
            f"{type(loader).__name__} says where it stands, but Lightning fetches a batch ahead of a loader "
            "without a length, which no step has had yet: give it a __len__, or leave out its state_dict (it is "
            "gone through once more after a fault)"
        )
    sampler = _sampler_of(loader)  # type: ignore[arg-type]
    if sampler is None or isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None  # it is gone through once more
    inner = _samplers_within(sampler)[-1]
    return (
        f"the sampler {type(inner).__name__} has no length, so Lightning fetches a batch ahead, which no step has "
        "had yet: give it a __len__"
    )


def _is_megatrons(sampler: object) -> TypeGuard[Any]:
    return hasattr(sampler, "consumed_samples") and hasattr(sampler, "micro_batch_times_data_parallel_size")


# --- The training loader of a fit, which is followed ------------------------------------------------------------


class _FitLoop(Protocol):
    epoch_loop: Any
    _data_fetcher: Any
    _combined_loader: Any


class TrainingData:
    """Follows the training loader of a trainer, whichever was made last."""

    def __init__(self) -> None:
        self._tracked: _TrackedSampler | None = None  # None: the loader, or the dataset alone, knows its position
        self._stateful: Iterable[object] | None = None  # a loader that knows its position
        self._order: _DrawnOrder | None = None  # of such a loader, if it does not know that

    def position(self, fit_loop: _FitLoop) -> DataPosition:
        fetcher = fit_loop._data_fetcher
        fetched = fetcher.fetched if fetcher is not None else 0
        tracked = self._tracked
        if self._order is not None:  # a point is reached, so the training goes on
            self._order.resumed()
        return DataPosition(
            fetched,
            fetched - fit_loop.epoch_loop.not_delivered,
            tracked.began_at if tracked is not None else None,
            tracked.consumed if tracked is not None else None,
            length=fetcher.length if fetcher is not None else None,
            length_at_start=tracked.length_at_start if tracked is not None else None,
            ahead=len(getattr(fetcher, "batches", ())),
        )

    def made(
        self,
        loader: Iterable[object],
        starts: _Starts,
        position: DataPosition | None,
        is_fetched_ahead: bool = False,
    ) -> None:
        """Follow a training loader that has just been made; it begins at ``position``."""
        reason = _ahead_of_steps(loader) if is_fetched_ahead else None
        if reason is not None:
            raise UnrecoverableError(reason)
        self._tracked = self._order = self._stateful = None
        if isinstance(loader, Stateful):
            self._stateful, self._order = loader, _repeat_order(loader, starts, position)
        else:
            self._tracked = _track(loader, starts, position)
        _repeat_items(loader, starts, position)

    def set_up(self) -> None:
        """Note that the fit is set up: Lightning has asked how many batches there are."""
        if self._tracked is not None:
            self._tracked.set_up()

    def begin_epoch(self, position: DataPosition | None = None) -> None:
        """Begin an epoch at ``position``, where the loops resume; None: after one that was over, or at first."""
        if self._tracked is not None:
            self._tracked.begin_epoch(position)
        for sampler in _samplers_of(self._stateful) if self._stateful is not None else ():
            # torchdata's StatefulDistributedSampler takes the place that it was given for that of the next pass.
            if getattr(sampler, "next_yielded", None) is not None:
                sampler.next_yielded = None
        if self._order is not None:
            self._order.begin_anew()

    def resume_at(self, position: DataPosition, fit_loop: _FitLoop) -> None:
        """Let an epoch that has begun in an earlier generation continue at ``position``, with rebuilt iterators."""
        fetcher = fit_loop._data_fetcher
        self._take_what_was_delivered(fit_loop._combined_loader.flattened, fetcher, position)
        fetcher.fetched, fetcher.length = position.fetched, position.length
        fetcher.done = fetcher.length is not None and fetcher.fetched >= fetcher.length
        _go_on_counting(fetcher, position)
        fit_loop.epoch_loop.not_delivered = position.fetched - position.delivered

    def _take_what_was_delivered(self, loaders: Iterable[object], fetcher: Any, position: DataPosition) -> None:
        """Advance an iterator whose batches only the dataset knows past those that were delivered."""
        if self._tracked is not None or any(isinstance(loader, Stateful) for loader in loaders):
            return
        ahead: list[Any] = getattr(fetcher, "batches", [])
        for _ in range(position.delivered - position.ahead):
            if ahead:
                ahead.pop(0)
            else:
                next(fetcher.iterator)
        while len(ahead) < position.ahead:
            ahead.append(next(fetcher.iterator))  # as many as the iterator had, so it does not end here


# --- Iterable datasets that keep no position ----------------------------------------------------------------------


def _repeat_items(loader: Iterable[object], starts: _Starts, position: DataPosition | None) -> None:
    """Have an iterable dataset give the same items when it is gone through once more after a fault."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return
    # Workers' streams follow from the number of the batch.
    if loader.num_workers > 0 or isinstance(loader, Stateful) or isinstance(loader.dataset, Stateful):
        return
    _keep_own_state(loader)
    dataset, make = loader.dataset, loader._get_iterator
    repeats = iter([position is not None and position.within and position.delivered > 0])  # the first pass alone

    def begin() -> Any:
        again = next(repeats, False)
        if isinstance(dataset, IterDataPipe):  # torch does more with these
            iterator: Any = make()
            fetcher = iterator._dataset_fetcher
            fetcher.dataset_iter = _one_pass(fetcher.dataset_iter, starts, again, owner=dataset)
            return iterator
        # What torch takes for the dataset draws nothing before its first item is asked for.
        object.__setattr__(loader, "dataset", _one_pass(dataset, starts, again))  # torch forbids a plain assignment
        try:
            iterator = make()
        finally:
            object.__setattr__(loader, "dataset", dataset)
        iterator._dataset = iterator._dataset_fetcher.dataset = dataset
        return iterator

    loader._get_iterator = begin  # type: ignore[method-assign]


def _repeat_order(loader: Iterable[object], starts: _Starts, position: DataPosition | None) -> _DrawnOrder | None:
    """Have a loader that keeps its position draw an interrupted epoch's order again, unless its position has it."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):  # torch's sampler of these gives None forever
        return None
    owner: Any = _sampler_of(loader)
    name = "sampler"
    if isinstance(owner, BatchSampler) or type(owner).__module__.startswith("torchdata."):
        sampler = getattr(owner, name, None)
    else:  # one of the user's own gives whole batches, or there are no batches
        owner, name, sampler = loader, _place_of_sampler(loader), owner
    if isinstance(sampler, DistributedSamplerWrapper):
        owner, name = sampler.dataset, "_sampler"
        sampler = getattr(owner, name)
    elif isinstance(sampler, Stateful) or type(sampler).__module__.startswith("torchdata."):
        return None
    if sampler is None or isinstance(sampler, DistributedSampler | SequentialSampler) or _is_megatrons(sampler):
        return None
    _keep_own_state(loader)
    order = _DrawnOrder(sampler, starts, position)
    object.__setattr__(owner, name, order)  # torch forbids a loader's plain assignment
    return order


class _DrawnOrder(_StandIn):
    """A sampler whose passes draw, until the training has resumed, what the interrupted pass had drawn."""

    def __init__(self, inner: Iterable[object], starts: _Starts, position: DataPosition | None) -> None:
        super().__init__(inner)
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
        yield from _one_pass(self._inner, self._starts, again)


def _go_on_counting(fetcher: DataFetcher, position: DataPosition) -> None:
    combined: Any = fetcher.iterator
    combined._iterator._idx = position.delivered
    if hasattr(fetcher, "_batch_idx"):  # the number of the last batch
        fetcher._batch_idx = max(position.delivered - 1, 0)


def _track(loader: Iterable[object], starts: _Starts, position: DataPosition | None) -> _TrackedSampler | None:
    """Follow the sampler of ``loader``, if it has one; its next iterator begins where the training stands."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    name, sampler = _place_of_sampler(loader), _sampler_of(loader)
    if sampler is None:
        return None
    _keep_own_state(loader)
    tracked = _TrackedSampler(sampler, starts, position)
    object.__setattr__(loader, name, tracked)  # torch forbids a plain assignment
    return tracked


class _TrackedSampler(_StandIn):
    """A sampler that knows how its iterator began, and whose first iterator begins after what was delivered."""

    def __init__(self, inner: Iterable[object], starts: _Starts, position: DataPosition | None) -> None:
        super().__init__(inner)
        self.began_at: int | None = None
        self._is_megatrons = _is_megatrons(inner)
        self._starts = starts
        self._position = position
        self._went_on_at = position
        self.length_at_start = position.length_at_start if position is not None else None
        self._has_begun = self._is_set_up = False

    def __iter__(self) -> Iterator[Any]:
        position, self._position = self._position, None
        self._has_begun = True
        if _is_megatrons(self._inner):
            yield from self._iterate_megatron(position)
            return
        again = position is not None and position.within and position.delivered > 0
        yield from _one_pass(self._inner, self._starts, again, position.delivered if again and position else 0)

    def _iterate_megatron(self, position: DataPosition | None) -> Iterator[Any]:
        """Iterate over a sampler of Megatron's, which draws no random numbers and can begin anywhere at once."""
        inner = self._inner
        if position is not None and position.began_at is not None:
            inner.consumed_samples = position.began_at if position.within else position.consumed
        self.began_at = inner.consumed_samples
        if position is None or position.delivered == 0 or not position.within:
            yield from inner
            return
        # NeMo's sampler of whole global batches ("batch") counts global batches.
        per_item = getattr(inner, "_global_batch_size", None) or inner.micro_batch_times_data_parallel_size
        begins_at = self.began_at + position.delivered * per_item
        inner.consumed_samples = begins_at
        for item in inner:
            if inner.consumed_samples == begins_at:  # the sampler does not count: its next one starts over
                inner.consumed_samples, begins_at = self.began_at, -1
            yield item

    def begin_epoch(self, position: DataPosition | None) -> None:
        """Begin an epoch at ``position``, whatever an unused iterator of Megatron's sampler has counted.

        None: after one that was over when it was resumed, if any was, and whose iterator's batches are not used.
        """
        begins_at = position or self._went_on_at
        if begins_at is not None and begins_at.consumed is not None and _is_megatrons(self._inner):
            self._inner.consumed_samples = begins_at.consumed
        if position is None and begins_at is not None:
            self._position = None

    @property
    def consumed(self) -> int | None:
        return self._inner.consumed_samples if self._is_megatrons else None

    def set_up(self) -> None:
        """Note that the fit is set up: Lightning has asked how many items there are."""
        if self.length_at_start is None:
            self.length_at_start = sized_len(self._inner)
        self._is_set_up = True

    def __len__(self) -> int:
        # Lightning asks once more when workers have begun to fetch, and refuses a validation that would come after
        # the end: it must not find fewer than without the fault, although some were used.
        known = self.length_at_start if self._has_begun and not self._is_set_up else None
        return len(self._inner) if known is None else known


# --- Validation loaders: the state that one validation leaves to the next ----------------------------------------


_SOURCE = "validation_data"
_aside = torch.Generator()  # of the numbers that iterators draw for workers, which get other seeds


class ValidationData:
    """Takes and puts back what the validation loaders of a trainer's fit carry over to the next validation."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = weakref.ref(trainer)
        self._waiting: dict[str, Any] = {}  # the state of loaders that are not made yet
        self._made = 0
        self._is_new = False  # whether the loaders take nothing over from those before the fault
        register_rng_source(_SOURCE, self._take, self._put)

    def made(self, loader: Iterable[object]) -> None:
        """Let the next loader, which has just been made, resume where the one before the fault stood."""
        if isinstance(loader, DataLoader) and loader.generator is None:
            loader.generator = _aside
        trainer = self._trainer()
        if self._waiting and trainer is not None and not vars(trainer.fit_loop).get("val_is_made_again", True):
            self._waiting, self._is_new = {}, True  # without the fault it would have been made for the epoch, too
        if self._waiting:
            self._put_own(loader, self._made, self._waiting)
            consumed = self._waiting.get(f"{self._made}")
            name = _place_of_sampler(loader)
            sampler = getattr(loader, name, None)
            if consumed is not None and _is_megatrons(sampler):
                object.__setattr__(loader, name, _GoesOn(sampler, consumed))  # torch forbids a plain assignment
            self._made += 1

    def _take(self) -> dict[str, Any]:
        loaders = self._loaders()
        if not loaders:
            return self._waiting
        found: dict[str, Any] = {}
        for index, each in enumerate(loaders):
            sampler = _sampler_of(each)
            if _is_megatrons(sampler):
                found[f"{index}"] = sampler.consumed_samples
            found.update((f"{index}/{key}", state) for key, state in self._own_of(each).take().items())
        return found

    def _put(self, state: dict[str, Any]) -> None:
        if self._is_new:
            return
        loaders = self._loaders()
        self._waiting, self._made = ({}, 0) if loaders else (state, 0)
        for index, loader in enumerate(loaders):
            sampler = _sampler_of(loader)
            if _is_megatrons(sampler) and f"{index}" in state:
                sampler.consumed_samples = state[f"{index}"]
            self._put_own(loader, index, state)

    def _own_of(self, loader: Any) -> _SamplerState:
        is_aside = getattr(loader, "generator", None) is _aside
        return _SamplerState([None if is_aside else loader, *_samplers_of(loader)])

    def _put_own(self, loader: Any, index: int, state: Mapping[str, Any]) -> None:
        prefix = f"{index}/"
        self._own_of(loader).put(
            {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        )

    def _loaders(self) -> list[Any]:
        trainer = self._trainer()
        combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader if trainer is not None else None
        return list(combined.flattened) if combined is not None else []


class _GoesOn(_StandIn):
    """A Megatron sampler whose first iterator begins where that before the fault stood, and whose length stays."""

    def __init__(self, inner: Any, consumed: int) -> None:
        super().__init__(inner)
        self._consumed: int | None = consumed

    @property
    def consumed_samples(self) -> int:
        return int(self._inner.consumed_samples) if self._consumed is None else self._consumed

    @consumed_samples.setter
    def consumed_samples(self, consumed: int) -> None:
        self._inner.consumed_samples, self._consumed = consumed, None

    def __iter__(self) -> Iterator[Any]:
        if self._consumed is not None:
            self.consumed_samples = self._consumed
        yield from self._inner
