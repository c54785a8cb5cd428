"""Where a training stands in its data, and how a loader that was rebuilt is brought there.

The loader is made as it was made at the start, so that its length and its order are the same; its first iterator
then begins after what was delivered before. Loaders that keep their own position (``state_dict``) are restored by
Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import IterableDataset

from checkpointless.integrations.compat.lightning import Stateful
from checkpointless.integrations.lightning.data.passes import Starts, one_pass
from checkpointless.integrations.lightning.data.sampler_state import (
    keep_own_state,
    place_of_sampler,
    sampler_of,
    samplers_within,
)
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.state_tree import copy_of

if TYPE_CHECKING:
    from nemo.lightning.pytorch.plugins import MegatronDataSampler

    from checkpointless.integrations.compat.lightning import DataFetcher

#: The attributes that NeMo's sampler counts with.
_SAMPLER = (
    "init_consumed_samples",
    "prev_consumed_samples",
    "if_first_step",
    "prev_global_batch_size",
    "init_global_step",
)


_PLAIN = (int, bool, type(None))
_MISSING = object()


class DataPosition(NamedTuple):
    """Where a training stands in an epoch's data.

    Attributes:
        began_at: how many samples Megatron's sampler counted as consumed when its iterator began; None: there is no
            Megatron sampler, or its iterator has not begun.
        consumed: how many samples Megatron's sampler counts as consumed now; None: there is no Megatron sampler.
        within: whether the epoch goes on. False: the next iterator begins a new epoch.
        length: how many batches Lightning's fetcher expects in the epoch; None: unknown. With a sampler that counts
            what workers fetch ahead, it depends on when it is asked for.
        length_at_start: how many batches there were when the fit was set up; None: unknown.
        ahead: how many of the delivered batches no step has had yet: where a loader has no length, Lightning
            fetches one ahead.
    """

    fetched: int
    delivered: int
    began_at: int | None = None
    consumed: int | None = None
    within: bool = True
    length: int | None = None
    length_at_start: int | None = None
    ahead: int = 0


def take_sampler(sampler: MegatronDataSampler | None, datamodule: object) -> Callable[[], dict[str, Any] | None]:
    """Take what NeMo's sampler and Megatron's microbatch calculator count with.

    Args:
        sampler: NeMo's sampler, as :func:`megatron_sampler` finds it; None: there is none.
        datamodule: the trainer's data module, if it has one.

    Returns:
        What makes their state as it is now; None without NeMo's sampler.
    """
    if sampler is None:
        return _no_sampler
    counted = [getattr(sampler, name, _MISSING) for name in _SAMPLER]
    changing = {
        name: copy_of(each)
        for name, each in zip(_SAMPLER, counted)
        if type(each) not in _PLAIN and each is not _MISSING
    }
    calculator = vars(_calculator()).copy()
    module_step = getattr(datamodule, "init_global_step", None)
    return lambda: {
        "sampler": {
            name: changing[name]() if name in changing else each
            for name, each in zip(_SAMPLER, counted)
            if each is not _MISSING
        },
        "calculator": {name: value for name, value in calculator.items() if type(value) is int},
        "module_step": module_step,
    }


def _no_sampler() -> None:
    return None


def begun_at(state: dict[str, Any] | None, now: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return ``state``, taken before the data was set up, with the step that the set-up counts from."""
    if state is None or now is None:
        return state
    step = {name: value for name, value in now["sampler"].items() if name == "init_global_step"}
    return {**state, "sampler": {**state["sampler"], **step}, "module_step": now["module_step"]}


def put_sampler(trainer: pl.Trainer, state: dict[str, Any] | None) -> None:
    """Put back what :func:`take_sampler` made."""
    sampler = megatron_sampler(trainer)
    if sampler is None or state is None:
        return
    for name, value in state["sampler"].items():
        setattr(sampler, name, state_tree.copy(value))
    for name, value in state["calculator"].items():
        setattr(_calculator(), name, value)
    if state["module_step"] is not None:
        trainer.datamodule.init_global_step = state["module_step"]  # type: ignore[attr-defined]


def megatron_sampler(trainer: pl.Trainer) -> MegatronDataSampler | None:
    """Return NeMo's data sampler, or None if the trainer has none."""
    sampler = getattr(trainer.strategy, "data_sampler", None)
    return sampler if hasattr(sampler, "init_consumed_samples") else None


