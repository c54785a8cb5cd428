"""Loaders that say where they stand, whose order is drawn by a sampler that does not: the order is drawn again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.types import _Stateful
from torch.utils.data import DistributedSampler, SequentialSampler

from checkpointless.recovery.rng import RngStates
from checkpointless.strategies.data.position import DataPosition, Starts, keep_generators, sampler_of, samplers_of


def repeat_order(loader: Iterable[object], starts: Starts, position: DataPosition | None) -> DrawnOrder | None:
    """Have a loader that keeps its position draw the order of an epoch that was begun before a fault once more.

    The position of such a loader counts how many indices its sampler has given. The order of these is part of it
    only if the sampler keeps it too, as torchdata's do, or follows from seed and epoch alone, as that of torch's
    ``DistributedSampler`` does.

    Args:
        loader: a loader with ``state_dict`` and a sampler.
        starts: keeps the random streams at the beginning of each pass.
        position: where the training stands; None: at the beginning.

    Returns:
        What stands in the place of the sampler that draws; None: the order needs nothing.
    """
    owner: Any = sampler_of(loader)
    name = "sampler"
    sampler = getattr(owner, name, None)
    if isinstance(sampler, DistributedSamplerWrapper):
        owner, name = sampler.dataset, "_sampler"
        sampler = getattr(owner, name)
    elif isinstance(sampler, _Stateful) or type(sampler).__module__.startswith("torchdata."):
        return None
    if sampler is None or isinstance(sampler, DistributedSampler | SequentialSampler):
        return None
    keep_generators(loader)
    order = DrawnOrder(sampler, starts, position)
    setattr(owner, name, order)
    return order


def begin_anew(loader: Iterable[object]) -> None:
    """Let the next pass of a loader begin at its beginning: the one that it was brought back to was over.

    torchdata's ``StatefulDistributedSampler`` takes the place that it was told for that of the pass begun next.
    """
    for sampler in samplers_of(loader):
        if getattr(sampler, "next_yielded", None) is not None:
            sampler.next_yielded = None


class DrawnOrder:
    """A sampler whose passes draw, until the training has resumed, what the interrupted pass had drawn.

    Args:
        inner: the sampler.
        starts: keeps the random streams at the beginning of each pass.
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
        start = self._starts.data_start() if self._repeats else None
        self._has_repeated, self._repeats = self._repeats, self._repeats and not self._has_resumed
        if start is None:
            self._starts.keep_data_start(RngStates.capture())
            return iter(list(self._inner))
        now = RngStates.capture()
        start.restore()
        items = list(self._inner)
        now.restore()
        return iter(items)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)
