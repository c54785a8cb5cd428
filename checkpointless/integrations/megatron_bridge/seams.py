"""Where Megatron-Bridge is entered: each function that is replaced acts as Bridge's own outside of a block."""

from __future__ import annotations

import functools
import inspect
import queue
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron.bridge.data import loaders
from megatron.bridge.training import pretrain, setup, train
from megatron.core.dist_checkpointing.strategies import filesystem_async

from checkpointless.system.patches import Patch, Patches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from checkpointless.integrations.megatron_bridge.generation import BridgeGeneration

_patches = Patches()
_running: list[BridgeGeneration] = []  # one at most


@contextmanager
def entered(generation: BridgeGeneration) -> Iterator[None]:
    """Have Bridge's seams lead to ``generation`` while the context lasts."""
    if not _patches.are_made:
        _patches.make(_rows())
    _running[:] = [generation]
    try:
        yield
    finally:
        _running.clear()


def _rows() -> list[Patch]:
    table = [
        Patch(pretrain, "setup", _setup, "tells Bridge's global state, of which there is a new one at each entry"),
        Patch(setup, "setup_optimizer", _setup_optimizer, "gives their state back to what was just made"),
        Patch(setup, "load_checkpoint", _load_checkpoint, "storage is not asked for what memory had"),
        Patch(setup, "setup_data_iterators", _setup_data_iterators, "positions the data where training resumes"),
        Patch(loaders, "build_train_valid_test_data_loaders", _build_loaders, "tells the streams' order"),
        Patch(loaders, "build_pretraining_data_loader", _build_loader, "seeds workers by the batch"),
        Patch(loaders, "cyclic_iter", _cyclic_iter, "begins in the middle of a pass"),
        Patch(pretrain, "train", _train, "adds what happens when training and a step start"),
        Patch(train, "train_step", _train_step, "notes the outcome of a step, or gives it once more"),
        Patch(train, "training_log", _training_log, "has what was added up before a fault"),
        Patch(
            filesystem_async, "_get_write_results_queue", _results_queue, "no process is there to be interrupted"
        ),
        # Of later versions:
        Patch(setup, "_should_load_checkpoint", _should_load_checkpoint, "as load_checkpoint, which is elsewhere"),
        Patch(pretrain, "_cleanup_after_pretrain_failure", _clean_up, "the block cleans up, and keeps the state"),
    ]
    return [row for row in table if hasattr(row.target, row.attribute)]


def _setup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(state: Any, *args: Any, **kwargs: Any) -> Any:
        for generation in _running:
            generation.begin(state)
        return original(state, *args, **kwargs)

    return replaced


def _setup_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        for generation in _running:
            generation.recover(signature.bind(*args, **kwargs).arguments["model"], made)
        return made

    return replaced


def _load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if any(generation.recovered for generation in _running):
            return None
        return original(*args, **kwargs)

    return replaced


def _results_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes the queue that writers of a save report to.

    Megatron's is in a process of its own, which imports the script, and torch with the first report. A rank that is
    interrupted while it talks to that process takes the old answer for that to its next question. Saves are not
    made in the background here, so a queue of this process does.
    """

    @functools.wraps(original)
    def replaced() -> Any:
        return queue.Queue() if _running else original()

    return replaced


def _should_load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> bool:
        return not any(generation.recovered for generation in _running) and bool(original(*args, **kwargs))

    return replaced


def _clean_up(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> None:
        if not _running:
            original(*args, **kwargs)

    return replaced


def _setup_data_iterators(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        build = functools.partial(original, *args, **kwargs)
        for generation in _running:
            return generation.build_data(build)
        return build()

    return replaced


def _build_loaders(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        for generation in _running:
            if generation.loaders is not None:
                generation.loaders.begin_build()
        return original(*args, **kwargs)

    return replaced


def _build_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, data_parallel_rank: int = 0, **kwargs: Any) -> Any:
        loader = original(*args, data_parallel_rank=data_parallel_rank, **kwargs)
        for generation in _running:
            if generation.loaders is not None:
                generation.loaders.made(loader, data_parallel_rank)
        return loader

    return replaced


def _cyclic_iter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(loader: Any) -> Any:
        for generation in _running:
            if generation.loaders is not None:
                return generation.loaders.passes(loader)
        return original(loader)

    return replaced


def _train(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, callback_manager: Any = None, **kwargs: Any) -> Any:
        for generation in _running:
            callback_manager = generation.callbacks(callback_manager)
        result = original(*args, callback_manager=callback_manager, **kwargs)
        for generation in _running:
            generation.end()
        return result

    return replaced


def _train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        for generation in _running:
            return generation.train_step(original, signature.bind(*args, **kwargs).arguments)
        return original(*args, **kwargs)

    return replaced


def _training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        for generation in _running:
            generation.log(signature.bind(*args, **kwargs).arguments["total_loss_dict"])
        return original(*args, **kwargs)

    return replaced
