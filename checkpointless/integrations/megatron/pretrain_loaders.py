"""Loaders of Bridge and Megatron-LM, positioned so that a resumed training takes the batches that are next."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from megatron.core import parallel_state

from checkpointless.inprocess.worker_streams import Place, seed_data_workers
from checkpointless.integrations.compat import megatron as compat

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from checkpointless.faults.inject import WorkersIterator

STREAMS = ("train", "valid", "test")


class _Passes:
    """Iterates over a loader again and again, from the batch that follows those consumed.

    ``cyclic_iter`` makes an iterator when the first batch is asked for, and torch draws a number from the
    training's stream for it. If the loader is in the middle of a pass, that iterator was made before the fault:
    here it is made at once, before the streams are put back. The sampler of whole batches of Bridge 0.3 would
    begin every further pass where the first one has resumed; here it begins where the training once began. That of
    Bridge 0.6 counts on.

    Args:
        loader: the loader, whose sampler knows how many samples are consumed.
        began: number of samples that were consumed when the training began.

    Attributes:
        number: how many passes precede the one under way. Workers ask for it when they start.
    """

    def __init__(self, loader: DataLoader[Any], began: int) -> None:
        self._loader = loader
        self._sampler: Any = getattr(loader, "batch_sampler", None)
        self._began = began
        # Workers that persist (the default of Bridge 0.6) have one iterator for all passes.
        is_begun = getattr(self._sampler, "consumed_samples", began) > began
        self._was_made = is_begun and bool(getattr(loader, "persistent_workers", False))
        self._counts_on = compat.samples_of_a_pass(self._sampler)
        self.number = self._find_place()
        self._first: Iterator[Any] | None = None
        self._workers: Callable[[], WorkersIterator | None] = lambda: None

    def resume(self) -> None:
        """Go on with a pass that is under way, if one is, or with an iterator that was there before the fault."""
        if self._is_inside_a_pass or self._was_made:
            self._first = self._begin_pass()

    def __iter__(self) -> Iterator[Any]:
        while True:
            iterator = self._begin_pass() if self._first is None else self._first
            self._first = None
            yield from iterator
            del iterator
            self._end_pass()

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

    def _find_place(self) -> int:
        """Have the first pass begin where it must, and return how many passes precede it."""
        sampler = self._sampler
        self._is_inside_a_pass = False
        if hasattr(sampler, "last_batch_size"):  # MegatronPretrainingRandomSampler
            return self._counted(sampler.consumed_samples, sampler.total_samples - sampler.last_batch_size)[0]
        size = compat.samples_of_a_whole_batch(sampler)
        if size is None:
            return 0
        if self._counts_on is not None:
            return self._counted(sampler.consumed_samples, self._counts_on)[0]
        taken = (sampler.consumed_samples - self._began) // size
        sampler.consumed_samples = self._began
        number, batch = self._counted(taken, len(sampler))
        sampler.consumed_samples = self._began % sampler.total_samples + batch * size
        return number

    def _counted(self, taken: int, whole: int) -> tuple[int, int]:
        """Return how many passes are ``taken`` and how far the next is, and note whether it is under way."""
        number, inside = divmod(taken, max(whole, 1))
        self._is_inside_a_pass = inside > 0
        return int(number), int(inside)

    def _end_pass(self) -> None:
        self.number += 1
        if compat.samples_of_a_whole_batch(self._sampler) is not None and self._counts_on is None:
            self._sampler.consumed_samples = self._began


class Loaders:
    """The data loaders of one generation.

    Args:
        resumes: whether the training resumes from memory.
        began: for each stream how many samples were consumed when the training began.
        seed: the seed of the job.
    """

    def __init__(self, resumes: bool, began: Mapping[str, int], seed: int) -> None:
        self._resumes = resumes
        self._began = began
        self._seed = seed
        self._made: list[tuple[DataLoader[Any], str]] = []
        self._passes: dict[str, _Passes] = {}

    def made(self, loaders: Sequence[DataLoader[Any] | Sequence[DataLoader[Any]] | None]) -> None:
        """Make what workers draw depend on the batch alone, not on how long a worker has lived.

        Args:
            loaders: of each stream in :data:`STREAMS` its loader, its loaders, or None.
        """
        for stream, of_stream in zip(STREAMS, loaders, strict=True):
            each = of_stream if isinstance(of_stream, Sequence) else [of_stream]
            for number, loader in enumerate(each):
                if loader is not None:
                    self._seed_workers(loader, stream if number == 0 else f"{stream}{number}")

    def _seed_workers(self, loader: DataLoader[Any], name: str) -> None:
        self._made.append((loader, name))
        rank = parallel_state.get_data_parallel_rank()
        seed_data_workers(loader, self._seed, rank=rank, stream=name, place=functools.partial(self._place, name))

    def _place(self, name: str) -> Place:
        return Place(self._passes[name].number if name in self._passes else 0)

    def passes(self, loader: DataLoader[Any]) -> _Passes:
        """Return what iterates over ``loader`` again and again."""
        name = next((name for each, name in self._made if each is loader), "")
        self._passes[name] = passes = _Passes(loader, self._began.get(name, 0))
        if self._resumes:
            passes.resume()
        return passes

    def workers_of(self, iterator: object, stream: str = STREAMS[0]) -> WorkersIterator | None:
        """Return torch's iterator with workers inside that over a stream; None if it has none now."""
        inner = getattr(iterator, "iterable", None)
        if hasattr(inner, "_workers"):
            return cast("WorkersIterator", inner)
        passes = self._passes.get(stream)
        return None if passes is None else passes.batches
