"""The data that a fit trains on: where it stands, and how a loader that was rebuilt is brought there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

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

from checkpointless.integrations.compat.lightning import Stateful
from checkpointless.integrations.lightning.data.position import (
    DataPosition,
    is_megatrons,
    keeps_its_position,
)
from checkpointless.integrations.lightning.data.samplers import (
    StandIn,
    Starts,
    keep_own_state,
    one_pass,
    place_of_sampler,
    sampler_of,
    samplers_of,
)

if TYPE_CHECKING:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    from checkpointless.integrations.compat.lightning import DataFetcher


class _CountingLoop(Protocol):
    not_delivered: int


class _FitLoop(Protocol):
    _data_fetcher: DataFetcher | None
    _combined_loader: CombinedLoader | None

    @property
    def epoch_loop(self) -> _CountingLoop: ...


class TrainingData:
    """Follows the training loader of a trainer, whichever was made last."""

    def __init__(self) -> None:
        self._tracked: _TrackedSampler | None = None  # None: the loader, or the dataset alone, knows its position
        self._stateful: Iterable[object] | None = None  # a loader that knows its position
        self._order: _DrawnOrder | None = None  # of such a loader, if it does not know that

    def position(self, fit_loop: _FitLoop) -> DataPosition:
        """Return where the training stands in its data."""
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

    def made(self, loader: Iterable[object], starts: Starts, position: DataPosition | None) -> None:
        """Follow a training loader that has just been made; it begins at ``position``."""
        self._tracked = self._order = self._stateful = None
        if keeps_its_position(loader):
            self._stateful, self._order = loader, _repeat_order(loader, starts, position)
        else:
            self._tracked = _track(loader, starts, position)
        _repeat_items(loader, starts, position)

    def set_up(self) -> None:
        """Note that the fit is set up: Lightning has asked how many batches there are."""
        if self._tracked is not None:
            self._tracked.set_up()

    def begin_epoch(self) -> None:
        """Begin an epoch; the one before it was over when it was resumed."""
        if self._tracked is not None:
            self._tracked.begin_epoch()
        self._begin_anew()

    def begin_epoch_at(self, position: DataPosition) -> None:
        """Let the epoch that begins where the loops resume begin at ``position``."""
        if self._tracked is not None:
            self._tracked.begin_at(position.consumed)
        self._begin_anew()

    def _begin_anew(self) -> None:
        if self._stateful is not None:
            _begin_anew(self._stateful)
        if self._order is not None:
            self._order.begin_anew()

    def resume_at(self, position: DataPosition, fit_loop: _FitLoop) -> None:
        """Let an epoch that has begun in an earlier generation continue at ``position``, with rebuilt iterators."""
        fetcher: Any = fit_loop._data_fetcher
        combined = cast("CombinedLoader", fit_loop._combined_loader)
        self._take_what_was_delivered(combined.flattened, fetcher, position)
        fetcher.fetched, fetcher.length = position.fetched, position.length
        fetcher.done = fetcher.length is not None and fetcher.fetched >= fetcher.length
        _go_on_counting(fetcher, position)
        fit_loop.epoch_loop.not_delivered = position.fetched - position.delivered

    def _take_what_was_delivered(self, loaders: Iterable[object], fetcher: Any, position: DataPosition) -> None:
        """Advance an iterator whose batches only the dataset knows past those that were delivered.

        Lightning's fetcher may have fetched some ahead to learn where they end; it has as many again.
        """
        if self._tracked is not None or any(keeps_its_position(loader) for loader in loaders):
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


def _repeat_items(loader: Iterable[object], starts: Starts, position: DataPosition | None) -> None:
    """Have the iterable dataset of ``loader`` give the same items when it is gone through once more after a fault.

    Nothing is done if data-loader workers go through it, whose streams follow from the number of the batch, or if
    it or its loader keeps its position.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return
    if loader.num_workers > 0 or isinstance(loader, Stateful) or isinstance(loader.dataset, Stateful):
        return
    keep_own_state(loader)
    dataset, make = loader.dataset, loader._get_iterator
    repeats = iter([position is not None and position.within and position.delivered > 0])  # the first pass alone

    def begin() -> Any:
        again = next(repeats, False)
        if isinstance(dataset, IterDataPipe):  # torch does more with these
            iterator: Any = make()
            fetcher = iterator._dataset_fetcher
            fetcher.dataset_iter = one_pass(fetcher.dataset_iter, starts, again, owner=dataset)
            return iterator
        # What torch takes for the dataset draws nothing before its first item is asked for.
        object.__setattr__(loader, "dataset", one_pass(dataset, starts, again))  # torch forbids a plain assignment
        try:
            iterator = make()
        finally:
            object.__setattr__(loader, "dataset", dataset)
        iterator._dataset = iterator._dataset_fetcher.dataset = dataset
        return iterator

    loader._get_iterator = begin  # type: ignore[method-assign]


