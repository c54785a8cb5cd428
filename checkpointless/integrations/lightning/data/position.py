"""Where a training stands in its data, and how a loader that was rebuilt is brought there.

The loader is made as it was made at the start, so that its length and its order are the same; its first iterator
then begins after what was delivered before. Loaders that keep their own position (``state_dict``) are restored by
Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import IterableDataset

from checkpointless.integrations.compat.lightning import Stateful
from checkpointless.integrations.lightning.data.samplers import (
    sampler_of,
    samplers_within,
)
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.state_tree import copy_of

if TYPE_CHECKING:
    from nemo.lightning.pytorch.plugins import MegatronDataSampler


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
    """Take what NeMo's sampler, if there is one, and Megatron's microbatch calculator count with.

    Returns:
        What makes their state as it is now; None without NeMo's sampler.
    """
    if sampler is None:
        return lambda: None
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


class _CountingSampler(Protocol):
    """A sampler of Megatron's or NeMo's, which counts samples and takes as many per microbatch and rank."""

    consumed_samples: int
    micro_batch_times_data_parallel_size: int

    def __iter__(self) -> Iterator[object]: ...


def is_megatrons(sampler: object) -> TypeGuard[_CountingSampler]:
    """Return whether ``sampler`` is one of Megatron's or NeMo's, which count the samples that were consumed."""
    return hasattr(sampler, "consumed_samples") and hasattr(sampler, "micro_batch_times_data_parallel_size")
