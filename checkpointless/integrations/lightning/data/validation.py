"""Where the loaders of a fit's validations stand: the state that one validation leaves to the next.

NeMo's shuffling sampler counts the samples that it has handed out, a loader may have a separate generator, and a
sampler of the user's may count or draw for itself. This continues from validation to validation, so it is taken and
put back with the random streams of the rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from checkpointless.integrations.lightning.data.position import is_megatrons
from checkpointless.integrations.lightning.data.samplers import (
    SamplerState,
    StandIn,
    place_of_sampler,
    sampler_of,
    samplers_of,
)
from checkpointless.state.rng import RngSource, register_rng_source

_SOURCE = "validation_data"
_aside = torch.Generator()  # of the numbers that iterators draw for workers, which get other seeds


class ValidationData:
    """Takes and puts back what the validation loaders of a trainer's fit carry over to the next validation."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = weakref.ref(trainer)
        self._waiting: dict[str, Any] = {}  # the state of loaders that are not made yet
        self._made = 0
        self._is_new = False  # whether the loaders take nothing over from those before the fault
        register_rng_source(_SOURCE, RngSource(self._take, self._put))

    def made(self, loader: Iterable[object]) -> None:
        """Let the next loader, which has just been made, resume where the one before the fault stood.

        Making its iterators takes no numbers from the training's streams.
        """
        if isinstance(loader, DataLoader) and loader.generator is None:
            loader.generator = _aside
        trainer = self._trainer()
        if self._waiting and trainer is not None and not vars(trainer.fit_loop).get("val_is_made_again", True):
            self._waiting, self._is_new = {}, True  # without the fault it would have been made for the epoch, too
        if self._waiting:
            self._put_own(loader, self._made, self._waiting)
            consumed = self._waiting.get(f"{self._made}")
            name = place_of_sampler(loader)
            sampler = getattr(loader, name, None)
            if consumed is not None and is_megatrons(sampler):
                object.__setattr__(loader, name, _GoesOn(sampler, consumed))  # torch forbids a plain assignment
            self._made += 1

    def _take(self) -> dict[str, Any]:
        loaders = self._loaders()
        if not loaders:
            return self._waiting
        found: dict[str, Any] = {}
        for index, each in enumerate(loaders):
            sampler = sampler_of(each)
            if is_megatrons(sampler):
                found[f"{index}"] = sampler.consumed_samples
            found.update((f"{index}/{key}", state) for key, state in self._own_of(each).take().items())
        return found

    def _put(self, state: dict[str, Any]) -> None:
        if self._is_new:
            return
        loaders = self._loaders()
        self._waiting, self._made = ({}, 0) if loaders else (state, 0)
        for index, loader in enumerate(loaders):
            sampler = sampler_of(loader)
            if is_megatrons(sampler) and f"{index}" in state:
                sampler.consumed_samples = state[f"{index}"]
            self._put_own(loader, index, state)

    def _own_of(self, loader: Any) -> SamplerState:
        is_aside = getattr(loader, "generator", None) is _aside
        return SamplerState([None if is_aside else loader, *samplers_of(loader)])

    def _put_own(self, loader: Any, index: int, state: Mapping[str, Any]) -> None:
        prefix = f"{index}/"
        self._own_of(loader).put(
            {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        )

    def _loaders(self) -> list[Any]:
        trainer = self._trainer()
        combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader if trainer is not None else None
        return list(combined.flattened) if combined is not None else []


class _GoesOn(StandIn):
    """A Megatron sampler whose first iterator begins where the sampler before the fault stood.

    The count is not put back earlier: Lightning asks for the sampler's length when the loader is made, and no
    sampler had counted anything by then.
    """

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