def _calculator() -> Any:
    from checkpointless.integrations.compat.megatron import microbatches_calculator

    return microbatches_calculator()  # NeMo's sampler brings it; Lightning alone does not


def samples_per_step(trainer: pl.Trainer) -> int | None:
    """Return how many samples the whole job takes per step; None if there is no Megatron sampler, or it varies."""
    sampler = megatron_sampler(trainer)
    size = getattr(sampler, "global_batch_size", None)
    return size if isinstance(size, int) and not getattr(sampler, "rampup_batch_size", None) else None


def several_loaders(count: int) -> str:
    """Say in one line why a training with ``count`` loaders is refused, and what to do."""
    return (
        f"checkpointless cannot bring {count} training dataloaders back to where each of them stood: let "
        "train_dataloader return one DataLoader, over one torch.utils.data.Dataset with the items of all of them "
        "(ConcatDataset or StackDataset, for example)"
    )


def go_on_counting(fetcher: DataFetcher, position: DataPosition) -> None:
    """Make the numbering of an epoch's batches continue from where the training stands."""
    combined: Any = fetcher.iterator
    combined._iterator._idx = position.delivered
    if hasattr(fetcher, "_batch_idx"):  # the number of the last batch
        fetcher._batch_idx = max(position.delivered - 1, 0)


def keeps_its_position(loader: object) -> bool:
    """Return whether Lightning saves and restores the position of ``loader``."""
    return isinstance(loader, Stateful)


def ahead_of_steps(loader: object) -> str | None:
    """Return why the position of ``loader`` cannot be restored if Lightning fetches its batches; None: it can."""
    if sized_len(loader) is not None:  # type: ignore[arg-type]
        return None
    if keeps_its_position(loader):
        return (
            f"{type(loader).__name__} says where it stands, but Lightning fetches a batch ahead of a loader "
            "without a length, which no step has had yet: give it a __len__, or leave out its state_dict (it is "
            "gone through once more after a fault)"
        )
    sampler = sampler_of(loader)  # type: ignore[arg-type]
    if sampler is None or isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None  # it is gone through once more
    inner = samplers_within(sampler)[-1]
    return (
        f"the sampler {type(inner).__name__} has no length, so Lightning fetches a batch ahead, which no step has "
        "had yet: give it a __len__"
    )


def track(loader: Iterable[object], starts: Starts, position: DataPosition | None) -> TrackedSampler | None:
    """Follow the sampler of ``loader``, and make its next iterator begin where the training stands.

    Args:
        position: where the training stands; None: at the beginning.

    Returns:
        The sampler that now stands in the old one's place; None if there is no sampler, so that only the dataset
        knows its batches.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    name, sampler = place_of_sampler(loader), sampler_of(loader)
    if sampler is None:
        return None
    keep_own_state(loader)
    tracked = TrackedSampler(sampler, starts, position)
    object.__setattr__(loader, name, tracked)  # torch forbids a plain assignment
    return tracked


class TrackedSampler:
    """A sampler that knows how its iterator began, and whose first iterator begins after what was delivered.

    Args:
        position: where the training stands; None: at the beginning.

    Attributes:
        began_at: how many samples Megatron's sampler counted as consumed when its newest iterator began; None: the
            sampler is not Megatron's, or has not begun.
        length_at_start: how many items there were when the fit was set up; None: unknown.
    """

    def __init__(self, inner: Iterable[object], starts: Starts, position: DataPosition | None) -> None:
        self.began_at: int | None = None
        self._inner: Any = inner  # of torch, Megatron or the user
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
        """The samples that Megatron's sampler counts as consumed; None: the sampler is not Megatron's."""
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)


class _CountingSampler(Protocol):
    """A sampler of Megatron's or NeMo's, which counts samples and takes as many per microbatch and rank."""

    consumed_samples: int
    micro_batch_times_data_parallel_size: int

    def __iter__(self) -> Iterator[object]:
        """Yield the indices of the samples of each batch."""


def is_megatrons(sampler: object) -> TypeGuard[_CountingSampler]:
    """Return whether ``sampler`` is one of Megatron's or NeMo's, which count the samples that were consumed."""
    return hasattr(sampler, "consumed_samples") and hasattr(sampler, "micro_batch_times_data_parallel_size")
