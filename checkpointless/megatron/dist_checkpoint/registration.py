"""Make the strategies the ones that Megatron-core uses for ``torch_dist`` if it is given none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron.core.dist_checkpointing.strategies import torch as torch_strategies

from checkpointless.megatron.dist_checkpoint.copies import Copies
from checkpointless.megatron.dist_checkpoint.load_strategy import CopiesLoadStrategy
from checkpointless.megatron.dist_checkpoint.save_strategy import CopiesSaveStrategy
from checkpointless.patches import Patch, Patches

_BACKEND = ("torch_dist", 1)
_PATCHES = Patches()


def register(copies: Copies | None = None) -> None:
    """Make ``dist_checkpointing.save`` and ``load`` use our strategies when they are given none.

    A later call takes the place of an earlier one.

    Args:
        copies: the copies to keep and to load from; None: those of this process.

    Raises:
        ImportError: this Megatron-core has no default strategies.
    """
    unregister()
    _install(_PATCHES, CopiesLoadStrategy(copies=copies), CopiesSaveStrategy(copies=copies))


def unregister() -> None:
    """Make Megatron-core use its own strategies again."""
    _PATCHES.undo()


def are_defaults() -> bool:
    """Return whether our strategies are the ones that Megatron-core uses if it is given none."""
    return _PATCHES.are_made


@contextmanager
def loading(strategy: CopiesLoadStrategy) -> Iterator[None]:
    """Return a context in which Megatron-core loads with ``strategy`` if it is given none."""
    patches = Patches()
    _install(patches, strategy, None)
    try:
        yield
    finally:
        patches.undo()


def _install(patches: Patches, load: CopiesLoadStrategy, save: CopiesSaveStrategy | None) -> None:
    try:
        from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
    except ImportError as error:
        raise ImportError(
            "this Megatron-core has no default strategies: give CopiesSaveStrategy() and CopiesLoadStrategy() to "
            "dist_checkpointing.save and load as sharded_strategy"
        ) from error

    def make(original: Callable[[], None]) -> Callable[[], None]:
        def register_ours() -> None:
            original()
            register_default_strategy(StrategyAction.LOAD_SHARDED, *_BACKEND, load)
            if save is not None:
                register_default_strategy(StrategyAction.SAVE_SHARDED, *_BACKEND, save)

        return register_ours

    why = "Megatron-core registers its own strategies again before each look-up"
    patches.make([Patch(torch_strategies, "register_default_torch_strategies", make, why)])