def _repeat_order(loader: Iterable[object], starts: Starts, position: DataPosition | None) -> _DrawnOrder | None:
    """Have a loader that keeps its position draw the order of an epoch that was begun before a fault once more.

    The position of such a loader counts how many indices its sampler has given. The order of these is part of it
    only if the sampler keeps it too, as torchdata's do, or follows from seed and epoch alone, as that of torch's
    ``DistributedSampler`` does. Then the order needs nothing, and None is returned.
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
    order = _DrawnOrder(sampler, starts, position)
    object.__setattr__(owner, name, order)  # torch forbids a loader's plain assignment
    return order


def _begin_anew(loader: Iterable[object]) -> None:
    """Let the next pass of a loader begin at its beginning: the one that it was brought back to was over.

    torchdata's ``StatefulDistributedSampler`` takes the place that it was given for that of the pass begun next.
    """
    for sampler in samplers_of(loader):
        if getattr(sampler, "next_yielded", None) is not None:
            sampler.next_yielded = None


def without_worker_seeds(state: object) -> object:
    """Leave out of a loader's ``state_dict``, or a list of these, what its batches do not depend on.

    torchdata's loaders keep the number that each of their iterators draws to seed workers. It differs between ranks
    that were seeded differently, or not at all, and between an iterator and the one that replaces it, so that the
    states could not be compared. Workers of a dataset that is not iterable get their streams from the job's seed
    and the batch instead (``seed_data_workers``).
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


class _DrawnOrder(StandIn):
    """A sampler whose passes draw, until the training has resumed, what the interrupted pass had drawn."""

    def __init__(self, inner: Iterable[object], starts: Starts, position: DataPosition | None) -> None:
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
        yield from one_pass(self._inner, self._starts, again)


def _go_on_counting(fetcher: DataFetcher, position: DataPosition) -> None:
    """Make the numbering of an epoch's batches continue from where the training stands."""
    combined: Any = fetcher.iterator
    combined._iterator._idx = position.delivered
    if hasattr(fetcher, "_batch_idx"):  # the number of the last batch
        fetcher._batch_idx = max(position.delivered - 1, 0)


def _track(loader: Iterable[object], starts: Starts, position: DataPosition | None) -> _TrackedSampler | None:
    """Follow the sampler of ``loader``, if it has one; its next iterator begins where the training stands."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    name, sampler = place_of_sampler(loader), sampler_of(loader)
    if sampler is None:
        return None
    keep_own_state(loader)
    tracked = _TrackedSampler(sampler, starts, position)
    object.__setattr__(loader, name, tracked)  # torch forbids a plain assignment
    return tracked


class _TrackedSampler(StandIn):
    """A sampler that knows how its iterator began, and whose first iterator begins after what was delivered.

    ``began_at`` and ``length_at_start`` are what :class:`DataPosition` has under these names.
    """

    def __init__(self, inner: Iterable[object], starts: Starts, position: DataPosition | None) -> None:
        super().__init__(inner)
        self.began_at: int | None = None
        self._is_megatrons = is_megatrons(inner)
        self._starts = starts
        self._position = position
        self._went_on_at = position
        self.length_at_start = position.length_at_start if position is not None else None
        self._has_begun = self._is_set_up = False

    def __iter__(self) -> Iterator[Any]:
        position, self._position = self._position, None
        self._has_begun = True
        if is_megatrons(self._inner):
            yield from self._iterate_megatron(position)
            return
        again = position is not None and position.within and position.delivered > 0
        yield from one_pass(self._inner, self._starts, again, position.delivered if again and position else 0)

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

    def begin_epoch(self) -> None:
        """Begin the epoch after one that was over when it was resumed and whose iterator's batches are not used."""
        if self._went_on_at is not None:
            self.begin_at(self._went_on_at.consumed)
            self._position = None

    def begin_at(self, consumed: int | None) -> None:
        """Let Megatron's sampler begin an epoch at ``consumed``, whatever an unused iterator has counted."""
        if consumed is not None and is_megatrons(self._inner):
            self._inner.consumed_samples = consumed

    @property
    def consumed(self) -> int | None:
        return self._inner.consumed_samples if self._is_megatrons else None

    def set_up(self) -> None:
        """Note that the fit is set up: Lightning has asked how many items there are."""
        if self.length_at_start is None:
            self.length_at_start = sized_len(self._inner)
        self._is_set_up = True

    def __len__(self) -> int:
        # Lightning asks before the iterator is made, when nothing is different, and after that.
        known = self.length_at_start if self._has_begun and not self._is_set_up else None
        return len(self._inner) if known is None else known
