"""Loaders of Bridge and Megatron-LM, positioned so that a resumed training takes the batches that are next."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from megatron.core import parallel_state

from checkpointless.inprocess.worker_streams import Place, seed_data_workers
from checkpointless.integrations.compat.megatron import BATCH_SIZE, SAMPLES_OF_A_PASS

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from checkpointless.faults.inject import WorkersIterator

STREAMS = ("train", "valid", "test")


class _Passes:
    """Iterates over a loader again and again, from the batch that follows those consumed.

    A resumed pass makes its iterator at once, before the streams are put back: it was made before the fault, and
    torch draws a number for it. Bridge 0.3's sampler of whole batches would begin every further pass where the
    first one has resumed; here it begins at ``began``, the samples consumed when the training began. ``number``
    passes precede this one.
    """

    def __init__(self, loader: DataLoader[Any], began: int) -> None:
        self._loader = loader
        self._began = began
        self._sampler: Any = getattr(loader, "batch_sampler", None)
        self._size: int | None = getattr(self._sampler, BATCH_SIZE, None)
        self._counts_on = hasattr(self._sampler, SAMPLES_OF_A_PASS)
        # Workers that persist (the default of Bridge 0.6) have one iterator for all passes.
        is_begun = getattr(self._sampler, "consumed_samples", began) > began
        was_made = is_begun and bool(getattr(loader, "persistent_workers", False))
        self.number, is_inside = self._find_place()
        self._was_there = is_inside or was_made  # an iterator, before the fault
        self._workers: Callable[[], WorkersIterator | None] = lambda: None
        self._first: Iterator[Any] | None = None

    def resume(self) -> None:
        """Make the iterator that was there before the fault, if there was one."""
        if self._was_there:
            self._first = self._begin_pass()

    def __iter__(self) -> Iterator[Any]:
        while True:
            iterator = self._begin_pass() if self._first is None else self._first
            self._first = None
            yield from iterator
            del iterator
            self.number += 1
            if self._size is not None and not self._counts_on:
                self._sampler.consumed_samples = self._began

    @property
    def batches(self) -> WorkersIterator | None:
        """Torch's iterator over the pass under way; None if it has no workers."""
        return self._workers()

    def _begin_pass(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        if hasattr(iterator, "_workers"):
            self._workers = weakref.ref(cast("WorkersIterator", iterator))
        else:
            self._workers = lambda: None
        return iterator

    def _find_place(self) -> tuple[int, bool]:
        """Have the first pass begin where it must; return how many precede it, and whether it is under way."""
        sampler, size, began = self._sampler, self._size, self._began
        if hasattr(sampler, "last_batch_size"):  # MegatronPretrainingRandomSampler
            number, inside = divmod(
                sampler.consumed_samples, max(sampler.total_samples - sampler.last_batch_size, 1)
            )
        elif size is None:
            number, inside = 0, 0
        elif self._counts_on:
            number, inside = divmod(sampler.consumed_samples, max(getattr(sampler, SAMPLES_OF_A_PASS)(), 1))
        else:
            taken = (sampler.consumed_samples - began) // size
            sampler.consumed_samples = began  # by which it counts its batches
            number, inside = divmod(taken, max(len(sampler), 1))
            sampler.consumed_samples = began % sampler.total_samples + inside * size
        return int(number), inside > 0


class Loaders:
    """The data loaders of one generation; ``began``: by stream, the samples consumed when the training began."""

    def __init__(self, resumes: bool, began: Mapping[str, int], seed: int) -> None:
        self._resumes = resumes
        self._began = began
        self._seed = seed
        self._made: list[tuple[DataLoader[Any], str]] = []
        self._passes: dict[str, _Passes] = {}

    def made(self, loaders: Sequence[DataLoader[Any] | Sequence[DataLoader[Any]] | None]) -> None:
        """Make what workers draw depend on the batch alone; ``loaders`` are by stream of :data:`STREAMS`."""
        rank = parallel_state.get_data_parallel_rank()
        for stream, of_stream in zip(STREAMS, loaders, strict=True):
            for number, loader in enumerate(of_stream if isinstance(of_stream, Sequence) else [of_stream]):
                if loader is not None:
                    name = f"{stream}{number or ''}"
                    self._made.append((loader, name))
                    place = functools.partial(self._place, name)
                    seed_data_workers(loader, self._seed, rank=rank, stream=name, place=place)

    def _place(self, name: str) -> Place:
        return Place(self._passes[name].number if name in self._passes else 0)

    def passes(self, loader: DataLoader[Any]) -> _Passes:
        """Return what iterates over ``loader`` again and again."""
        name = next((name for each, name in self._made if each is loader), "")
        self._passes[name] = passes = _Passes(loader, self._began.get(name, 0))
        if self._resumes:
            passes.resume()  # not earlier: workers that start ask for the place, which is then that of these passes
        return passes

    def workers_of(self, iterator: object, stream: str = STREAMS[0]) -> WorkersIterator | None:
        """Return torch's iterator with workers inside that over a stream; None if it has none now."""
        inner = getattr(iterator, "iterable", None)
        if hasattr(inner, "_workers"):
            return cast("WorkersIterator", inner)
        passes = self._passes.get(stream)
        return None if passes is None else passes.batches
