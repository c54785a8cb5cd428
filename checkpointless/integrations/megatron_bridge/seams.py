"""Where Megatron-Bridge is entered: each function that is replaced acts as Bridge's own outside of a block."""

from __future__ import annotations

import functools
import inspect
import queue
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron.bridge.data import loaders
from megatron.bridge.training import pretrain, setup, train

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.compat import BRIDGE, CORE, installed, untested
from checkpointless.integrations.compat.megatron import queues_of_writers
from checkpointless.system.patches import Patch, Patches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from checkpointless.integrations.megatron_bridge.generation import BridgeGeneration

Call = functools.partial[Any]  # of a function of Bridge's, with its arguments
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
    required = [
        Patch(pretrain, "setup", _setup, "tells Bridge's global state, of which there is a new one at each entry"),
        Patch(setup, "setup_optimizer", _setup_optimizer, "gives their state back to what was just made"),
        Patch(setup, "setup_data_iterators", _setup_data_iterators, "positions the data where training resumes"),
        Patch(loaders, "build_train_valid_test_data_loaders", _build_loaders, "tells the streams' order"),
        Patch(loaders, "build_pretraining_data_loader", _build_loader, "seeds workers by the batch"),
        Patch(loaders, "cyclic_iter", _cyclic_iter, "begins in the middle of a pass"),
        Patch(pretrain, "train", _train, "adds what happens when training and a step start"),
        Patch(train, "train_step", _train_step, "notes the outcome of a step, or gives it once more"),
        Patch(train, "training_log", _training_log, "has what was added up before a fault"),
    ]
    of_some_versions = [
        Patch(setup, "load_checkpoint", _load_checkpoint, "storage is not asked for what memory had"),
        Patch(setup, "_should_load_checkpoint", _should_load_checkpoint, "as load_checkpoint, which is elsewhere"),
        Patch(pretrain, "_cleanup_after_pretrain_failure", _clean_up, "the block cleans up, and keeps the state"),
    ]
    queues = [
        Patch(module, name, _results_queue, "no process is there to be interrupted")
        for module, name in queues_of_writers()
    ]
    for row in required:
        if not hasattr(row.target, row.attribute):
            seen = untested(installed((BRIDGE, CORE))) or "this Megatron-Bridge"
            place = f"{getattr(row.target, '__name__', row.target)}.{row.attribute}"
            raise UnrecoverableError(f"{seen}: there is no {place}, without which nothing can be recovered")
    return [*required, *(row for row in of_some_versions if hasattr(row.target, row.attribute)), *queues]


def _in_a_block(act: Callable[[BridgeGeneration, Call], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes the replacement of a function of Bridge's, which stays what it is outside of a block.

    Args:
        act: what is done in a block, given the generation and the call of the original.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            call = functools.partial(original, *args, **kwargs)
            return act(_running[0], call) if _running else call()

        return replaced

    return make


_signature = functools.cache(inspect.signature)


def _named(call: Call) -> Mapping[str, Any]:
    """Return the arguments of a call by name."""
    return _signature(call.func).bind(*call.args, **call.keywords).arguments


@_in_a_block
def _setup(generation: BridgeGeneration, call: Call) -> Any:
    generation.begin(_named(call)["state"])
    return call()


@_in_a_block
def _setup_optimizer(generation: BridgeGeneration, call: Call) -> Any:
    made = call()
    generation.recover(_named(call)["model"], made)
    return made


@_in_a_block
def _load_checkpoint(generation: BridgeGeneration, call: Call) -> Any:
    return None if generation.recovered else call()


@_in_a_block
def _should_load_checkpoint(generation: BridgeGeneration, call: Call) -> bool:
    return not generation.recovered and bool(call())


@_in_a_block
def _results_queue(generation: BridgeGeneration, call: Call) -> Any:
    """Return a queue of this process for what writers of a save report.

    Megatron's is in a process of its own, which imports the script, and torch with the first report. A rank that is
    interrupted while it talks to that process takes the old answer for that to its next question. Saves are not
    made in the background here, so a queue of this process does.
    """
    return queue.Queue()


@_in_a_block
def _clean_up(generation: BridgeGeneration, call: Call) -> None:
    """Do nothing: the block cleans up."""


@_in_a_block
def _setup_data_iterators(generation: BridgeGeneration, call: Call) -> Any:
    return generation.build_data(call)


@_in_a_block
def _build_loaders(generation: BridgeGeneration, call: Call) -> Any:
    if generation.loaders is not None:
        generation.loaders.begin_build()
    return call()


@_in_a_block
def _build_loader(generation: BridgeGeneration, call: Call) -> Any:
    loader = call()
    if generation.loaders is not None:
        generation.loaders.made(loader, _named(call).get("data_parallel_rank", 0))
    return loader


@_in_a_block
def _cyclic_iter(generation: BridgeGeneration, call: Call) -> Any:
    return call() if generation.loaders is None else generation.loaders.passes(*call.args)


@_in_a_block
def _train(generation: BridgeGeneration, call: Call) -> Any:
    result = call(callback_manager=generation.callbacks(_named(call).get("callback_manager")))
    generation.end()
    return result


@_in_a_block
def _train_step(generation: BridgeGeneration, call: Call) -> Any:
    return generation.train_step(call.func, _named(call))


@_in_a_block
def _training_log(generation: BridgeGeneration, call: Call) -> Any:
    generation.log(_named(call)["total_loss_dict"])
    return call()
