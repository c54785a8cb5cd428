"""The progress of Lightning's training loops, read at every moment in one call instead of by their ``state_dict``.

What a loop counts with are numbers in data classes, at places that stay the same as long as the loops do. They are
read through their paths, so that it does not matter which object is at a place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress

from checkpointless.serialization import state_tree
from checkpointless.serialization.later import IMMUTABLE


class LoopProgress:
    """Reads the state of one training loop and of the loops in it.

    Args:
        fit_loop: Lightning's loop over epochs.
    """

    def __init__(self, fit_loop: _FitLoop) -> None:
        self._fit_loop = fit_loop
        self._loops: list[tuple[str, Any]] = []  # the loops, each with the prefix of its keys
        self._attributes: list[dict[str, Any]] = []  # of each loop
        self._sizes: list[int] = []  # how many each had when its progress was looked for
        self._saving: list[tuple[str, Any]] = []  # the loops that save more than their progress
        self._places: list[tuple[str, ...]] = []  # where each number is in the state
        self._read: Callable[[Any], tuple[Any, ...]] = lambda _: ()
        self._loaders: tuple[Any, Any] = (None, None)  # the collection of loaders, and their list
        self._stateful: list[Any] = []  # those that have a state
        self._begun_at = 0  # where in what is read is whether an epoch has begun

    def take(self) -> tuple[bool, Callable[[], dict[str, Any]]]:
        """Return whether an epoch has begun, and what makes what ``fit_loop.state_dict()`` would return now."""
        if not self._loops or list(map(len, self._attributes)) != self._sizes:
            self._look()
        values = self._read(self._fit_loop)
        kept = [(prefix, self._saved(loop)) for prefix, loop in self._saving]
        combined = self._fit_loop._combined_loader
        loaders = combined.flattened if combined is not None else None
        if combined is not self._loaders[0] or loaders is not self._loaders[1]:
            self._stateful = [each for each in loaders or () if isinstance(each, _Stateful)]  # which is slow
            self._loaders = (combined, loaders)
        states = [state_tree.copy(loader.state_dict()) for loader in self._stateful]
        loops, places = self._loops, self._places

        def make() -> dict[str, Any]:
            state: dict[str, Any] = {f"{prefix}state_dict": {} for prefix, _ in loops}
            state.update({f"{prefix}state_dict": saved for prefix, saved in kept})
            if states:
                state["state_dict"]["combined_loader"] = states
            for place, value in zip(places, values):
                inner = state
                for name in place[:-1]:
                    inner = inner.setdefault(name, {})
                inner[place[-1]] = value
            return state

        return values[self._begun_at] > 0, make

    def _look(self) -> None:
        """Find the loops, and the numbers that they count with."""
        self._loops, paths, self._places = [], [], []
        for prefix, path, loop in _loops_of(self._fit_loop):
            self._loops.append((prefix, loop))
            for name, value in vars(loop).items():
                if isinstance(value, _BaseProgress):
                    for inner in _numbers_of(value):
                        self._places.append((prefix + name, *inner))
                        paths.append(".".join((*path, name, *inner)))
            if type(loop).on_save_checkpoint is _TrainingEpochLoop.on_save_checkpoint:
                self._places.append((f"{prefix}state_dict", _STEPPED))
                paths.append(".".join((*path, _STEPPED)))
        self._attributes = [vars(loop) for _, loop in self._loops]
        self._sizes = list(map(len, self._attributes))
        self._saving = [each for each in self._loops if type(each[1]).on_save_checkpoint not in _KNOWN_HOOKS]
        self._begun_at = paths.index("epoch_progress.current.ready")
        self._read = operator.attrgetter(*paths)

    def _saved(self, loop: Any) -> dict[str, Any]:
        """Return what a loop saves beside its progress, as nobody changes it."""
        saved: dict[str, Any] = loop.on_save_checkpoint()
        if all(type(value) in IMMUTABLE for value in saved.values()):
            return dict(saved)
        return state_tree.copy(saved)


_STEPPED = "_batches_that_stepped"
#: What the hooks that save more of a loop than its progress save, is read with the progress.
_KNOWN_HOOKS = (_Loop.on_save_checkpoint, _FitLoop.on_save_checkpoint, _TrainingEpochLoop.on_save_checkpoint)
_OF_LOOP = "_checkpointless_progress"


def progress_of(fit_loop: _FitLoop) -> LoopProgress:
    """Return what reads the state of ``fit_loop``, always the same object."""
    known = vars(fit_loop).get(_OF_LOOP)
    if known is None:
        known = LoopProgress(fit_loop)
        setattr(fit_loop, _OF_LOOP, known)
    return known


def _loops_of(
    loop: Any, prefix: str = "", path: tuple[str, ...] = ()
) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield a loop and those in it, each with the prefix of its keys and its place."""
    yield prefix, path, loop
    for name, value in vars(loop).items():
        if isinstance(value, _Loop):
            yield from _loops_of(value, f"{prefix}{name}.", (*path, name))


def _numbers_of(progress: Any) -> Iterator[tuple[str, ...]]:
    """Yield the place of each number in a data class."""
    for each in fields(progress):
        value = getattr(progress, each.name)
        if isinstance(value, _BaseProgress):
            yield from ((each.name, *inner) for inner in _numbers_of(value))
        else:
            yield (each.name,)
